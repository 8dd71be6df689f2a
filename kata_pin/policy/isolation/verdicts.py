"""Whether a window proves that a pCPU was its owner's alone. Pure.

Three values, because a measurement that is not whole proves nothing: lost records, a pCPU that went
offline or a source that cannot tell tasks apart never make a pCPU look isolated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kata_pin.model.count_noun import count
from kata_pin.model.measured.windows import IDLE, CpuWindow, Measured, Method, TaskClass, Verdict
from kata_pin.policy.isolation.classes import FOREIGN, Known, Owner, class_of


@dataclass(frozen=True)
class Judged:
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
        if one.tid != IDLE
    }
    ran: dict[TaskClass, int] = {}
    slices, idle = 0, 0
    for one in window.tasks:
        if one.tid == IDLE:
            idle += one.ran_ns
            continue
        kind = classes[one.tid]
        ran[kind] = ran.get(kind, 0) + one.ran_ns
        slices += one.slices if kind in FOREIGN else 0
    judged = Judged(window, Verdict.UNPROVED, "", classes, ran, idle, slices)
    verdict, reason = _verdict(judged, max_foreign_percent)
    return Judged(window, verdict, reason, classes, ran, idle, slices)


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
