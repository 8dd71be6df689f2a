"""What others had of pCPUs by counters alone: where neither perf nor histograms are to be had."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from typing import Final

from kata_pin.errors import HostError, ParseError
from kata_pin.host.files import read_bytes
from kata_pin.host.measure.taskruns import over, task_runs
from kata_pin.host.root import HostRoot
from kata_pin.host.topology import online
from kata_pin.model.cpuset import CpuSet
from kata_pin.model.measured.counters import CpuRun
from kata_pin.model.measured.windows import CpuWindow, Measured, Method
from kata_pin.wire.kernel.sched import MAX_CPUS, parse_cpu_runs

STEP_S: Final = 0.2

Progress = Callable[[float], None]


def count_others(
    root: HostRoot,
    cpus: CpuSet,
    seconds: float,
    threads: Iterable[tuple[int, int]],
    progress: Progress,
    *,
    by_cpu: bool,
) -> Measured:
    """Compare the counters of threads, and with `by_cpu` those of pCPUs, over so many seconds.

    Raises HostError where the kernel has no counters of pCPUs and they are asked for.
    """
    began, threads = time.thread_time_ns(), list(threads)
    start = time.monotonic_ns()
    # first and last the pCPUs: a slice of a thread between two readings may look like somebody
    # else's, and never hides one
    runs_before = cpu_runs(root, cpus) if by_cpu else {}
    before = task_runs(root, threads)
    while (left := seconds - (time.monotonic_ns() - start) / 1e9) > 0:
        time.sleep(min(STEP_S, left))
        progress(1 - max(0.0, left - STEP_S) / seconds)
    end = time.monotonic_ns()
    after = task_runs(root, threads)
    runs_after = cpu_runs(root, cpus) if by_cpu else {}
    still = online(root)
    return Measured(
        Method.SCHEDSTAT if by_cpu else Method.WAIT,
        {
            cpu: CpuWindow(cpu, start, end, problem="" if cpu in still else "it is offline")
            for cpu in cpus
        },
        times=over(before, after),
        cpu_runs={
            cpu: (one, runs_after[cpu]) for cpu, one in runs_before.items() if cpu in runs_after
        },
        reader_ns=time.thread_time_ns() - began,
    )


def cpu_runs(root: HostRoot, cpus: Collection[int]) -> dict[int, CpuRun]:
    """Return the counters of pCPUs; raises HostError where the kernel has none."""
    try:
        return parse_cpu_runs(read_bytes(root.proc("schedstat"), MAX_CPUS), cpus)
    except OSError as error:
        hint = "the kernel needs CONFIG_SCHEDSTATS"
        raise HostError("read", "/proc/schedstat", error.errno or 0, hint=hint) from error
    except ParseError as error:
        raise HostError("read", "/proc/schedstat", hint=error.message) from error
