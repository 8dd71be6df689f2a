"""Reading files that must belong to root: Kata's state, bundles, the spool, the kubelet's files."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from typing import Final, TypeVar

from kata_pin.broker.trust import trusted_uid
from kata_pin.calls import DIRECT, Calls
from kata_pin.errors import KataPinError, ParseError, StateError

T = TypeVar("T")

OUR_UID: Final = trusted_uid()
"""Whom files and peers may belong to beside root, as this program was started."""

# O_NONBLOCK: opening a FIFO that somebody put there must not hang; regular files ignore it.
_FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_NO_FILE = {  # open(2); the last is the broker's
    errno.ELOOP: "a symlink",
    errno.ENXIO: "a socket",
    errno.EINVAL: "not a regular file",
}


class FileRefused(KataPinError):  # noqa: N818 - refused by a rule, not failed
    """The file may not be read; `rule` is the rule it breaks, in a few words."""

    def __init__(self, name: str, rule: str) -> None:
        super().__init__(f"{name} {rule}")
        self.rule = rule


def read_owned(path: str, limit: int, *, calls: Calls = DIRECT) -> bytes:
    """Return the content, at most `limit` bytes, of a regular file owned by root or by us.

    `calls` may have the rights to read it. Raises FileRefused naming the rule that the file breaks
    (a symlink, another owner, too large), and OSError for everything else, FileNotFoundError among
    it.
    """
    folder, name = os.path.split(path)
    return _read(lambda: calls.open_below(folder or ".", [name]), name, limit)


def _read(opened: Callable[[], int], name: str, limit: int) -> bytes:
    try:
        descriptor = opened()
    except OSError as error:
        if error.errno in _NO_FILE:
            raise FileRefused(name, f"is {_NO_FILE[error.errno]}") from error
        raise
    return _content(descriptor, name, limit)


def read_projected(path: str, limit: int) -> bytes:
    """Return the content of a file owned by root or by us, which a symlink may name.

    A kubelet shows tokens and certificates through symlinks that it replaces to renew them
    (`token` -> `..data/token`). Only root's and our own symlinks are followed, in a folder of
    root's or ours in which others can replace nothing: none may write there, or it is sticky, as
    the kubelet's are. Raises as read_owned does.
    """
    folder, name = os.path.split(path)
    here = os.open(folder or ".", _FOLDER)
    try:
        status = os.fstat(here)
        _check_owner(folder, status)
        if status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX:
            raise FileRefused(folder, "can be written by others than its owner")
        _check_owner(path, os.stat(name, dir_fd=here, follow_symlinks=False))
        descriptor = os.open(name, _FILE, dir_fd=here)
    except OSError as error:
        error.filename = path
        raise
    finally:
        os.close(here)
    return _content(descriptor, path, limit)


def read_below(base: str, *parts: str, limit: int, calls: Calls = DIRECT) -> bytes:
    """Return the content of a file below the folder `base`; raises as read_owned does.

    `base` may be a symlink, none of the parts may: they are opened one by one.
    """
    return _read(lambda: calls.open_below(base, parts), parts[-1], limit)


def read_state(
    path: str, limit: int, parse: Callable[[bytes], T], *, calls: Calls = DIRECT
) -> T | None:
    """Return a parsed file, None if it does not exist; StateError names the file and the reason."""
    try:
        return parse(read_owned(path, limit, calls=calls))
    except FileNotFoundError:
        return None
    except FileRefused as error:
        raise StateError(f"{path} {error.rule}") from error
    except ParseError as error:
        raise StateError(f"{path}: {error}") from error
    except OSError as error:
        raise StateError(f"{path}: {error.strerror}") from error


def _content(descriptor: int, name: str, limit: int) -> bytes:
    """Return what an open file contains, and close it; FileRefused unless it passes the rules."""
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise FileRefused(name, "is not a regular file")
        _check_owner(name, status)
        if status.st_size > limit:
            raise FileRefused(name, f"is larger than {limit} bytes")
        content = os.read(descriptor, limit + 1)
    finally:
        os.close(descriptor)
    if len(content) > limit:  # it grew
        raise FileRefused(name, f"is larger than {limit} bytes")
    return content


def _check_owner(name: str, status: os.stat_result) -> None:
    if status.st_uid not in {0, OUR_UID}:
        raise FileRefused(name, f"is owned by uid {status.st_uid}, not by root")
