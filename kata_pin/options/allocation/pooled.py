"""A policy over pools: a rule says what a container gets, a choice says which CPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Final, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from kata_pin.base.allocation import (
    AllocState,
    AttachedDevice,
    Candidate,
    ContainerRequest,
    Decision,
    Grant,
    PodRequest,
    Refusal,
    RunningContainer,
)
from kata_pin.base.config.alloc import Alloc
from kata_pin.base.cpuset import EMPTY, CpuSet, HostTopology, union
from kata_pin.base.placement import Note
from kata_pin.base.settings import ManagerPolicy
from kata_pin.base.values import CpuClass, GrantKind, KataRuntime, count, listed
from kata_pin.options.allocation.accumulator import Machine
from kata_pin.options.allocation.choice import Choice, grow, in_whole_cores, shrink, whole_cores
from kata_pin.options.allocation.demand import Demand, StaticOptions, asked, strict
from kata_pin.options.allocation.policy import AllocError, AllocFailure
from kata_pin.options.allocation.shared_pool import (
    RunningClaims,
    bound,
    changes,
    differing,
    follow_pools,
    free_cpus,
    initial_state,
)
from kata_pin.placement.vm_size import PERIOD_US, ContainerCpu, PodCpu, Sizing, vm_size

# CPUs that concern a container although they are not its own.
#
# Those of its pod, and of the NUMA nodes of its VM's memory and of its devices.

_NAMED: Final = 4
"""Devices of a node that an explanation names."""


class KeptCpus(Struct, frozen=True):
    """Which CPUs a container is to keep, and which are another's.

    `prefer`: keep these, the VM as well; `home`: its zone of the pool so far; `avoid`: claimed by
    others; `own_cpus`: of its VM, None for as many as the setting says.
    """

    prefer: CpuSet = EMPTY
    home: CpuSet = EMPTY
    avoid: CpuSet = EMPTY
    own_cpus: int | None = None


def cpus_beside(state: AllocState, request: ContainerRequest, topology: HostTopology) -> CpuSet:
    """Return the CPUs that a container's own should be near.

    Those of its devices' NUMA nodes: among them the own CPUs of its pod's other containers, if they
    have some there. Without devices those of its pod, else its pod's zones.
    """
    members = _containers(state, request)
    pod = own_cpus(members) or union(one.zone for one in members)
    near = union(node_cpus(topology, device.node) for device in request.devices)
    return near & pod or near or pod


def node_cpus(topology: HostTopology, node: int) -> CpuSet:
    """Return a NUMA node's CPUs, those of the nearest nodes if it has none; empty if unknown.

    Empty also where there is only one node: every CPU is as near.
    """
    nodes, distances = topology.nodes, topology.distances
    if len(nodes) < 2:
        return EMPTY
    if node in nodes:
        return nodes[node]
    far = dict(zip(sorted(distances), distances.get(node, ()), strict=False))
    known = [home for home in nodes if home in far]
    least = min((far[home] for home in known), default=0)
    return union(nodes[home] for home in known if far[home] == least)


def device_reasons(
    topology: HostTopology, request: ContainerRequest, cpus: CpuSet
) -> Iterator[str]:
    """Yield where CPUs are beside the devices that they were chosen for, node by node."""
    if len(topology.nodes) < 2:
        return
    devices = sorted(request.devices, key=lambda device: device.node)
    for node, there in groupby(devices, key=lambda device: device.node):
        titles, home = _titles(list(there)), node_cpus(topology, node)
        if not home:
            yield f"no NUMA node is known for {titles}"
        elif cpus <= home:
            yield f"near {titles} (NUMA node {node})"
        elif cpus & home:
            yield f"partly near {titles} (NUMA node {node})"
        else:
            yield f"not near {titles} (NUMA node {node})"


def _titles(devices: Sequence[AttachedDevice]) -> str:
    """Return the names of some devices of one node."""
    return listed([device.title for device in devices], _NAMED)


def memory_home(state: AllocState, request: ContainerRequest) -> CpuSet:
    """Return the CPUs of the node that has most of the VM's memory, as far as that is known.

    Empty where the pod has CPUs of its own: these say where the VM runs.
    """
    home = state.memory.get(request.pod.sandbox_id, EMPTY)
    return EMPTY if home and own_cpus(_containers(state, request)) else home


def at_home(state: AllocState, request: ContainerRequest, free: CpuSet, wanted: int) -> CpuSet:
    """Return the free CPUs of the node of a VM's memory, empty if they are not enough."""
    home = memory_home(state, request) & free
    return home if len(home) >= wanted else EMPTY


