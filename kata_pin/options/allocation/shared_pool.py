"""The shared pool's part in each grant, and what running containers claim."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from msgspec.structs import replace

from kata_pin.base.allocation import AllocState, ContainerRequest, Grant, RunningContainer
from kata_pin.base.config.alloc import Alloc
from kata_pin.base.cpuset import EMPTY, CpuSet, HostTopology, union
from kata_pin.base.documents.pools import Pools
from kata_pin.base.values import CpuClass, GrantKind
from kata_pin.options.allocation.demand import Demand

# The pools of an empty node, the shared pool's part in each grant, and what an event changed.


def initial_state(topology: HostTopology, settings: Alloc) -> AllocState:
    """Return the state of a node without containers.

    If the settings leave no CPU for the shared pool (the rest is offline), the whole host is
    shared: containers have to run somewhere.
    """
    online = CpuSet(cpu.cpu for cpu in topology.cpus)
    allowed = settings.cpus or online - topology.isolated
    housekeeping = settings.housekeeping & online
    kept_out = housekeeping | (settings.reserved if settings.strict_reserved else EMPTY)
    cpus = (allowed & online) - kept_out
    if not cpus:
        return AllocState(cpus=online, reserved=online)
    return AllocState(cpus, settings.reserved & online, housekeeping)


def pools_of(state: AllocState) -> Pools:
    """Return the pools as documents show them."""
    return Pools(
        reserved=str(state.reserved),
        housekeeping=str(state.housekeeping),
        shared=str(state.shared),
        exclusive=str(state.exclusive),
        taken=str(state.taken),
    )


def follow_pools(state: AllocState) -> AllocState:
    """Return the state in which every grant that follows a pool has that pool's current CPUs.

    Unchanged grants stay the same objects.
    """
    pool = state.shared
    vm_pool = state.housekeeping - state.taken or state.housekeeping or pool
    roomy = _roomy(state, pool)
    grants = {name: _following(grant, pool, vm_pool, roomy) for name, grant in state.grants.items()}
    return replace(state, grants=grants)


def changes(before: AllocState, after: AllocState) -> tuple[Grant, ...]:
    """Return the grants of `after` that are new or have other CPUs, nodes or limits than before."""
    changed = []
    for name, grant in after.grants.items():
        old = before.grants.get(name)
        if old is grant:
            continue
        if old is None or _sent(old) != _sent(grant):
            changed.append(grant)
    return tuple(changed)


def _sent(grant: Grant) -> tuple[object, ...]:
    return grant.cpus, grant.mems, grant.limits


def free_cpus(state: AllocState, kept: CpuSet = EMPTY) -> CpuSet:
    """Return the CPUs of the shared pool that can become a container's own.

    CPUs that others hold exclusively are not free, but for those of `kept`: the container has them
    already.
    """
    pool = state.cpus - state.exclusive - state.reserved
    return pool - (state.taken - kept)


def bound(state: AllocState, sharers: int = 1) -> CpuSet:
    """Return the CPUs that at least `sharers` SHARE containers chose."""
    if sharers == 1:
        return union(grant.bound for grant in state.grants.values())
    counts = Counter(cpu for grant in state.grants.values() for cpu in grant.bound)
    return CpuSet(cpu for cpu, count in counts.items() if count >= sharers)


def _following(grant: Grant, pool: CpuSet, vm_pool: CpuSet, roomy: set[CpuSet]) -> Grant:
    if grant.cpu_class is CpuClass.SHARE or grant.shared is None:
        return grant
    followed = vm_pool if grant.kind is GrantKind.SANDBOX else pool
    if grant.zone in roomy or followed is not pool:
        followed = (followed & grant.zone) or followed
    return grant if followed == grant.shared else replace(grant, shared=followed)


def _roomy(state: AllocState, pool: CpuSet) -> set[CpuSet]:
    """Return the zones whose part of the pool is enough for what their followers request.

    Followers of a zone that is too small use the whole pool instead.
    """
    load: Counter[CpuSet] = Counter()
    for grant in state.grants.values():
        if grant.zone and grant.shared is not None:
            load[grant.zone] += pool_millis(grant)
    return {zone for zone, millis in load.items() if len(pool & zone) * 1000 >= max(millis, 1)}


def pool_millis(grant: Grant) -> int:
    """Return the part of a container's request that the shared pool serves, in thousandths."""
    return max(0, grant.request.cpu_millis - 1000 * len(grant.exclusive))


