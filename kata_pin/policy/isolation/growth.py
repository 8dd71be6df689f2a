"""Whether anybody else had a pCPU between two looks at the kernel's counters. Pure.

Three facts about threads that may run on one pCPU only, and are alone there. While one is ready,
its wait grows by the run time of everybody else: exact for a busy vCPU; several threads wait for
each other, which says nothing. What the pCPU counts beyond the threads' own slices and run time was
somebody else's: that sees what came and went while the vCPU slept. And a pCPU that was neither idle
nor theirs was somebody else's: that sees who came before the first look and never left. Who it was,
and whether it was a kernel thread that belongs there, takes a window.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final, NamedTuple

from kata_pin.model.measured.counters import TICK_NS, CpuRun, CpuTimes, TaskRun

SLACK_TICKS: Final = 2
"""What the difference of two counts of ticks may be off."""

SWITCH_NS: Final = 50_000
"""Most time for which a pCPU is neither idle nor a thread's, each time that a thread wakes up."""


class Look(NamedTuple):
    """The counters of threads that may run on one pCPU only, by tid, at one time."""

    at_ns: int
    own: Mapping[int, TaskRun]


class CpuLook(NamedTuple):
    """The counters of a pCPU at one time; None: the kernel does not have them."""

    at_ns: int
    run: CpuRun | None
    times: CpuTimes | None


class Growth(NamedTuple):
    """What grew between two looks: how long the own threads waited and ran, what others took.

    `taken_ns` and `slices` are by the pCPU's own counters; `slices` is None where there are none.
    `several`: the own threads may have waited for each other. `doubtful_ns` is what of `taken_ns`
    interrupts may have had.
    """

    length_ns: int
    waited_ns: int
    taken_ns: int
    slices: int | None
    ran_ns: int = 0
    several: bool = False
    doubtful_ns: int = 0

    @property
    def others_ns(self) -> int:
        """How long others had it at most."""
        waited_ns = 0 if self.several else self.waited_ns
        return min(self.length_ns, max(waited_ns, self.taken_ns))

    @property
    def percent(self) -> float:
        """The same as a share."""
        return self._share(self.others_ns)

    @property
    def waited_percent(self) -> float:
        """How much of the time the own threads waited; not more than all of it.

        A wait is counted when it ends, and may have begun before the first look.
        """
        return self._share(self.waited_ns)

    def _share(self, ns: int) -> float:
        return min(100.0, 100 * ns / self.length_ns) if self.length_ns > 0 else 0.0

    @property
    def of_tasks(self) -> Growth:
        """The same without what interrupts may have had."""
        return self._replace(taken_ns=self.taken_ns - self.doubtful_ns, doubtful_ns=0)


def growth(
    before: Look,
    after: Look,
    tids: Collection[int],
    cpu: tuple[CpuLook, CpuLook] | None = None,
) -> Growth | None:
    """Return what grew, with these threads as the only own ones; None where nothing can be said.

    `cpu` are looks at the pCPU: the first one after `before`, the second before `after`, so that
    all that the threads did between them is counted as theirs; the other way round where no other
    task may be missed. None where threads of the owner come and go that may run elsewhere too: then
    they cannot be told from others.
    """
    length = after.at_ns - before.at_ns
    if length <= 0 or not tids or not (before.own.keys() & after.own.keys()).issuperset(tids):
        return None
    pairs = [(before.own[tid], after.own[tid]) for tid in tids]
    ran = sum(new.ran_ns - old.ran_ns for old, new in pairs)
    waited = sum(new.waited_ns - old.waited_ns for old, new in pairs)
    mine = sum(new.slices - old.slices for old, new in pairs)
    if ran < 0 or waited < 0 or mine < 0:
        return None
    slices, taken, doubtful = None, 0, 0
    if cpu is not None:
        slices, taken, doubtful = _counted(*cpu, ran, mine, length)
    return Growth(length, waited, taken, slices, ran, len(pairs) > 1, doubtful)


def _counted(
    before: CpuLook, after: CpuLook, ran_ns: int, mine: int, length_ns: int
) -> tuple[int | None, int, int]:
    """Return the slices and the time of others by the pCPU's own counters, and what is doubtful.

    The run time of a pCPU grows when a task leaves it: by more than passed if the task came before
    the first look, and not at all if nobody left. Hence no more than what passed is counted, and of
    that no time in which the pCPU was idle.

    Interrupts of an idle pCPU are neither idle time nor a task's. Where slices are counted and it
    was idle, only who came after that, and stayed, can be mistaken for them.
    """
    slices, tasks, rest = None, 0, 0
    if before.run is not None and after.run is not None:
        slices = max(0, after.run.slices - before.run.slices - mine)
        tasks = min(after.run.ran_ns - before.run.ran_ns, length_ns) - ran_ns if slices else 0
    if before.times is not None and after.times is not None:
        idle_ns = (after.times.idle - before.times.idle - SLACK_TICKS) * TICK_NS
        unused_ns = (sum(after.times) - sum(before.times) + SLACK_TICKS) * TICK_NS
        rest = after.at_ns - before.at_ns - unused_ns - ran_ns - mine * SWITCH_NS
        tasks = min(tasks, length_ns - max(0, idle_ns) - ran_ns)
        if slices is None or idle_ns <= 0:
            tasks = max(tasks, rest)
    tasks, taken = max(0, tasks), max(0, tasks, rest)
    return slices, taken, taken - tasks
