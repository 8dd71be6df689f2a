"""What reading and setting affinities costs, against the bare system calls in the same run."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from kata_pin.base.placement import Action
from kata_pin.base.steps import finish
from kata_pin.linux.affinity import (
    NOTHING,
    ExpectedThread,
    apply_all,
    audit_affinity,
    audit_deep,
)
from kata_pin.linux.cgroups import CpusetReader
from kata_pin.linux.files import HOST
from kata_pin.linux.tasks import TaskReader
from tests.support.specimen import Specimen, specimen


def best_ms(work: Callable[[], object], runs: int = 9) -> float:
    """Return the CPU time of the quickest run: what the work costs, without the neighbours."""
    times = []
    for _ in range(runs):
        start = time.process_time_ns()
        work()
        times.append(time.process_time_ns() - start)
    return min(times) / 1e6


@pytest.fixture(scope="module")
def herd() -> Iterator[list[Specimen]]:
    """Ten processes of twenty threads."""
    with ExitStack() as stack:
        yield [stack.enter_context(specimen(19)) for _ in range(10)]


def test_audit(herd: list[Specimen]) -> None:
    """The audit costs at most 3 x a bare listing with getaffinity."""
    expected = {s.pid: {tid: frozenset(os.sched_getaffinity(tid)) for tid in s.tids} for s in herd}

    def bare() -> None:
        for pid in expected:
            for name in os.listdir(f"/proc/{pid}/task"):
                os.sched_getaffinity(int(name))

    def audit() -> None:
        for pid, threads in expected.items():
            assert finish(audit_affinity(HOST, pid, threads)) is NOTHING

    floor, cost = best_ms(bare), best_ms(audit)
    print(f"\n200 threads: bare {floor:.2f} ms, audit {cost:.2f} ms, {cost / floor:.2f} x")
    assert cost <= 3 * floor


def test_deep_audit(herd: list[Specimen]) -> None:
    """The deep audit costs at most 2 x a bare listing with stat files and getaffinity."""
    expected = {
        s.pid: {
            task.key.tid: ExpectedThread(task.key.starttime, frozenset(task.affinity))
            for task in finish(TaskReader().read(HOST, s.pid, CpusetReader(HOST)))
        }
        for s in herd
    }

    def bare() -> None:
        for pid in expected:
            for name in os.listdir(f"/proc/{pid}/task"):
                fd = os.open(f"/proc/{pid}/task/{name}/stat", os.O_RDONLY)
                os.read(fd, 4096)
                os.close(fd)
                os.sched_getaffinity(int(name))

    def audit() -> None:
        for pid, threads in expected.items():
            assert finish(audit_deep(HOST, pid, threads)) is NOTHING

    floor, cost = best_ms(bare), best_ms(audit)
    print(f"\n200 threads: bare {floor:.2f} ms, deep audit {cost:.2f} ms, {cost / floor:.2f} x")
    assert cost <= 2 * floor


@pytest.mark.parametrize("threads", [20, 260])
def test_pass(threads: int) -> None:
    """Reading all threads of a VMM costs at most 6 x their stat files, setting them all 5 x."""
    with specimen(threads - 1) as ours:

        def bare() -> None:
            for tid in ours.tids:
                fd = os.open(f"/proc/{ours.pid}/task/{tid}/stat", os.O_RDONLY)
                os.read(fd, 4096)
                os.close(fd)
                os.sched_getaffinity(tid)

        tasks = finish(TaskReader().read(HOST, ours.pid, CpusetReader(HOST)))
        actions = [Action(task.key, task.affinity, task.affinity, "") for task in tasks]
        floor = best_ms(bare)
        read = best_ms(lambda: finish(TaskReader().read(HOST, ours.pid, CpusetReader(HOST))))
        applied = best_ms(lambda: apply_all(HOST, actions))
    print(
        f"\n{threads} threads: {floor=:.2f} ms, {read=:.2f} ms, set and verified {applied:.2f} ms"
    )
    assert len(tasks) == threads
    assert read <= 6 * floor
    assert applied <= 5 * floor
