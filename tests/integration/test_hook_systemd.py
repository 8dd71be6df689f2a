"""The installed unit, tmpfiles.d and sysusers.d files, read by systemd's own tools below a root."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from tests.support.commandline import run as kata_pin

MOST_EXPOSED = (
    23  # tenths, as systemd-analyze 252 counts; 2 of them for perf_event_open (prove, watch)
)
UNIT = "usr/lib/systemd/system/kata-pin.service"

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd is not installed"),
]


@pytest.fixture
def node(tmp_path: Path) -> Path:
    assert kata_pin(["install", "--root", str(tmp_path), "--program", "/usr/bin/true"]) == 0
    (tmp_path / f"{UNIT}.d/before-linux-6.6.conf").unlink()  # one right more, on older kernels only
    return tmp_path


def run(*command: str) -> str:
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        timeout=20, env={**os.environ, "SYSTEMD_PAGER": "cat"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_unit_is_understood(node: Path) -> None:
    """systemd knows every line of the unit: a misspelt one would only be ignored."""
    assert run("systemd-analyze", "verify", "--man=no", str(node / UNIT)) == ""


def test_unit_is_hardened(node: Path) -> None:
    """The unit's exposure stays low as systemd itself counts it; the figure is printed."""
    threshold = f"--threshold={MOST_EXPOSED}"
    said = run("systemd-analyze", "security", "--offline=yes", threshold, str(node / UNIT))
    print("systemd-analyze security:", said.splitlines()[-1])


def test_group_and_directories(node: Path) -> None:
    """The group gets in to read; the spool is the daemon's, and messages get its group."""
    (node / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    (node / "etc/group").write_text("root:x:0:\n")
    run("systemd-sysusers", f"--root={node}")
    run("systemd-tmpfiles", "--create", f"--root={node}", "kata-pin.conf")
    gid = int((node / "etc/group").read_text().partition("kata-pin:x:")[2].partition(":")[0])
    uid = int((node / "etc/passwd").read_text().partition("kata-pin:x:")[2].partition(":")[0])
    assert uid != 0
    modes = {}
    for name in ("run/kata-pin", "run/kata-pin/spool"):
        status = (node / name).stat()
        modes[name] = (oct(stat.S_IMODE(status.st_mode)), status.st_uid, status.st_gid)
    assert modes == {
        "run/kata-pin": ("0o750", uid, gid),
        "run/kata-pin/spool": ("0o700", uid, gid),
    }
