"""Choosing CPUs for a container: what every policy needs, and the kubelet's way to do it.

The kubelet takes hinted nodes first, packed or distributed (policy_static.go). A Choice is made
once per host and settings. Out of scope: whether a container may have its own CPUs
(`demand`), and which CPUs are free (`pooled`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple, Protocol

from kata_pin.errors import ConfigError
from kata_pin.model.alloc import AllocState, Candidate
from kata_pin.model.cpuset import EMPTY, CpuSet
from kata_pin.model.settings import ManagerPolicy
from kata_pin.policy.alloc.accumulator import Accumulator, Packing, take_packed
from kata_pin.policy.alloc.distributed import take_distributed
from kata_pin.policy.alloc.failure import AllocError, AllocFailure
from kata_pin.policy.alloc.hints import MAX_NODES, choose, make_hints
from kata_pin.policy.alloc.options import StaticOptions
from kata_pin.policy.alloc.topology import CORE, LLC, NODE, Machine, Masks


class Choice(Protocol):
    """How CPUs are chosen. `beside` are those that the container's pod already has."""

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


def take(machine: Machine, available: CpuSet, wanted: int, options: StaticOptions) -> CpuSet:
    """Return `wanted` of the available CPUs by the algorithm that the options choose.

    Raises AllocError when there are not enough.
    """
    packing = Packing(
        spread=options.distribute_cpus_across_cores,
        by_llc=options.prefer_align_cpus_by_uncorecache,
        true_sizes=options.true_unit_sizes,
    )
    if options.distribute_cpus_across_numa:
        group = machine.threads_per_core if options.full_pcpus_only else 1
        return take_distributed(machine, available, wanted, group, packing)
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
    taken = take(machine, aligned, min(wanted, len(aligned)), options)
    return taken | take(machine, allocatable - taken, wanted - len(taken), options)


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


class _Step(NamedTuple):
    """A step of the packed algorithm: its units in order, and the taking."""

    level: str
    units: Callable[[], list[int]]
    masks: Masks
    take: Callable[[], None]


def _packed(
    machine: Machine, options: StaticOptions, free: CpuSet, wanted: int
) -> Iterator[Candidate]:
    """Yield the units of each step of `take_packed`, until the request is served."""
    accumulator = Accumulator(machine, free.bits, wanted, true_sizes=options.true_unit_sizes)
    for step in _steps(accumulator, options):
        if accumulator.satisfied:
            return
        units, available, taken = step.units(), accumulator.available, accumulator.taken
        step.take()
        got = accumulator.taken & ~taken
        for unit in units:
            yield _candidate(step.level, unit, step.masks[unit], available, got)


def _steps(accumulator: Accumulator, options: StaticOptions) -> Iterator[_Step]:
    """Yield the steps of `take_packed` in its order."""
    machine, spread = accumulator.machine, options.distribute_cpus_across_cores
    wholes: dict[str, Callable[[], None]] = {
        level: partial(accumulator.take_whole, level) for level in (machine.upper, machine.lower)
    }
    if options.prefer_align_cpus_by_uncorecache:
        wholes[LLC] = accumulator.take_llcs
    if not spread:
        wholes[CORE] = partial(accumulator.take_whole, CORE)
    for level, take in wholes.items():
        yield _Step(level, partial(accumulator.units, level), machine.units[level], take)
    yield _Step(
        "cpu",
        partial(accumulator.cpus, spread=spread),
        {cpu: 1 << cpu for cpu in machine.cpus},
        partial(accumulator.take_cpus, spread=spread),
    )


def _candidate(level: str, unit: int, bits: int, available: int, taken: int) -> Candidate:
    """Return a unit with its keys: fewest available first, then by id; `of` is its size."""
    here = bits & available
    keys = (("available", here.bit_count()), ("id", unit), ("of", bits.bit_count()))
    return Candidate(
        level, unit, CpuSet.from_bits(here), keys, taken=CpuSet.from_bits(bits & taken)
    )
