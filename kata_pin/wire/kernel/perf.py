"""Records of perf's ring buffers (linux/perf_event.h) for the events of broker/perf.py.

Only what says who ran is read. A task that leaves its CPU names the one that comes next, so an
arrival is told only where it is news: Linux 6.18 was seen to write no records at all for some
tasks, which then show in the records of their neighbours alone.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final, NamedTuple

from kata_pin.errors import ParseError

HEAD_AT: Final = 1024
TAIL_AT: Final = 1032
"""Where the first page of a ring has how much was written, and how much was read (u64 each)."""

COMM_BYTES: Final = 16
"""Longest name of a task with its zero (TASK_COMM_LEN)."""

_HEADER: Final = struct.Struct("=IHH")  # type, misc, size
_SWITCH: Final = struct.Struct("=IHHIIIIQII")  # next pid, tid; pid, tid, time, CPU, 0
_SAMPLE: Final = struct.Struct("=IHHIIQII")  # pid, tid, time, CPU, 0
_LOST: Final = struct.Struct("=QQ")  # id, how many
_TASK: Final = struct.Struct("=IIIIQ")  # pid, parent's pid, tid, parent's tid, time
_IDS: Final = struct.Struct("=II")  # pid, tid

_TYPE_LOST: Final = 2
_TYPE_COMM: Final = 3
_TYPE_FORK: Final = 7
_TYPE_SAMPLE: Final = 9
_TYPE_SWITCH: Final = 15
_MISC_OUT: Final = 1 << 13


DEAD: Final = 0xFFFF_FFFF
"""The tid of a task that has exited, in the record of its last switch."""


class Left(NamedTuple):
    """A task left its CPU at `time_ns` (CLOCK_MONOTONIC) for the next; 0 is the idle task."""

    time_ns: int
    tid: int
    pid: int
    next_tid: int
    next_pid: int


class Came(NamedTuple):
    """A task came to its CPU after another one whose leave was not recorded."""

    time_ns: int
    tid: int
    pid: int
    from_tid: int
    from_pid: int


class Ran(NamedTuple):
    """The task that a sample found on the CPU."""

    time_ns: int
    tid: int
    pid: int


class Lost(NamedTuple):
    """So many records did not fit into the ring; when is not known."""

    records: int


class Named(NamedTuple):
    """A task took a name."""

    tid: int
    pid: int
    comm: str


class Forked(NamedTuple):
    """A task made another one."""

    tid: int
    pid: int
    parent_pid: int


Event = Left | Came | Ran | Lost | Named | Forked


@dataclass(frozen=True, slots=True)
class Records:
    """What a piece of a ring says: events in their order, and how many records there were."""

    events: tuple[Event, ...]
    records: int


def parse_records(data: bytes) -> Records:
    """Read whole records; those of other types are only counted.

    Raises ParseError where a record is shorter than its type's, or ends behind the data.
    """
    events: list[Event] = []
    add = events.append
    at, end, count = 0, len(data), 0
    expected = -1  # who came last, by the leave before; at first nobody knows
    while at < end:
        if end - at < _HEADER.size:
            raise ParseError("a record's header is cut off", source="perf ring")
        kind, misc, size = _HEADER.unpack_from(data, at)
        if size < _HEADER.size or size > end - at:
            raise ParseError(f"a record of {size} bytes", source="perf ring")
        count += 1
        if kind == _TYPE_SWITCH:
            if size < _SWITCH.size:
                raise ParseError(f"a switch of {size} bytes", source="perf ring")
            _, _, _, other_pid, other, pid, tid, time_ns, _, _ = _SWITCH.unpack_from(data, at)
            if misc & _MISC_OUT:
                add(Left(time_ns, tid, pid, other, other_pid))
                expected = other
            elif tid != expected:
                add(Came(time_ns, tid, pid, other, other_pid))
                expected = tid
        elif kind in _OTHERS:
            least, read = _OTHERS[kind]
            if size < least:
                raise ParseError(f"a record of type {kind} of {size} bytes", source="perf ring")
            add(read(data, at, size))
        at += size
    return Records(tuple(events), count)


def _sample(data: bytes, at: int, _: int) -> Event:
    _, _, _, pid, tid, time_ns, _, _ = _SAMPLE.unpack_from(data, at)
    return Ran(time_ns, tid, pid)


def _lost(data: bytes, at: int, _: int) -> Event:
    return Lost(_LOST.unpack_from(data, at + _HEADER.size)[1])


def _named(data: bytes, at: int, size: int) -> Event:
    start = at + _HEADER.size + _IDS.size
    pid, tid = _IDS.unpack_from(data, at + _HEADER.size)
    comm = data[start : min(start + COMM_BYTES, at + size)].split(b"\0", 1)[0]
    return Named(tid, pid, comm.decode("utf-8", "backslashreplace"))


def _forked(data: bytes, at: int, _: int) -> Event:
    pid, parent_pid, tid, _, _ = _TASK.unpack_from(data, at + _HEADER.size)
    return Forked(tid, pid, parent_pid)


_OTHERS: Final = {
    _TYPE_LOST: (_HEADER.size + _LOST.size, _lost),
    _TYPE_COMM: (_HEADER.size + _IDS.size, _named),
    _TYPE_FORK: (_HEADER.size + _TASK.size, _forked),
    _TYPE_SAMPLE: (_SAMPLE.size, _sample),
}
"""How the other types are read, each with its least size."""


def between(area: bytes | memoryview, tail: int, head: int) -> bytes:
    """Return the bytes of a ring between two positions, which count from its beginning.

    `area` is the ring without its first page. Raises ParseError where the positions do not fit: the
    writer went round.
    """
    size = len(area)
    if not size or not 0 <= head - tail <= size:
        raise ParseError(f"from {tail} to {head} of {size} bytes", source="perf ring")
    first = tail % size if size else 0
    end = first + head - tail
    if end <= size:
        return bytes(area[first:end])
    return bytes(area[first:]) + bytes(area[: end - size])
