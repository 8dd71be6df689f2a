"""Sets of CPUs that every decision starts from (D8, D11).

These are the cpuset of the source that is believed, a grant, the sandbox mask, isolated CPUs, and
what one thread should have.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Final, NamedTuple

from msgspec import Struct, field
from msgspec.structs import replace

from kata_pin.base.allocation import AllocState, PodRequest
from kata_pin.base.cpuset import EMPTY, CpuSet, HostTopology, union
from kata_pin.base.placement import KubeletState, Node, Placement, SandboxMask
from kata_pin.base.sandbox import Container, ReportedCpuset, Sandbox, Thread
from kata_pin.base.values import ContainerKind, ContainerState, CpusetSource
from kata_pin.placement.exclusive import exclusive_claims, looks_exclusive

# The sandbox mask: which CPUs the containers of a sandbox have together (D8).
#
# Computed in each pass from the recorded containers; one that ended no longer counts.


def sandbox_mask(
    sandbox: Sandbox,
    node: Node,
    *,
    allocated: Mapping[str, CpuSet] | None = None,
    pool: CpuSet = EMPTY,
    kept: CpuSet = EMPTY,
) -> SandboxMask:
    """Return the sandbox mask and its parts.

    The mask is the union over counting containers that have a cpuset; without any, the kubelet's
    default set where its checkpoint says static, else `pool` (the shared pool of our own
    allocator), else the pod sandbox's own cpuset, else None. `exclusive` and `shared` split it;
    `overhead_extra` is what the pod sandbox's own cpuset adds for overhead and surplus vCPUs.
    `allocated` and `pool` come from our own allocator and are absent without it; `kept` are the
    CPUs of the last pass's pairs.
    """
    counting = counted(sandbox, node)
    found = exclusive_claims(counting, node, sandbox.handler, allocated=allocated, kept=kept)
    containers = _union_of(counting, ContainerKind.CONTAINER)
    pause = _union_of(counting, ContainerKind.SANDBOX)
    mask, origin = _mask_and_origin(containers, pause, node, pool)
    if mask is None:
        return SandboxMask(mask=None, origin=origin, claims=found)
    exclusive = union(claim.exclusive for claim in found)
    return SandboxMask(
        mask=mask,
        exclusive=exclusive,
        shared=mask - exclusive,
        overhead_extra=pause - mask,
        origin=origin,
        claims=found,
    )


def counted(sandbox: Sandbox, node: Node) -> tuple[Container, ...]:
    """Return the containers that count: created or running, by `stopped_counts` stopped too."""
    late = node.settings.stopped_counts
    return tuple(
        one
        for one in sandbox.containers
        if one.state.counts or (late and one.state is ContainerState.STOPPED)
    )


def _union_of(containers: tuple[Container, ...], kind: ContainerKind) -> CpuSet:
    return union(one.cpus or EMPTY for one in containers if one.kind is kind)


def _mask_and_origin(
    containers: CpuSet, pause: CpuSet, node: Node, pool: CpuSet
) -> tuple[CpuSet | None, str]:
    if containers:
        return containers, "union of the containers' cpusets"
    if node.kubelet is not None and node.kubelet.static and node.kubelet.default:
        return node.kubelet.default, "kubelet's default set (no container has a cpuset)"
    if pool:
        return pool, "allocator's shared pool (no container has a cpuset)"
    if pause:
        return pause, "pod sandbox's own cpuset (no container has one)"
    return None, "no container has a cpuset"


# What policy wants for one thread, before the cgroup and the online CPUs have their say.


class WantKind(Enum):
    """Why a thread is wanted where it is."""

    PAIRED = "paired"  # a vCPU with exclusive CPUs
    SURPLUS = "surplus"  # an unpaired vCPU, beyond the exclusive CPUs
    SHARED = "shared"  # the vCPU kept for containers without exclusive CPUs
    FLOAT = "float"  # a vCPU on the whole sandbox mask
    DISPUTED = "disputed"  # a thread of disputed role on the whole sandbox mask
    KATA = "kata"  # a vCPU that Kata pins, put back on its pin (D13)
    OVERHEAD = "overhead"  # a thread that is no vCPU

    @property
    def vcpu_for_all(self) -> bool:
        """Whether it is a vCPU whose CPUs other threads may fall back to (D7)."""
        return self is WantKind.SURPLUS or self is WantKind.SHARED


class Want(NamedTuple):
    """The policy's choice for one thread; a paired vCPU serves container `container_id`."""

    thread: Thread
    cpus: CpuSet
    kind: WantKind
    reason: str
    container_id: str = ""


