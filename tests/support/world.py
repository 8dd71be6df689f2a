"""Small builders of model values for policy tests: hosts, containers, threads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from kata_pin.base.cpuset import CpuPlace, CpuSet, HostTopology
from kata_pin.base.placement import KubeletState, Node, Placement
from kata_pin.base.sandbox import (
    Container,
    GuestTopology,
    ProcessKey,
    Role,
    Sandbox,
    Task,
    Thread,
    Vmm,
)
from kata_pin.base.settings import Overhead, OverheadKind, PlacementSettings
from kata_pin.base.threads import ThreadKey
from kata_pin.base.values import ContainerKind, ContainerState, RoleSource, ThreadRole

VMM_PID = 1000
"""The process of every VMM here; its main thread has this tid."""

FIRST_VCPU_TID = 1100
"""vCPU N has tid FIRST_VCPU_TID + N unless a test says otherwise."""


def cpus(text: str) -> CpuSet:
    """Return the set of a Linux cpu list."""
    return CpuSet.parse(text)


def repinned(task: Task, affinity: CpuSet) -> Task:
    """Return the thread with another affinity."""
    return task.moved(affinity, task.cpuset, task.cgroup)


def flat(count: int) -> HostTopology:
    """Return a host of `count` single-thread cores on one node."""
    cpus = tuple(
        CpuPlace(n, node=0, package=0, llc=0, core=n, thread=0, kind="") for n in range(count)
    )
    every = CpuSet(range(count))
    return HostTopology(cpus=cpus, online=every, present=every)


def smt_host(cores: int = 8, nodes: int = 2) -> HostTopology:
    """Return a host with two threads a core: CPU n and n + cores are siblings.

    With the defaults node 0 has cores 0-3 (CPUs 0-3,8-11), node 1 cores 4-7 (CPUs 4-7,12-15).
    """
    per_node = cores // nodes
    every = tuple(
        CpuPlace(
            number,
            node=number % cores // per_node,
            package=number % cores // per_node,
            llc=number % cores // per_node * per_node,
            core=number % cores,
            thread=number // cores,
            kind="",
        )
        for number in range(2 * cores)
    )
    online = CpuSet(range(2 * cores))
    return HostTopology(cpus=every, online=online, present=online)


def without(topology: HostTopology, offline: str) -> HostTopology:
    """Return the host with these CPUs off: they keep being present and lose their place."""
    online = topology.online - cpus(offline)
    there = tuple(cpu for cpu in topology.cpus if cpu.cpu in online)
    return replace(topology, cpus=there, online=online)


def isolating(topology: HostTopology, isolated: str) -> HostTopology:
    """Return the host with these CPUs isolated."""
    return replace(topology, isolated=cpus(isolated))


def overhead(text: str) -> Overhead:
    """Return an overhead setting from its text: a word, `reserve:k` or a cpu list."""
    if text.startswith("reserve:"):
        return Overhead(OverheadKind.RESERVE, reserve=int(text.removeprefix("reserve:")))
    if text[:1].isdigit():
        return Overhead(OverheadKind.CPUS, cpus=cpus(text))
    return Overhead(OverheadKind(text))


def node(
    topology: HostTopology | None = None,
    settings: PlacementSettings | None = None,
    *,
    default: str | None = None,
    live_threads: bool = True,
    release_mask: str = "",
) -> Node:
    """Return a node; `default` makes its kubelet static with that shared pool."""
    return Node(
        topology=topology or flat(16),
        settings=settings or PlacementSettings(),
        kubelet=None if default is None else KubeletState("static", cpus(default)),
        release_mask=cpus(release_mask),
        live_threads=live_threads,
    )


def exclusive(name: str, cpu_list: str) -> Container:
    """Return a running container whose quota is that of its cpuset: inferred to be exclusive."""
    size = len(cpus(cpu_list))
    return replace(shared(name, cpu_list), quota_us=size * 100_000, period_us=100_000)


def shared(name: str, cpu_list: str | None) -> Container:
    """Return a running container with a cpuset, or without for None, that is not exclusive."""
    return Container(
        id=name,
        sandbox_id="pod",
        state=ContainerState.RUNNING,
        cpus=None if cpu_list is None else cpus(cpu_list),
        name=name,
        pod_uid="uid",
        source="test",
    )


def pause(cpu_list: str | None) -> Container:
    """Return the record of the pod sandbox itself."""
    return replace(shared("pause", cpu_list), kind=ContainerKind.SANDBOX)


def sandbox(*containers: Container, guest: GuestTopology | None = None) -> Sandbox:
    """Return a sandbox with a QEMU."""
    vmm = Vmm(
        "qemu",
        ProcessKey(VMM_PID, 5),
        parent=1,
        exe="/usr/bin/qemu",
        witness="test",
        apic_ids=True,
        guest=guest or GuestTopology(),
    )
    return Sandbox("pod", containers, vmm)


def task(
    tid: int,
    *,
    on: str = "0-15",
    cpuset: str = "0-15",
    tgid: int = VMM_PID,
    cgroup: str = "/kata_pod",
    flags: int = 0,
) -> Task:
    """Return a task with an affinity (`on`) and a cgroup's cpuset (empty: unknown)."""
    return Task(ThreadKey(tgid, tid, 5), "qemu", flags, cpus(on), cpus(cpuset), cgroup)


