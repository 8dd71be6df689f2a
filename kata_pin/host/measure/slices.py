"""The slices of one pCPU, added up task by task while its records come in."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from kata_pin.broker.perf import SAMPLE_NS
from kata_pin.model.measured.windows import BUCKETS, CROWD, CpuWindow, RanTask
from kata_pin.wire.kernel.perf import DEAD, Came, Event, Left, Lost, Ran

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


class Slices:
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

    def take(self, events: Iterable[Event]) -> None:
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
        """Return the window; nothing is added after that."""
        self._note(end_ns)
        if self._since is None:
            self._unknown_ns += max(0, end_ns - self._hole)
        elif self._current is None:
            self._unknown_ns += max(0, end_ns - self._since)
        else:
            self._add(self._current, self._since, end_ns)
        return CpuWindow(
            self.cpu,
            self._start,
            end_ns,
            tuple(
                RanTask(
                    *(tid, one.slices, one.ran_ns, one.longest_ns),
                    tuple(one.buckets),
                    tuple(one.parts.items()),
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
