"""Rows of the prove document, summed for people."""

from __future__ import annotations

from dataclasses import replace

from kata_pin.policy.isolation.tables import by_process
from tests.unit.cli.proved import proved

TASK = proved().pcpus[0].tasks[0]


def test_threads_are_summed_by_process_and_class() -> None:
    """Named after the thread that had the pCPU longest; tasks without a process stay apart."""
    tasks = (
        replace(TASK, pid=7, tid=8, comm="b", slices=1, total_ms=2.0, longest_ms=2.0),
        replace(TASK, pid=7, tid=7, comm="a", slices=3, total_ms=3.0, longest_ms=1.0),
        replace(TASK, pid=9, tid=9, comm="c", slices=1, total_ms=4.0, longest_ms=4.0),
        replace(TASK, pid=0, tid=10, task_class="unknown", total_ms=0.2),
        replace(TASK, pid=0, tid=11, task_class="unknown", total_ms=0.1),
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
