"""Containers get all CPUs and their own limits again when the allocator is switched off.

NRI cannot remove a cpuset, only replace it by a longer list. A cpuset is ours if this daemon set it
or, if an earlier one did, if it is the one stored in the grant. Any other was set by another
program. The same holds for limits: CFS values and the memory limit.

Pure but for the ledger's last cpusets. Out of scope: sending, and the pins of Kata's threads.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from kata_pin.daemon.allocation.allocator import Allocator
from kata_pin.daemon.allocation.ledger import NOTHING, cpuset_for
from kata_pin.daemon.store.containers import Registry
from kata_pin.model.alloc import AllocState, Grant
from kata_pin.model.cpuset import EMPTY, CpuSet
from kata_pin.model.reports.pools import KeptCpuset
from kata_pin.model.topology import HostTopology
from kata_pin.policy.alloc.failure import other_owner
from kata_pin.wire.nri.replies import Cpuset

log = logging.getLogger(__name__)


def restore_cpusets(allocator: Allocator, *, sure: bool = False) -> None:
    """Send all CPUs and first limits to containers, as soon as the runtime can be asked.

    `sure`: this daemon has decided until now, so every container with a grant has one. Not under
    the kubelet's static policy: it sets every cpuset of the node itself.
    """
    state, node, ledger = allocator.state, allocator.node, allocator.ledger
    if other_owner(node.kubelet) is not None:
        return
    count = 0
    for grant in allocator.grants.containers():
        ours, entry = cpuset_for(grant, state), ledger.get(grant.container_id)
        has = NOTHING if entry is None or entry.confirmed is None else entry.confirmed
        final = NOTHING
        if ours.confines and has.cpus and (sure or has.cpus == ours.cpus):
            final = unconfined(state, node.topology, mems=bool(ours.mems))
        if ours.limits and (sure or ours.limits.over(has.limits) == has.limits):
            final = replace(final, limits=grant.request.limits.where_set(ours.limits))
        if final:
            ledger.restore(grant.container_id, final)
            count += 1
    if count:
        log.info("allocator: switched off: restoring CPUs and limits of %d containers", count)


def unconfined(state: AllocState, topology: HostTopology, *, mems: bool = False) -> Cpuset:
    """Return the most a container can have: CPUs that are not isolated, and those we granted.

    Online CPUs only: cgroup v1 accepts no others. With `mems` all memory nodes too.
    """
    ordinary = topology.online - topology.isolated
    given = state.cpus | state.reserved | state.housekeeping
    nodes = CpuSet(topology.nodes) if mems else EMPTY
    return Cpuset((ordinary | given) & topology.online, nodes)


def kept_cpusets(allocator: Allocator, registry: Registry) -> tuple[KeptCpuset, ...]:
    """Return the containers whose cpuset is still kata-pin's.

    If no runtime is connected, a Kata container's record says what it has; other containers are
    known only because a runtime reported them.
    """
    state = allocator.state
    return tuple(
        KeptCpuset(grant.container_id, grant.request.pod.title, grant.request.name, str(ours.cpus))
        for grant in allocator.grants.containers()
        if (ours := cpuset_for(grant, state)).confines and _keeps(grant, ours, allocator, registry)
    )


def _keeps(grant: Grant, ours: Cpuset, allocator: Allocator, registry: Registry) -> bool:
    name = grant.container_id
    if grant.request.ended_in:
        return False
    if allocator.ledger.knows(name):
        return allocator.ledger.is_restoring(name)
    if not grant.request.pod.kata:
        return True
    record = registry.container(name)
    return record is not None and record.cpus == ours.cpus
