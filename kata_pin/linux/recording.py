"""Measuring pCPUs by the best method that this kernel and our rights allow."""

from __future__ import annotations

import os
import re
import resource
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from kata_pin.base.counters import CpuRun, CpuWindow, KvmCounts, Measured, MeasuredExits
from kata_pin.base.cpuset import EMPTY, CpuSet
from kata_pin.base.errors import HostError, ParseError
from kata_pin.base.values import Method
from kata_pin.linux.counters import MAX_CPUS, kvm_counts, parse_cpu_runs
from kata_pin.linux.files import HostRoot, host_errors, read_bytes, read_text
from kata_pin.linux.switches import RING_BYTES as LEAST_BYTES
from kata_pin.linux.switches import SwitchRecorder
from kata_pin.linux.task_counters import over, task_runs
from kata_pin.linux.topology import online
from kata_pin.linux.tracepoints import (
    InterruptRecorder,
    Traced,
    TraceRecorder,
    event_id,
    record_hists,
)

# How long vCPUs were outside their guests, by KVM's tracepoints.
#
# An exit lasts from kvm_exit to the next kvm_entry of the same thread. One in which the vCPU halted
# (kvm_vcpu_wakeup came in between) is the guest's own idle time, whichever reason this CPU's vendor
# numbers it by (arch/x86/kvm/trace.h, virt/kvm/kvm_main.c).

LONG_EXIT_NS: Final = 100_000
"""An exit of this length or more is long: handled by QEMU, or not at all for a while."""

MOST_VCPUS: Final = 1024
"""Most threads whose exits are told apart."""

_KVM_EXIT, _KVM_ENTRY, _KVM_WAKEUP = "kvm/kvm_exit", "kvm/kvm_entry", "kvm/kvm_vcpu_wakeup"


class ExitTimes:
    """Adds up the exits of vCPU threads, by thread and reason."""

    def __init__(self) -> None:
        self._sums: dict[tuple[int, int], MeasuredExits] = {}
        self._tids: set[int] = set()
        self._out: dict[int, tuple[int, int]] = {}
        """Of each thread that is outside: since when, and why."""
        self._halted: set[int] = set()

    def exit(self, tid: int, reason: int, time_ns: int) -> None:
        """A vCPU leaves its guest."""
        if tid in self._tids or len(self._tids) < MOST_VCPUS:
            self._tids.add(tid)
            self._out[tid] = time_ns, reason

    def halt(self, tid: int) -> None:
        """It has halted since it left."""
        if tid in self._out:
            self._halted.add(tid)

    def enter(self, tid: int, time_ns: int) -> None:
        """It goes on in its guest; one whose exit was not seen does not count."""
        since, reason = self._out.pop(tid, (-1, 0))
        halted = tid in self._halted
        self._halted.discard(tid)
        if since < 0:
            return
        took = max(0, time_ns - since)
        one = self._sums.get((tid, reason)) or MeasuredExits(tid, reason)
        if halted:
            one = one._replace(halts=one.halts + 1, halted_ns=one.halted_ns + took)
        else:
            one = one._replace(
                times=one.times + 1,
                total_ns=one.total_ns + took,
                longest_ns=max(one.longest_ns, took),
                long=one.long + (took >= LONG_EXIT_NS),
            )
        self._sums[tid, reason] = one

    def forget(self) -> None:
        """Records were lost: what is under way is not known."""
        self._out.clear()
        self._halted.clear()

    def sums(self) -> tuple[MeasuredExits, ...]:
        """Return the sums by thread and reason."""
        return tuple(self._sums.values())


class ExitRecorder(TraceRecorder):
    """Records the exits of vCPUs on some pCPUs until `end`."""

    what = "exits"

    def __init__(self, root: HostRoot, cpus: CpuSet) -> None:
        self._events: dict[int, str] = {}
        self._names: Mapping[int, str] = {}
        self._times = {cpu: ExitTimes() for cpu in cpus}
        super().__init__(root, cpus)

    def _find(self, tracing: str) -> Collection[int]:
        numbers = {event_id(tracing, name): name for name in (_KVM_EXIT, _KVM_ENTRY, _KVM_WAKEUP)}
        if None in numbers:
            return ()
        self._events = {number: name for number, name in numbers.items() if number is not None}
        vendor = _vendor(self._root)
        if vendor is not None:
            with suppress(OSError):
                text = read_text(f"{tracing}/events/{_KVM_EXIT}/format")
                self._names = exit_names(text, vendor)
        return self._events

    def _forget(self, cpu: int) -> None:
        self._times[cpu].forget()

    def _add(self, cpu: int, hits: Iterable[Traced]) -> None:
        times, events = self._times[cpu], self._events
        for hit in hits:
            name = events.get(hit.event)
            if name == _KVM_EXIT:
                times.exit(hit.tid, hit.number & 0xFFFF_FFFF, hit.time_ns)
            elif name == _KVM_ENTRY:
                times.enter(hit.tid, hit.time_ns)
            elif name == _KVM_WAKEUP:
                times.halt(hit.tid)

    def end(self) -> tuple[tuple[MeasuredExits, ...] | None, str]:
        """Return what was recorded, or None and why it is not known."""
        self.drain()
        if self.problem:
            return None, self.problem
        return tuple(
            one._replace(name=self._names.get(one.reason, ""))
            for times in self._times.values()
            for one in times.sums()
        ), ""


_REASON: Final = re.compile(
    r'\{ (0x[0-9a-f]{1,8}|[0-9]{1,10})(?: \+ ([0-9]{1,3}))?, "([^"]{1,40})" \}'
)


def exit_names(text: str, vendor: int) -> dict[int, str]:
    """Return KVM's names of exit reasons, from the format of kvm_exit.

    The format has a table per vendor: 0 is Intel's, 1 AMD's.
    """
    tables = text.partition("print fmt")[2].split("__print_symbolic")[1:]
    table = tables[vendor] if vendor < len(tables) else ""
    return {
        int(number, 0) + int(more or 0): name.lower()
        for number, more, name in _REASON.findall(table)
    }


def _vendor(root: HostRoot) -> int | None:
    """Return whose exits the host's KVM has: 0 Intel's, 1 AMD's; None if it is neither module."""
    for number, module in enumerate(("kvm_intel", "kvm_amd")):
        if os.path.isdir(root.sys("module", module)):
            return number
    return None


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
        with host_errors("read", "/proc/schedstat", hint="the kernel needs CONFIG_SCHEDSTATS"):
            return parse_cpu_runs(read_bytes(root.proc("schedstat"), MAX_CPUS), cpus)
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