class Fit(NamedTuple):
    """A want after D7: what can be applied, and the fallback step that was needed."""

    want: Want
    applied: CpuSet
    step: str = ""
    detail: str = ""

    @property
    def paired(self) -> bool:
        """Whether the thread has the exclusive CPUs it was meant to have."""
        return self.want.kind is WantKind.PAIRED and not self.step


# Exclusive pCPUs that are not: claimed by two sandboxes.
#
# Needs all sandboxes of the node at once; what is done about it is the operator's choice.


class Conflict(Struct, frozen=True):
    """pCPUs that several sandboxes claim exclusively; the ids are sorted."""

    cpus: CpuSet
    sandboxes: tuple[str, ...]


def conflicts(placements: Mapping[str, Placement]) -> tuple[Conflict, ...]:
    """Return the pCPUs that more than one sandbox claims exclusively, grouped by claimants."""
    claimants: dict[int, list[str]] = {}
    for sandbox_id, placement in sorted(placements.items()):
        for cpu in placement.mask.exclusive:
            claimants.setdefault(cpu, []).append(sandbox_id)
    together: dict[tuple[str, ...], list[int]] = {}
    for cpu, who in sorted(claimants.items()):
        if len(who) > 1:
            together.setdefault(tuple(who), []).append(cpu)
    return tuple(Conflict(CpuSet(cpus), who) for who, cpus in together.items())


# Threads on isolated CPUs, which no scheduler domain balances (D11).
#
# A thread that may run on several isolated CPUs sits on one and never moves
# (/sys/devices/system/cpu/isolated, isolcpus=domain in kernel-parameters.txt). So every thread
# whose CPUs touch isolated ones gets one CPU, dealt round robin; threads that are not paired take
# unpaired CPUs first, and keep them all where those are not isolated.

_DETAIL: Final = "one CPU only: isolated CPUs are not load-balanced"


def deal(fits: Sequence[Fit], topology: HostTopology) -> list[Fit]:
    """Return the fits with one CPU where isolated CPUs are involved, in the same order."""
    isolated = topology.isolated
    if not isolated:
        return list(fits)
    result = list(fits)
    paired = [i for i, one in enumerate(result) if one.paired]
    _deal(result, [(i, result[i].applied) for i in paired], topology)
    taken = union(result[i].applied for i in paired)
    rest = [
        (i, _unpaired_first(one.applied, taken, isolated))
        for i, one in enumerate(result)
        if not one.paired
    ]
    _deal(result, rest, topology)
    return result


def _unpaired_first(applied: CpuSet, paired: CpuSet, isolated: CpuSet) -> CpuSet:
    if len(applied) < 2 or applied.isdisjoint(isolated):
        return applied
    return applied - paired or applied


def _deal(fits: list[Fit], allowed: Sequence[tuple[int, CpuSet]], topology: HostTopology) -> None:
    """Replace fits in place: `allowed` says for each number the CPUs it may have."""
    groups: dict[CpuSet, list[int]] = {}
    for number, cpus in allowed:
        if len(cpus) > 1 and not cpus.isdisjoint(topology.isolated):
            groups.setdefault(cpus, []).append(number)
        elif cpus != fits[number].applied:
            fits[number] = fits[number]._replace(applied=cpus, detail=_DETAIL)
    for cpus, numbers in groups.items():
        _deal_group(fits, cpus, numbers, topology)


