"""The running counters of threads: how long each ran and waited, how often it was moved."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kata_pin.errors import ParseError
from kata_pin.host.files import read_once
from kata_pin.host.root import HostRoot
from kata_pin.model.measured.counters import TaskRun
from kata_pin.wire.kernel.sched import MAX_TASK, parse_sched, parse_task_run


def task_runs(root: HostRoot, threads: Iterable[tuple[int, int]]) -> dict[int, TaskRun]:
    """Return the counters by tid; `threads` are pairs of process and thread. No rights are needed.

    A thread that is gone is left out, and so is every one where the kernel has no schedstat
    (CONFIG_SCHED_INFO).
    """
    found = {}
    for tgid, tid in threads:
        try:
            found[tid] = parse_task_run(read_once(root.proc(tgid, "task", tid, "schedstat")))
        except (OSError, ParseError):
            continue
    return found


def migrations(root: HostRoot, threads: Iterable[tuple[int, int]]) -> dict[int, int]:
    """Return by tid how often threads were moved to another CPU; the others as in `task_runs`.

    Kernels before 6.15 have it with CONFIG_SCHED_DEBUG alone.
    """
    found = {}
    for tgid, tid in threads:
        try:
            moves = parse_sched(read_once(root.proc(tgid, "task", tid, "sched"), MAX_TASK))
        except (OSError, ParseError):
            continue
        if moves.migrations is not None:
            found[tid] = moves.migrations
    return found


def over(
    before: Mapping[int, TaskRun], after: Mapping[int, TaskRun]
) -> dict[int, tuple[TaskRun, TaskRun]]:
    """Return both readings of each thread that has two; counters of one thread never shrink."""
    return {
        tid: (one, after[tid])
        for tid, one in before.items()
        if tid in after and all(a >= b for a, b in zip(after[tid], one, strict=True))
    }
