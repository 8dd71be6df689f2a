"""Perf's ring buffers: mapped, read, and their records added up to slices of pCPUs."""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from fcntl import ioctl
from typing import Final, NamedTuple

from msgspec import Struct

from kata_pin.base.counters import BUCKETS, CROWD, CpuWindow, RanTask
from kata_pin.base.errors import ParseError
from kata_pin.rights.broker.libc import SAMPLE_NS

# Records of perf's ring buffers (linux/perf_event.h) for the events of rights/broker/libc.py.
#
# Only what says who ran is read. A task that leaves its CPU names the one that comes next, so an
# arrival is told only where it is news: Linux 6.18 was seen to write no records at all for some
# tasks, which then show in the records of their neighbours alone.

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
_MISC_PREEMPTED: Final = 1 << 14


DEAD: Final = 0xFFFF_FFFF
"""The tid of a task that has exited, in the record of its last switch."""


class Left(NamedTuple):
    """A task left its CPU at `time_ns` (CLOCK_MONOTONIC) for the next; 0 is the idle task.

    `preempted`: it was still ready to run.
    """

    time_ns: int
    tid: int
    pid: int
    next_tid: int
    next_pid: int
    preempted: bool = False


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


class TaskNamed(NamedTuple):
    """A task took a name."""

    tid: int
    pid: int
    comm: str


class Forked(NamedTuple):
    """A task made another one."""

    tid: int
    pid: int
    parent_pid: int


Event = Left | Came | Ran | Lost | TaskNamed | Forked


class Records(Struct, frozen=True):
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
                ready = bool(misc & _MISC_PREEMPTED)
                add(Left(time_ns, tid, pid, other, other_pid, ready))
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
    return TaskNamed(tid, pid, comm.decode("utf-8", "backslashreplace"))


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


# One of perf's ring buffers: mapped, enabled, read piece by piece.

ENABLE: Final = 0x2400
_DISABLE: Final = 0x2401
_LONGEST: Final = 256  # bytes of any record
_POSITION: Final = struct.Struct("@Q")  # native: one load or store of 8 bytes


