"""What guests feel, measured on the host, beside what the host did: `prove --guest`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import groupby
from shlex import quote
from typing import Final

from kata_pin.base.counters import Measured, MeasuredExits
from kata_pin.base.cpuset import CpuSet
from kata_pin.base.documents.measured import (
    ExitReason,
    GuestCommand,
    GuestLatency,
    HaltPolling,
    HostCause,
    ProvedPcpu,
    VcpuLatency,
)
from kata_pin.base.documents.state import Sandbox, State, Thread
from kata_pin.base.values import Method
from kata_pin.cli.reports import pcpus
from kata_pin.placement.proof_rows import by_process

MOST: Final = 5
"""Reasons and causes of one vCPU that are listed."""


def vms(state: State, sandboxes: Collection[str]) -> tuple[int, ...]:
    """Return the processes of these sandboxes' VMs, where KVM runs them."""
    return tuple(
        one.vmm.pid
        for one in state.sandboxes
        if one.id in sandboxes and one.vmm is not None and one.vmm.kvm
    )


def vcpu_threads(state: State, sandboxes: Collection[str]) -> list[tuple[int, int]]:
    """Return process and thread of every vCPU of these sandboxes."""
    return [
        (thread.tgid, thread.tid)
        for one in state.sandboxes
        if one.id in sandboxes
        for thread in _vcpus(one)
    ]


def latencies(
    state: State, measured: Measured, rows: Iterable[ProvedPcpu], seconds: float
) -> Iterator[GuestLatency]:
    """Yield what each guest with exclusive pCPUs felt; `rows` are those pCPUs."""
    by_sandbox: dict[str, dict[int, ProvedPcpu]] = {}
    for row in rows:
        by_sandbox.setdefault(row.sandbox, {})[row.cpu] = row
    for sandbox in state.sandboxes:
        if sandbox.id not in by_sandbox:
            continue
        polling = _polling(sandbox, measured)
        yield GuestLatency(
            sandbox=sandbox.id,
            pod=sandbox.pod,
            vcpus=tuple(_vcpu(sandbox, measured, by_sandbox[sandbox.id])),
            halt_polling=polling,
            problems=tuple(_problems(sandbox, measured, polling)),
            commands=tuple(_commands(sandbox, seconds)),
        )


def _vcpus(sandbox: Sandbox) -> list[Thread]:
    threads = [one for one in sandbox.threads if one.role == "vcpu"]
    return sorted(threads, key=lambda one: (len(one.label), one.label))


def _vcpu(
    sandbox: Sandbox, measured: Measured, rows: Mapping[int, ProvedPcpu]
) -> Iterator[VcpuLatency]:
    guest_cpus = {one.tid: one.guest_cpu for one in sandbox.guest.vcpus} if sandbox.guest else {}
    names = {one.id: one.name for one in sandbox.containers}
    exits = _by_thread(measured.exits or ())
    for thread in _vcpus(sandbox):
        place = pcpus.parse(thread.expected if thread.expected is not None else thread.affinity)
        row = rows.get(next(iter(place), -1)) if len(place) == 1 else None
        before, after = measured.times.get(thread.tid, (None, None))
        here = _switches(thread.tid, row, measured)
        outside = exits.get(thread.tid, [])
        known = measured.exits is not None and row is not None
        yield VcpuLatency(
            vcpu=thread.label,
            tid=thread.tid,
            guest_cpu=guest_cpus.get(thread.tid),
            cpus=str(place),
            container=names.get(thread.container, ""),
            ran_ms=_ms(after.ran_ns - before.ran_ns) if before and after else None,
            steal_ms=_ms(after.waited_ns - before.waited_ns) if before and after else None,
            preempted=here[0] if here else None,
            longest_wait_ms=_ms(here[1]) if here else None,
            halts=sum(one.halts for one in outside) if known else None,
            exits=sum(one.times for one in outside) if known else None,
            outside_ms=_ms(sum(one.total_ns for one in outside)) if known else None,
            reasons=tuple(_reasons(outside))[:MOST] if known else (),
            causes=tuple(_causes(thread, row))[:MOST] if row else (),
        )