# Which containers claim which CPUs when a state is reconciled with what runs.
#
# Claims come from the old state and, for containers without a grant, from the CPUs they are
# observed on. A claim keeps others away until its container has been served. Lives for one
# reconcile.


class RunningClaims:
    """The claims of running containers; `pending` are those of containers not yet served."""

    def __init__(
        self,
        state: AllocState,
        running: Sequence[RunningContainer],
        rule: Callable[[ContainerRequest], Demand],
        vm_cpus: int,
    ) -> None:
        """`vm_cpus` is how many own CPUs a VM has in the cpuset beside its containers'."""
        self._state = state
        self._rule = rule
        self._vm_cpus = vm_cpus
        self._known = {one.request.container_id: one for one in running}
        self._claims: dict[str, CpuSet] = {}

    @property
    def pending(self) -> CpuSet:
        """All CPUs that are still claimed."""
        return union(self._claims.values())

    def within(self, free: CpuSet) -> Iterator[tuple[RunningContainer, CpuSet]]:
        """Yield each container with the CPUs to prefer for it.

        First containers with grants of own CPUs, in the order of the grants, then those observed on
        CPUs that suit them, then those that wait for CPUs, then the rest as listed. Containers of
        the shared pool come last, so that a VM keeps its own CPUs meanwhile. `free` are the CPUs
        that can be granted. A container's claim ends when the next one is yielded.
        """
        grants = self._state.grants.items()  # their own CPUs, even if those CPUs are gone
        self._claims = {name: grant.own for name, grant in grants if name in self._known}
        self._claims |= self._seen(free)
        others = [name for name in self._known if name not in self._claims]
        claims = dict(self._claims)
        for name in sorted(
            [*claims, *others], key=lambda one: (self._pooled(one), not claims.get(one))
        ):
            yield self._known[name], self._claims.get(name, EMPTY)
            self._claims.pop(name, None)

    def _pooled(self, name: str) -> bool:
        return self._rule(self._known[name].request).pooled

    def vms(self, free: CpuSet) -> Iterator[Grant]:
        """Yield the old grants of running VMs that still have own CPUs."""
        running = {one.request.pod.sandbox_id for one in self._known.values()}
        for name, grant in self._state.grants.items():
            if grant.kind is GrantKind.SANDBOX and name in running and grant.exclusive & free:
                yield replace(grant, exclusive=grant.exclusive & free)

    def _seen(self, free: CpuSet) -> dict[str, CpuSet]:
        """Return the CPUs that containers without a grant are observed on, if those suit them.

        All of them must be free, and as many as requested; a Kata container's cpuset can also
        contain its VM's and the housekeeping CPUs.
        """
        claims: dict[str, CpuSet] = {}
        for name, one in self._known.items():
            if name in self._claims or one.cpus is None:
                continue
            demand = self._rule(one.request)
            seen = one.cpus & free
            most = demand.whole + (self._vm_cpus if one.request.pod.kata else 0)
            if not demand.pooled and demand.whole <= len(seen) <= most:
                claims[name] = seen
        return claims


def differing(
    before: AllocState, after: AllocState, running: Sequence[RunningContainer]
) -> tuple[Grant, ...]:
    """Return the grants whose CPUs are not those that the container is observed on.

    If that is unknown, and for VMs: not those of the old grant.
    """
    had = {name: grant.cpus for name, grant in before.grants.items()}
    had |= {one.request.container_id: one.cpus for one in running if one.cpus is not None}
    return tuple(grant for name, grant in after.grants.items() if had.get(name) != grant.cpus)
