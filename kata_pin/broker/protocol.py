"""What the daemon and its broker send each other: records, and their bytes (docs/broker.md)."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

MAX_MESSAGE: Final = 64 * 1024
MAX_INLINE: Final = MAX_MESSAGE - 64
"""Longest answer that is sent as such; a longer one comes as memory (memfd_create(2))."""

MAX_READ: Final = 128 * 1024
MAX_CHANGES: Final = 512
MAX_MASK: Final = 1024  # bytes: 8,192 CPUs
MAX_KEPT: Final = 4096  # masks that are remembered

REQUEST: Final = struct.Struct("=cI")  # operation, number of the request
ANSWER: Final = struct.Struct("=Ii")  # number of the request, errno
NUMBER: Final = struct.Struct("=I")
STATUS: Final = struct.Struct("=QQIIIqq")  # a FileStatus

_CHANGES: Final = struct.Struct("=HH")  # how many sets, how many changes
_CHANGE: Final = struct.Struct("=iiQQH")  # tgid, tid, start time, inode, number of the set
_ERRNO: Final = struct.Struct("=i")
_LENGTH: Final = struct.Struct("=H")


class Change(NamedTuple):
    """An affinity to set.

    `starttime` and `inode` identify the thread: when it started, in clock ticks since boot, and the
    inode of its folder in /proc, 0 where that is not known.
    """

    tgid: int
    tid: int
    starttime: int
    inode: int
    cpus: frozenset[int]


class Changed(NamedTuple):
    """What became of a Change: `errno` of the call, and the affinity that the thread then had.

    ESRCH: the thread is gone. ESTALE: its tid belongs to another thread. EACCES: the process is
    none that may be changed.
    """

    errno: int
    after: frozenset[int] = frozenset()


class FileStatus(NamedTuple):
    """What is used of stat(2)."""

    device: int
    inode: int
    mode: int
    uid: int
    links: int
    size: int
    modified_ns: int


def parse_changes(data: bytes) -> list[Change]:
    """Return the changes of a request; raises ValueError or struct.error."""
    masks, count = _CHANGES.unpack_from(data)
    at = _CHANGES.size
    sets: list[frozenset[int]] = []
    for _ in range(masks):
        mask, at = _mask(data, at)
        sets.append(mask)
    if count > MAX_CHANGES or len(data) != at + count * _CHANGE.size:
        raise ValueError("not as long as it says")
    changes = []
    for tgid, tid, starttime, inode, number in _CHANGE.iter_unpack(data[at:]):
        if tgid <= 0 or tid <= 0 or number >= len(sets):
            raise ValueError("no such thread or set")
        changes.append(Change(tgid, tid, starttime, inode, sets[number]))
    return changes


def render_changes(changes: Sequence[Change]) -> bytes:
    """Return the request for changes, at most MAX_CHANGES."""
    numbers: dict[frozenset[int], int] = {}
    rows = [
        _CHANGE.pack(one.tgid, one.tid, one.starttime, one.inode, number)
        for one in changes
        for number in [numbers.setdefault(one.cpus, len(numbers))]
    ]
    masks = [_LENGTH.pack(len(mask)) + mask for mask in map(mask_of, numbers)]
    return b"".join((_CHANGES.pack(len(masks), len(rows)), *masks, *rows))


class GroupRequest(NamedTuple):
    """A group of resctrl, by its class and its name, and the threads that join it."""

    class_name: str
    name: str
    threads: list[Change]


def parse_group(data: bytes) -> GroupRequest:
    """Return the group of a request; raises ValueError, struct.error or IndexError.

    The names are separated by a zero byte, another one ends them; changes may follow.
    """
    class_name, name, rest = data.split(b"\0", 2)
    threads = parse_changes(rest) if rest else []
    return GroupRequest(class_name.decode("ascii"), name.decode("ascii"), threads)


def render_group(class_name: str, name: str, threads: bytes = b"") -> bytes:
    """Return the request for a group; `threads` is a request for changes, without CPUs."""
    return f"{class_name}\0{name}\0".encode("ascii") + threads


def parse_changed(data: bytes) -> list[Changed]:
    """Return the answer to a request for changes."""
    at = 0
    done: list[Changed] = []
    while at < len(data):
        (errno,) = _ERRNO.unpack_from(data, at)
        mask, at = _mask(data, at + _ERRNO.size)
        done.append(Changed(errno, mask))
    return done


def render_changed(done: Iterable[Changed]) -> bytes:
    """Return the answer to a request for changes."""
    rows = ((_ERRNO.pack(one.errno), mask_of(one.after)) for one in done)
    return b"".join(errno + _LENGTH.pack(len(mask)) + mask for errno, mask in rows)


@lru_cache(MAX_KEPT)
def mask_of(cpus: frozenset[int]) -> bytes:
    """Return a set as the kernel's bits, little-endian; a node has few distinct ones."""
    bits = sum(1 << cpu for cpu in cpus)
    return bits.to_bytes((bits.bit_length() + 7) // 8, "little")


@lru_cache(MAX_KEPT)
def _cpus(mask: bytes) -> frozenset[int]:
    bits = int.from_bytes(mask, "little")
    return frozenset(cpu for cpu in range(bits.bit_length()) if bits >> cpu & 1)


def _mask(data: bytes, at: int) -> tuple[frozenset[int], int]:
    """Return a set, and where the next thing begins."""
    (length,) = _LENGTH.unpack_from(data, at)
    start, end = at + _LENGTH.size, at + _LENGTH.size + length
    if length > MAX_MASK or end > len(data):
        raise ValueError("no such set")
    return _cpus(data[start:end]), end
