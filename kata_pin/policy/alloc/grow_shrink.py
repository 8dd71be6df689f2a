"""Growing a set of CPUs by the nearest ones, and shrinking it with the least fragmentation.

Both keep CPUs in use: caches are warm there and vCPUs are pinned. Pure. Near means, in this order:
the same core, last-level cache, NUMA node, package, and then nodes by the kernel's distances
(Documentation/ABI/stable/sysfs-devices-node, `distance`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kata_pin.model.cpuset import CpuSet
from kata_pin.model.topology import HostTopology
from kata_pin.policy.alloc.accumulator import Packing, take_packed
from kata_pin.policy.alloc.failure import AllocError, AllocFailure, not_enough
from kata_pin.policy.alloc.topology import Machine, Masks

WHOLE_CORES = Packing(by_llc=True, true_sizes=True)
"""Packing on real hosts: whole caches, whole cores, half-used cores for the rest."""


def grow(machine: Machine, topology: HostTopology, held: CpuSet, free: CpuSet, more: int) -> CpuSet:
    """Return `held` and `more` of the free CPUs, the nearest; AllocError if there are too few.

    Among equally near ones whole cores come first.
    """
    free -= held
    if more > len(free):
        raise not_enough(more, len(free))
    grown = held
    for layer in layers(machine, topology, held):
        here = free & layer
        part = take_packed(machine, here, min(more, len(here)), WHOLE_CORES)
        grown |= part
        free -= here
        more -= len(part)
        if more == 0:
            break
    return grown


def shrink(topology: HostTopology, held: CpuSet, wanted: int) -> CpuSet:
    """Return `wanted` of the CPUs held: single threads are dropped first, then the last in order.

    First those of the node with the fewest of the set, in it of the cache, then of the core with
    the fewest: whole cores stay whole as long as possible.
    """
    kept = held
    units = [topology.nodes, topology.llcs, topology.cores]
    ranks = {cpu: rank for rank, cpu in enumerate(topology.in_order(held))}
    while len(kept) > wanted:
        counts = [
            {cpu: len(kept & cpus) for cpus in level.values() for cpu in kept & cpus}
            for level in units
        ]
        now = kept
        dropped = min(now, key=lambda cpu: (*(count.get(cpu, 0) for count in counts), -ranks[cpu]))
        kept -= CpuSet([dropped])
    return kept


def layers(machine: Machine, topology: HostTopology, around: CpuSet) -> Iterator[CpuSet]:
    """Yield wider and wider sets of CPUs around some; the last is the whole host."""
    wider = [machine.cores, machine.llcs, machine.nodes, machine.packages]
    if machine.nodes_first:
        wider[2:] = [machine.packages, machine.nodes]
    for masks in wider:
        yield CpuSet.from_bits(_touched(masks, around.bits))
    for node in nodes_by_distance(topology, around):
        yield topology.nodes[node]
    yield machine.cpus


def nodes_by_distance(topology: HostTopology, around: CpuSet) -> list[int]:
    """Return the nodes that have CPUs, the nearest to these CPUs first; by number when unknown."""
    known = sorted(topology.distances)
    column = {node: place for place, node in enumerate(known)}
    homes = [node for node, cpus in topology.nodes.items() if cpus & around]

    def distance(node: int) -> int:
        rows = [topology.distances.get(home, ()) for home in homes]
        place = column.get(node, -1)
        known_rows = [row[place] for row in rows if 0 <= place < len(row)]
        return min(known_rows, default=0)

    return sorted(topology.nodes, key=lambda node: (distance(node), node))


def apartness(machine: Machine, cpus: int, around: int) -> tuple[int, int]:
    """Return how far CPUs (bits) are from others: by node (0 same, 1 same package, 2), by cache.

    (0, 0) if there are no others.
    """
    if not around:
        return 0, 0
    if _touched(machine.nodes, around) & cpus:
        by_node = 0
    else:
        by_node = 1 if machine.package_bits(around) & cpus else 2
    return by_node, 0 if _touched(machine.llcs, around) & cpus else 1


def _touched(masks: Masks, bits: int) -> int:
    return Machine.union(mask for mask in masks.values() if mask & bits)


def whole_cores(machine: Machine, free: int) -> int:
    """Return the CPUs of all cores of which every CPU is free."""
    return machine.union(core for core in machine.cores.values() if core & ~free == 0)


def in_whole_cores(
    machine: Machine, free: CpuSet, wanted: int, choose: Callable[[CpuSet], CpuSet]
) -> tuple[CpuSet, CpuSet]:
    """Return what `choose` takes, which must be whole cores, and what it was offered for that.

    All free CPUs are offered first, as by the kubelet, which counts single ones when it orders
    nodes and packages (the sibling of a reserved CPU). If that gives no whole cores, only those are
    offered, and then only the largest. AllocError if the request is no multiple of the largest
    core's CPUs, or there are too few.
    """
    threads = max(core.bit_count() for core in machine.cores.values())
    if wanted % threads:
        raise AllocError(
            AllocFailure.SMT_ALIGNMENT,
            f"requested {wanted} CPUs, not a multiple of CPUs per core = {threads}",
        )
    whole = CpuSet.from_bits(whole_cores(machine, free.bits))
    large = whole & CpuSet.from_bits(
        machine.union(core for core in machine.cores.values() if core.bit_count() == threads)
    )
    for offered in (free, whole, large):
        if len(offered & whole) < wanted:
            raise not_enough(wanted, len(offered & whole))
        chosen = choose(offered)
        if whole_cores(machine, chosen.bits) == chosen.bits:
            return chosen, offered
    raise AllocError(
        AllocFailure.SMT_ALIGNMENT, f"cannot take {wanted} of CPUs {large} as whole cores"
    )
