"""The kubelet's topology accumulator: collects CPUs for one request, packed or distributed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import combinations
from typing import Final, NamedTuple

from msgspec import Struct

from kata_pin.base.cpuset import EMPTY, CpuSet, HostTopology
from kata_pin.options.allocation.policy import AllocError, AllocFailure, not_enough

# The host's topology as bit masks, made once per host and used by every allocation.
#
# The accumulator counts the available CPUs of cores, caches, nodes and packages many times; on
# integers that costs a machine instruction or two for each 64 CPUs. A Machine is immutable and
# lives as long as the HostTopology that it was made from.

Masks = Mapping[int, int]
"""Unit id to the bits of its CPUs, ids ascending."""

NODE, PACKAGE, LLC, CORE, CPU = "node", "package", "llc", "core", "cpu"


class Machine(Struct, frozen=True, eq=False, dict=True):
    """The units of a host: id to CPU bits for cores, caches, NUMA nodes and packages.

    The ids are those of HostTopology, which are the kubelet's except for caches: there the kubelet
    uses sysfs' cache id and HostTopology the lowest CPU; both ascend the same way.
    """

    cores: Masks
    llcs: Masks
    nodes: Masks
    packages: Masks

    @classmethod
    def of(cls, topology: HostTopology) -> Machine:
        """Return the machine of the CPUs that are online: the kubelet too knows no others."""
        return cls(
            cores=_masks(topology.cores),
            llcs=_masks(topology.llcs),
            nodes=_masks(topology.nodes),
            packages=_masks(topology.packages),
        )

    @cached_property
    def bits(self) -> int:
        """All CPUs of the host."""
        return self.union(self.nodes.values())

    @property
    def cpus(self) -> CpuSet:
        """All CPUs of the host."""
        return CpuSet.from_bits(self.bits)

    @cached_property
    def units(self) -> Mapping[str, Masks]:
        """The units by level."""
        return {
            NODE: self.nodes,
            PACKAGE: self.packages,
            LLC: self.llcs,
            CORE: self.cores,
            CPU: {cpu: 1 << cpu for cpu in self.cpus},
        }

    @cached_property
    def nodes_first(self) -> bool:
        """Whether NUMA nodes stand above packages in the hierarchy (kubelet newCPUAccumulator).

        They do unless a package holds several nodes, which is judged by the two counts alone.
        """
        return len(self.packages) >= len(self.nodes)

    @property
    def upper(self) -> str:
        """The highest level."""
        return NODE if self.nodes_first else PACKAGE

    @property
    def lower(self) -> str:
        """The second level."""
        return PACKAGE if self.nodes_first else NODE

    @cached_property
    def outer(self) -> Mapping[str, str]:
        """The level by whose units a level is ordered; the upper one has none."""
        return {self.lower: self.upper, LLC: NODE, CORE: self.lower}

    @cached_property
    def inside(self) -> Mapping[str, Mapping[int, tuple[int, ...]]]:
        """The units of a level that have CPUs in each unit of its outer level."""
        return {
            level: {
                unit: tuple(part for part, inner in self.units[level].items() if inner & bits)
                for unit, bits in self.units[outer].items()
            }
            for level, outer in self.outer.items()
        }

    @cached_property
    def threads_per_core(self) -> int:
        """CPUs by cores, rounded down, as the kubelet counts it; 1 on most hybrid parts."""
        return self.bits.bit_count() // len(self.cores) if self.cores else 1

    @cached_property
    def cpus_per_llc(self) -> int:
        """CPUs by last-level caches, rounded down, as the kubelet counts it."""
        return self.bits.bit_count() // len(self.llcs) if self.llcs else 0

    @cached_property
    def averages(self) -> Mapping[str, int]:
        """The average sizes by which the kubelet judges packages and cores, rounded down."""
        per_package = self.bits.bit_count() // len(self.packages) if self.packages else 0
        return {PACKAGE: per_package, CORE: self.threads_per_core}

    def node_bits(self, nodes: Iterable[int]) -> int:
        """Return the CPUs of these NUMA nodes; a node that the host lacks has none."""
        return self.union(self.nodes.get(node, 0) for node in nodes)

    def package_bits(self, bits: int) -> int:
        """Return all CPUs of every package that has one of these CPUs."""
        return self.union(package for package in self.packages.values() if package & bits)

    def packages_of(self, node: int) -> frozenset[int]:
        """Return the packages that have CPUs of a NUMA node."""
        bits = self.nodes[node]
        return frozenset(package for package, mask in self.packages.items() if mask & bits)

    @staticmethod
    def union(masks: Iterable[int]) -> int:
        """Return the union of any number of masks."""
        bits = 0
        for mask in masks:
            bits |= mask
        return bits


def _masks(groups: Mapping[int, CpuSet]) -> Masks:
    return {unit: groups[unit].bits for unit in sorted(groups)}


# It holds which CPUs are available and taken, and knows the kubelet's order of nodes, packages,
# caches, cores and CPUs (cpu_assignment.go, KEP-2902, KEP-4800). An Accumulator lives for one
# request. `take_packed` is the packed algorithm: as few and as full units as possible (kubelet
# takeByTopologyNUMAPacked).
#
# One deviation, on purpose: a unit is free only if every CPU of it is available. The kubelet
# compares counts with an average, so on a host with unequal cores or packages it can call a
# half-used unit free and assign CPUs that another container has.


class Accumulator:
    """What one request still needs, what is available, and what was taken, as bit masks.

    `true_sizes` counts packages and cores by their own size instead of the host's average, which
    differs on hybrid hosts only; the kubelet uses the average.
    """

    __slots__ = ("_true_sizes", "available", "machine", "needed", "taken")

    def __init__(
        self, machine: Machine, available: int, needed: int, *, true_sizes: bool = False
    ) -> None:
        self.machine = machine
        self._true_sizes = true_sizes
        self.available = available & machine.bits
        self.needed = needed
        self.taken = 0

    @property
    def satisfied(self) -> bool:
        """Whether nothing more is needed."""
        return self.needed < 1

    @property
    def failed(self) -> bool:
        """Whether more is needed than is available."""
        return self.needed > self.available.bit_count()

    def take(self, bits: int) -> None:
        """Take these CPUs, which must be available."""
        assert bits & ~self.available == 0
        self.taken |= bits
        self.available &= ~bits
        self.needed -= bits.bit_count()

    def units(self, level: str) -> list[int]:
        """Return the units of a level that have an available CPU: fewest first, then by id.

        Outer unit by outer unit (Machine.outer). A unit counts whole, even if only a part of it
        lies in the outer one, and is listed once, at its first place.
        """
        outer, masks = self.machine.outer.get(level), self.machine.units[level]
        if outer is None:
            return self._fullest(masks, masks)
        listed: dict[int, None] = {}
        for unit in self.units(outer):
            here = self.machine.units[outer][unit] & self.available
            parts = [part for part in self.machine.inside[level][unit] if masks[part] & here]
            listed.update(dict.fromkeys(self._fullest(parts, masks)))
        return list(listed)

    def cpus(self, *, spread: bool = False) -> list[int]:
        """Return single CPUs: core by core, or (spread) by number in each package."""
        level = PACKAGE if spread else CORE
        masks = self.machine.units[level]
        listed = [
            cpu for unit in self.units(level) for cpu in _numbers(masks[unit] & self.available)
        ]
        return list(dict.fromkeys(listed))

    def free(self, level: str) -> list[int]:
        """Return the units of a level of which every CPU is available, in the same order."""
        average = None if self._true_sizes else self.machine.averages.get(level)
        masks = self.machine.units[level]
        return [
            unit
            for unit in self.units(level)
            if masks[unit] & ~self.available == 0
            and (average is None or masks[unit].bit_count() == average)
        ]

    def take_whole(self, level: str) -> None:
        """Take free units of a level, as long as they are needed whole."""
        for unit in self.free(level):
            bits = self.machine.units[level][unit]
            if self.needed >= bits.bit_count() and bits & ~self.available == 0:
                self.take(bits)

    def take_llcs(self) -> None:
        """Take whole free caches, then the rest from one cache if it can give exactly the rest.

        Best effort: what no cache can give is left for the steps after this one.
        """
        for llc in self.units(LLC):
            if self.satisfied:
                return
            if self.needed >= self.machine.cpus_per_llc:
                self.take_whole(LLC)
            self._take_part(llc)

    def take_cpus(self, *, spread: bool = False) -> None:
        """Take single CPUs until nothing more is needed."""
        for cpu in self.cpus(spread=spread):
            if self.satisfied:
                return
            self.take(1 << cpu)

    def _take_part(self, llc: int) -> None:
        """Take the rest from one cache: its lowest cores, only if they give exactly the rest."""
        machine = self.machine
        threads = machine.threads_per_core
        wanted_cores = -(-self.needed // threads)
        inside = machine.llcs[llc] & self.available
        in_cache = [core for core in machine.cores.values() if core & inside]
        part = machine.union(in_cache[:wanted_cores]) & self.available
        if self.needed % 2 and threads > 1 and part.bit_count() > self.needed:
            part &= ~(1 << (part.bit_length() - 1))
        if part.bit_count() == self.needed:
            self.take(part)

    def _fullest(self, units: Iterable[int], masks: Masks) -> list[int]:
        """Return the units that have an available CPU, fewest available first, then by id."""
        available = self.available
        counted = [((masks[unit] & available).bit_count(), unit) for unit in units]
        return [unit for count, unit in sorted(counted) if count]


def _numbers(bits: int) -> Iterator[int]:
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low


class Packing(Struct, frozen=True):
    """How to pack. `spread` skips whole cores and takes CPUs by number, package by package.

    `by_llc` prefers one last-level cache. `true_sizes` is this project's own: see Accumulator.
    """

    spread: bool = False
    by_llc: bool = False
    true_sizes: bool = False


PLAIN = Packing()


class PackingStep(NamedTuple):
    """A step of the packed algorithm: its units in order, and the taking."""

    level: str
    units: Callable[[], list[int]]
    take: Callable[[], None]


def packing_steps(accumulator: Accumulator, packing: Packing) -> Iterator[PackingStep]:
    """Yield the steps of the packed algorithm in their order.

    Whole units of the upper level first, then of the lower level, then caches (`by_llc`), whole
    cores, and single CPUs beginning with cores already in part use. A step with nothing left to
    take does nothing.
    """
    machine, spread = accumulator.machine, packing.spread
    takes: dict[str, Callable[[], None]] = {
        level: partial(accumulator.take_whole, level) for level in (machine.upper, machine.lower)
    }
    if packing.by_llc:
        takes[LLC] = accumulator.take_llcs
    if not spread:
        takes[CORE] = partial(accumulator.take_whole, CORE)
    for level, take in takes.items():
        yield PackingStep(level, partial(accumulator.units, level), take)
    cpus = partial(accumulator.cpus, spread=spread)
    yield PackingStep(CPU, cpus, partial(accumulator.take_cpus, spread=spread))


def take_packed(
    machine: Machine, available: CpuSet, wanted: int, packing: Packing = PLAIN
) -> CpuSet:
    """Return `wanted` of the available CPUs; AllocError if there are not as many."""
    accumulator = Accumulator(machine, available.bits, wanted, true_sizes=packing.true_sizes)
    if accumulator.satisfied:
        return EMPTY
    if accumulator.failed:
        raise not_enough(wanted, len(available))
    for step in packing_steps(accumulator, packing):
        step.take()
    if accumulator.needed > 0:
        raise AllocError(
            AllocFailure.FAILED, f"failed to allocate {wanted} CPUs from {available or 'none'}"
        )
    return CpuSet.from_bits(accumulator.taken)


# The distributed algorithm: the same number of CPUs from each of few NUMA nodes.
#
# Kubelet takeByTopologyNUMADistributed (KEP-2902). Among the combinations of the fewest nodes that
# can serve, the one that leaves the nodes of the host most evenly used is taken; with
# align-by-socket those of one package come first, and an uneven split of them will do (kubelet
# 1.37). Two deviations, both where the kubelet cannot be followed: CPUs that are too scattered for
# groups are skipped (the kubelet never returns), and the search is bounded (SEARCH_LIMIT).

SEARCH_LIMIT: Final = 100_000
"""Most candidates considered for one request, about 0.2 s.

