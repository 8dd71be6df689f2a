"""The host's topology as bit masks, made once for a host and used by every allocation.

The accumulator counts available CPUs of cores, caches, nodes and packages many times over; on
integers that costs a machine instruction or two for each 64 CPUs. A Machine is immutable and lives
as long as the HostTopology that it was made from. Out of scope: anything about what is available.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from kata_pin.model.cpuset import CpuSet
from kata_pin.model.topology import HostTopology

Masks = Mapping[int, int]
"""Unit id to the bits of its CPUs, ids ascending."""


@dataclass(frozen=True, eq=False)
class Machine:
    """The units of a host: id to CPU bits for cores, caches, NUMA nodes and packages.

    The ids are those of HostTopology, which are the kubelet's but for caches: there the kubelet
    has sysfs' cache id and HostTopology the lowest CPU; both ascend the same way.
    """

    cores: Masks
    llcs: Masks
    nodes: Masks
    packages: Masks

    @classmethod
    def of(cls, topology: HostTopology) -> Machine:
        """Take the CPUs that are online: the kubelet too knows no others."""
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
    def nodes_first(self) -> bool:
        """Whether NUMA nodes stand above packages in the hierarchy (kubelet newCPUAccumulator).

        So it is unless a package holds several nodes, which is judged by the two counts alone.
        """
        return len(self.packages) >= len(self.nodes)

    @cached_property
    def threads_per_core(self) -> int:
        """CPUs by cores, rounded down, as the kubelet counts it; 1 on most hybrid parts."""
        return self.bits.bit_count() // len(self.cores) if self.cores else 1

    @cached_property
    def cpus_per_package(self) -> int:
        """CPUs by packages, rounded down, as the kubelet counts it."""
        return self.bits.bit_count() // len(self.packages) if self.packages else 0

    @cached_property
    def cpus_per_llc(self) -> int:
        """CPUs by last-level caches, rounded down, as the kubelet counts it."""
        return self.bits.bit_count() // len(self.llcs) if self.llcs else 0

    @cached_property
    def packages_of_node(self) -> Mapping[int, tuple[int, ...]]:
        """Packages that have CPUs in a node, by node."""
        return _inside(self.nodes, self.packages)

    @cached_property
    def nodes_of_package(self) -> Mapping[int, tuple[int, ...]]:
        """Nodes that have CPUs in a package, by package."""
        return _inside(self.packages, self.nodes)

    @cached_property
    def llcs_of_node(self) -> Mapping[int, tuple[int, ...]]:
        """Caches that have CPUs in a node, by node."""
        return _inside(self.nodes, self.llcs)

    @cached_property
    def cores_of_lower(self) -> Mapping[int, tuple[int, ...]]:
        """Cores that have CPUs in a unit of the lower level (package or node), by that unit."""
        return _inside(self.packages if self.nodes_first else self.nodes, self.cores)

    def node_bits(self, nodes: Iterable[int]) -> int:
        """Return the CPUs of these NUMA nodes; a node that the host lacks has none."""
        return self.union(self.nodes.get(node, 0) for node in nodes)

    def package_bits(self, bits: int) -> int:
        """Return all CPUs of every package that has one of these CPUs."""
        return self.union(package for package in self.packages.values() if package & bits)

    def core_bits(self, bits: int) -> int:
        """Return all CPUs of every core that has one of these CPUs."""
        return self.union(core for core in self.cores.values() if core & bits)

    @staticmethod
    def union(masks: Iterable[int]) -> int:
        """Return the union of any number of masks."""
        bits = 0
        for mask in masks:
            bits |= mask
        return bits


def _masks(groups: Mapping[int, CpuSet]) -> Masks:
    return {unit: groups[unit].bits for unit in sorted(groups)}


def _inside(outer: Masks, inner: Masks) -> Mapping[int, tuple[int, ...]]:
    return {
        unit: tuple(part for part, part_bits in inner.items() if part_bits & bits)
        for unit, bits in outer.items()
    }