class Ring:
    """The ring of an event, whose descriptor it owns; raises OSError where it cannot be mapped."""

    def __init__(self, fd: int, size: int) -> None:
        """`size` in bytes of data: a power of two of pages."""
        self.fd = fd
        try:
            self._map = mmap.mmap(fd, (1 + max(1, size // mmap.PAGESIZE)) * mmap.PAGESIZE)
        except BaseException:
            os.close(fd)
            raise
        self._area = memoryview(self._map)[mmap.PAGESIZE :]
        self.full = False
        """Whether it was full when it was last read: a loss is only recorded after that."""

    def enable(self) -> None:
        """Begin to record."""
        ioctl(self.fd, ENABLE, 0)

    def disable(self) -> None:
        """Record nothing more."""
        ioctl(self.fd, _DISABLE, 0)

    def read(self) -> bytes:
        """Return what was written since the last call, and make room for more.

        Raises ParseError where the positions make no sense; then what was written is left out.
        """
        (head,) = _POSITION.unpack_from(self._map, HEAD_AT)
        (tail,) = _POSITION.unpack_from(self._map, TAIL_AT)
        self.full = head - tail > len(self._area) - _LONGEST
        try:
            return between(self._area, tail, head)
        finally:
            _POSITION.pack_into(self._map, TAIL_AT, head)

    def close(self) -> None:
        """Unmap it and close the event."""
        self._area.release()
        self._map.close()
        os.close(self.fd)


# The slices of one pCPU, added up task by task while its records come in.

MOST_TASKS: Final = 4096
"""Most tasks of one pCPU that are told apart."""

SILENT_NS: Final = 5 * SAMPLE_NS
"""Longest time without any record; samples come more often as long as the CPU is online."""


@dataclass(slots=True)
class _Total:
    """One task's sums so far."""

    slices: int = 0
    ran_ns: int = 0
    longest_ns: int = 0
    buckets: list[int] = field(default_factory=lambda: [0] * BUCKETS)
    parts: dict[int, int] = field(default_factory=dict)
    preempted: int = 0
    ready_ns: int = 0
    """Since when it is ready and has not had this CPU again; 0 if it is not."""
    longest_wait_ns: int = 0


class RunSlices:
    """Adds up one window of one pCPU, which is divided into equal parts.

    Each switch closes the slice of one task and opens that of the next at the same moment, so the
    sums have no gaps. The first and the last slice count from the window's beginning and to its
    end. Records that were lost make the time around them unknown.
    """

    def __init__(self, cpu: int, start_ns: int, length_ns: int, parts: int) -> None:
        """`length_ns` is how long the window shall be; what comes later is in the last part."""
        self.cpu = cpu
        self._start = start_ns
        self._part_ns = max(1, length_ns // parts)
        self._last_part = parts - 1
        self._totals: dict[int, _Total] = {}
        self._since: int | None = start_ns
        """Since when one task has the CPU; None after a loss."""
        self._current: int | None = None
        """That task, where it is known."""
        self._process = 0
        """Its process."""
        self._last = start_ns
        self._silent_ns = 0
        self._unknown_ns = 0
        self._hole = 0
        """When the records before a loss ended; 0 without one."""
        self.lost = 0

    def add(self, events: Iterable[Event]) -> None:
        """Add events, in the order of the ring."""
        for event in events:
            if type(event) is Left:
                self._leave(event)
            elif type(event) is Came:
                self._come(event)
            elif type(event) is Ran:
                self._note(event.time_ns)
                if self._current is None and self._since is not None:
                    self._current, self._process = event.tid, event.pid
            elif type(event) is Lost:
                self.lost += event.records
                if self._since is not None:
                    self._hole, self._since, self._current = self._last, None, None

    def end(self, end_ns: int, records: int, problem: str = "") -> CpuWindow:
        """Return the window; nothing is added after that. It ends with the last record at least."""
        end_ns = max(end_ns, self._last)
        self._note(end_ns)
        if self._since is None:
            self._unknown_ns += max(0, end_ns - self._hole)
        elif self._current is None:
            self._unknown_ns += max(0, end_ns - self._since)
        else:
            self._add(self._current, self._since, end_ns)
        for total in self._totals.values():
            if total.ready_ns:  # it waits still
                total.longest_wait_ns = max(total.longest_wait_ns, end_ns - total.ready_ns)
        return CpuWindow(
            self.cpu,
            self._start,
            end_ns,
            tuple(
                RanTask(
                    *(tid, one.slices, one.ran_ns, one.longest_ns),
                    tuple(one.buckets),
                    tuple(one.parts.items()),
                    *(one.preempted, one.longest_wait_ns),
                )
                for tid, one in self._totals.items()
            ),
            records,
            self.lost,
            self._unknown_ns,
            problem or self._problem(),
        )

    def _problem(self) -> str:
        """Return why the records do not tell everything."""
        if self.lost:
            return f"{self.lost} records were lost"
        if self._silent_ns > SILENT_NS:
            return f"no record for {self._silent_ns / 1e9:.1f} s: the pCPU may have been offline"
        return "who ran is not known for a part of it" if self._unknown_ns else ""

    def _note(self, time_ns: int) -> None:
        self._silent_ns = max(self._silent_ns, time_ns - self._last)
        self._last = max(self._last, time_ns)

    def _leave(self, event: Left) -> None:
        self._close(event.time_ns, event.tid, event.pid)
        self._since = max(event.time_ns, self._start)
        self._current, self._process = event.next_tid, event.next_pid
        if event.preempted and (total := self._totals.get(event.tid)) is not None:
            total.preempted += 1
            total.ready_ns = event.time_ns

    def _come(self, event: Came) -> None:
        if self._current != event.tid:
            self._close(event.time_ns, event.from_tid, event.from_pid)
            self._since = max(event.time_ns, self._start)
            self._current, self._process = event.tid, event.pid

    def _close(self, time_ns: int, tid: int, pid: int) -> None:
        """End the slice of the task that had the CPU; it is unknown if two are named for it.

        A thread that executes a program becomes the first of its process, under that one's tid.
        """
        self._note(time_ns)
        if tid == DEAD:
            tid = DEAD if self._current is None else self._current
        if self._since is None:
            self._unknown_ns += max(0, time_ns - self._hole)
        elif self._current not in {None, tid} and not tid == pid == self._process:
            self._unknown_ns += max(0, time_ns - self._since)
        else:
            self._add(tid, self._since, time_ns)

    def _add(self, tid: int, since_ns: int, until_ns: int) -> None:
        """Add one slice."""
        ran = until_ns - since_ns
        if ran < 0:  # it left before the window began
            return
        total = self._totals.get(tid)
        if total is None:
            if len(self._totals) >= MOST_TASKS:
                tid = CROWD
            total = self._totals.setdefault(tid, _Total())
        total.slices += 1
        total.ran_ns += ran
        if total.ready_ns:
            total.longest_wait_ns = max(total.longest_wait_ns, since_ns - total.ready_ns)
            total.ready_ns = 0
        total.longest_ns = max(total.longest_ns, ran)
        bucket = (ran >> 10).bit_length()
        total.buckets[bucket if bucket < BUCKETS else BUCKETS - 1] += 1
        width, parts = self._part_ns, total.parts
        first = min((since_ns - self._start) // width, self._last_part)
        last = min((until_ns - self._start) // width, self._last_part)
        while first < last:
            edge = self._start + (first + 1) * width
            parts[first] = parts.get(first, 0) + edge - since_ns
            since_ns, first = edge, first + 1
        parts[last] = parts.get(last, 0) + until_ns - since_ns
