"""Mounts of the kernel's own list, as the checks of a VMM's executable read it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.root

MOUNTS = 100
"""The kernel's list has more than a page then, of which one read returns no more."""

_MOUNT = """
i=0
while [ $i -lt "$1" ]; do mkdir "$2/$i" && mount -t tmpfs none "$2/$i" || exit 9; i=$((i+1)); done
exec "$3" -c "$4" "$2/$((i-1))"
"""
_CHECK = """
import os, sys
from kata_pin.linux.files import HostRoot
from kata_pin.linux.proc import ExeFile
from kata_pin.vmm.checks import Allowlist
device = os.stat(sys.argv[1]).st_dev
gone = ExeFile("/gone/qemu", deleted=True, device=device, inode=1, uid=0, mode=0o100755)
Allowlist(HostRoot(), ["/gone/qemu"]).check(gone)
"""


def test_an_executable_that_was_on_the_last_mount(tmp_path: Path) -> None:
    """A program that was replaced is the host's if its device is that of any of its mounts."""
    command = ["unshare", "-m", "sh", "-c", _MOUNT, "sh", str(MOUNTS), str(tmp_path)]
    subprocess.run([*command, sys.executable, _CHECK], check=True, timeout=120)