def own_cpus(grants: Sequence[Grant]) -> CpuSet:
    """Return all CPUs that are these containers' own."""
    return union(one.own for one in grants)


def _containers(state: AllocState, request: ContainerRequest) -> list[Grant]:
    return [one for one in state.of_pod(request.pod.pod_uid) if one.kind is GrantKind.CONTAINER]


# The VM of a Kata pod in the accounting: its vCPUs and overhead threads.
#
# Containers keep their CPU limits beside our allocator, so Kata gives a VM default_vcpus more vCPUs
# than their sum (placement/vm_size.py), usually more than there are exclusive CPUs. The unpaired
# vCPUs and every thread that is not a vCPU need CPUs too: the VM's own, the housekeeping pool's, or
# the shared pool's.


def vcpus(members: Sequence[Grant], default_vcpus: int) -> int:
    """Return how many vCPUs Kata gives the VM of these containers, with dynamic sizing."""
    limits = (member.request.limit_millis for member in members)
    containers = tuple(ContainerCpu(limit * PERIOD_US // 1000 or -1) for limit in limits)
    sizing = Sizing(KataRuntime.GO, default_vcpus=default_vcpus)
    return vm_size(sizing, PodCpu(containers=containers)).running


def overhead_millis(pod: PodRequest, settings: Alloc) -> int:
    """Return the CPU of a VM's overhead in thousandths: the pod's, else the setting."""
    return pod.overhead_millis or settings.overhead_millis


def shared_floor(state: AllocState, settings: Alloc, minimum: int) -> int:
    """Return how many CPUs the shared pool needs: its minimum, or what the VMs in it need.

    VMs with their own CPUs need none of it, nor do any if there is a housekeeping pool.
    """
    if state.housekeeping:
        return minimum
    millis = sum(
        overhead_millis(grant.request.pod, settings)
        for grant in state.grants.values()
        if grant.kind is GrantKind.SANDBOX and not grant.exclusive
    )
    return max(minimum, -(-millis // 1000))


def vm_grant(
    members: Sequence[Grant],
    settings: Alloc,
    *,
    own: CpuSet,
    zone: CpuSet,
    old: Grant | None,
) -> Grant:
    """Return the grant of the VM of these containers (at least one); `old` if it is the same.

    Its CPUs are its own, or those of the pool that it follows, near the containers if possible.
    """
    pod = members[0].request.pod
    grant = Grant(
        ContainerRequest(pod.sandbox_id, pod, cpu_millis=overhead_millis(pod, settings)),
        members[0].policy,
        CpuClass.EXCLUSIVE if own else CpuClass.NONE,
        exclusive=own,
        shared=None if own else EMPTY,
        zone=EMPTY if own else zone,
        kind=GrantKind.SANDBOX,
        reasons=(_balance(members, own, settings),),
    )
    if old is not None and not own and old.shared is not None:
        grant = replace(grant, shared=old.shared)
    return old if old == grant else grant


def _balance(members: Sequence[Grant], own: CpuSet, settings: Alloc) -> str:
    exclusive = sum(len(one.exclusive) for one in members)
    number = vcpus(members, settings.default_vcpus)
    if own:
        place = f"{own}, its own"
    else:
        place = "the housekeeping pool" if settings.housekeeping else "the shared pool"
    if not exclusive:
        return f"its VM has {count(number, 'vCPU')}; the overhead threads run on {place}"
    return (
        f"its VM has {count(number, 'vCPU')} and {count(exclusive, 'exclusive CPU')}; the "
        f"unpaired vCPUs ({max(0, number - exclusive)}) and the overhead threads run on {place}"
    )


# `static`, `annotation` and `topology` (policies.py) are this class, each with its rule and choice.
# Its invariants after every call: no CPU is exclusive twice; exclusive, shared and taken CPUs are
# together `state.cpus`, the first two disjoint; CPUs that SHARE containers chose are in the shared
# pool; the shared pool has its minimum as far as the host has CPUs. It holds no state, for one host
# and its settings.

Rule: TypeAlias = Callable[[ContainerRequest, Alloc], Demand]
MakeChoice: TypeAlias = Callable[[HostTopology, Machine, StaticOptions, Alloc], Choice]


class PooledPolicy:
    """A Policy; `make_choice` makes its choice for a host."""

    def __init__(
        self,
        name: str,
        rule: Rule,
        make_choice: MakeChoice,
        topology: HostTopology,
        settings: Alloc,
        *,
        follows_memory: bool,
    ) -> None:
        """`follows_memory`: prefer the NUMA node of a running VM's memory; the kubelet does not."""
        self.name = name
        self._topology = topology
        self._machine = Machine.of(topology)
        self._rule = rule
        self._follows_memory = follows_memory
        self._options = StaticOptions.parse({"true-unit-sizes": "true", **settings.options})
        if self._options.strict_cpu_reservation:
            settings = replace(settings, strict_reserved=True)
        self._settings = settings
        single = settings.topology_manager is ManagerPolicy.SINGLE_NUMA_NODE
        self._options.check_against(self._machine, single_numa_node=single)
        self._choice = make_choice(topology, self._machine, self._options, settings)

    def start(self) -> AllocState:
        """Return the state of a node without containers."""
        return initial_state(self._topology, self._settings)

    def allocate(self, state: AllocState, request: ContainerRequest) -> Decision:
        """Give a new container its CPUs; one with a grant keeps it (see `change`)."""
        if state.get(request.container_id) is not None:
            return Decision(state)
        return self._new(state, request, refused=strict(request, self._settings))

    def _new(self, state: AllocState, request: ContainerRequest, *, refused: bool) -> Decision:
        """Give a container without a grant its CPUs; `refused`: refuse it if there are too few.

        The pod's init containers have ended when another of its containers starts: it gets their
        CPUs first, and the rest returns to the shared pool.
        """
        ended = [one for one in state.of_pod(request.pod.pod_uid) if one.request.init]
        kept = state.without(*(one.container_id for one in ended))
        use = KeptCpus(own_cpus(ended) - state.taken)
        demand = self._rule(request, self._settings)
        try:
            after = self._served(kept, request, demand, use, floor_from=state)
        except AllocError as error:
            refusal = error.refusal(strict=refused)
            if refused:
                return Decision(state, refused=refusal, notes=demand.notes)
            after = self._in_pool(kept, request, (*demand.reasons, error.message), use)
            return self._decided(state, after, demand, refusal)
        return self._decided(state, after, demand)

    def release(self, state: AllocState, container_id: str) -> Decision:
        """See Policy. Containers that wait for CPUs are retried, the oldest first."""
        grant = state.get(container_id)
        if grant is None:
            return Decision(state)
        gone = state.of_pod(grant.pod_uid) if grant.kind is GrantKind.SANDBOX else (grant,)
        after = state.without(*(one.container_id for one in gone))
        after = follow_pools(self._retried(self._with_vm(after, grant, KeptCpus())))
        return Decision(after, changes(state, after))

    def change(self, state: AllocState, request: ContainerRequest) -> Decision:
        """Give a running container what it requests now; if that fails it keeps what it has.

        CPUs in use stay: a larger set grows by the nearest CPUs, a smaller one drops single threads
        first, and a set that changes between shared and exclusive stays the same.
        """
        old = state.get(request.container_id)
        if old is None:  # it runs already, so it cannot be refused
            return self._new(state, request, refused=False)
        demand = self._rule(request, self._settings)
        served = (old.cpu_class, len(old.own)) == (demand.cpu_class, demand.whole)
        pinned = bool(old.mems) == (self._settings.pin_memory and bool(old.own))
        if request == old.request and served and pinned:  # its zone stays as it is, too
            return Decision(state, notes=demand.notes)
        try:
            after = self._served(
                state, request, demand, KeptCpus(old.own, old.zone), floor_from=state
            )
        except AllocError as error:
            return Decision(state, refused=error.refusal(strict=False), notes=demand.notes)
        return self._decided(state, after, demand)

    def reconcile(self, state: AllocState, running: Sequence[RunningContainer]) -> Decision:
        """See Policy.

        Grants hold as far as their CPUs still exist. Containers without a grant keep the CPUs they
        are observed on, if those suit their request and are in no grant (lost state). All are
        served in the old order, then VMs get new CPUs; the rest of them get the shared pool.
        """
        vm_cpus = self._settings.own_cpus
        claims = RunningClaims(state, running, lambda one: self._rule(one, self._settings), vm_cpus)
        after = replace(self.start(), taken=state.taken, memory=state.memory)
        for vm in claims.vms(after.cpus - after.reserved):
            after = after.with_grant(vm)
        had = {name for name, grant in state.grants.items() if grant.exclusive}
        notes: list[Note] = []
        later: list[tuple[ContainerRequest, Demand]] = []
        waiting: dict[str, Refusal] = {}
        for one, prefer in claims.within(after.cpus - after.reserved - after.taken):
            demand = self._rule(one.request, self._settings)
            notes += demand.notes
            if not demand.pooled:
                known = one.request.pod.sandbox_id in had or len(prefer) > demand.whole
                use = KeptCpus(prefer, EMPTY, claims.pending, None if known else 0)
                try:
                    after = self._resumed(after, one.request, demand, use)
                    continue
                except AllocError as error:
                    waiting[one.request.container_id] = error.refusal(strict=False)
            later.append((one.request, demand))
        for grant in tuple(after.grants.values()):
            if grant.kind is GrantKind.SANDBOX and not grant.exclusive:
                after = self._with_vm(after, grant, KeptCpus())
        for request, demand in later:  # only now: the pool is what the others leave of it
            why = waiting.get(request.container_id)
            reasons = (*demand.reasons, why.message) if why else demand.reasons
            old = state.get(request.container_id)
            use = KeptCpus(home=old.zone & self._machine.cpus if old else EMPTY)
            after = self._in_pool(after, request, reasons, use)
        after = follow_pools(self._retried(after))
        unserved = tuple(one for one in waiting.items() if not after.grants[one[0]].own)
        changed = differing(state, after, running)
        return Decision(after, changed, notes=tuple(notes), waiting=unserved)

    def decline(self, state: AllocState, request: ContainerRequest, refusal: Refusal) -> Decision:
        """See Policy."""
        demand = self._rule(request, self._settings)
        if demand.pooled or not asked(request.pod):
            return Decision(state, notes=demand.notes)
        declined = replace(refusal, strict=strict(request, self._settings))
        return Decision(state, refused=declined, notes=demand.notes)

    def candidates(self, state: AllocState, request: ContainerRequest) -> tuple[Candidate, ...]:
        """Return the choices for a request; for a pooled one only the shared pool."""
        demand = self._rule(request, self._settings)
        rest = state.without(request.container_id)
        if demand.pooled:
            return (Candidate("pool", 0, rest.shared, taken=rest.shared),)
        free = self._free(rest, demand)
        wanted, beside = demand.whole, cpus_beside(rest, request, self._topology)
        free = (self._follows_memory and at_home(rest, request, free, wanted)) or free
        if self._options.full_pcpus_only:
            try:
                free = self._in_whole_cores(free, wanted, EMPTY, beside)[1]
            except AllocError:
                free = CpuSet.from_bits(whole_cores(self._machine, free.bits))
        return self._choice.candidates(free, wanted, beside)

    # ---- states after an event -----------------------------------------------------------

    def _resumed(
        self, state: AllocState, request: ContainerRequest, demand: Demand, use: KeptCpus
    ) -> AllocState:
        """Return the state in which a running container has its CPUs; AllocError if not possible.

        CPUs that later grants claim are left to them, unless this one cannot be served without.
        """
        before = state.without(request.pod.sandbox_id)
        with suppress(AllocError):
            return self._served(state, request, demand, use, floor_from=before)
        return self._served(state, request, demand, replace(use, avoid=EMPTY), floor_from=before)

    def _retried(self, state: AllocState) -> AllocState:
        """Return the state in which containers that wait for own CPUs have them, if possible."""
        for grant in tuple(state.grants.values()):
            if grant.kind is GrantKind.SANDBOX or grant.cpu_class is not CpuClass.NONE:
                continue
            demand = self._rule(grant.request, self._settings)
            if not demand.pooled:
                with suppress(AllocError):
                    state = self._served(state, grant.request, demand, KeptCpus(), floor_from=state)
        return state

    def _served(
        self,
        state: AllocState,
        request: ContainerRequest,
        demand: Demand,
        use: KeptCpus,
        *,
        floor_from: AllocState,
    ) -> AllocState:
        """Return the state with the container's grant and its VM's; AllocError if not possible.

        The minimum of the shared pool is checked only if there are more exclusive CPUs than in
        `floor_from`: existing grants stay. Its VM's own CPUs are given up before it fails.
        """
        if demand.pooled:
            return self._in_pool(state, request, demand.reasons, use)
        vm = state.get(request.pod.sandbox_id)
        if vm is not None and vm.exclusive:
            with suppress(AllocError):
                return self._granted(state, request, demand, use, floor_from)
            state = state.with_grant(replace(vm, exclusive=EMPTY, shared=EMPTY))
            use = replace(use, own_cpus=0)
        return self._granted(state, request, demand, use, floor_from)

    def _granted(
        self,
        state: AllocState,
        request: ContainerRequest,
        demand: Demand,
        use: KeptCpus,
        floor_from: AllocState,
    ) -> AllocState:
        rest = state.without(request.container_id)
        avoid = use.avoid - use.prefer
        free = self._free(rest, demand, use.prefer) - avoid
        own = self._chosen(rest, request, free, demand.whole, use.prefer)
        grant = self._grant(rest, request, demand, own)
        spare = replace(use, prefer=use.prefer - own, avoid=avoid)
        after = self._with_vm(state.with_grant(grant), grant, spare)
        kept = own <= use.prefer  # it loses nothing because others took CPUs of the pool
        pool = after.cpus - after.exclusive if kept else after.shared - after.taken
        if shortage := self._shortage(after, floor_from, len(pool)):
            raise AllocError(AllocFailure.SHARED_MINIMUM, shortage)
        return after

    def _in_pool(
        self, state: AllocState, request: ContainerRequest, reasons: tuple[str, ...], use: KeptCpus
    ) -> AllocState:
        """Return the state in which the container follows the shared pool."""
        rest = state.without(request.container_id)
        beside = use.home or cpus_beside(rest, request, self._topology)
        zone = self._choice.zone(rest, request.cpu_millis, beside)
        reasons = (*reasons, *self._device_reasons(request, zone or rest.shared))
        grant = Grant(request, self.name, shared=EMPTY, zone=zone, reasons=reasons)
        return self._with_vm(state.with_grant(grant), grant, KeptCpus(own_cpus=use.own_cpus))

    def _grant(
        self, rest: AllocState, request: ContainerRequest, demand: Demand, own: CpuSet
    ) -> Grant:
        mems = EMPTY
        if self._settings.pin_memory:
            mems = CpuSet(node for node, cpus in self._topology.nodes.items() if cpus & own)
        reasons = demand.reasons
        if self._follows_memory and own and own <= memory_home(rest, request):
            reasons = (*reasons, "on the NUMA node of its VM's memory")
        if own:
            reasons = (*reasons, *self._device_reasons(request, own))
        grant = Grant(request, self.name, demand.cpu_class, mems=mems, reasons=reasons)
        if demand.cpu_class is CpuClass.SHARE:
            return replace(grant, shared=own)
        if not demand.fraction_millis:
            return replace(grant, exclusive=own)
        zone = self._choice.zone(rest, demand.fraction_millis, own)
        return replace(grant, exclusive=own, shared=EMPTY, zone=zone)

    def _device_reasons(self, request: ContainerRequest, cpus: CpuSet) -> Iterator[str]:
        """Yield where CPUs are beside the container's devices, if these were considered."""
        if self._choice.follows_devices:
            yield from device_reasons(self._topology, request, cpus)

    def _with_vm(self, state: AllocState, grant: Grant, use: KeptCpus) -> AllocState:
        """Return the state in which the VM of the grant's pod has what it needs now."""
        pod = grant.request.pod
        if not (pod.kata and pod.sandbox_id):
            return state
        members = [  # a pod's old sandbox may still run when its new one starts
            one
            for one in state.of_pod(pod.pod_uid)
            if one.kind is GrantKind.CONTAINER and one.request.pod.sandbox_id == pod.sandbox_id
        ]
        rest = state.without(pod.sandbox_id)
        if not members:
            return rest
        old = state.get(pod.sandbox_id)
        own = EMPTY
        wanted = self._settings.own_cpus if use.own_cpus is None else use.own_cpus
        if wanted and any(one.exclusive for one in members):
            held = EMPTY if old is None else old.exclusive
            free = free_cpus(rest, held) - bound(rest) - (use.avoid - held)
            kept = held <= free and len(held) == wanted
            own = held if kept else self._vm_cpus(rest, members, free, held or use.prefer)
        near = own_cpus(members) or union(one.zone for one in members)
        zone = self._choice.zone(rest, overhead_millis(pod, self._settings), near)
        vm = vm_grant(members, self._settings, own=own, zone=zone, old=old)
        return state if vm is old else state.with_grant(vm)

    def _vm_cpus(
        self, rest: AllocState, members: Sequence[Grant], free: CpuSet, prefer: CpuSet
    ) -> CpuSet:
        """Return a VM's own CPUs; none if the shared pool would be too small.

        Containers take precedence: a VM without its own CPUs runs in the pool.
        """
        wanted = self._settings.own_cpus
        floor = shared_floor(rest, self._settings, self._minimum())
        if len(free) < wanted or len(rest.shared) - wanted < floor:
            return EMPTY
        try:
            return self._nearest(free, wanted, prefer, own_cpus(members))
        except AllocError:  # whole cores only, and none is free
            return EMPTY

    def _decided(
        self, before: AllocState, after: AllocState, demand: Demand, refused: Refusal | None = None
    ) -> Decision:
        """Return the decision for a new state, after CPUs that are free went to those that wait."""
        state = follow_pools(self._retried(after))
        return Decision(state, changes(before, state), refused, demand.notes)

    # ---- which CPUs ----------------------------------------------------------------------

    def _free(self, rest: AllocState, demand: Demand, prefer: CpuSet = EMPTY) -> CpuSet:
        """Return the CPUs that may be chosen.

        For SHARE those with the fewest sharers, and all preferred ones that are allowed.
        """
        pool = free_cpus(rest, prefer)
        if demand.cpu_class is CpuClass.EXCLUSIVE:
            return pool - bound(rest)
        most = max(1, self._settings.max_sharers)
        for sharers in range(1, most):
            free = pool - bound(rest, sharers)
            if len(free) >= demand.whole:
                return free | ((prefer & pool) - bound(rest, most))
        return pool - bound(rest, most)

    def _chosen(
        self, rest: AllocState, request: ContainerRequest, free: CpuSet, wanted: int, prefer: CpuSet
    ) -> CpuSet:
        """Return a container's CPUs: kept and near ones, else on the node of its VM's memory."""
        if self._follows_memory and not prefer & free:
            with suppress(AllocError):
                if home := at_home(rest, request, free, wanted):
                    return self._nearest(home, wanted, EMPTY, EMPTY)
        beside = cpus_beside(rest, request, self._topology)
        return self._nearest(free, wanted, prefer, beside)

    def _nearest(self, free: CpuSet, wanted: int, prefer: CpuSet, beside: CpuSet) -> CpuSet:
        """Return `wanted` free CPUs: all preferred ones that are free, then the nearest."""
        if not self._options.full_pcpus_only:
            return self._kept(free, wanted, prefer, beside)
        return self._in_whole_cores(free, wanted, prefer, beside)[0]

    def _in_whole_cores(
        self, free: CpuSet, wanted: int, prefer: CpuSet, beside: CpuSet
    ) -> tuple[CpuSet, CpuSet]:
        """Return CPUs as `_nearest`, whole cores only, and those that they were chosen from."""
        return in_whole_cores(
            self._machine, free, wanted, lambda cpus: self._kept(cpus, wanted, prefer, beside)
        )

    def _kept(self, free: CpuSet, wanted: int, prefer: CpuSet, beside: CpuSet) -> CpuSet:
        kept = prefer & free
        if not kept:
            return self._choice.choose(free, wanted, beside)
        if len(kept) >= wanted:
            return shrink(self._topology, kept, wanted)
        return grow(self._machine, self._topology, kept, free, wanted - len(kept))

    def _shortage(self, state: AllocState, before: AllocState, left: int) -> str:
        """Return what a pool of `left` CPUs lacks if there are more exclusive CPUs than before."""
        floor = shared_floor(state, self._settings, self._minimum())
        if left >= floor or len(state.exclusive) <= len(before.exclusive):
            return ""
        return f"only {left} CPUs would remain in the shared pool, which needs {floor}"

    def _minimum(self) -> int:
        """Return the least size of the shared pool: the setting, else the size of a core."""
        cores = self._machine.cores.values()
        return self._settings.shared_minimum or max(core.bit_count() for core in cores)
