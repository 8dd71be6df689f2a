"""A policy over pools: a rule says what a container gets, a choice says which CPUs.

`static`, `annotation` and `topology` (policies.py) are this class, each with its rule and choice.
Its invariants after every call: no CPU is exclusive twice; exclusive, shared and taken CPUs are
together `state.cpus`, the first two disjoint; CPUs that SHARE containers chose are in the shared
pool; the shared pool has its minimum as far as the host has CPUs. It holds no state, for one host
and its settings. Out of scope: the order of live changes (`handover`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TypeAlias

from kata_pin.model.alloc import (
    AllocState,
    Candidate,
    ContainerRequest,
    Decision,
    Grant,
    GrantKind,
    Refusal,
    Running,
)
from kata_pin.model.cpuset import EMPTY, CpuSet, union
from kata_pin.model.placement import Note
from kata_pin.model.settings import AllocSettings, CpuClass, ManagerPolicy
from kata_pin.model.topology import HostTopology
from kata_pin.policy.alloc.choice import Choice
from kata_pin.policy.alloc.demand import Demand, asked, strict
from kata_pin.policy.alloc.failure import AllocError, AllocFailure
from kata_pin.policy.alloc.grow_shrink import grow, in_whole_cores, shrink, whole_cores
from kata_pin.policy.alloc.options import StaticOptions
from kata_pin.policy.alloc.pod_cpus import Use, at_home, cpus_beside, memory_home, own_cpus
from kata_pin.policy.alloc.reconciling import Claims, differing
from kata_pin.policy.alloc.shared_pool import bound, changes, free_cpus, initial_state, settled
from kata_pin.policy.alloc.topology import Machine
from kata_pin.policy.alloc.vm import overhead_millis, shared_floor, vm_grant

Rule: TypeAlias = Callable[[ContainerRequest, AllocSettings], Demand]


class PooledPolicy:
    """A Policy; `make_choice` makes its choice for a host."""

    def __init__(
        self,
        name: str,
        topology: HostTopology,
        settings: AllocSettings,
        rule: Rule,
        make_choice: Callable[[HostTopology, Machine, StaticOptions], Choice],
        *,
        follows_memory: bool,
    ) -> None:
        """`follows_memory`: prefer the NUMA node of a running VM's memory; the kubelet does not."""
        self.name = name
        self._topology = topology
        self._machine = Machine.of(topology)
        self._settings = settings
        self._rule = rule
        self._follows_memory = follows_memory
        self._options = StaticOptions.parse({"true-unit-sizes": "true", **settings.options})
        single = settings.manager is ManagerPolicy.SINGLE_NUMA_NODE
        self._options.check_against(self._machine, single_numa_node=single)
        self._choice = make_choice(topology, self._machine, self._options)

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
        use = Use(own_cpus(ended) - state.taken)
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
        after = settled(self._retried(self._with_vm(after, grant, Use())))
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
            after = self._served(state, request, demand, Use(old.own, old.zone), floor_from=state)
        except AllocError as error:
            return Decision(state, refused=error.refusal(strict=False), notes=demand.notes)
        return self._decided(state, after, demand)

    def reconcile(self, state: AllocState, running: Sequence[Running]) -> Decision:
        """See Policy.

        Grants hold as far as their CPUs still exist. Containers without a grant keep the CPUs they
        are observed on, if those suit their request and are in no grant (lost state). All are
        served in the old order, then VMs get new CPUs; the rest of them get the shared pool.
        """
        vm_cpus = self._settings.vm.own_cpus
        claims = Claims(state, running, lambda one: self._rule(one, self._settings), vm_cpus)
        after = replace(self.start(), taken=state.taken, memory=state.memory)
        for vm in claims.vms(after.cpus - after.reserved):
            after = after.with_grant(vm)
        had = {name for name, grant in state.grants.items() if grant.exclusive}
        notes: list[Note] = []
        later: list[tuple[ContainerRequest, Demand]] = []
        for one, prefer in claims.within(after.cpus - after.reserved - after.taken):
            demand = self._rule(one.request, self._settings)
            notes += demand.notes
            if not demand.pooled:
                known = one.request.pod.sandbox_id in had or len(prefer) > demand.whole
                use = Use(prefer, EMPTY, claims.pending, None if known else 0)
                with suppress(AllocError):
                    after = self._resumed(after, one.request, demand, use)
                    continue
            later.append((one.request, demand))
        for grant in tuple(after.grants.values()):
            if grant.kind is GrantKind.SANDBOX and not grant.exclusive:
                after = self._with_vm(after, grant, Use())
        for request, demand in later:  # only now: the pool is what the others leave of it
            reasons = demand.reasons if demand.pooled else (*demand.reasons, "not enough free CPUs")
            old = state.get(request.container_id)
            use = Use(home=old.zone & self._machine.cpus if old else EMPTY)
            after = self._in_pool(after, request, reasons, use)
        after = settled(self._retried(after))
        return Decision(after, differing(state, after, running), notes=tuple(notes))

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
        wanted, beside = demand.whole, cpus_beside(rest, request)
        free = (self._follows_memory and at_home(rest, request, free, wanted)) or free
        if self._options.full_pcpus_only:
            try:
                free = self._in_whole_cores(free, wanted, EMPTY, beside)[1]
            except AllocError:
                free = CpuSet.from_bits(whole_cores(self._machine, free.bits))
        return self._choice.candidates(free, wanted, beside)

    # ---- states after an event -----------------------------------------------------------

    def _resumed(
        self, state: AllocState, request: ContainerRequest, demand: Demand, use: Use
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
                    state = self._served(state, grant.request, demand, Use(), floor_from=state)
        return state

    def _served(
        self,
        state: AllocState,
        request: ContainerRequest,
        demand: Demand,
        use: Use,
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
        use: Use,
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
        self, state: AllocState, request: ContainerRequest, reasons: tuple[str, ...], use: Use
    ) -> AllocState:
        """Return the state in which the container follows the shared pool."""
        rest = state.without(request.container_id)
        zone = self._choice.zone(rest, request.cpu_millis, use.home or cpus_beside(rest, request))
        grant = Grant(request, self.name, shared=EMPTY, zone=zone, reasons=reasons)
        return self._with_vm(state.with_grant(grant), grant, Use(own_cpus=use.own_cpus))

    def _grant(
        self, rest: AllocState, request: ContainerRequest, demand: Demand, own: CpuSet
    ) -> Grant:
        mems = EMPTY
        if self._settings.pin_memory:
            mems = CpuSet(node for node, cpus in self._topology.nodes.items() if cpus & own)
        reasons = demand.reasons
        if self._follows_memory and own and own <= memory_home(rest, request):
            reasons = (*reasons, "on the NUMA node of its VM's memory")
        grant = Grant(request, self.name, demand.cpu_class, mems=mems, reasons=reasons)
        if demand.cpu_class is CpuClass.SHARE:
            return replace(grant, shared=own)
        if not demand.fraction_millis:
            return replace(grant, exclusive=own)
        zone = self._choice.zone(rest, demand.fraction_millis, own)
        return replace(grant, exclusive=own, shared=EMPTY, zone=zone)

    def _with_vm(self, state: AllocState, grant: Grant, use: Use) -> AllocState:
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
        wanted = self._settings.vm.own_cpus if use.own_cpus is None else use.own_cpus
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
        wanted = self._settings.vm.own_cpus
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
        state = settled(self._retried(after))
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
        return self._nearest(free, wanted, prefer, cpus_beside(rest, request))

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
        if self._settings.shared_min is not None:
            return max(1, self._settings.shared_min)
        return max(core.bit_count() for core in self._machine.cores.values())
