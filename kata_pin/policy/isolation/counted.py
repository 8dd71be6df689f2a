"""What counters alone prove of a pCPU: no names, and often no proof. Pure.

`schedstat` sees that others had it and at most how long, `wait` only whether its thread had to
wait. Kernel threads that belong to the pCPU cannot be told from intruders, so a few of others'
slices prove nothing, and only more than NAMELESS_PERCENT of the time is a violation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kata_pin.model.count_noun import count
from kata_pin.model.measured.counters import TaskRun
from kata_pin.model.measured.windows import CpuWindow, Measured, Verdict
from kata_pin.policy.isolation.classes import Owner
from kata_pin.policy.isolation.growth import CpuLook, Growth, Look, growth

NAMELESS_PERCENT: Final = 0.1
"""Kernel threads that belong to a pCPU stay below it, but for interrupt storms."""

ALWAYS: Final = 0.999
"""Share of a window that a thread ran which never left its pCPU."""

LATE_NS: Final = 1_000_000
"""How much a pCPU's run time may be ahead of its threads': what was under way at the start."""


@dataclass(frozen=True)
class Counted:
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
    verdict, reason = _verdict(grown, ran, most_percent, by_cpu=cpu is not None)
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


def _verdict(
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
