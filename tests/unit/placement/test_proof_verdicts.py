"""A window proves, refutes or proves nothing; what is not whole never proves."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from kata_pin.base.counters import PF_NO_SETAFFINITY, CpuWindow, Measured, RanTask, SeenTask
from kata_pin.base.cpuset import CpuSet
from kata_pin.base.sandbox import PF_KTHREAD
from kata_pin.base.values import Method, TaskClass, Verdict
from kata_pin.placement.owners import Known, Owner
from kata_pin.placement.proof import Judged, judge, overall

OWNER = Owner(4, "p1", "shop/web", own={7: "vcpu 0"})
MS = 1_000_000
TASKS = {
    7: SeenTask(7, 6, "CPU 0/KVM", affinity=CpuSet.parse("4")),
    20: SeenTask(20, 20, "migration/4", PF_KTHREAD | PF_NO_SETAFFINITY, CpuSet.parse("4")),
    30: SeenTask(30, 30, "sh", affinity=CpuSet.parse("0-7")),
}


def judged(*tasks: RanTask, most: float = 0.0, **window: Any) -> Judged:
    facts: dict[str, Any] = {"cpu": 4, "start_ns": 0, "end_ns": 1000 * MS, "tasks": tasks}
    measured = Measured(Method.PERF, {4: CpuWindow(**(facts | window))}, TASKS)
    return judge(measured, OWNER, Known(), most)


VCPU = RanTask(7, 3, 900 * MS, 500 * MS)
IDLE = RanTask(0, 3, 99 * MS, 50 * MS)
MIGRATION = RanTask(20, 1, MS, MS)
SHELL = RanTask(30, 2, 5 * MS, 4 * MS)


def test_proved() -> None:
    """The owner, an idle CPU and kernel threads of this CPU prove it."""
    found = judged(VCPU, IDLE, MIGRATION)
    assert (found.verdict, found.reason) == (Verdict.PROVED, "no foreign task ran there")
    assert found.ran_ns == {TaskClass.OWN: 900 * MS, TaskClass.PER_CPU_KERNEL: MS}
    assert found.idle_ns == 99 * MS


def test_violated() -> None:
    """One foreign slice is enough, unless a share is accepted."""
    found = judged(VCPU, SHELL)
    assert found.verdict is Verdict.VIOLATED
    assert found.reason == "foreign tasks ran there 2 times, for 5.000 ms (0.500 % of the time)"
    assert judged(VCPU, SHELL, most=0.4).verdict is Verdict.VIOLATED
    accepted = judged(VCPU, SHELL, most=0.5)
    assert accepted.verdict is Verdict.PROVED
    assert accepted.reason == f"{found.reason}, within the limit of 0.5 %"


@pytest.mark.parametrize(
    "window",
    [{"problem": "3 records were lost", "lost": 3}, {"unknown_ns": 5}, {"end_ns": 0}],
)
def test_unproved(window: dict[str, Any]) -> None:
    """What is not whole proves nothing, and refutes all the same."""
    assert judged(VCPU, **window).verdict is Verdict.UNPROVED
    assert judged(VCPU, SHELL, **window).verdict is Verdict.VIOLATED
    assert judged(VCPU, most=100.0, **window).verdict is Verdict.UNPROVED


def test_a_task_that_nobody_saw_is_foreign() -> None:
    """Who ran and is not known may be anybody."""
    found = judged(VCPU, RanTask(99, 1, 10, 10))
    assert (found.verdict, found.classes[99]) == (Verdict.VIOLATED, TaskClass.UNKNOWN)


def test_overall() -> None:
    """One violation is enough; nothing measured proves nothing."""
    proved, violated, unproved = Verdict.PROVED, Verdict.VIOLATED, Verdict.UNPROVED
    assert overall([proved, unproved, violated]) is violated
    assert overall([proved, unproved]) is unproved
    assert overall([proved, proved]) is proved
    assert overall([]) is unproved


def test_an_owner_of_several_threads() -> None:
    """Every thread that is placed there is the owner's."""
    owner = replace(OWNER, own={7: "vcpu 0", 30: "emulator"})
    window = CpuWindow(4, 0, 1000 * MS, (VCPU, SHELL))
    found = judge(Measured(Method.PERF, {4: window}, TASKS), owner, Known(), 0.0)
    assert found.verdict is Verdict.PROVED