def vcpu(
    index: int | None,
    *,
    on: str = "0-15",
    cpuset: str = "0-15",
    tid: int | None = None,
    conflict: str = "",
) -> Thread:
    """Return a vCPU thread."""
    number = FIRST_VCPU_TID + (index or 0) if tid is None else tid
    role = Role(ThreadRole.VCPU, RoleSource.DEBUGFS, vcpu=index, conflict=conflict)
    return Thread(task(number, on=on, cpuset=cpuset), role)


def vcpus(*indexes: int, on: str = "0-15", cpuset: str = "0-15") -> list[Thread]:
    """Return vCPU threads with these indexes."""
    return [vcpu(index, on=on, cpuset=cpuset) for index in indexes]


def thread(
    role: ThreadRole,
    tid: int,
    *,
    on: str = "0-15",
    cpuset: str = "0-15",
    tgid: int = VMM_PID,
    conflict: str = "",
) -> Thread:
    """Return a thread that is no vCPU."""
    return Thread(
        task(tid, on=on, cpuset=cpuset, tgid=tgid),
        Role(role, RoleSource.REST, conflict=conflict),
    )


def main_thread(*, on: str = "0-15", cpuset: str = "0-15") -> Thread:
    """Return QEMU's main thread."""
    return thread(ThreadRole.EMULATOR, VMM_PID, on=on, cpuset=cpuset)


def applied(placement: Placement, threads: Iterable[Thread]) -> dict[str, str]:
    """Return `label -> cpu list` of what is applied; threads left alone are absent."""
    return {
        one.label: str(placement.desired[one.key].applied)
        for one in threads
        if one.key in placement.desired
    }


def codes(placement: Placement) -> set[str]:
    """Return the codes of the placement's notes."""
    return {note.code for note in placement.notes}


def after(placement: Placement, threads: Iterable[Thread]) -> list[Thread]:
    """Return the threads as they are observed once the placement stands."""
    return [
        one._replace(task=repinned(one.task, placement.desired[one.key].applied))
        if one.key in placement.desired
        else one
        for one in threads
    ]


def kubelet(
    entries: Mapping[str, str] | None = None, *, pod: str = "", default: str = "0-3"
) -> KubeletState:
    """Return a static checkpoint for the pod `uid`: container names to cpu lists."""
    return KubeletState(
        "static",
        cpus(default),
        entries={"uid": {name: cpus(text) for name, text in (entries or {}).items()}},
        pod_entries={"uid": cpus(pod)} if pod else {},
    )