Up to 10 nodes with available CPUs the search is complete: there are at most 3**10 + 2**10
candidates. Beyond, the best found so far is taken, or else the request is packed.
"""


class _Split(Struct, frozen=True):
    """Nodes by position: those that give `share` CPUs, and the node of each group of the rest."""

    share: int
    chosen: tuple[int, ...]
    extra: tuple[int, ...] = ()


def take_distributed(
    machine: Machine,
    available: CpuSet,
    wanted: int,
    group: int = 1,
    packing: Packing = PLAIN,
    *,
    by_socket: bool = False,
) -> CpuSet:
    """Return `wanted` of the available CPUs, shared evenly by NUMA nodes, in groups of `group`.

    Falls back to packed when `wanted` is no multiple of `group` or no even split exists. `packing`
    is how each node's share is chosen; caches are not considered. `by_socket`: nodes of one package
    are preferred. AllocError if there are not enough CPUs.
    """
    whole = Packing(spread=packing.spread, true_sizes=packing.true_sizes)
    if wanted % group:
        return take_packed(machine, available, wanted, whole)
    accumulator = Accumulator(machine, available.bits, wanted)
    if accumulator.satisfied:
        return EMPTY
    if accumulator.failed:
        raise not_enough(wanted, len(available))
    nodes = accumulator.units(NODE)
    free = [(machine.nodes[node] & accumulator.available).bit_count() for node in nodes]
    packages = [machine.packages_of(node) for node in nodes] if by_socket else None
    search = _Search(free, wanted, group, packages)
    for size in _node_counts(machine, len(nodes), wanted, group):
        split = search.best(size)
        if split is not None:
            return _deal(accumulator, nodes, split, group, whole)
    return take_packed(machine, available, wanted, whole)


def _node_counts(machine: Machine, usable: int, wanted: int, group: int) -> range:
    """Return how many nodes to try: from the fewest that could serve on an idle host upwards."""
    groups = -(-machine.bits.bit_count() // group)
    groups_per_node = -(-groups // len(machine.nodes))
    needed = wanted // group
    return range(-(-needed // groups_per_node), min(needed, usable) + 1)


def _deal(
    accumulator: Accumulator, nodes: Sequence[int], split: _Split, group: int, packing: Packing
) -> CpuSet:
    """Take the even share from each chosen node, then the remainder a group at a time."""
    for position in split.chosen:
        _take_from(accumulator, nodes[position], split.share, packing)
    for position in split.extra:
        _take_from(accumulator, nodes[position], group, packing)
    return CpuSet.from_bits(accumulator.taken)


def _take_from(accumulator: Accumulator, node: int, count: int, packing: Packing) -> None:
    machine = accumulator.machine
    here = CpuSet.from_bits(machine.nodes[node] & accumulator.available)
    accumulator.take(take_packed(machine, here, count, packing).bits)


class _Search:
    """Searches the split of one request with the smallest score.

    `free` has the available CPUs of each usable node, in the accumulator's order, `packages` the
    packages of each if nodes of one package are preferred. The score is the standard deviation of
    what the split leaves on all nodes. Lives for one request.
    """

    def __init__(
        self,
        free: Sequence[int],
        wanted: int,
        group: int,
        packages: Sequence[frozenset[int]] | None = None,
    ) -> None:
        self._free = free
        self._wanted = wanted
        self._group = group
        self._packages = packages
        self._mean = _round3((sum(free) - wanted) / len(free))
        self._scores: dict[int, float] = {}
        self._looked = 0

    def best(self, size: int) -> _Split | None:
        """Return the best split over `size` nodes, the first among equals; None if there is none.

        Nodes with equally many available CPUs in the same places of a combination score equally,
        so only the first such combination is considered, and the first within one package.
        """
        best: _Split | None = None
        best_score, best_together = math.inf, False
        known: set[tuple[bool, tuple[int, ...]]] = set()
        for chosen in combinations(range(len(self._free)), size):
            if (best_score == 0 and (self._packages is None or best_together)) or self._exhausted():
                break
            counts = tuple(self._free[position] for position in chosen)
            together = self._together(chosen)
            if (together, counts) in known:
                continue
            known.add((together, counts))
            split, score = self._score_chosen(chosen, counts)
            if split is None:
                continue
            better = together if together != best_together else score < best_score
            if better:
                best, best_score, best_together = split, score, together
        return best

    def _together(self, chosen: Sequence[int]) -> bool:
        """Return whether nodes of one package are preferred, and these are."""
        return (
            self._packages is not None
            and len(frozenset().union(*(self._packages[position] for position in chosen))) == 1
        )

    def _exhausted(self) -> bool:
        self._looked += 1
        return self._looked > SEARCH_LIMIT

    def _score_chosen(
        self, chosen: tuple[int, ...], counts: Sequence[int]
    ) -> tuple[_Split | None, float]:
        """Return the best split over these nodes and its score; None and inf if impossible."""
        group = self._group
        share = self._wanted // len(chosen) // group * group
        if self._packages is not None:
            share = min(share, min(counts) // group * group)
        if min(counts) < share or sum(count // group for count in counts) * group < self._wanted:
            return None, math.inf
        left = list(self._free)
        for position in chosen:
            left[position] -= share
        rest = (self._wanted - share * len(chosen)) // group
        if rest == 0:
            return _Split(share, chosen), self._score(left)
        best, best_score = None, math.inf
        givers = [position for position in chosen if left[position] >= group]
        for extra in _subsets(givers, rest):
            if self._exhausted():
                break
            after = list(left)
            dealt = _hand_out(after, extra, rest, group)
            if len(dealt) == rest and (score := self._score(after)) < best_score:
                best, best_score = _Split(share, chosen, dealt), score
        return best, best_score

    def _score(self, left: Sequence[int]) -> float:
        """Return the standard deviation, mean and result rounded to three decimals.

        The sum of `left` is the same for each split of a request, so the sum of squares decides.
        """
        squares = sum(count * count for count in left)
        score = self._scores.get(squares)
        if score is None:
            variance = sum((count - self._mean) ** 2 for count in left) / len(left)
            score = self._scores[squares] = _round3(math.sqrt(variance))
        return score


def _subsets(givers: Sequence[int], rest: int) -> Iterator[tuple[int, ...]]:
    """Yield the nodes that may give `rest` groups round robin: the largest subsets first.

    Of a subset of `rest` or more only the first `rest` give one group each. So such subsets are cut
    to those, and each is yielded where it comes first in the full order: by its last member,
    because the larger a subset is, the nearer to the front its first `rest` members are.
    """
    for last in range(rest - 1, len(givers)):
        for head in combinations(givers[:last], rest - 1):
            yield (*head, givers[last])
    for size in range(min(rest - 1, len(givers)), 0, -1):
        yield from combinations(givers, size)


def _hand_out(left: list[int], extra: Iterable[int], rest: int, group: int) -> tuple[int, ...]:
    """Take up to `rest` groups round robin off `left`; return the node of each, in turn."""
    dealt: list[int] = []
    able = list(extra)
    while able and len(dealt) < rest:
        able = [position for position in able if left[position] >= group]
        turn = able[: rest - len(dealt)]
        for position in turn:
            left[position] -= group
        dealt += turn
    return tuple(dealt)


def _round3(value: float) -> float:
    """Round half up to three decimals; Python's round goes to the even neighbour."""
    scaled = value * 1000
    whole = math.floor(scaled)
    return (whole + (scaled - whole >= 0.5)) / 1000