def _by_thread(exits: Iterable[MeasuredExits]) -> dict[int, list[MeasuredExits]]:
    ordered = sorted(exits, key=lambda one: one.tid)
    return {tid: list(same) for tid, same in groupby(ordered, key=lambda one: one.tid)}


def _switches(tid: int, row: ProvedPcpu | None, measured: Measured) -> tuple[int, int] | None:
    """Return how often a thread with a pCPU for itself lost it, and the longest wait for it."""
    if row is None or measured.method is not Method.PERF:
        return None
    task = next((one for one in measured.cpus[row.cpu].tasks if one.tid == tid), None)
    return (task.preempted, task.longest_wait_ns) if task else (0, 0)


def _reasons(exits: Iterable[MeasuredExits]) -> Iterator[ExitReason]:
    """Yield why a vCPU was outside, the longest exit first."""
    for one in sorted(exits, key=lambda one: -one.longest_ns):
        if one.times:
            name = one.name or f"reason {one.reason}"
            yield ExitReason(name, one.times, _ms(one.total_ns), _ms(one.longest_ns), one.long)


def _causes(thread: Thread, row: ProvedPcpu) -> list[HostCause]:
    """Return what else ran on a vCPU's pCPU, longest first."""
    found = [
        HostCause(f"{one.label} (tid {one.tid})", one.here_ms)
        for one in row.own
        if one.tid != thread.tid and one.here_ms
    ]
    for task, _ in by_process(row.tasks):
        if task.total_ms:
            pid = f" (pid {task.pid})" if task.pid else ""
            found.append(HostCause(f"{task.comm or 'gone'}{pid}", task.total_ms))
    if row.interrupt_ms:
        found.append(HostCause("interrupts", row.interrupt_ms))
    return sorted(found, key=lambda one: -one.ran_ms)


def _polling(sandbox: Sandbox, measured: Measured) -> HaltPolling | None:
    pair = measured.kvm.get(sandbox.vmm.pid) if sandbox.vmm else None
    if pair is None:
        return None
    before, after = pair
    return HaltPolling(
        halts=after.halts - before.halts,
        polled_ms=_ms(after.polled_ns - before.polled_ns),
        wasted_ms=_ms(after.wasted_ns - before.wasted_ns),
        slept_ms=_ms(after.slept_ns - before.slept_ns),
    )


def _problems(sandbox: Sandbox, measured: Measured, polling: HaltPolling | None) -> Iterator[str]:
    """Yield what could not be measured, and why."""
    if sandbox.vmm is None:
        yield f"no VMM: {sandbox.vmm_problem}"
    elif not sandbox.vmm.kvm:
        yield "exits and halt polling unknown: the VM is emulated, without KVM"
    else:
        if measured.exits is None:
            yield f"exits unknown: {measured.no_exits}"
        if polling is None:
            yield f"halt polling unknown: {measured.no_kvm or 'the VM is gone'}"


def _commands(sandbox: Sandbox, seconds: float) -> Iterator[GuestCommand]:
    """Yield how to measure in each container that has exclusive pCPUs and guest CPUs of its own."""
    guest = sandbox.guest
    namespace, slash, pod = sandbox.pod.partition("/")
    exclusive = {one.id for one in sandbox.containers if one.exclusive}
    for one in guest.containers if guest else ():
        cpus = pcpus.parse(one.cpus)
        if one.id not in exclusive or not cpus:
            continue
        run = f"crictl exec -it {quote(one.id)} "
        if slash:
            run = f"kubectl exec -n {quote(namespace)} {quote(pod)} -c {quote(one.name)} -- "
        for program, words in _programs(cpus, max(1, round(seconds))).items():
            yield GuestCommand(one.name, program, f"{run}{program} {words}")


def _programs(cpus: CpuSet, seconds: int) -> dict[str, str]:
    """Return the arguments of the programs of rt-tests for some guest CPUs."""
    return {
        "cyclictest": f"-q -m -p 95 -i 200 -h 1000 -t {len(cpus)} -a {cpus} -D {seconds}",
        "oslat": f"-f 95 -c {cpus} -D {seconds}",
    }


def _ms(ns: int) -> float:
    return ns / 1e6
