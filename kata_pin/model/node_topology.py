"""What a NodeResourceTopology object says of one NUMA node (topology.node.k8s.io/v1alpha2)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Zone:
    """A NUMA node with its pCPUs: all, those that containers may get, and those that are free."""

    node: int
    capacity: int
    allocatable: int
    available: int
