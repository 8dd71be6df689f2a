"""The project into a machine: its wheel into the virtual environment, then `kata-pin install`.

The wheel is unpacked on the host, because pip inside takes a minute under emulation; the result is
what pip makes: the package, its metadata and the command.
"""

from __future__ import annotations

import os
import shutil
import tempfile
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
from kata_pin.cli.main import main
sys.exit(main())
"""


@dataclass(frozen=True, slots=True)
class Installed:
    """Whether `kata-pin install` was run and succeeded, and a line to show."""

    ok: bool
    text: str


def install(channel: Channel, suite: Suite, results: Path, *, scale: float) -> Installed:
    """Put the project into the machine and let it install itself; its output goes to install.txt.

    A failing `kata-pin install` is a result for the tests, not an error of the lab.
    """
    log = results / "install.txt"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wheel = wheels.project_wheel(folder / "wheel", log, deadline_s=WHEEL_S)
        site = folder / "site-packages"
        _unpack(wheel, site, log)
        target = f"{VENV}/lib/python{suite.python}"
        transfer.put(channel, [str(site)], target, deadline_s=INSTALL_S * scale)
        has_command = (site / "kata_pin/cli/main.py").exists()
        command = folder / "kata-pin"
        command.write_text(_COMMAND)
        command.chmod(0o755)
        transfer.put(channel, [str(command)], f"{VENV}/bin", deadline_s=INSTALL_S * scale)
    if not has_command:
        return Installed(ok=False, text="the project has no command yet, its package is in place")
    done = channel.run([f"{VENV}/bin/kata-pin", "install"], deadline_s=INSTALL_S * scale)
    with log.open("ab") as text:
        text.write(b"+ kata-pin install\n" + done.stdout + done.stderr)
    if done.code == 0:
        return Installed(ok=True, text="kata-pin install done")
    return Installed(ok=False, text=f"kata-pin install failed with {done.code}, see {log}")


def _unpack(wheel: Path, site: Path, log: Path) -> None:
    """Unpack the wheel as pip would, for whatever Python: the project is pure Python."""
    pip = [wheels.python_with_pip(), "-m", "pip", "--disable-pip-version-check", "install"]
    pip += ["--no-deps", "--no-compile", "--no-index", f"--target={site}", str(wheel)]
    process.run(pip, deadline_s=WHEEL_S, log=log, env=dict(os.environ))
    shutil.rmtree(site / "bin", ignore_errors=True)
