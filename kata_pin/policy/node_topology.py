"""From the daemon's state to the zones of a NodeResourceTopology object. Pure."""

from __future__ import annotations

from kata_pin.model.cpuset import CpuSet
from kata_pin.model.node_topology import Zone
from kata_pin.model.reports.state import State


def topology_zones(state: State) -> tuple[Zone, ...]:
    """Return the NUMA nodes with the pCPUs that our allocator may give; empty where it does not.

    Who else allocates (the kubelet) has writers of such objects of its own.
    """
    allocation = state.allocation
    if allocation is None or allocation.suspended:
        return ()
    pools, online = allocation.pools, CpuSet.parse(state.node.online)
    allocatable = online - CpuSet.parse(pools.reserved)
    available = (allocatable & CpuSet.parse(pools.shared)) - CpuSet.parse(pools.exclusive)
    nodes: dict[int, list[int]] = {}
    for place in state.node.cpus:
        nodes.setdefault(place.node, []).append(place.cpu)
    members = {node: CpuSet(cpus) & online for node, cpus in sorted(nodes.items())}
    return tuple(
        Zone(node, len(cpus), len(cpus & allocatable), len(cpus & available))
        for node, cpus in members.items()
    )
