"""Jails: Firecracker's jailer starts a VMM with a root folder and a program of its sandbox's own.

Such a program shows `/firecracker` as its path, in a mount namespace of its own. What it is and
where it runs is verified by the files themselves: the process's root is the jail's folder, and its
executable the jail's program, by inode; and only root may write there.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection
from errno import EACCES, EINVAL, ESTALE
from typing import Final

from kata_pin.broker.libc import AT_EMPTY_PATH, AT_SYMLINK_NOFOLLOW, libc, status_of
from kata_pin.broker.protocol import FileStatus

ROOT: Final = "root"
"""The folder of a jail that becomes the process's root (jailer/src/env.rs, chroot_dir)."""

_WRITABLE: Final = stat.S_IWGRP | stat.S_IWOTH
_FOLDER: Final = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC


def parts_of(jail: str) -> tuple[str, str, str]:
    """Return where jails are, the program's name and the jail's id; ValueError for another path.

    A jail is `<base>/<program>/<id>/root` (firecracker/docs/jailer.md).
    """
    base, program, name, root = jail.rsplit("/", 3)
    if root != ROOT or {program, name} & {"", ".", ".."}:
        raise ValueError("not the path of a jail")
    return base, program, name


def check_jailed(pid: int, jail: str, owners: Collection[int]) -> None:
    """Raise OSError unless a process runs the program of a jail, in it.

    EACCES: others than `owners` (root, and us) may write to the jail or its program. ESTALE: the
    process has another root, or runs another file. EINVAL: that is no jail's path.
    """
    try:
        base, program, name = parts_of(jail)
    except ValueError as error:
        raise OSError(EINVAL, str(error)) from error
    here = os.open(base, _FOLDER)
    try:
        _require_owned(_status(here), owners)
        for part in (program, name, ROOT):
            inner = os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=here)
            os.close(here)
            here = inner
            _require_owned(_status(here), owners)
        file = libc().statx(here, program, AT_SYMLINK_NOFOLLOW)
        if not stat.S_ISREG(file.mode):
            raise OSError(EACCES, "its program is no file")
        _require_owned(file, owners)
        runs_it = _is_same(status_of(f"/proc/{pid}/exe"), file)
        if not runs_it or not _is_same(status_of(f"/proc/{pid}/root"), _status(here)):
            raise OSError(ESTALE, "the process has another root, or runs another file")
    finally:
        os.close(here)


def _status(folder: int) -> FileStatus:
    return libc().statx(folder, "", AT_EMPTY_PATH)


def _require_owned(found: FileStatus, owners: Collection[int]) -> None:
    if found.uid not in owners or found.mode & _WRITABLE:
        raise OSError(EACCES, "others than root may write there")


def _is_same(one: FileStatus, other: FileStatus) -> bool:
    return (one.device, one.inode) == (other.device, other.inode)
