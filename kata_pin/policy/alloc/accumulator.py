"""The topology accumulator: collects CPUs for one request, best fit first.

It holds what is available and what was taken, and knows the orders in which the kubelet looks at
nodes, packages, caches, cores and CPUs (kubelet cpu_assignment.go, KEP-2902, KEP-4800). An
Accumulator lives for one request. Out of scope: which steps are taken in which order; `packed` and
`distributed` say that.

One deviation, on purpose: a unit is free only if every CPU of it is available. The kubelet compares
counts with an average, so on a host with unequal cores or packages it can call a half-used unit
free and hand out CPUs that another container holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from kata_pin.policy.alloc.topology import Machine, Masks


class Accumulator:
    """What one request still needs, what it may have, what it took.

    CPUs are bit masks. `true_sizes` counts packages and cores by their own size instead of the
    host's average, which differs on hybrid hosts only; the kubelet uses the average.
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
        """Whether more is needed than there is."""
        return self.needed > self.available.bit_count()

    def take(self, bits: int) -> None:
        """Take these CPUs, which must be available."""
        assert bits & ~self.available == 0
        self.taken |= bits
        self.available &= ~bits
        self.needed -= bits.bit_count()

    # Orders. Each lists the units that have at least one available CPU, those with the fewest
    # first (best fit), equal ones by id.

    def nodes(self) -> list[int]:
        """Return NUMA nodes in order; inside their packages where packages stand above."""
        machine = self.machine
        if machine.nodes_first:
            return self._fullest(machine.nodes, machine.nodes)
        return self._below(
            self.packages(), machine.packages, machine.nodes_of_package, machine.nodes
        )

    def packages(self) -> list[int]:
        """Return packages in order; inside their NUMA nodes where nodes stand above."""
        machine = self.machine
        if not machine.nodes_first:
            return self._fullest(machine.packages, machine.packages)
        return self._below(self.nodes(), machine.nodes, machine.packages_of_node, machine.packages)

    def llcs(self) -> list[int]:
        """Return last-level caches in order, node by node."""
        machine = self.machine
        return self._below(self.nodes(), machine.nodes, machine.llcs_of_node, machine.llcs)

    def cores(self) -> list[int]:
        """Return cores in order, by package or by node, whichever is the lower level."""
        machine = self.machine
        if machine.nodes_first:
            outer, masks = self.packages(), machine.packages
        else:
            outer, masks = self.nodes(), machine.nodes
        return self._below(outer, masks, machine.cores_of_lower, machine.cores)

    def cpus(self, *, spread: bool = False) -> list[int]:
        """Return single CPUs: core by core, or (spread) by number in each package."""
        if spread:
            units, masks = self.packages(), self.machine.packages
        else:
            units, masks = self.cores(), self.machine.cores
        listed = [cpu for unit in units for cpu in _numbers(masks[unit] & self.available)]
        return list(dict.fromkeys(listed))

    # Wholly free units, in the same orders.

    def free_nodes(self) -> list[int]:
        """Return the nodes of which every CPU is available."""
        return [unit for unit in self.nodes() if self._all_available(self.machine.nodes[unit])]

    def free_llcs(self) -> list[int]:
        """Return the caches of which every CPU is available."""
        return [unit for unit in self.llcs() if self._all_available(self.machine.llcs[unit])]

    def free_packages(self) -> list[int]:
        """Return the packages of which every CPU is available."""
        machine = self.machine
        return self._free_sized(self.packages(), machine.packages, machine.cpus_per_package)

    def free_cores(self) -> list[int]:
        """Return the cores of which every CPU is available."""
        machine = self.machine
        return self._free_sized(self.cores(), machine.cores, machine.threads_per_core)

    # Steps.

    def take_upper(self) -> None:
        """Take whole free units of the upper level, as long as they are needed whole."""
        if self.machine.nodes_first:
            self._take_whole(self.free_nodes(), self.machine.nodes)
        else:
            self._take_whole(self.free_packages(), self.machine.packages)

    def take_lower(self) -> None:
        """Take whole free units of the lower level, as long as they are needed whole."""
        if self.machine.nodes_first:
            self._take_whole(self.free_packages(), self.machine.packages)
        else:
            self._take_whole(self.free_nodes(), self.machine.nodes)

    def take_cores(self) -> None:
        """Take whole free cores, as long as they are needed whole."""
        self._take_whole(self.free_cores(), self.machine.cores)

    def take_llcs(self) -> None:
        """Take whole free caches, then the rest from one cache if it can give exactly the rest.

        Best effort: what no cache can give is left for the steps after this one.
        """
        for llc in self.llcs():
            if self.satisfied:
                return
            if self.needed >= self.machine.cpus_per_llc:
                self._take_whole(self.free_llcs(), self.machine.llcs)
            self._take_part(llc)

    def take_cpus(self, *, spread: bool = False) -> None:
        """Take single CPUs until satisfied."""
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

    def _take_whole(self, units: Iterable[int], masks: Masks) -> None:
        for unit in units:
            bits = masks[unit]
            if self.needed >= bits.bit_count() and self._all_available(bits):
                self.take(bits)

    def _free_sized(self, units: Iterable[int], masks: Masks, average: int) -> list[int]:
        return [
            unit
            for unit in units
            if self._all_available(masks[unit])
            and (self._true_sizes or masks[unit].bit_count() == average)
        ]

    def _all_available(self, bits: int) -> bool:
        return bits & ~self.available == 0

    def _fullest(self, units: Iterable[int], masks: Masks) -> list[int]:
        """Return the units that have an available CPU, fewest available first, then by id."""
        available = self.available
        counted = [((masks[unit] & available).bit_count(), unit) for unit in units]
        return [unit for count, unit in sorted(counted) if count]

    def _below(
        self,
        outer: Iterable[int],
        outer_masks: Masks,
        inside: Mapping[int, tuple[int, ...]],
        masks: Masks,
    ) -> list[int]:
        """Return the inner units, outer unit by outer unit, each group in best-fit order.

        An inner unit is counted whole, also where only a part of it lies in the outer one; it is
        listed once, at its first place.
        """
        listed: dict[int, None] = {}
        for unit in outer:
            here = outer_masks[unit] & self.available
            parts = [part for part in inside[unit] if masks[part] & here]
            listed.update(dict.fromkeys(self._fullest(parts, masks)))
        return list(listed)


def _numbers(bits: int) -> Iterator[int]:
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low
