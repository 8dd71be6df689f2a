"""Who may run on CPUs that the threads of another sandbox are still allowed on, seen as it happens.

    with Watch(owner=[...], others=[...], cpus=own) as watch:
        ...                                   # the change
    assert watch.lines == []

A thread of the test's own process looks again and again. Of one look: first the affinities of the
others, then the owner's. So an overlap it sees was one, unless the owner came back in between.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from threading import Event, Thread
from typing import Self

from kata_pin.model.cpuset import EMPTY, CpuSet


class Watch:
    """Looks from its entry to its exit; `looks` are how often, `lines` what it saw, each once."""

    def __init__(self, *, owner: Iterable[int], others: Iterable[int], cpus: CpuSet) -> None:
        self.looks = 0
        self.lines: list[str] = []
        self.entered = EMPTY
        """Those of the CPUs that others have been allowed on by now."""
        self._owner = tuple(owner)
        self._others = tuple(others)
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
        while not self._over.is_set():
            self._look()
            self.looks += 1

    def _look(self) -> None:
        there = {tid: _affinity(tid) & self._cpus for tid in self._others}
        owners = {tid: _affinity(tid) & self._cpus for tid in self._owner}
        for tid, cpus in there.items():
            self.entered |= cpus
            both = sorted(one for one, own in owners.items() if own & cpus)
            line = f"thread {tid} was allowed on CPUs {cpus} of threads {both}"
            if both and line not in self.lines:
                self.lines.append(line)


def _affinity(tid: int) -> CpuSet:
    """Return where a thread may run: nowhere once it is gone."""
    try:
        return CpuSet(os.sched_getaffinity(tid))
    except ProcessLookupError:
        return EMPTY
