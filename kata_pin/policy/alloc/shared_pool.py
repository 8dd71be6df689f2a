"""The pools of an empty node, the shared pool's part in each grant, and what an event changed.

Pure. Out of scope: which CPUs are a container's own (`pooled`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from kata_pin.model.alloc import AllocState, Grant, GrantKind
from kata_pin.model.cpuset import EMPTY, CpuSet, union
from kata_pin.model.settings import AllocSettings, CpuClass
from kata_pin.model.topology import HostTopology


def initial_state(topology: HostTopology, settings: AllocSettings) -> AllocState:
    """Return the state of a node without containers.

    If the settings leave no CPU for the shared pool (the rest is offline), the whole host is
    shared: containers have to run somewhere.
    """
    online = CpuSet(cpu.cpu for cpu in topology.cpus)
    allowed = online - topology.isolated if settings.cpus is None else settings.cpus
    housekeeping = settings.housekeeping & online
    kept_out = housekeeping | (settings.reserved if settings.strict_reserved else EMPTY)
    cpus = (allowed & online) - kept_out
    if not cpus:
        return AllocState(cpus=online, reserved=online)
    return AllocState(cpus, settings.reserved & online, housekeeping)


def settled(state: AllocState) -> AllocState:
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
