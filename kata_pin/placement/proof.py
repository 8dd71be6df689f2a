"""Whether a window proves that a pCPU was its owner's alone.

Three values, because a measurement that is not whole proves nothing: lost records, a pCPU that
went offline or a source that cannot tell tasks apart never make a pCPU look isolated.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Final, NamedTuple

from msgspec import Struct, field
from msgspec.structs import replace

from kata_pin.base.counters import IDLE_TASK, TICK_NS, CpuRun, CpuTimes, CpuWindow, Measured
from kata_pin.base.threads import TaskRun
from kata_pin.base.values import Method, TaskClass, Verdict, count
from kata_pin.placement.owners import FOREIGN, Known, Owner, class_of


class Judged(Struct, frozen=True):
    """A window of one pCPU, judged; times in ns by class, idle time apart."""

    window: CpuWindow
    verdict: Verdict
    reason: str
    classes: Mapping[int, TaskClass] = field(default_factory=dict)
    ran_ns: Mapping[TaskClass, int] = field(default_factory=dict)
    idle_ns: int = 0
    foreign_slices: int = 0

    @property
    def foreign_ns(self) -> int:
        """Time of foreign tasks."""
        return sum(self.ran_ns.get(one, 0) for one in FOREIGN)

    @property
    def foreign_percent(self) -> float:
        """The same as a share of the window."""
        return 100 * self.foreign_ns / self.window.length_ns if self.window.length_ns else 0.0


def judge(measured: Measured, owner: Owner, known: Known, max_foreign_percent: float) -> Judged:
    """Judge the window of one pCPU of which every task's time is known (perf, hist)."""
    window = measured.cpus[owner.cpu]
    classes = {
        one.tid: class_of(measured.tasks.get(one.tid), owner, known)
        for one in window.tasks
        if one.tid != IDLE_TASK
    }
    ran: dict[TaskClass, int] = {}
    slices, idle = 0, 0
    for one in window.tasks:
        if one.tid == IDLE_TASK:
            idle += one.ran_ns
            continue
        kind = classes[one.tid]
        ran[kind] = ran.get(kind, 0) + one.ran_ns
        slices += one.slices if kind in FOREIGN else 0
    judged = Judged(window, Verdict.UNPROVED, "", classes, ran, idle, slices)
    verdict, reason = _verdict(judged, max_foreign_percent)
    return replace(judged, verdict=verdict, reason=reason)


def _verdict(judged: Judged, most_percent: float) -> tuple[Verdict, str]:
    how_often = count(judged.foreign_slices, "time")
    found = f"foreign tasks ran there {how_often}, for {milliseconds(judged)}"
    excess = judged.foreign_percent > most_percent or (judged.foreign_slices and not most_percent)
    if excess:
        return Verdict.VIOLATED, found
    if judged.window.problem:
        return Verdict.UNPROVED, judged.window.problem
    if judged.window.unknown_ns or not judged.window.length_ns:
        return Verdict.UNPROVED, "who ran is not known for a part of the window"
    if judged.foreign_slices:
        return Verdict.PROVED, f"{found}, within the limit of {most_percent:g} %"
    return Verdict.PROVED, "no foreign task ran there"


def milliseconds(judged: Judged) -> str:
    """Return the foreign time in words."""
    return f"{judged.foreign_ns / 1e6:.3f} ms ({judged.foreign_percent:.3f} % of the time)"


