"""README's installation on a throwaway copy of this machine, as a new user would do it.

An overlay of the root file system in mount and pid namespaces of its own: `install` writes to its
/, and nothing of it is seen or left outside; what services left in /run and /var/tmp is not seen in
there. What needs a network (pip) is left out, and systemd is
not started in there: the daemon is started by the unit's own command.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(sys.executable).with_name("kata-pin")
TOOLS = ("systemd-sysusers", "systemd-tmpfiles", "unshare", "chroot")

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(not all(map(shutil.which, TOOLS)), reason=f"needs {', '.join(TOOLS)}"),
]

ENTER = """\
set -e
mount -t tmpfs none "$1"
mkdir "$1/upper" "$1/work" "$1/root"
mount -t overlay none -o "lowerdir=/,upperdir=$1/upper,workdir=$1/work" "$1/root" || exit 77
mount -t proc none "$1/root/proc"
for each in sys dev tmp; do mount --rbind "/$each" "$1/root/$each"; done
for each in run var/tmp; do mount -t tmpfs none "$1/root/$each"; done
mount --rbind "$2" "$1/root/$2"
cd /
exec chroot "$1/root" /bin/sh -e "$1/steps"
"""


def _readme() -> list[str]:
    """Return the commands of README's section on the installation, without their remarks."""
    section = (ROOT / "README.md").read_text().partition("## Install on a node")[2]
    section = section.partition("\n## ")[0]
    found = re.findall(r"^ {4}(.+)$", section, re.MULTILINE)
    return [one.partition("  #")[0].strip() for one in found]


def _installation() -> list[str]:
    """Return README's commands from `install` on, for the program under test."""
    commands = _readme()
    (first,) = (n for n, one in enumerate(commands) if "bin/kata-pin install" in one)
    return [re.sub(r"^/opt/kata-pin/bin/kata-pin", str(PROGRAM), one) for one in commands[first:]]


def _played(folder: Path, steps: list[str]) -> dict[str, str]:
    """Run shell commands in the throwaway root; return what each printed."""
    lines = [f"echo '== {n}'; {{ {step}; }} 2>&1" for n, step in enumerate(steps)]
    stage = folder / "stage"
    stage.mkdir()
    script = folder / "enter"
    script.write_text(ENTER.replace('"$1/steps"', f'"{folder}/steps"'))
    (folder / "steps").write_text("\n".join(lines) + "\n")
    done = subprocess.run(
        ["unshare", "-m", "-p", "-f", "--propagation", "private", "sh", script, stage, ROOT],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    if done.returncode == 77:
        pytest.skip(f"no overlay of / here: {done.stderr}")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    parts = re.split(r"^== \d+\n", done.stdout, flags=re.MULTILINE)[1:]
    return dict(zip(steps, parts, strict=True))


def test_readme_has_every_step_in_order() -> None:
    """A program in a place of its own, the locked packages, files, group and folders, service."""
    order = ("-m venv", "requirements.lock", "kata-pin install", "systemd-sysusers",
             "systemd-tmpfiles --create", "systemctl enable --now", "kata-pin doctor")  # fmt: skip
    text = "\n".join(_readme())
    found = [text.find(one) for one in order]
    assert -1 not in found
    assert found == sorted(found)


@pytest.mark.timeout(150)
def test_after_readmes_steps_there_is_nothing_to_fix(tmp_path: Path) -> None:
    """`doctor` names what is missing before a step, and says 0 to fix after the last one."""
    install, directories, systemctl, doctor = _installation()
    assert systemctl.startswith("systemctl ")
    unit = "/usr/lib/systemd/system/kata-pin.service"
    daemon = f"$(sed -n 's/^ExecStart=//p' {unit}) 2>/dev/null & sleep 0.1"
    ready = "for n in $(seq 200); do [ -S /run/kata-pin/status.sock ] && break; sleep 0.1; done"
    before, after = f"{doctor} || true", f"{doctor} && true"
    uninstall = "kata-pin uninstall"
    others = (
        "-not -path '/usr/src/*' -not -path '/var/lib/containers/*'"  # images have kata-pin too
    )
    left = f"find /usr /etc /var /var/tmp -xdev -name '*kata-pin*' {others}"
    said = _played(
        tmp_path,
        [
            install, before, directories, daemon, ready, after,
            "readlink /usr/bin/kata-pin", "! command -v man >/dev/null || man -w kata-pin",
            "kata-pin check", "sha256sum -c --quiet /var/lib/kata-pin/installed",
            uninstall,
            left,
        ],
    )  # fmt: skip
    for step in ("systemd-sysusers && systemd-tmpfiles --create", "kata-pin doctor"):
        assert step in said[install]
    assert said[before].splitlines()[-1].startswith("3 to fix, ")  # the daemon too
    assert said[after].splitlines()[-1].startswith("0 to fix, ")
    assert "all installed files are in place" in said[after]
    assert said["readlink /usr/bin/kata-pin"].strip() == str(PROGRAM)
    assert said["! command -v man >/dev/null || man -w kata-pin"].strip() in {
        "", "/usr/share/man/man8/kata-pin.8",
    }  # fmt: skip
    assert "by the daemon" in said[uninstall]
    assert list(said.values())[-1] == ""
