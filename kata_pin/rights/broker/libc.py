"""What Python lacks: statx, prctl, capset, perf_event_open, malloc_trim; the process connector."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterable
from contextlib import suppress
from errno import ENOSYS
from functools import cache
from typing import Final

from kata_pin.rights.broker.protocol import FileStatus

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

    def trim(self) -> None:
        """Give freed memory back to the kernel, where the C library can (malloc_trim(3), glibc)."""
        with suppress(AttributeError):
            self._library.malloc_trim(0)

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


# Opening perf events that record which tasks a CPU switches between (perf_event_open(2)).
#
# The event is a clock of the CPU, which also records switches, new tasks and names. Its samples,
# four in a second, say who runs where nothing switches; they come from an idle CPU too, so one that
# went offline is noticed.

SAMPLE_NS: Final = 250_000_000

_CALLS: Final = {"x86_64": 298, "aarch64": 241, "riscv64": 241, "ppc64le": 319, "s390x": 331}
"""The number of the call by machine."""

_BYTES: Final = 136  # PERF_ATTR_SIZE_VER8
_ATTR: Final = struct.Struct("=IIQQQQQ")  # type, size, config, period, sample type, format, bits
_WATERMARK_AT: Final = 48
_CLOCK_AT: Final = 92
_SOFTWARE: Final = 1
_CPU_CLOCK: Final = 0
_TID, _TIME, _CPU = 1 << 1, 1 << 2, 1 << 7
_DISABLED, _COMM, _TASK, _WATERMARK = 1 << 0, 1 << 9, 1 << 13, 1 << 14
_SAMPLE_ID_ALL, _USE_CLOCKID, _CONTEXT_SWITCH = 1 << 18, 1 << 25, 1 << 26
_BITS: Final = _DISABLED | _COMM | _TASK | _WATERMARK | _SAMPLE_ID_ALL | _CONTEXT_SWITCH
_CLOCK_MONOTONIC: Final = 1
_WAKE_AT: Final = 64 * 1024  # bytes that were written since the last wake-up
_ANY_TASK: Final = -1
_NO_GROUP: Final = -1
_CLOEXEC: Final = 8


def open_switches(cpu: int) -> int:
    """Return a descriptor of such an event, not enabled yet; raises OSError.

    EACCES or EPERM without CAP_PERFMON, EINVAL or ENODEV for a CPU that is absent or offline.
    """
    kinds = _TID | _TIME | _CPU
    return open_event(attributes(_SOFTWARE, _CPU_CLOCK, SAMPLE_NS, kinds, _BITS), cpu)


def attributes(kind: int, config: int, period: int, fields: int, bits: int) -> bytes:
    """Return struct perf_event_attr; times are CLOCK_MONOTONIC."""
    found = bytearray(_BYTES)
    _ATTR.pack_into(found, 0, kind, _BYTES, config, period, fields, 0, bits | _USE_CLOCKID)
    struct.pack_into("=I", found, _WATERMARK_AT, _WAKE_AT)
    struct.pack_into("=i", found, _CLOCK_AT, _CLOCK_MONOTONIC)
    return bytes(found)


def open_event(attr: bytes, cpu: int) -> int:
    """Return a descriptor of an event on a CPU, of any task; raises OSError."""
    number = _CALLS.get(os.uname().machine)
    if number is None:
        raise OSError(ENOSYS, os.strerror(ENOSYS))
    return libc().call("syscall", number, attr, _ANY_TASK, cpu, _NO_GROUP, _CLOEXEC)


# A socket of the kernel's process connector (drivers/connector/cn_proc.c).

RECEIVE_BYTES: Final = 4 * 1024 * 1024
"""Room for about 10,000 events in the kernel (it accounts some 800 bytes for each)."""

_NETLINK_CONNECTOR: Final = 11
_CN_IDX_PROC: Final = 1
_SO_RCVBUFFORCE: Final = 33  # asm-generic/socket.h; not in Python's socket module


LISTEN: Final = 1  # enum proc_cn_mcast_op
IGNORE: Final = 2
FORK: Final = 0x1  # enum proc_cn_event
EXEC: Final = 0x2
EXIT: Final = 0x8000_0000

_HEADER: Final = struct.Struct("=IHHIIIIIIHH")  # nlmsghdr, then cn_msg
_NLMSG_DONE: Final = 3
_CN_VAL_PROC: Final = 1


def request(token: int, operation: int, events: int | None = None) -> bytes:
    """Return a request to the connector; the kernel answers with `token` + 1."""
    words = (operation,) if events is None else (operation, events)
    payload = struct.pack(f"={len(words)}I", *words)
    length = _HEADER.size + len(payload)
    header = (length, _NLMSG_DONE, 0, 0, 0)
    return _HEADER.pack(*header, _CN_IDX_PROC, _CN_VAL_PROC, 0, token, len(payload), 0) + payload


def subscription(token: int, *, execs: bool) -> tuple[bytes, bytes]:
    """Return the two requests of a listener: to listen, and for which events."""
    events = FORK | (EXEC if execs else 0) | EXIT
    return request(token, LISTEN), request(token, LISTEN, events)


def process_events(token: int, *, execs: bool) -> socket.socket:
    """Return a socket of the process connector that listens; raises OSError.

    Two requests are sent on it: to listen, and for which events; both are acknowledged with `token`
    + 1. Connected so that only the kernel can send to it. Linux before 6.6 takes requests from
    CAP_NET_ADMIN alone, and ignores the second.
    """
    kind = socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
    sock = socket.socket(socket.AF_NETLINK, kind, _NETLINK_CONNECTOR)
    try:
        try:
            sock.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, RECEIVE_BYTES)
        except PermissionError:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
        sock.bind((0, _CN_IDX_PROC))
        sock.connect((0, 0))
        for message in subscription(token, execs=execs):
            sock.send(message)
    except BaseException:
        sock.close()
        raise
    return sock
