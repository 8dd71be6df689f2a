"""Files and sockets that must be root's: opened as paths (O_PATH), then checked, then used."""

from __future__ import annotations

import os
import socket
import stat
import struct
from collections.abc import Collection, Sequence
from contextlib import suppress
from errno import EINVAL, ENOTSOCK
from itertools import islice
from typing import Final, NamedTuple

from kata_pin.rights.broker.protocol import FileStatus

_FOLDER: Final = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_PATH: Final = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_READ: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC


class File(NamedTuple):
    """What a file is, and what was read of it: nothing where `refusal` says why not."""

    status: FileStatus
    content: bytes


def open_path(base: str, parts: Sequence[str]) -> int:
    """Open `base`, then each part in the one before, as paths; only `base` may be a link.

    Nothing is opened for reading by it, so no FIFO or device is touched. A link as the last part is
    opened as itself.
    """
    if any(part in {"", ".", ".."} or "/" in part for part in parts):
        raise OSError(EINVAL, "not the names of files")
    if not parts:
        return os.open(base, os.O_PATH | os.O_CLOEXEC)
    here = os.open(base, _FOLDER)
    try:
        for part in parts[:-1]:
            inner = os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=here)
            os.close(here)
            here = inner
        return os.open(parts[-1], _PATH, dir_fd=here)
    finally:
        os.close(here)


def read_file(base: str, parts: Sequence[str], limit: int, owners: Collection[int]) -> File:
    """Return a file's status and, unless `refusal` objects, its content; raises OSError."""
    fd = open_path(base, parts)
    try:
        status = status_of_fd(fd)
        if not limit or refusal(status, limit, owners):
            return File(status, b"")
        readable = os.open(f"/proc/self/fd/{fd}", _READ)
    finally:
        os.close(fd)
    try:
        content = os.read(readable, limit + 1)
    finally:
        os.close(readable)
    if len(content) > limit:  # it grew meanwhile
        return File(status._replace(size=len(content)), b"")
    return File(status, content)


def refusal(status: FileStatus, limit: int, owners: Collection[int]) -> str:
    """Return the rule that a file breaks, in a few words; empty for none."""
    if stat.S_ISLNK(status.mode):
        return "is a symlink"
    if stat.S_ISSOCK(status.mode):
        return "is a socket"
    if not stat.S_ISREG(status.mode):
        return "is not a regular file"
    if status.uid not in owners:
        return f"is owned by uid {status.uid}, not by root"
    return f"is larger than {limit} bytes" if status.size > limit else ""


def status_of_fd(fd: int) -> FileStatus:
    """Return the status of an open file."""
    return as_status(os.fstat(fd))


def as_status(found: os.stat_result) -> FileStatus:
    """Return what is used of a status."""
    return FileStatus(
        found.st_dev,
        found.st_ino,
        found.st_mode,
        found.st_uid,
        found.st_nlink,
        found.st_size,
        found.st_mtime_ns,
    )


def names_in(folder: str, most: int, *, folders: bool = False) -> list[str]:
    """Return names in a folder, at most so many: the rest is not even read.

    With `folders` those of folders alone, links to some not among them.
    """
    with os.scandir(folder) as entries:
        wanted = (e.name for e in entries if not folders or e.is_dir(follow_symlinks=False))
        return list(islice(wanted, most))


def links_in(folder: str, most: int) -> list[str]:
    """Return where the first links of a folder lead; those that end meanwhile are left out."""
    links: list[str] = []
    here = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in names_in(folder, most):
            with suppress(OSError):
                links.append(os.readlink(name, dir_fd=here))
    finally:
        os.close(here)
    return links


# Connecting to unix sockets that were opened as paths first, so that no link is followed.

_UCRED: Final = struct.Struct("=iII")


def connected(fd: int) -> socket.socket:
    """Return a non-blocking connection to a socket that is open as a path, and close that.

    BlockingIOError where its backlog is full.
    """
    try:
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            raise OSError(ENOTSOCK, "not a socket")
        kind = socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
        end = socket.socket(socket.AF_UNIX, kind)
        try:
            end.connect(f"/proc/self/fd/{fd}")
        except BaseException:
            end.close()
            raise
        return end
    finally:
        os.close(fd)


def listener(end: socket.socket) -> int:
    """Return the process that made the socket at the other end listen (unix(7), SO_PEERCRED)."""
    found = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    return int(_UCRED.unpack(found)[0])


# Whose files and peers are believed beside root's.


def trusted_uid() -> int:
    """Return our user, if it is a person's; a service's user, who has capabilities, is not trusted.

    The service gives them up later, and its user may be shared (D23). For root nothing is read:
    a package may be installed in a chroot that has no /proc.
    """
    uid = os.geteuid()
    if uid == 0:
        return 0
    with open("/proc/self/status", "rb", buffering=0) as file:
        lines = file.read(8192).split(b"\n")
    capable = any(line.startswith(b"CapEff:") and int(line.split()[1], 16) for line in lines)
    return 0 if capable else uid
