"""Choosing CPUs for a container as the kubelet does; growing and shrinking a set of CPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations
from typing import ClassVar, Final, Protocol

from msgspec import Struct

from kata_pin.base.allocation import AllocState, Candidate
from kata_pin.base.cpuset import EMPTY, CpuSet, HostTopology
from kata_pin.base.errors import ConfigError
from kata_pin.base.settings import ManagerPolicy
from kata_pin.options.allocation.accumulator import (
    NODE,
    Accumulator,
    Machine,
    Masks,
    Packing,
    packing_steps,
    take_distributed,
    take_packed,
)
from kata_pin.options.allocation.demand import StaticOptions
from kata_pin.options.allocation.policy import AllocError, AllocFailure, not_enough

# NUMA hints: which sets of nodes could serve a request, and which one is chosen.
#
# Kubelet policy_static.go (generateCPUTopologyHints) and the topology manager with the CPU manager
# as its only provider of hints.

MAX_NODES: Final = 8
"""Most NUMA nodes for which hints are made (the kubelet's max-allowable-numa-nodes): 2**8 sets."""


class Hint(Struct, frozen=True):
    """A set of NUMA nodes that could serve a request; `preferred` if no smaller set ever could."""

    nodes: CpuSet
    preferred: bool


class Affinity(Struct, frozen=True):
    """The topology manager's answer: the nodes to take from (None = any), and whether to admit."""

    nodes: CpuSet | None
    admit: bool


def make_hints(
    machine: Machine,
    available: CpuSet,
    reusable: CpuSet,
    wanted: int,
    *,
    align_by_socket: bool = False,
) -> tuple[Hint, ...]:
    """Return a hint for each set of nodes with `wanted` CPUs in it, small sets first.

    `reusable` CPUs count as available, and every set must include all their nodes. A hint is
    preferred if it has as few nodes as an idle host would need, or (`align_by_socket`) spans as few
    packages as that. An empty result means that the request cannot be served.
    """
    nodes = tuple(machine.nodes)
    sets = [chosen for size in range(1, len(nodes) + 1) for chosen in combinations(nodes, size)]
    fewest = len(nodes)
    serving: list[tuple[int, ...]] = []
    for chosen in sets:
        bits = machine.node_bits(chosen)
        if bits.bit_count() >= wanted:
            fewest = min(fewest, len(chosen))
        offered = (available.bits | reusable.bits) & bits
        if reusable.bits & ~bits == 0 and offered.bit_count() >= wanted:
            serving.append(chosen)
    return tuple(
        Hint(
            CpuSet(chosen),
            preferred=len(chosen) == fewest
            or (align_by_socket and _fewest_packages(machine, chosen, fewest)),
        )
        for chosen in serving
    )


def choose(hints: tuple[Hint, ...] | None, policy: ManagerPolicy, all_nodes: CpuSet) -> Affinity:
    """Return what the topology manager chooses; None: the provider has no preference.

    Preferred hints come first, then narrow ones, then those of lower nodes. Under single-numa-node
    a hint of all nodes counts as none.
    """
    if policy is ManagerPolicy.NONE or hints is None:
        return Affinity(None, admit=True)
    if policy is ManagerPolicy.SINGLE_NUMA_NODE:
        hints = tuple(hint for hint in hints if hint.preferred and len(hint.nodes) == 1)
    best = min(
        hints,
        key=lambda hint: (not hint.preferred, len(hint.nodes), hint.nodes.bits),
        default=Hint(all_nodes, preferred=False),
    )
    admit = best.preferred or policy is ManagerPolicy.BEST_EFFORT
    if policy is ManagerPolicy.SINGLE_NUMA_NODE and best.nodes == all_nodes:
        return Affinity(None, admit)
    return Affinity(best.nodes, admit)


def _fewest_packages(machine: Machine, chosen: tuple[int, ...], fewest: int) -> bool:
    """Return whether these nodes lie in as few packages as `fewest` nodes could."""
    nodes_per_package = len(machine.nodes) // len(machine.packages)
    if nodes_per_package == 0:
        return False
    bits = machine.node_bits(chosen)
    spanned = sum(1 for package in machine.packages.values() if package & bits)
    return spanned == -(-fewest // nodes_per_package)


# The kubelet takes hinted nodes first, packed or distributed (policy_static.go). A Choice is made
# once per host and settings.


class Choice(Protocol):
    """How CPUs are chosen. `beside` are those near which they should be (pooled.py).

    `follows_devices`: that counts here, so the container's devices do.
    """

    follows_devices: ClassVar[bool]

    def choose(self, free: CpuSet, wanted: int, beside: CpuSet) -> CpuSet:
        """Return `wanted` of the free CPUs; AllocError if that is not possible."""
        ...

    def candidates(self, free: CpuSet, wanted: int, beside: CpuSet) -> tuple[Candidate, ...]:
        """Return what `choose` considers, in its order; `taken` is what it takes of each."""
        ...

    def zone(self, state: AllocState, millis: int, beside: CpuSet) -> CpuSet:
        """Return where a container should use the shared pool; empty: anywhere.

        `millis` is what it requests of the pool, in thousandths of a CPU.
        """
        ...


class KubeletChoice:
    """The kubelet's algorithms, packed or distributed by the options; `beside` has no effect.

    `manager` is the topology manager's policy: CPUs are taken from its hint first.
    """

    follows_devices: ClassVar[bool] = False

    def __init__(
        self, machine: Machine, options: StaticOptions, manager: ManagerPolicy = ManagerPolicy.NONE
    ) -> None:
        """Raise ConfigError if the host has too many nodes for hints."""
        if manager is not ManagerPolicy.NONE and len(machine.nodes) > MAX_NODES:
            raise ConfigError(
                f"the topology manager supports at most {MAX_NODES} NUMA nodes, "
                f"this host has {len(machine.nodes)}",
                key="alloc.topology_manager",
            )
        self._machine = machine
        self._options = options
        self._manager = manager

    def choose(self, free: CpuSet, wanted: int, beside: CpuSet) -> CpuSet:
        """Return what the kubelet would take; AllocError as in the kubelet."""
        nodes = self._hinted_nodes(free, wanted)
        return take_hinted(self._machine, free, wanted, self._options, nodes)

    def candidates(self, free: CpuSet, wanted: int, beside: CpuSet) -> tuple[Candidate, ...]:
        """Return each step's units in the accumulator's order, down to what was taken last."""
        try:
            nodes = self._hinted_nodes(free, wanted)
            taken = take_hinted(self._machine, free, wanted, self._options, nodes)
        except AllocError:
            return ()
        if self._options.distribute_cpus_across_numa:
            return self._by_node(free, taken)
        first = hinted(self._machine, free, self._options, nodes)
        aligned = min(wanted, len(first))
        rest = free - first
        return (
            *_packed(self._machine, self._options, first, aligned),
            *_packed(self._machine, self._options, rest, wanted - aligned),
        )

    def zone(self, state: AllocState, millis: int, beside: CpuSet) -> CpuSet:
        """Return nothing: the kubelet has one shared pool."""
        return EMPTY

    def _hinted_nodes(self, free: CpuSet, wanted: int) -> CpuSet | None:
        """Return the topology manager's hint, None: any node; AllocError if it does not admit."""
        if self._manager is ManagerPolicy.NONE or not 0 < wanted <= len(free):
            return None
        by_socket = self._options.align_by_socket
        hints = make_hints(self._machine, free, EMPTY, wanted, align_by_socket=by_socket)
        affinity = choose(hints, self._manager, CpuSet(self._machine.nodes))
        if not affinity.admit:
            raise AllocError(
                AllocFailure.TOPOLOGY_AFFINITY,
                f"no NUMA alignment for {wanted} CPUs under topology manager policy "
                f"{self._manager.value}",
            )
        return affinity.nodes

    def _by_node(self, free: CpuSet, taken: CpuSet) -> tuple[Candidate, ...]:
        accumulator = Accumulator(self._machine, free.bits, 0)
        return tuple(
            _candidate(NODE, node, self._machine.nodes[node], free.bits, taken.bits)
            for node in accumulator.units(NODE)
        )


def choose_cpus(machine: Machine, available: CpuSet, wanted: int, options: StaticOptions) -> CpuSet:
    """Return `wanted` of the available CPUs by the algorithm that the options choose.

    Raises AllocError when there are not enough.
    """
    packing = options.packing
    if options.distribute_cpus_across_numa:
        group = machine.threads_per_core if options.full_pcpus_only else 1
        return take_distributed(
            machine, available, wanted, group, packing, by_socket=options.align_by_socket
        )
    return take_packed(machine, available, wanted, packing)


def take_hinted(
    machine: Machine,
    allocatable: CpuSet,
    wanted: int,
    options: StaticOptions,
    nodes: CpuSet | None = None,
) -> CpuSet:
    """Return `wanted` CPUs, from the hinted nodes as many as they have, the rest from anywhere.

    With align-by-socket the nodes are widened to their packages. Raises AllocError.
    """
    aligned = hinted(machine, allocatable, options, nodes)
    taken = choose_cpus(machine, aligned, min(wanted, len(aligned)), options)
    return taken | choose_cpus(machine, allocatable - taken, wanted - len(taken), options)


def hinted(
    machine: Machine, allocatable: CpuSet, options: StaticOptions, nodes: CpuSet | None
) -> CpuSet:
    """Return what of the CPUs is in the hinted nodes; nothing without a hint."""
    if nodes is None:
        return EMPTY
    bits = machine.node_bits(nodes)
    if options.align_by_socket:
        bits = machine.package_bits(bits)
    return allocatable & CpuSet.from_bits(bits)


def _packed(
    machine: Machine, options: StaticOptions, free: CpuSet, wanted: int
) -> Iterator[Candidate]:
    """Yield the units of each step of `take_packed`, until the request is served."""
    accumulator = Accumulator(machine, free.bits, wanted, true_sizes=options.true_unit_sizes)
    for step in packing_steps(accumulator, options.packing):
        if accumulator.satisfied:
            return
        units, available, taken = step.units(), accumulator.available, accumulator.taken
        step.take()
        got = accumulator.taken & ~taken
        for unit in units:
            yield _candidate(step.level, unit, machine.units[step.level][unit], available, got)


def _candidate(level: str, unit: int, bits: int, available: int, taken: int) -> Candidate:
    """Return a unit with its keys: fewest available first, then by id; `of` is its size."""
    here = bits & available
    keys = (("available", here.bit_count()), ("id", unit), ("of", bits.bit_count()))
    return Candidate(
        level, unit, CpuSet.from_bits(here), keys, taken=CpuSet.from_bits(bits & taken)
    )


# Growing a set of CPUs by the nearest ones, and shrinking it with the least fragmentation.
#
# Both keep CPUs in use: caches are warm there and vCPUs are pinned. Near means, in this order: the
# same core, last-level cache, NUMA node, package, and then nodes by the kernel's distances
# (Documentation/ABI/stable/sysfs-devices-node, `distance`).

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
