"""Where the host's files hang: small bounded reads of them, and where cgroups are mounted."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from errno import ENOENT, ESRCH
from typing import TYPE_CHECKING, Final, cast

from msgspec import Struct

from kata_pin.base.errors import HostError, TaskGone

if TYPE_CHECKING:
    from kata_pin.rights.calls import Calls

# A HostRoot lives as long as the program. A captured tree is an ordinary root; a test that wants
# affinities there brings its own Calls.


class _Direct:
    """The calls of this process, whose module is imported by the first of them.

    A command that reads what everybody may read makes none, and that import takes 10 ms.
    """

    def __getattr__(self, name: str) -> object:
        from kata_pin.rights.calls import DIRECT  # noqa: PLC0415 - see above

        return getattr(DIRECT, name)


_DIRECT: Final = cast("Calls", _Direct())


class HostRoot(Struct, frozen=True):
    """The root that every host path hangs off.

    `debugfs` is where debugfs is mounted, a path as seen from `root` (D6: it may be a
    private mount). `calls` makes the system calls that may need rights.
    """

    root: str = "/"
    debugfs: str = "/sys/kernel/debug"
    calls: Calls = _DIRECT

    @property
    def _prefix(self) -> str:
        return self.root.rstrip("/")

    @property
    def live(self) -> bool:
        """Whether this is the running system and not a captured tree."""
        return not self._prefix

    def path(self, absolute: str) -> str:
        """Return where an absolute path of the host is found."""
        return f"{self._prefix}/{absolute.lstrip('/')}"

    def proc(self, *parts: str | int) -> str:
        """Return a path below /proc."""
        return "/".join((f"{self._prefix}/proc", *map(str, parts)))

    def sys(self, *parts: str | int) -> str:
        """Return a path below /sys."""
        return "/".join((f"{self._prefix}/sys", *map(str, parts)))

    def debug(self, *parts: str | int) -> str:
        """Return a path below debugfs."""
        return "/".join((self.path(self.debugfs), *map(str, parts)))


HOST: Final = HostRoot()
"""The running system."""


# Small bounded reads of /proc and /sys, the only way this room opens a file.
#
# Nothing is kept open. Errors are bare OSError: each caller knows what a missing file means there.

STAT_BYTES: Final = 4096
"""Room for a stat file or one of sysfs: one record of a page at most, so one read returns it."""

TEXT_BYTES: Final = 64 * 1024
"""Most that is read of a sysfs or cgroup file; CpuSet.MAX_TEXT is half of it."""


def read_once(path: str, size: int = STAT_BYTES) -> bytes:
    """Return what one read of the file gives: for single-record files such as stat."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, size)
    finally:
        os.close(fd)


def read_bytes(path: str, limit: int = TEXT_BYTES) -> bytes:
    """Return the file's bytes, at most `limit`; a longer file is cut there.

    A seq_file may return less than asked for before its end, so reads go on until nothing comes.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = os.read(fd, limit)
        while len(data) < limit:
            more = os.read(fd, limit - len(data))
            if not more:
                break
            data += more
        return data
    finally:
        os.close(fd)


GONE_ERRNOS: Final = frozenset({ENOENT, ESRCH})
"""What opening (ENOENT) or reading (ESRCH) a file of a vanished process gives."""


def translated(error: OSError, operation: str, subject: str) -> HostError:
    """Return the HostError for a system call's error: TaskGone when the task vanished."""
    kind = TaskGone if error.errno in GONE_ERRNOS else HostError
    return kind(operation, subject, error.errno or 0)


@contextmanager
def host_errors(operation: str, subject: str, *, hint: str = "") -> Iterator[None]:
    """Raise HostError for an OSError of the block."""
    try:
        yield
    except OSError as error:
        raise HostError(operation, subject, error.errno or 0, hint=hint) from error


def read_text(path: str, limit: int = TEXT_BYTES) -> str:
    """Return the file as text without white space around it; odd bytes become U+FFFD."""
    return read_bytes(path, limit).decode("utf-8", "replace").strip()
