"""Reading files that must belong to root: Kata's state, bundles, the spool, the kubelet's files."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from typing import TypeVar

from kata_pin.errors import KataPinError, ParseError, StateError

T = TypeVar("T")

# O_NONBLOCK: opening a FIFO that somebody put there must not hang; regular files ignore it.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_NO_FILE = {errno.ELOOP: "a symlink", errno.ENXIO: "a socket"}  # open(2)


class FileRefused(KataPinError):  # noqa: N818 - refused by a rule, not failed
    """The file may not be read; `rule` is the rule it breaks, in a few words."""

    def __init__(self, name: str, rule: str) -> None:
        super().__init__(f"{name} {rule}")
        self.rule = rule


def read_owned(path: str, limit: int, *, dir_fd: int | None = None) -> bytes:
    """Return the content, at most `limit` bytes, of a regular file owned by root or by us.

    Raises FileRefused naming the rule that the file breaks (a symlink, another owner, too large),
    and OSError for everything else, FileNotFoundError among it.
    """
    name = os.path.basename(path)
    try:
        descriptor = os.open(path, _FILE, dir_fd=dir_fd)
    except OSError as error:
        if error.errno in _NO_FILE:
            raise FileRefused(name, f"is {_NO_FILE[error.errno]}") from error
        raise
    try:
        _check(name, os.fstat(descriptor), limit)
        content = os.read(descriptor, limit + 1)
    finally:
        os.close(descriptor)
    if len(content) > limit:  # it grew
        raise FileRefused(name, f"is larger than {limit} bytes")
    return content


def read_below(base: str, *parts: str, limit: int) -> bytes:
    """Return the content of a file below the folder `base`; raises as read_owned does.

    `base` may be a symlink, none of the parts may: they are opened one by one.
    """
    *folders, name = parts
    here = os.open(base, _FOLDER)
    try:
        for folder in folders:
            inner = os.open(folder, _FOLDER | os.O_NOFOLLOW, dir_fd=here)
            os.close(here)
            here = inner
        return read_owned(name, limit, dir_fd=here)
    finally:
        os.close(here)


def read_state(path: str, limit: int, parse: Callable[[bytes], T]) -> T | None:
    """Return a parsed file, None if it does not exist; StateError names the file and the reason."""
    try:
        return parse(read_owned(path, limit))
    except FileNotFoundError:
        return None
    except FileRefused as error:
        raise StateError(f"{path} {error.rule}") from error
    except ParseError as error:
        raise StateError(f"{path}: {error}") from error
    except OSError as error:
        raise StateError(f"{path}: {error.strerror}") from error


def _check(name: str, status: os.stat_result, limit: int) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise FileRefused(name, "is not a regular file")
    if status.st_uid not in {0, os.geteuid()}:
        raise FileRefused(name, f"is owned by uid {status.st_uid}, not by root")
    if status.st_size > limit:
        raise FileRefused(name, f"is larger than {limit} bytes")
