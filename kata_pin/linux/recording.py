"""Measuring pCPUs by the best method that this kernel and our rights allow."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from kata_pin.base.counters import CpuRun, CpuWindow, KvmCounts, Measured
from kata_pin.base.cpuset import EMPTY, CpuSet
from kata_pin.base.errors import HostError, ParseError
from kata_pin.base.values import Method
from kata_pin.linux.counters import MAX_CPUS, kvm_counts, over, parse_cpu_runs, task_runs
from kata_pin.linux.exits import ExitRecorder
from kata_pin.linux.files import HostRoot, read_bytes
from kata_pin.linux.switches import RING_BYTES as LEAST_BYTES
from kata_pin.linux.switches import SwitchRecorder
from kata_pin.linux.topology import online
from kata_pin.linux.tracepoints import InterruptRecorder, record_hists

# What others had of pCPUs by counters alone: where neither perf nor histograms are to be had.

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
        no_exits="the method does not have them",
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


RING_BYTES: Final = 1024 * 1024
"""Per pCPU; root may lock as much as it likes, and a loaded node keeps us from draining often."""

MOST_BYTES: Final = 32 * 1024 * 1024
"""Of all rings, as long as each has its least."""


class Asked(Struct, frozen=True):
    """What is to be measured: pCPUs, and pairs of process and thread that are placed there.

    `methods` are tried in this order; `irq`: interrupts too; `vms`: the processes of VMs whose
    exits and counters of KVM are measured too. `free` are pCPUs where this process may run:
    elsewhere it would find itself.
    """

    cpus: CpuSet
    seconds: float
    threads: tuple[tuple[int, int], ...] = ()
    methods: tuple[Method, ...] = tuple(Method)
    irq: bool = False
    free: CpuSet = EMPTY
    vms: tuple[int, ...] = ()


def measure(root: HostRoot, asked: Asked, progress: Progress = lambda _: None) -> Measured:
    """Measure by the first method that works; raises the first one's HostError where none does."""
    with suppress(OSError):  # none of them is free, or our cgroup allows none of them
        os.sched_setaffinity(0, asked.free)
    refused: list[tuple[Method, str]] = []
    first: HostError | None = None
    kvm, _ = _kvm(root, asked.vms)
    for method in asked.methods:
        try:
            found = _BY_METHOD[method](root, asked, progress)
        except HostError as error:
            first = first or error
            refused.append((method, str(error)))
        else:
            after, no_kvm = _kvm(root, asked.vms)
            counts = {pid: (kvm[pid], now) for pid, now in after.items() if pid in kvm}
            return replace(found, refused=tuple(refused), kvm=counts, no_kvm=no_kvm)
    assert first is not None, "some method is asked for"
    raise first


def _kvm(root: HostRoot, pids: Iterable[int]) -> tuple[dict[int, KvmCounts], str]:
    """Return what KVM counts of these processes' VMs, and why not of some."""
    found, problem = {}, ""
    for pid in pids:
        try:
            found[pid] = kvm_counts(root, pid)
        except HostError as error:
            problem = str(error)
    return found, problem


def _by_perf(root: HostRoot, asked: Asked, progress: Progress) -> Measured:
    room = max(LEAST_BYTES, MOST_BYTES // len(asked.cpus))
    ring_bytes = min(RING_BYTES, 1 << room.bit_length() - 1)
    if asked.irq or asked.vms:
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    recorder = SwitchRecorder(root, asked.cpus, asked.seconds, ring_bytes=ring_bytes)
    interrupts = InterruptRecorder(root, asked.cpus if asked.irq else CpuSet())
    exits = ExitRecorder(root, asked.cpus if asked.vms else CpuSet())
    with recorder, interrupts, exits:
        before = task_runs(root, asked.threads)
        while recorder.left_s > 0:
            recorder.wait()
            recorder.drain()
            interrupts.drain()
            exits.drain()
            progress(1 - recorder.left_s / asked.seconds)
        found, problem = interrupts.end()
        outside, no_exits = exits.end()
        measured = recorder.end()
    return replace(
        measured,
        times=over(before, task_runs(root, asked.threads)),
        interrupts=found,
        no_interrupts=problem,
        exits=outside,
        no_exits=no_exits,
    )


def _by_hists(root: HostRoot, asked: Asked, progress: Progress) -> Measured:
    before = task_runs(root, asked.threads)
    measured = record_hists(root, asked.cpus, asked.seconds, progress)
    after = task_runs(root, asked.threads)
    problem = "the method does not have them"
    times = over(before, after)
    return replace(measured, times=times, no_interrupts=problem, no_exits=problem)


def _by_counters(root: HostRoot, asked: Asked, progress: Progress) -> Measured:
    return count_others(root, asked.cpus, asked.seconds, asked.threads, progress, by_cpu=True)


def _by_waits(root: HostRoot, asked: Asked, progress: Progress) -> Measured:
    return count_others(root, asked.cpus, asked.seconds, asked.threads, progress, by_cpu=False)


_BY_METHOD: Final = {
    Method.PERF: _by_perf,
    Method.HIST: _by_hists,
    Method.SCHEDSTAT: _by_counters,
    Method.WAIT: _by_waits,
}
