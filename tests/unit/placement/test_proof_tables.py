"""Rows of the prove document, summed for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pytest
from msgspec.structs import replace

from kata_pin.base.counters import CpuWindow, Measured, SeenTask
from kata_pin.base.counters import RanTask as Totals
from kata_pin.base.cpuset import CpuSet
from kata_pin.base.documents.measured import ProvedPcpu
from kata_pin.base.sandbox import PF_KTHREAD
from kata_pin.base.values import Method, TaskClass
from kata_pin.cli.reports.prove import judged
from kata_pin.placement.owners import Known, Owner
from kata_pin.placement.proof import judge
from kata_pin.placement.proof_rows import by_process, pcpu
from kata_pin.placement.remedies import NodeConditions
from tests.unit.cli.proved import proved

ALL: Final = CpuSet.parse("0-7")
NOBODY: Final = Known()
TASK = proved().pcpus[0].tasks[0]


def test_threads_are_summed_by_process_and_class() -> None:
    """Named after the thread that had the pCPU longest; tasks without a process stay apart."""
    tasks = (
        replace(TASK, pid=7, tid=8, comm="b", slices=1, total_ms=2.0, longest_ms=2.0),
        replace(TASK, pid=7, tid=7, comm="a", slices=3, total_ms=3.0, longest_ms=1.0),
        replace(TASK, pid=9, tid=9, comm="c", slices=1, total_ms=4.0, longest_ms=4.0),
        replace(TASK, pid=0, tid=10, task_class=TaskClass.UNKNOWN, total_ms=0.2),
        replace(TASK, pid=0, tid=11, task_class=TaskClass.UNKNOWN, total_ms=0.1),
    )
    found = by_process(tasks)
    assert [(one.comm, one.tid, threads) for one, threads in found[:2]] == [
        ("a", 7, 2),
        ("c", 9, 1),
    ]
    assert (found[0][0].slices, found[0][0].total_ms, found[0][0].longest_ms) == (4, 5.0, 2.0)
    assert [one.tid for one, _ in found[2:]] == [10, 11]


def test_a_time_that_was_not_measured_stays_unknown() -> None:
    """Histograms have no longest slice."""
    tasks = [replace(TASK, pid=7, tid=tid, total_ms=1.0, longest_ms=None) for tid in (7, 8)]
    ((both, threads),) = by_process(tasks)
    assert (both.total_ms, both.longest_ms, threads) == (2.0, None, 2)


SHORT_LIVED: Final = 3000
"""Tasks with 0.3 ms of a second each: 90 % in all, while the 50 that are listed had 1.5 %."""


def test_no_time_is_lost_however_many_tasks_had_it() -> None:
    """A shell that starts one program after another: sums and pictures have all of them."""
    row = _row([SeenTask(tid, tid, "true", affinity=ALL) for tid in range(100, 100 + SHORT_LIVED)])
    crowd = row.tasks[-1]
    assert (len(row.tasks), crowd.tasks, crowd.comm) == (51, 2950, "2950 more tasks")
    assert sum(one.tasks for one in row.tasks) == SHORT_LIVED
    assert row.tasks_left_out == crowd.tasks
    assert (crowd.tid, crowd.pid, crowd.slices) == (-1, 0, 2950)
    assert crowd.longest_ms == 0.3
    assert sum(one.total_ms or 0.0 for one in row.tasks) == pytest.approx(row.foreign_ms)
    assert sum(one.ran_ms for one in crowd.timeline) == pytest.approx(crowd.total_ms)
    assert crowd.remedy == row.tasks[0].remedy


def test_no_class_hides_another() -> None:
    """Tasks of the kernel keep their names beside a crowd of users' tasks."""
    kernel = SeenTask(99, 99, "kworker/u8:1", PF_KTHREAD, ALL)
    users = [SeenTask(tid, tid, "true", affinity=ALL) for tid in range(100, 160)]
    row = _row([kernel, *users])
    assert [(one.task_class, one.comm, one.tasks) for one in row.tasks[-2:]] == [
        ("user", "10 more tasks", 10),
        ("unbound-kernel", "kworker/u8:1", 1),
    ]
    assert row.tasks_left_out == 10


def test_check_counts_them_too() -> None:
    """By its fifty longest tasks alone this pCPU would be within a limit of 5 %."""
    row = _row([SeenTask(tid, tid, "true", affinity=ALL) for tid in range(100, 100 + SHORT_LIVED)])
    (finding,) = judged(replace(proved(), pcpus=(row,), max_foreign_percent=5.0)).findings
    assert finding.fails
    assert finding.text.startswith(
        "others ran on pCPU 4 of shop/web for 90 % of 1.0 s: 2950 more tasks 885.0 ms, true "
        "(pid 100)"
    )


@pytest.mark.parametrize(
    ("cgroup", "owner"),
    [
        ("/user.slice/user-0.slice/session-1.scope", "kata-pin itself"),
        (
            "/kubepods.slice/kubepods-pod0d2a8d5e_0ba5_4a2b_8d4e_1c2b3a4d5e6f.slice/c.scope",
            "0d2a8d5e-0ba5",
        ),
    ],
)
def test_a_pods_task_is_named_after_it_whatever_it_is_called(cgroup: str, owner: str) -> None:
    """So a pod cannot pass for one of our own commands."""
    row = _row([SeenTask(9, 9, "kata-pin", affinity=ALL, cgroup=cgroup)])
    (finding,) = judged(replace(proved(), pcpus=(row,), max_foreign_percent=0.0)).findings
    assert f"kata-pin (pid 9 of {owner}" in finding.text


def _row(tasks: Sequence[SeenTask], known: Known = NOBODY) -> ProvedPcpu:
    """Return the object of a pCPU that each of some tasks had for 0.3 ms of a second."""
    owner = Owner(4, "p1", "shop/web")
    ran = tuple(
        Totals(one.tid, 1, 300_000, 300_000, parts=((one.tid % 60, 300_000),)) for one in tasks
    )
    window = CpuWindow(4, 0, 1_000_000_000, ran)
    measured = Measured(Method.PERF, {4: window}, {one.tid: one for one in tasks})
    node = NodeConditions(CpuSet([0]), cgroup_v2=True)
    return pcpu(judge(measured, owner, known, 0.0), owner, measured, known, node)


@pytest.mark.parametrize("comm", ["CPU 1/KVM", "kata-pin"])
@pytest.mark.parametrize(
    ("mask", "command"), [("4-5", "kata-pin explain p2"), ("5", "kata-pin pin p2")]
)
def test_a_thread_of_a_sandbox_that_has_the_pcpu_too(mask: str, command: str, comm: str) -> None:
    """Its affinities are as they should be: to apply them again helps only where they are not.

    What a VMM calls itself says nothing.
    """
    task = SeenTask(50, 49, comm, affinity=ALL)
    known = Known({50: "p2"}, pods={"p2": "shop/db"}, masks={"p2": CpuSet.parse(mask)})
    (found,) = _row([task], known).tasks
    assert (found.task_class, found.command) == ("other-sandbox", command)
