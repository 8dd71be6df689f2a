"""What the lab needs from this machine, checked before anything starts and named all at once."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Final

from tests.lab import wheels
from tests.lab.errors import LabError
from tests.lab.flavours import MEMORY_MIB

DISK_GIB: Final = 7
"""Free space that a build of one image takes at its worst (measured: 5.1 GiB), with a reserve."""

_BUILD: Final = {
    "apt-get": "apt",
    "chroot": "coreutils",
    "debootstrap": "debootstrap",
    "mkfs.ext4": "e2fsprogs",
    "tar": "tar",
    "unshare": "util-linux",
}
_BOOT: Final = {
    "qemu-system-x86_64": "qemu-system-x86",
    "setpriv": "util-linux",
    "tar": "tar",
}
_TEST: Final = {"as": "binutils", "ld": "binutils"}
"""For the firmware and the guest of the machines that the tests start inside."""
_KEYRING: Final = Path("/usr/share/keyrings/debian-archive-keyring.gpg")


def _missing_commands(commands: dict[str, str]) -> list[str]:
    return [
        f"command {command} (package {package})"
        for command, package in commands.items()
        if shutil.which(command, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") is None
    ]


def _existing_parent(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path


def missing_to_build(suite: str, cache: Path) -> list[str]:
    """Return what is missing to build the image of `suite` below `cache`; empty if nothing is."""
    missing = _missing_commands(_BUILD)
    if os.geteuid() != 0:
        missing.append("root: debootstrap makes devices and changes its root")
    if not _KEYRING.exists():
        missing.append(f"{_KEYRING} (package debian-archive-keyring)")
    script = Path("/usr/share/debootstrap/scripts") / suite
    if shutil.which("debootstrap") and not script.exists():
        missing.append(f"{script} (a newer package debootstrap)")
    missing += _missing_permission(cache)
    parent = _existing_parent(cache)
    free = shutil.disk_usage(parent).free / 2**30
    if free < DISK_GIB:
        missing.append(
            f"{DISK_GIB} GiB of disk at {parent}, there are {free:.1f}: "
            "free some or set KATA_PIN_LAB_CACHE"
        )
    return missing


def missing_to_boot(cache: Path) -> list[str]:
    """Return what is missing to start a machine; empty if nothing is."""
    missing = _missing_commands(_BOOT) + _missing_permission(cache)
    available = _available_memory_mib()
    if available < MEMORY_MIB:
        missing.append(f"{MEMORY_MIB} MiB of memory, {available} MiB are available")
    return missing


def missing_to_test(results: Path) -> list[str]:
    """Return what is missing to make ready what the tests need, and to keep their results."""
    return _missing_commands(_TEST) + _missing_pip() + _missing_permission(results)


def _missing_pip() -> list[str]:
    try:
        wheels.python_with_pip()
    except LabError as error:
        return [str(error).removeprefix("no ")]
    return []


def _missing_permission(folder: Path) -> list[str]:
    parent = _existing_parent(folder)
    return [] if os.access(parent, os.W_OK) else [f"permission to write in {parent}"]


def _available_memory_mib() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) // 1024
    return 0


def require(missing: list[str], purpose: str) -> None:
    """Raise LabError listing everything in `missing` once, if anything is."""
    if missing:
        lines = "".join(f"\n  - {item}" for item in dict.fromkeys(missing))
        raise LabError(f"cannot {purpose}, this machine lacks:{lines}")
