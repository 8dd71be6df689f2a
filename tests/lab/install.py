"""The project into a machine: its wheel into the virtual environment, then `kata-pin install`.

The wheel is unpacked on the host, because pip inside takes a minute under emulation; the result is
what pip makes: the package, its metadata and the command.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.lab import process, transfer, wheels
from tests.lab.channel import Channel
from tests.lab.flavours import Suite
from tests.lab.image import VENV

WHEEL_S: Final = 120
INSTALL_S: Final = 30
"""Deadline of a step in the machine; multiplied by the scale."""

_COMMAND: Final = f"""#!{VENV}/bin/python
import sys
from kata_pin.cli.entry import main
sys.exit(main())
"""

_STEPS: Final = (
    (f"{VENV}/bin/kata-pin", "install", "--containerd"),
    # What `kata-pin install` says to do next.
    ("systemd-sysusers",),
    ("systemd-tmpfiles", "--create", "kata-pin.conf"),
    ("systemctl", "daemon-reload"),
    ("systemctl", "enable", "kata-pin"),
    # Not `enable --now`: a machine that is used again may still run the project's last version.
    ("systemctl", "restart", "kata-pin"),
)


@dataclass(frozen=True, slots=True)
class Project:
    """The project made ready on the host: what goes to site-packages, and its command."""

    site: Path
    command: Path | None
    log: Path


@dataclass(frozen=True, slots=True)
class Installed:
    """Whether `kata-pin install` was run and succeeded, and a line to show."""

    ok: bool
    text: str


def prepare(folder: Path, log: Path) -> Project:
    """Build the project's wheel and unpack it in `folder`; what the builder says goes to `log`."""
    wheel = wheels.project_wheel(folder / "wheel", log, deadline_s=WHEEL_S)
    site = folder / "site-packages"
    _unpack(wheel, site, log)
    command = folder / "kata-pin"
    command.write_text(_COMMAND)
    command.chmod(0o755)
    has_command = (site / "kata_pin/cli/entry.py").exists()
    return Project(site=site, command=command if has_command else None, log=log)


def install(channel: Channel, project: Project, suite: Suite, *, scale: float) -> Installed:
    """Put the project into the machine and let it install itself; its output joins the log.

    A failing `kata-pin install` is a result for the tests, not an error of the lab.
    """
    limit = INSTALL_S * scale
    transfer.put(channel, [str(project.site)], f"{VENV}/lib/python{suite.python}", deadline_s=limit)
    if project.command is None:
        return Installed(ok=False, text="the project has no command yet; its package is in place")
    transfer.put(channel, [str(project.command)], f"{VENV}/bin", deadline_s=limit)
    with project.log.open("ab") as text:
        for step in _STEPS:
            done = channel.run(step, deadline_s=limit)
            text.write(f"+ {' '.join(step)}\n".encode() + done.stdout + done.stderr)
            if done.code != 0:
                failed = f"{' '.join(step)} failed with {done.code}, see {project.log}"
                return Installed(ok=False, text=failed)
    return Installed(ok=True, text="kata-pin is installed and its service runs")


def _unpack(wheel: Path, site: Path, log: Path) -> None:
    """Unpack the wheel as pip would, for whatever Python: the project is pure Python."""
    pip = [wheels.python_with_pip(), "-m", "pip", "--disable-pip-version-check", "install"]
    pip += ["--no-deps", "--no-compile", "--no-index", f"--target={site}", str(wheel)]
    process.run(pip, deadline_s=WHEEL_S, log=log, env=dict(os.environ))
    shutil.rmtree(site / "bin", ignore_errors=True)
