"""The host's topology as bit masks, made once per host and used by every allocation.

The accumulator counts the available CPUs of cores, caches, nodes and packages many times; on
integers that costs a machine instruction or two for each 64 CPUs. A Machine is immutable and lives
as long as the HostTopology that it was made from. Out of scope: which CPUs are available.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from kata_pin.model.cpuset import CpuSet
from kata_pin.model.topology import HostTopology

Masks = Mapping[int, int]
"""Unit id to the bits of its CPUs, ids ascending."""

NODE, PACKAGE, LLC, CORE = "node", "package", "llc", "core"


@dataclass(frozen=True, eq=False)
class Machine:
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
        return {NODE: self.nodes, PACKAGE: self.packages, LLC: self.llcs, CORE: self.cores}

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

    @staticmethod
    def union(masks: Iterable[int]) -> int:
        """Return the union of any number of masks."""
        bits = 0
        for mask in masks:
            bits |= mask
        return bits


def _masks(groups: Mapping[int, CpuSet]) -> Masks:
    return {unit: groups[unit].bits for unit in sorted(groups)}