def _deal_group(fits: list[Fit], cpus: CpuSet, numbers: list[int], topology: HostTopology) -> None:
    """Deal one set of CPUs evenly; a thread that already sits on one of them stays there."""
    order = topology.in_order(cpus)
    load = dict.fromkeys(order, 0)
    fair = -(-len(numbers) // len(load))
    moving: list[int] = []
    for number in numbers:
        observed = fits[number].want.thread.task.affinity
        if len(observed) == 1 and load.get(observed.first, fair) < fair:
            load[observed.first] += 1
            fits[number] = _with_one(fits[number], observed)
        else:
            moving.append(number)
    lightest = [(load[cpu], place, cpu) for place, cpu in enumerate(order)]
    heapq.heapify(lightest)
    for number in moving:
        count, place, cpu = lightest[0]
        heapq.heapreplace(lightest, (count + 1, place, cpu))
        fits[number] = _with_one(fits[number], CpuSet((cpu,)))


def _with_one(one: Fit, cpu: CpuSet) -> Fit:
    detail = f"{one.detail}; {_DETAIL}" if one.detail else _DETAIL
    return one._replace(applied=cpu, detail=detail)


# Which source's value of a container's cpuset is used when they disagree, and why.
#
# The order, first to last:
#
# 1. live sources, which report a container's current cpuset: NRI and Kata's persist.json. If both
#    report one, the one whose value changed last: an update reaches both, unless one missed it.
# 2. the kubelet's checkpoint, where it gives the container CPUs of its own: they stay while it
#    lives.
# 3. the configured cpuset of the sandbox's cgroup: Kata keeps the union of the containers' cpusets
#    there. It says nothing about a single container, but is exactly the sandbox mask.
# 4. config.json of the bundle, which updates do not change.
#
# Steps 2 and 3 are for containers that no live source reports (runtime-rs without NRI). A value is
# as old as its last change: repeating it does not make it newer.

LIVE: Final = (CpusetSource.NRI, CpusetSource.KATA)
"""Sources that report each container's current cpuset."""

SOURCES: Final = {
    CpusetSource.NRI: "NRI",
    CpusetSource.KATA: "persist.json",
    CpusetSource.KUBELET: "the kubelet's checkpoint",
    CpusetSource.CGROUP: "the sandbox's cgroup",
    CpusetSource.BUNDLE: "config.json",
}
"""What each source is called; of those that are not live the first one wins."""

_ORDER: Final = tuple(SOURCES)


def believed(reported: Iterable[ReportedCpuset]) -> ReportedCpuset | None:
    """Return the value to use of those that sources reported, None without any."""
    values = tuple(reported)
    live = [one for one in values if one.source in LIVE]
    if live:
        return max(live, key=lambda one: (one.recorded_ns, one.source is CpusetSource.KATA))
    return min(values, key=lambda one: _ORDER.index(one.source), default=None)


def why(reported: Iterable[ReportedCpuset]) -> str:
    """Return in a few words why that value is used."""
    values = tuple(reported)
    winner = believed(values)
    if winner is None:
        return "no source reports it"
    word = SOURCES[winner.source]
    others = [one for one in values if one is not winner]
    if not others:
        return f"only {word} reports it"
    if all(one.cpus == winner.cpus for one in others):
        return "all sources agree"
    if winner.source not in LIVE:
        return f"{word} takes precedence over config.json, which updates do not change"
    if any(one.source in LIVE and one.cpus != winner.cpus for one in others):
        return f"{word} changed most recently"
    return f"{word} reports the current value"


def resolve_cpusets(
    containers: Sequence[Container], *, kubelet: KubeletState | None, configured: CpuSet
) -> tuple[Container, ...]:
    """Return the containers with the cpusets to use.

    What live sources reported is in the record already. `configured` is the cpuset of the sandbox's
    cgroup, empty where none is configured.
    """
    every = tuple(_by_kubelet(one, kubelet) for one in containers)
    if not configured:
        return every
    shares = _shares(every, configured)
    return tuple(_with(one, CpusetSource.CGROUP, shares.get(one.id)) for one in every)


def is_stale(container: Container) -> bool:
    """Whether only config.json reported a container's cpuset."""
    winner = believed(container.reported)
    return (
        container.kind is ContainerKind.CONTAINER
        and container.state.counts
        and winner is not None
        and winner.source is CpusetSource.BUNDLE
    )


def _by_kubelet(container: Container, kubelet: KubeletState | None) -> Container:
    if kubelet is None or not kubelet.static or not is_stale(container):
        return container
    entry = kubelet.entries.get(container.pod_uid, {}).get(container.name)
    return _with(container, CpusetSource.KUBELET, entry or None)


def _with(container: Container, source: CpusetSource, cpus: CpuSet | None) -> Container:
    """Return the container with one more value; None: this source reports none."""
    if cpus is None:
        return container
    return replace(
        container, cpus=cpus, reported=(*container.reported, ReportedCpuset(source, cpus, 0))
    )


def _shares(every: Sequence[Container], configured: CpuSet) -> dict[str, CpuSet]:
    """Return what the union means for the containers that only config.json reports.

    Each keeps what is still in the union. New CPUs go to those that lost some, because they were
    moved; else to those that do not look exclusive, whose cpusets are the ones that change.
    """
    rest = [one for one in every if is_stale(one) and one.cpus]
    listed = [one for one in every if one.state is not ContainerState.DELETED]
    known = union(one.cpus or EMPTY for one in listed)
    if not known:
        rest = [one for one in every if is_stale(one)]
    if known == configured:
        return {}
    kept = {one.id: (one.cpus or EMPTY) & configured for one in rest}
    others = union(one.cpus or EMPTY for one in listed if one.id not in kept)
    came = configured - others - union(kept.values())
    moved = [one for one in rest if kept[one.id] != (one.cpus or EMPTY)]
    heirs = moved or [one for one in rest if not looks_exclusive(one)] or rest
    for one in heirs:
        kept[one.id] |= came
    return {key: cpus or configured for key, cpus in kept.items()}


# What a grant means for a pass over one sandbox, and what a sandbox's VM is called in grants (D9).
#
# A grant takes precedence over the recorded cpuset: a Kata container without a CPU quota never gets
# its cpuset from us (D14), and one that does may have it a moment later than its threads have their
# affinity. An Allotment lives for one pass.

_VM: Final = "vm:"  # no id has a colon


def vm_of(sandbox_id: str) -> str:
    """Return the name of a sandbox's VM in requests and grants.

    Not the sandbox's id: where there is no pod, that is the container's own.
    """
    return f"{_VM}{sandbox_id}"


def sandbox_of(pod: PodRequest) -> str:
    """Return the id of a pod's sandbox, empty for one that is not Kata's."""
    return pod.sandbox_id.removeprefix(_VM)


class Allotment(Struct, frozen=True):
    """A sandbox's containers with the CPUs of their grants.

    `allocated` has the exclusive CPUs by container id, the empty set for a container with shared
    CPUs only; `pool` is the shared pool, `others` what other sandboxes have exclusively.
    """

    containers: tuple[Container, ...] = ()
    allocated: Mapping[str, CpuSet] = field(default_factory=dict)
    pool: CpuSet = EMPTY
    others: CpuSet = EMPTY


def nothing_allotted(containers: Sequence[Container]) -> Allotment:
    """Return the allotment of a node without an allocator: everything is as recorded."""
    return Allotment(tuple(containers))


def allot(containers: Iterable[Container], state: AllocState) -> Allotment:
    """Return what the state means for one sandbox's containers.

    The pod sandbox itself gets the CPUs of its VM's grant: for overhead and unpaired vCPUs only.
    """
    given: dict[str, CpuSet] = {}
    every: list[Container] = []
    for container in containers:
        of_vm = container.kind is ContainerKind.SANDBOX
        grant = state.get(vm_of(container.id) if of_vm else container.id)
        if grant is not None:
            container = replace(container, cpus=grant.cpus)  # noqa: PLW2901 - the same, with them
            if not of_vm:
                given[container.id] = grant.exclusive
        every.append(container)
    others = union(grant.exclusive for owner, grant in state.grants.items() if owner not in given)
    return Allotment(tuple(every), given, state.shared, others)
