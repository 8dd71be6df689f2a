"""Measuring pCPUs by the best method that this kernel and our rights allow."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

from kata_pin.errors import HostError
from kata_pin.host.measure.counted import count_others
from kata_pin.host.measure.hists import record_hists
from kata_pin.host.measure.interrupts import InterruptRecorder
from kata_pin.host.measure.rings import RING_BYTES as LEAST_BYTES
from kata_pin.host.measure.rings import SwitchRecorder
from kata_pin.host.measure.taskruns import over, task_runs
from kata_pin.host.root import HostRoot
from kata_pin.model.cpuset import EMPTY, CpuSet
from kata_pin.model.measured.windows import Measured, Method

RING_BYTES: Final = 1024 * 1024
"""Per pCPU; root may lock as much as it likes, and a loaded node keeps us from draining often."""

MOST_BYTES: Final = 32 * 1024 * 1024
"""Of all rings, as long as each has its least."""

Progress = Callable[[float], None]
"""Is called with the share of the window that has passed, 0 to 1."""


@dataclass(frozen=True)
class Asked:
    """What is to be measured: pCPUs, and pairs of process and thread that are placed there.

    `methods` are tried in this order; `irq`: interrupts too. `free` are pCPUs where this process
    may run: elsewhere it would find itself.
    """

    cpus: CpuSet
    seconds: float
    threads: tuple[tuple[int, int], ...] = ()
    methods: tuple[Method, ...] = tuple(Method)
    irq: bool = False
    free: CpuSet = EMPTY


def measure(root: HostRoot, asked: Asked, progress: Progress = lambda _: None) -> Measured:
    """Measure by the first method that works; raises the first one's HostError where none does."""
    with suppress(OSError):  # none of them is free, or our cgroup allows none of them
        os.sched_setaffinity(0, asked.free)
    refused: list[tuple[str, str]] = []
    first: HostError | None = None
    for method in asked.methods:
        try:
            found = _BY_METHOD[method](root, asked, progress)
        except HostError as error:
            first = first or error
            refused.append((method.value, str(error)))
        else:
            return replace(found, refused=tuple(refused))
    assert first is not None, "some method is asked for"
    raise first


def _by_perf(root: HostRoot, asked: Asked, progress: Progress) -> Measured:
    room = max(LEAST_BYTES, MOST_BYTES // len(asked.cpus))
    ring_bytes = min(RING_BYTES, 1 << room.bit_length() - 1)
    if asked.irq:
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    recorder = SwitchRecorder(root, asked.cpus, asked.seconds, ring_bytes=ring_bytes)
    interrupts = InterruptRecorder(root, asked.cpus if asked.irq else CpuSet())
    with recorder, interrupts:
        before = task_runs(root, asked.threads)
        while recorder.left_s > 0:
            recorder.wait()
            recorder.drain()
            interrupts.drain()
            progress(1 - recorder.left_s / asked.seconds)
        found, problem = interrupts.end()
        measured = recorder.end()
    return replace(
        measured,
        times=over(before, task_runs(root, asked.threads)),
        interrupts=found,
        no_interrupts=problem,
    )


def _by_hists(root: HostRoot, asked: Asked, progress: Progress) -> Measured:
    before = task_runs(root, asked.threads)
    measured = record_hists(root, asked.cpus, asked.seconds, progress)
    after = task_runs(root, asked.threads)
    problem = "the method does not have them"
    return replace(measured, times=over(before, after), no_interrupts=problem)


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
