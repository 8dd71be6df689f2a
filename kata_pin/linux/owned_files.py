"""Reading files that must belong to root: Kata's state, bundles, the spool, the kubelet's files."""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import time
from collections.abc import Callable, Iterator
from typing import Final, TypeVar

from kata_pin.base.errors import KataPinError, ParseError, StateError
from kata_pin.rights.broker.files import refusal, status_of_fd, trusted_uid
from kata_pin.rights.calls import DIRECT, Calls

log = logging.getLogger(__name__)

T = TypeVar("T")

OUR_UID: Final = trusted_uid()
"""Whom files and peers may belong to beside root, as this program was started."""

_OWNERS: Final = frozenset({0, OUR_UID})

# O_NONBLOCK: opening a FIFO that somebody put there must not hang; regular files ignore it.
_FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC


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
    return read_below(folder or ".", name, limit=limit, calls=calls)


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
    found = calls.file(base, parts, limit)
    rule = refusal(found.status, limit, _OWNERS)
    if rule:
        raise FileRefused(parts[-1], rule)
    return found.content


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


def clear(path: str, *, folder: bool = False) -> None:
    """Set aside what has the name of a file, or folder, of ours and is none; raises OSError."""
    if is_foreign(path, folder=folder):
        with contextlib.suppress(FileNotFoundError):
            set_aside(path, f"not a {'folder' if folder else 'file'} of ours")


def is_foreign(path: str, *, folder: bool = False) -> bool:
    """Whether something is there that is no file, or folder, of ours; raises OSError.

    Links are not followed. A file or folder may belong to root, to us, or to whom its folder
    belongs to.
    """
    try:
        found, is_ours = os.lstat(path), stat.S_ISDIR if folder else stat.S_ISREG
    except FileNotFoundError:
        return False
    return not is_ours(found.st_mode) or found.st_uid not in owners_in(os.path.dirname(path))


@contextlib.contextmanager
def as_owner(folder: str) -> Iterator[None]:
    """As root, act as the user whom a folder belongs to: no link in it leads to files of others.

    For everybody else it changes nothing. Needs a process without other threads.
    """
    owner = os.stat(folder)
    if os.geteuid() != 0 or owner.st_uid == 0:
        yield
        return
    gid, groups = os.getegid(), os.getgroups()
    os.setgroups([])
    os.setegid(owner.st_gid)
    os.seteuid(owner.st_uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(gid)
        os.setgroups(groups)


def owners_in(folder: str) -> set[int]:
    """Return whom our own files in a folder may belong to."""
    return {0, os.geteuid(), os.stat(folder or ".").st_uid}


def set_aside(path: str, why: str) -> None:
    """Give something in a folder of ours another name; raises OSError."""
    aside = f"{path}.foreign-{time.time_ns()}"
    os.rename(path, aside)
    log.warning("%s: %s; set aside as %s", path, why, aside)


def _content(descriptor: int, name: str, limit: int) -> bytes:
    """Return what an open file contains, and close it; FileRefused unless it passes the rules."""
    try:
        rule = refusal(status_of_fd(descriptor), limit, _OWNERS)
        content = b"" if rule else os.read(descriptor, limit + 1)
    finally:
        os.close(descriptor)
    if rule or len(content) > limit:  # it grew
        raise FileRefused(name, rule or f"is larger than {limit} bytes")
    return content


def _check_owner(name: str, status: os.stat_result) -> None:
    if status.st_uid not in _OWNERS:
        raise FileRefused(name, f"is owned by uid {status.st_uid}, not by root")
