"""NUMA hints: which sets of nodes could serve a request, and which one is chosen.

Kubelet policy_static.go (generateCPUTopologyHints) and the topology manager with the CPU manager as
its only provider of hints. Pure. Out of scope: hints of devices and memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import Final

from kata_pin.errors import ConfigError
from kata_pin.model.cpuset import CpuSet
from kata_pin.model.settings import ManagerPolicy
from kata_pin.policy.alloc.topology import Machine

MAX_NODES: Final = 8
"""Most NUMA nodes for which hints are made (the kubelet's max-allowable-numa-nodes): 2**8 sets."""


@dataclass(frozen=True, slots=True)
class Hint:
    """A set of NUMA nodes that could serve a request; `preferred` if no smaller set ever could."""

    nodes: CpuSet
    preferred: bool

    @property
    def width(self) -> tuple[int, int]:
        """Sort key: fewer nodes are narrower, then lower-numbered ones."""
        return len(self.nodes), self.nodes.bits


@dataclass(frozen=True, slots=True)
class Affinity:
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
    max_nodes: int = MAX_NODES,
) -> tuple[Hint, ...]:
    """Return a hint for each set of nodes with `wanted` CPUs in it, small sets first.

    `reusable` CPUs count as available, and every set must include all their nodes. A hint is
    preferred if it has as few nodes as an idle host would need, or (`align_by_socket`) spans as few
    packages as that. An empty result means that the request cannot be served. Raises ConfigError
    on a host with more than `max_nodes` nodes: there are 2**n sets.
    """
    nodes = tuple(machine.nodes)
    if len(nodes) > max_nodes:
        raise ConfigError(
            f"{len(nodes)} NUMA nodes, hints are made for at most {max_nodes}",
            key="max-allowable-numa-nodes",
        )
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
        key=lambda hint: (not hint.preferred, hint.width),
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
