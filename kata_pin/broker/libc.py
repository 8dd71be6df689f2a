"""System calls that Python does not have: statx, prctl, capset, inotify_add_watch."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from functools import cache
from typing import Final

from kata_pin.broker.protocol import FileStatus

CAP_DAC_OVERRIDE: Final = 1
CAP_DAC_READ_SEARCH: Final = 2
CAP_SETUID: Final = 7
CAP_NET_ADMIN: Final = 12
CAP_SYS_PTRACE: Final = 19
CAP_SYS_NICE: Final = 23
CAP_PERFMON: Final = 38

_AT_FDCWD: Final = -100
AT_EMPTY_PATH: Final = 0x1000
AT_SYMLINK_NOFOLLOW: Final = 0x100
_AT_STATX_DONT_SYNC: Final = 0x4000
_STATX_BASIC: Final = 0x7FF
_STATX_BYTES: Final = 256
_STATX: Final = struct.Struct("=16xIIIH2xQQ64xqI12xII")
"""linux/stat.h: links, uid, gid, mode, inode, size, modified (s, ns), device (major, minor)."""

_PR_SET_DUMPABLE: Final = 4
_PR_SET_KEEPCAPS: Final = 8
_PR_SET_NAME: Final = 15
_PR_SET_NO_NEW_PRIVS: Final = 38
_PR_CAP_AMBIENT: Final = 47
_PR_CAP_AMBIENT_CLEAR_ALL: Final = 4
_PR_SCHED_CORE: Final = 62
_PR_SCHED_CORE_GET: Final = 0
_PIDTYPE_PID: Final = 0
_CAPABILITY_VERSION_3: Final = 0x20080522


class Libc:
    """The C library; ctypes takes 3 ms to import, so the first use imports it."""

    def __init__(self) -> None:
        import ctypes  # noqa: PLC0415

        self._ctypes = ctypes
        self._library = ctypes.CDLL(None, use_errno=True)

    def call(self, name: str, *arguments: object) -> int:
        """Call a function that returns an int; raises OSError for a negative one."""
        result = int(getattr(self._library, name)(*arguments))
        if result < 0:
            number = self._ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return result

    def add_watch(self, inotify: int, path: str, mask: int) -> int:
        """Watch a file or folder; return the number of the watch."""
        return self.call("inotify_add_watch", inotify, os.fsencode(path), mask)

    def statx(self, folder: int, path: str, flags: int) -> FileStatus:
        """Return a file's status as this kernel knows it, without asking a file system's server."""
        found = self._ctypes.create_string_buffer(_STATX_BYTES)
        name = os.fsencode(path)
        self.call("statx", folder, name, flags | _AT_STATX_DONT_SYNC, _STATX_BASIC, found)
        links, uid, _, mode, inode, size, seconds, nanoseconds, major, minor = _STATX.unpack_from(
            found.raw
        )
        modified_ns = seconds * 1_000_000_000 + nanoseconds
        return FileStatus(os.makedev(major, minor), inode, mode, uid, links, size, modified_ns)

    def hide(self) -> None:
        """Let no process of the same user look into this one, nor dump its memory."""
        self.call("prctl", _PR_SET_DUMPABLE, 0, 0, 0, 0)

    def set_name(self, name: str) -> None:
        """Set this process's name, at most 15 bytes."""
        self.call("prctl", _PR_SET_NAME, name.encode(), 0, 0, 0)

    def core_cookie(self, tid: int) -> int:
        """Return the core-scheduling cookie of a thread, 0 for none."""
        found = self._ctypes.c_ulonglong()
        self.call(
            *("prctl", _PR_SCHED_CORE, _PR_SCHED_CORE_GET, tid, _PIDTYPE_PID),
            self._ctypes.byref(found),
        )
        return found.value

    def keep_permitted(self) -> None:
        """Have capabilities outlive the next change of the user."""
        self.call("prctl", _PR_SET_KEEPCAPS, 1, 0, 0, 0)

    def keep_rights(self, rights: Iterable[int]) -> None:
        """Give up every capability but these, for good; programs that are started get none."""
        self.call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        self.call("prctl", _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
        head = self._ctypes.create_string_buffer(struct.pack("=Ii", _CAPABILITY_VERSION_3, 0), 8)
        now = self._ctypes.create_string_buffer(24)
        self.call("capget", head, now)
        _, low, _, _, high, _ = struct.unpack("=6I", now.raw)
        kept = sum(1 << one for one in rights) & (low | high << 32)
        words = (kept & 0xFFFFFFFF, kept >> 32)
        data = struct.pack("=6I", words[0], words[0], 0, words[1], words[1], 0)
        self.call("capset", head, self._ctypes.create_string_buffer(data, 24))


@cache
def libc() -> Libc:
    """Return the C library."""
    return Libc()


def status_of(path: str) -> FileStatus:
    """Return the status of what a path leads to."""
    return libc().statx(_AT_FDCWD, path, 0)
