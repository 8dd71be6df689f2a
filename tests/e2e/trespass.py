"""Who may run on CPUs that the threads of another sandbox are still allowed on, seen as it happens.

    with Watch(lambda: tids(giver), lambda: tids(taker), cpus=passed) as watch:
        ...                                   # the change
    assert watch.lines == []

A thread of the test's own process looks every 10 ms, or as often as it can. The parties are given
in the order in which a CPU passes from one to the next, and looked at in reverse: who may have got
a CPU first, then who should have left it before. So an overlap that is seen was one, unless a CPU
went the other way in between.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterable
from threading import Event, Thread
from typing import Final, Self

from kata_pin.base.cpuset import EMPTY, CpuSet

PERIOD_S: Final = 0.01

Party = Callable[[], Iterable[int]]
"""Returns the threads of one owner; asked at each look, for threads come and go."""


class Watch:
    """Looks from its entry to its exit; `looks` are how often, `lines` what it saw, each once."""

    def __init__(self, *parties: Party, cpus: CpuSet) -> None:
        self.looks = 0
        self.lines: list[str] = []
        self.longest_s = 0.0
        """The longest time from the start of one look to that of the next."""
        self.seen = [EMPTY] * len(parties)
        """Those of the CPUs that the threads of each party have been allowed on by now."""
        self._parties = parties
        self._cpus = cpus
        self._over = Event()
        self._thread = Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        began = time.monotonic()
        while not self._over.is_set():
            self._look()
            self.looks += 1
            self._over.wait(began + PERIOD_S - time.monotonic())
            last, began = began, time.monotonic()
            self.longest_s = max(self.longest_s, began - last)

    def _look(self) -> None:
        masks = [{tid: _affinity(tid) & self._cpus for tid in one()} for one in self._parties[::-1]]
        masks.reverse()
        for number, there in enumerate(masks):
            for cpus in there.values():
                self.seen[number] |= cpus
        for before, after in itertools.combinations(masks, 2):
            self._compare(before, after)

    def _compare(self, before: dict[int, CpuSet], after: dict[int, CpuSet]) -> None:
        for tid, cpus in after.items():
            both = sorted(one for one, own in before.items() if own & cpus)
            line = f"thread {tid} was allowed on CPUs {cpus} of threads {both}"
            if both and line not in self.lines:
                self.lines.append(line)


def _affinity(tid: int) -> CpuSet:
    """Return where a thread may run: nowhere once it is gone."""
    try:
        return CpuSet(os.sched_getaffinity(tid))
    except ProcessLookupError:
        return EMPTY
