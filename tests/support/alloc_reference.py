"""A slow second reading of the kubelet's rules, to compare the allocator with.

Sets and lists only, everything counted anew each time, every combination tried. It shares no code
with kata_pin.options.allocation. Hosts must be regular: units of one kind all of one size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import combinations

from kata_pin.base.cpuset import CpuPlace

Key = Callable[[CpuPlace], int]


class Reference:
    """The rules on one host."""

    def __init__(self, cpus: Iterable[CpuPlace]) -> None:
        self.all = list(cpus)
        self.nodes_on_top = len({c.package for c in self.all}) >= len({c.node for c in self.all})

    def members(self, key: Key, unit: int) -> set[int]:
        """Return the CPUs of a unit."""
        return {cpu.cpu for cpu in self.all if key(cpu) == unit}

    def ordered(self, key: Key, free: set[int], inside: set[int]) -> list[int]:
        """Return units with a free CPU inside, fewest free first, then by id."""
        units = {key(cpu) for cpu in self.all if cpu.cpu in free & inside}
        return sorted(units, key=lambda unit: (len(self.members(key, unit) & free), unit))

    def levels(self) -> tuple[Key, Key]:
        """Return the upper and the lower level."""
        return (node, package) if self.nodes_on_top else (package, node)

    def uppers(self, free: set[int]) -> list[int]:
        """Return the units of the upper level in order."""
        return self.ordered(self.levels()[0], free, free)

    def lowers(self, free: set[int]) -> list[int]:
        """Return the units of the lower level in order."""
        upper, lower = self.levels()
        return [
            unit
            for outer in self.uppers(free)
            for unit in self.ordered(lower, free, self.members(upper, outer))
        ]

    def nodes(self, free: set[int]) -> list[int]:
        """Return NUMA nodes in order."""
        return self.uppers(free) if self.nodes_on_top else self.lowers(free)

    def packages(self, free: set[int]) -> list[int]:
        """Return packages in order."""
        return self.lowers(free) if self.nodes_on_top else self.uppers(free)

    def caches(self, free: set[int]) -> list[int]:
        """Return caches in order."""
        return [
            unit
            for outer in self.nodes(free)
            for unit in self.ordered(llc, free, self.members(node, outer))
        ]

    def cores(self, free: set[int]) -> list[int]:
        """Return cores in order."""
        lower = self.levels()[1]
        return [
            unit
            for outer in self.lowers(free)
            for unit in self.ordered(core, free, self.members(lower, outer))
        ]

    def packed(
        self, free: set[int], wanted: int, *, spread: bool = False, by_llc: bool = False
    ) -> set[int]:
        """Return what the packed algorithm takes."""
        free, taken = set(free), set[int]()
        upper, lower = self.levels()

        def whole(key: Key, units: list[int]) -> None:
            for unit in [unit for unit in units if self.members(key, unit) <= free]:
                if wanted - len(taken) >= len(self.members(key, unit)):
                    taken.update(self.members(key, unit))
            free.difference_update(taken)

        whole(upper, self.uppers(free))
        whole(lower, self.lowers(free))
        if by_llc:
            for cache in self.caches(free):
                whole(llc, self.caches(free))
                part = self.part_of_cache(cache, free, wanted - len(taken))
                taken.update(part)
                free.difference_update(part)
        if not spread:
            whole(core, self.cores(free))
        singles = [
            cpu
            for key, unit in (
                [(package, unit) for unit in self.packages(free)]
                if spread
                else [(core, unit) for unit in self.cores(free)]
            )
            for cpu in sorted(self.members(key, unit) & free)
        ]
        taken.update(singles[: wanted - len(taken)])
        return taken

    def part_of_cache(self, cache: int, free: set[int], needed: int) -> set[int]:
        """Return the exact rest from one cache, or nothing."""
        threads = len(self.all) // len({cpu.core for cpu in self.all})
        here = self.members(llc, cache) & free
        cores = sorted({cpu.core for cpu in self.all if cpu.cpu in here})
        cpus = sorted(
            cpu
            for unit in cores[: math.ceil(needed / threads)]
            for cpu in self.members(core, unit) & free
        )
        if needed % 2 and threads > 1 and len(cpus) > needed:
            cpus.pop()
        return set(cpus) if len(cpus) == needed else set()

    def distributed(self, free: set[int], wanted: int, group: int) -> set[int]:
        """Return what the distributed algorithm takes."""
        if wanted % group or not wanted:
            return self.packed(free, wanted)
        order = self.nodes(free)
        count = {unit: len(self.members(node, unit) & free) for unit in order}
        groups = math.ceil(len(self.all) / group)
        per_node = math.ceil(groups / len({cpu.node for cpu in self.all}))
        fewest = math.ceil(wanted // group / per_node)
        for size in range(fewest, min(wanted // group, len(order)) + 1):
            share = wanted // size // group * group
            best: tuple[float, tuple[int, ...], tuple[int, ...]] = (math.inf, (), ())
            for chosen in combinations(order, size):
                if sum(count[unit] // group for unit in chosen) * group < wanted:
                    continue
                if any(count[unit] < share for unit in chosen):
                    continue
                score, extra = self.score(count, chosen, share, wanted, group)
                if score < best[0]:
                    best = (score, chosen, extra)
            if best[1]:
                return self.deal(free, best[1:], share, wanted, group)
        return self.packed(free, wanted)

    def score(
        self, count: dict[int, int], chosen: tuple[int, ...], share: int, wanted: int, group: int
    ) -> tuple[float, tuple[int, ...]]:
        """Return the best score of a combination and who gives the remainder."""
        left = {unit: cpus - share * (unit in chosen) for unit, cpus in count.items()}
        rest = wanted - share * len(chosen)
        if not rest:
            return deviation(left.values()), ()
        best: tuple[float, tuple[int, ...]] = (math.inf, ())
        able = [unit for unit in chosen if left[unit] >= group]
        for size in range(len(able), 0, -1):
            for extra in combinations(able, size):
                if sum(left[unit] // group for unit in extra) * group < rest:
                    continue
                after, owed = dict(left), rest
                while owed:
                    for unit in extra:
                        if owed and after[unit] >= group:
                            after[unit] -= group
                            owed -= group
                if deviation(after.values()) < best[0]:
                    best = (deviation(after.values()), extra)
        return best

    def deal(
        self,
        free: set[int],
        split: tuple[tuple[int, ...], tuple[int, ...]],
        share: int,
        wanted: int,
        group: int,
    ) -> set[int]:
        """Return the CPUs of a split: who gives the share, and who the remainder."""
        chosen, extra = split
        taken: set[int] = set()
        for unit in chosen:
            taken |= self.packed(free & self.members(node, unit), share)
        while len(taken) < wanted:
            for unit in extra:
                here = (free - taken) & self.members(node, unit)
                if len(here) >= group and len(taken) < wanted:
                    taken |= self.packed(here, group)
        return taken


def deviation(values: Iterable[int]) -> float:
    """Return the population standard deviation, mean and result to three decimals."""
    numbers = list(values)
    mean = round3(sum(numbers) / len(numbers))
    return round3(math.sqrt(sum((number - mean) ** 2 for number in numbers) / len(numbers)))


def round3(value: float) -> float:
    """Round half up."""
    return math.floor(value * 1000 + 0.5) / 1000


def node(cpu: CpuPlace) -> int:
    """Return the CPU's node."""
    return cpu.node


def package(cpu: CpuPlace) -> int:
    """Return the CPU's package."""
    return cpu.package


def llc(cpu: CpuPlace) -> int:
    """Return the CPU's cache."""
    return cpu.llc


def core(cpu: CpuPlace) -> int:
    """Return the CPU's core."""
    return cpu.core
