"""The distributed algorithm: the same number of CPUs from each of few NUMA nodes.

Kubelet takeByTopologyNUMADistributed (KEP-2902). Among the combinations of the fewest nodes that
can serve, the one that leaves the nodes of the host most evenly used is taken. Two deviations, both
where the kubelet cannot be followed: CPUs that are too scattered for groups are skipped (the
kubelet never returns), and the search is bounded (SEARCH_LIMIT).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final

from kata_pin.model.cpuset import EMPTY, CpuSet
from kata_pin.policy.alloc.accumulator import PLAIN, Accumulator, Packing, take_packed
from kata_pin.policy.alloc.failure import not_enough
from kata_pin.policy.alloc.topology import NODE, Machine

SEARCH_LIMIT: Final = 100_000
"""Most candidates considered for one request, about 0.2 s.

Up to 10 nodes with available CPUs the search is complete: there are at most 3**10 + 2**10
candidates. Beyond, the best found so far is taken, or else the request is packed.
"""


@dataclass(frozen=True, slots=True)
class _Split:
    """Nodes by position: those of the even share, and the node of each group of the remainder."""

    chosen: tuple[int, ...]
    extra: tuple[int, ...] = ()


def take_distributed(
    machine: Machine, available: CpuSet, wanted: int, group: int = 1, packing: Packing = PLAIN
) -> CpuSet:
    """Return `wanted` of the available CPUs, shared evenly by NUMA nodes, in groups of `group`.

    Falls back to packed when `wanted` is no multiple of `group` or no even split exists. `packing`
    is how each node's share is chosen; caches are not considered. AllocError if there are not
    enough CPUs.
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
    search = _Search(free, wanted, group)
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
    share = _even_share(accumulator.needed, len(split.chosen), group)
    for position in split.chosen:
        _take_from(accumulator, nodes[position], share, packing)
    for position in split.extra:
        _take_from(accumulator, nodes[position], group, packing)
    return CpuSet.from_bits(accumulator.taken)


def _take_from(accumulator: Accumulator, node: int, count: int, packing: Packing) -> None:
    machine = accumulator.machine
    here = CpuSet.from_bits(machine.nodes[node] & accumulator.available)
    accumulator.take(take_packed(machine, here, count, packing).bits)


def _even_share(wanted: int, nodes: int, group: int) -> int:
    return wanted // nodes // group * group


class _Search:
    """Searches the split of one request with the smallest score.

    `free` has the available CPUs of each usable node, in the accumulator's order. The score is the
    standard deviation of what the split leaves on all of them. Lives for one request.
    """

    def __init__(self, free: Sequence[int], wanted: int, group: int) -> None:
        self._free = free
        self._wanted = wanted
        self._group = group
        self._mean = _round3((sum(free) - wanted) / len(free))
        self._scores: dict[int, float] = {}
        self._looked = 0

    def best(self, size: int) -> _Split | None:
        """Return the best split over `size` nodes, the first among equals; None if there is none.

        Nodes with equally many available CPUs in the same places of a combination score equally,
        so only the first such combination is considered.
        """
        best: _Split | None = None
        best_score = math.inf
        known: set[tuple[int, ...]] = set()
        for chosen in combinations(range(len(self._free)), size):
            if best_score == 0 or self._exhausted():
                break
            counts = tuple(self._free[position] for position in chosen)
            if counts in known:
                continue
            known.add(counts)
            score, extra = self._score_chosen(chosen, counts)
            if score < best_score:
                best, best_score = _Split(chosen, extra), score
        return best

    def _exhausted(self) -> bool:
        self._looked += 1
        return self._looked > SEARCH_LIMIT

    def _score_chosen(
        self, chosen: Sequence[int], counts: Sequence[int]
    ) -> tuple[float, tuple[int, ...]]:
        """Return the best score of these nodes and those of the remainder; inf if impossible."""
        group = self._group
        share = _even_share(self._wanted, len(chosen), group)
        if min(counts) < share or sum(count // group for count in counts) * group < self._wanted:
            return math.inf, ()
        left = list(self._free)
        for position in chosen:
            left[position] -= share
        rest = (self._wanted - share * len(chosen)) // group
        if rest == 0:
            return self._score(left), ()
        best: tuple[float, tuple[int, ...]] = (math.inf, ())
        givers = [position for position in chosen if left[position] >= group]
        for extra in _subsets(givers, rest):
            if self._exhausted():
                break
            after = list(left)
            dealt = _hand_out(after, extra, rest, group)
            if len(dealt) == rest and (score := self._score(after)) < best[0]:
                best = score, dealt
        return best

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
