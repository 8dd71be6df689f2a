"""The topology accumulator: collects CPUs for one request, best fit first.

It holds which CPUs are available and taken, and knows the kubelet's order of nodes, packages,
caches, cores and CPUs (cpu_assignment.go, KEP-2902, KEP-4800). An Accumulator lives for one
request. `take_packed` is the packed algorithm: as few and as full units as possible (kubelet
takeByTopologyNUMAPacked).

One deviation, on purpose: a unit is free only if every CPU of it is available. The kubelet compares
counts with an average, so on a host with unequal cores or packages it can call a half-used unit
free and assign CPUs that another container has.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kata_pin.model.cpuset import EMPTY, CpuSet
from kata_pin.policy.alloc.failure import AllocError, AllocFailure, not_enough
from kata_pin.policy.alloc.topology import CORE, LLC, PACKAGE, Machine, Masks


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


@dataclass(frozen=True, slots=True)
class Packing:
    """How to pack. `spread` skips whole cores and takes CPUs by number, package by package.

    `by_llc` prefers one last-level cache. `true_sizes` is this project's own: see Accumulator.
    """

    spread: bool = False
    by_llc: bool = False
    true_sizes: bool = False


PLAIN = Packing()


def take_packed(
    machine: Machine, available: CpuSet, wanted: int, packing: Packing = PLAIN
) -> CpuSet:
    """Return `wanted` of the available CPUs; AllocError if there are not as many.

    Whole units of the upper level first, then of the lower level, then caches (`by_llc`), whole
    cores, and single CPUs beginning with cores already in part use. A step with nothing left
    to take does nothing.
    """
    accumulator = Accumulator(machine, available.bits, wanted, true_sizes=packing.true_sizes)
    if accumulator.satisfied:
        return EMPTY
    if accumulator.failed:
        raise not_enough(wanted, len(available))
    accumulator.take_whole(machine.upper)
    accumulator.take_whole(machine.lower)
    if packing.by_llc:
        accumulator.take_llcs()
    if not packing.spread:
        accumulator.take_whole(CORE)
    accumulator.take_cpus(spread=packing.spread)
    if accumulator.needed > 0:
        raise AllocError(
            AllocFailure.FAILED, f"failed to allocate {wanted} CPUs from {available or 'none'}"
        )
    return CpuSet.from_bits(accumulator.taken)