def overall(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the verdict over several pCPUs; over none it is unproved."""
    found = set(verdicts)
    for one in (Verdict.VIOLATED, Verdict.UNPROVED):
        if one in found:
            return one
    return Verdict.PROVED if found else Verdict.UNPROVED


NAMES_TASKS = frozenset({Method.PERF, Method.HIST})
"""The methods of which `judge` can be asked."""


# Whether anybody else had a pCPU between two looks at the kernel's counters.
#
# Three facts about threads that may run on one pCPU only, and are alone there. While one is ready,
# its wait grows by the run time of everybody else: exact for a busy vCPU; several threads wait for
# each other, which says nothing. What the pCPU counts beyond the threads' own slices and run time
# was somebody else's: that sees what came and went while the vCPU slept. And a pCPU that was
# neither idle nor theirs was somebody else's: that sees who came before the first look and never
# left. Who it was, and whether it was a kernel thread that belongs there, takes a window.

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


# What counters alone prove of a pCPU: no names, and often no proof.
#
# `schedstat` sees that others had it and at most how long, `wait` only whether its thread had to
# wait. Kernel threads that belong to the pCPU cannot be told from intruders, so a few of others'
# slices prove nothing, and only more than NAMELESS_PERCENT of the time is a violation.

NAMELESS_PERCENT: Final = 0.1
"""Kernel threads that belong to a pCPU stay below it, but for interrupt storms."""

ALWAYS: Final = 0.999
"""Share of a window that a thread ran which never left its pCPU."""

LATE_NS: Final = 1_000_000
"""How much a pCPU's run time may be ahead of its threads': what was under way at the start."""


class Counted(Struct, frozen=True):
    """A window of one pCPU of which nobody is known by name; None: not known."""

    window: CpuWindow
    verdict: Verdict
    reason: str
    own_ns: int | None = None
    others_ns: int | None = None
    slices: int | None = None


def judge_counts(measured: Measured, owner: Owner, most_percent: float) -> Counted:
    """Judge the window of one pCPU."""
    window = measured.cpus[owner.cpu]
    own = {tid: pair for tid, pair in measured.times.items() if tid in owner.alone}
    if set(own) != set(owner.alone) or not own:
        return Counted(window, Verdict.UNPROVED, "the counters of its threads are not known")
    cpu = None if set(owner.own) - owner.alone else measured.cpu_runs.get(owner.cpu)
    grown = growth(
        Look(window.start_ns, {tid: before for tid, (before, _) in own.items()}),
        Look(window.end_ns, {tid: after for tid, (_, after) in own.items()}),
        own.keys(),
        cpu and (CpuLook(window.start_ns, cpu[0], None), CpuLook(window.end_ns, cpu[1], None)),
    )
    if grown is None:
        return Counted(window, Verdict.UNPROVED, "its counters say nothing")
    ran = sum(after.ran_ns - before.ran_ns for before, after in own.values())
    verdict, reason = _counted_verdict(grown, ran, most_percent, by_cpu=cpu is not None)
    if verdict is Verdict.PROVED and cpu is not None:
        ahead = cpu[1].ran_ns - cpu[0].ran_ns - ran
        slept = ran < ALWAYS * window.length_ns
        if slept and (ahead > LATE_NS or not _arrived(own)):
            verdict, reason = Verdict.UNPROVED, "a task may have been there since before the window"
    if verdict is Verdict.PROVED and window.problem:
        verdict, reason = Verdict.UNPROVED, window.problem
    return Counted(window, verdict, reason, ran, grown.others_ns, grown.slices)


def _arrived(own: dict[int, tuple[TaskRun, TaskRun]]) -> bool:
    return any(after.slices > before.slices for before, after in own.values())


def _counted_verdict(
    grown: Growth, ran_ns: int, most_percent: float, *, by_cpu: bool
) -> tuple[Verdict, str]:
    limit = max(most_percent, NAMELESS_PERCENT)
    how_often = "" if grown.slices is None else f" {count(grown.slices, 'time')}"
    found = f"others ran there{how_often}, for {grown.percent:.3f} % of the time at most"
    if grown.percent > limit:
        return Verdict.VIOLATED, f"{found}; this method cannot name them"
    if grown.slices or grown.others_ns:
        return Verdict.UNPROVED, f"{found}; this method cannot name them"
    if by_cpu:
        return Verdict.PROVED, "no other task ran there"
    if ran_ns >= ALWAYS * grown.length_ns:
        return Verdict.PROVED, "its thread ran all the time"
    return Verdict.UNPROVED, "its thread never waited, but others may have run while it slept"
