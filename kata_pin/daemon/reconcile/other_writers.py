"""Other writers of a sandbox's affinities: detect them, back off from them, report them (D13).

A thread that was pinned and found elsewhere three times within a minute has another writer.
kata-pin then leaves it alone, each time for longer, so that two writers never fight in a tight
loop; the other threads stay pinned. An event about the sandbox ends the back-off.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from kata_pin.model.cpuset import CpuSet
from kata_pin.model.placement import ActionResult, Outcome, Placement
from kata_pin.model.reports.sandbox import Writer
from kata_pin.model.thread import Thread, ThreadKey

RETURNS: Final = 3
WINDOW_S: Final = 60.0
FIRST_BACK_OFF_S: Final = 30.0
LONGEST_BACK_OFF_S: Final = 600.0


@dataclass
class _Watch:
    """What was seen of one thread."""

    first: float
    times: list[float] = field(default_factory=list)
    until: float = 0.0
    back_off_s: float = FIRST_BACK_OFF_S
    seen: int = 0
    has_writer: bool = False


class OtherWriters:
    """The drifts of one sandbox's threads; times are those of any one monotonic clock."""

    def __init__(self) -> None:
        self.asked: dict[ThreadKey, CpuSet] = {}
        """What each thread was given last, until an event: one that something narrows since is
        left (policy/placement/drift.py)."""
        self._threads: dict[ThreadKey, _Watch] = {}

    def given(self, placement: Placement, threads: Iterable[Thread]) -> None:
        """Note which threads have the CPUs that they should have, after a pass that sets them."""
        desired = placement.desired
        for task, _role in threads:
            found = desired.get(task.key)
            if found is not None and found.applied == task.affinity:
                self.asked[task.key] = found.applied

    def clipped(self, results: Iterable[ActionResult]) -> None:
        """Note what threads were set to that got less."""
        for one in results:
            if one.outcome is Outcome.CLIPPED:
                self.asked[one.action.key] = one.action.target

    def drifted(self, keys: Iterable[ThreadKey], now: float) -> None:
        """Note threads that were pinned and have moved since."""
        for key in keys:
            watch = self._threads.setdefault(key, _Watch(first=now))
            watch.seen += 1
            if now < watch.until:
                continue
            watch.times = [t for t in watch.times if now - t < WINDOW_S] + [now]
            if len(watch.times) >= RETURNS:
                watch.times = []
                watch.has_writer = True
                watch.until = now + watch.back_off_s
                watch.back_off_s = min(watch.back_off_s * 2, LONGEST_BACK_OFF_S)

    def backed_off(self, now: float) -> frozenset[ThreadKey]:
        """Return the threads that are left to another writer for now."""
        return frozenset(key for key, watch in self._threads.items() if now < watch.until)

    def retry_at(self) -> float:
        """Return when the first back-off ends; 0 without one."""
        return min((one.until for one in self._threads.values() if one.until), default=0.0)

    def writer(self, now: float) -> Writer | None:
        """Return the other writer, also between back-offs; None for ordinary drift."""
        known = {key: watch for key, watch in self._threads.items() if watch.has_writer}
        if not known:
            return None
        first = min(watch.first for watch in known.values())
        return Writer(
            name="other",
            active=bool(self.backed_off(now)),
            evidence="drift that returns",
            count=sum(one.seen for one in known.values()),
            since_s=round(max(0.0, now - first), 3),
            tids=tuple(sorted(key.tid for key in known)),
        )

    def ended(self, now: float) -> bool:
        """Whether a back-off has ended since the last call: the placement is due again."""
        over = [watch for watch in self._threads.values() if 0 < watch.until <= now]
        for watch in over:
            watch.until = 0.0
        return bool(over)

    def forget(self) -> None:
        """End every back-off: something changed, so the placement is asserted again (D13)."""
        self.asked.clear()
        for watch in self._threads.values():
            watch.times = []
            watch.until = 0.0

    def keep_only(self, keys: Iterable[ThreadKey]) -> None:
        """Drop threads that are gone."""
        alive = set(keys)
        self._threads = {key: one for key, one in self._threads.items() if key in alive}
        self.asked = {key: cpus for key, cpus in self.asked.items() if key in alive}
