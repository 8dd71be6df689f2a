"""The policies by name, and how the policy `topology` chooses CPUs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from typing import ClassVar, Final, NamedTuple

from kata_pin.base.allocation import AllocState, Candidate
from kata_pin.base.config.alloc import Alloc
from kata_pin.base.cpuset import EMPTY, CpuSet, HostTopology, union
from kata_pin.base.errors import ConfigError
from kata_pin.options.allocation.accumulator import Machine, take_packed
from kata_pin.options.allocation.choice import (
    WHOLE_CORES,
    Choice,
    KubeletChoice,
    apartness,
    nodes_by_distance,
    whole_cores,
)
from kata_pin.options.allocation.demand import (
    StaticOptions,
    annotated_demand,
    static_demand,
    topology_demand,
)
from kata_pin.options.allocation.policy import Factory, Policy, not_enough
from kata_pin.options.allocation.pooled import PooledPolicy
from kata_pin.options.allocation.shared_pool import pool_millis

# The choice of the policy `topology`: the narrowest zone that fits, near devices and the pod.
#
# A zone is a last-level cache, a NUMA node, a package or the host. The zones that have enough free
# CPUs are compared by KEYS in their order, smaller first; inside the best one CPUs are packed by
# whole caches and cores. Pure; made once per host.

KEYS: Final = ("nodes", "apart", "split", "width", "cache_apart", "left", "id")
"""The keys by which zones are compared.

- nodes: the fewest NUMA nodes that can serve in it.
- apart: 0 on a node of the container's devices, if it has some, else on one where its pod has CPUs
  (or if it has none), 1 in such a package, else 2.
- split: CPUs that would be single threads here and could be whole cores elsewhere.
- width: 0 cache, 1 node, 2 package, 3 host.
- cache_apart: 0 in a cache with such CPUs (or if there are none), else 1.
- left: free CPUs that remain: the tightest fit keeps large zones for large requests.
- id: the lowest CPU of the zone.
"""


class _Zone(NamedTuple):
    """A zone: its level in the order of narrowness, and its CPUs as bits."""

    level: int
    name: str
    unit: int
    bits: int


class ZoneChoice:
    """Chooses by zones."""

    follows_devices: ClassVar[bool] = True

    def __init__(self, topology: HostTopology, machine: Machine) -> None:
        self._topology = topology
        self._machine = machine
        self._zones = tuple(_zones(machine))

    def choose(self, free: CpuSet, wanted: int, beside: CpuSet) -> CpuSet:
        """Return CPUs of the best zone; AllocError if no zone, so not even the host, has enough."""
        if wanted == 0:
            return EMPTY
        ranked = self._ranked(free, wanted, beside)
        if not ranked:
            raise not_enough(wanted, len(free))
        _, zone = ranked[0]
        return self._inside(zone, free, wanted, beside)

    def candidates(self, free: CpuSet, wanted: int, beside: CpuSet) -> tuple[Candidate, ...]:
        """Return every zone that could serve, the best first, with what is taken of it."""
        ranked = self._ranked(free, wanted, beside)
        return tuple(
            Candidate(
                zone.name,
                zone.unit,
                free & CpuSet.from_bits(zone.bits),
                tuple(zip(KEYS, key, strict=True)),
                taken=self._inside(zone, free, wanted, beside) if place == 0 else EMPTY,
            )
            for place, (key, zone) in enumerate(ranked)
        )

    def zone(self, state: AllocState, millis: int, beside: CpuSet) -> CpuSet:
        """Return the nodes of the pod's CPUs, or the node with the idlest part of the pool.

        The first of them with room for the request; nothing if none has, or nothing is requested.
        """
        nodes = self._topology.nodes
        if millis == 0 or len(nodes) < 2:
            return EMPTY
        pool = state.shared
        load = Counter[CpuSet]()
        for grant in state.grants.values():
            load[grant.zone] += pool_millis(grant)

        def left(zone: CpuSet) -> int:
            return 1000 * len(pool & zone) - load[zone]

        near = union(cpus for cpus in nodes.values() if cpus & beside)
        idlest = max(nodes.values(), key=left)
        roomy = (zone for zone in (near, idlest) if zone and left(zone) >= millis)
        return next(roomy, EMPTY)

    def _ranked(
        self, free: CpuSet, wanted: int, beside: CpuSet
    ) -> list[tuple[tuple[int, ...], _Zone]]:
        """Return the zones that can serve with their keys, the best first."""
        bits = free.bits
        whole = whole_cores(self._machine, bits)
        keyed = [
            (self._key(zone, bits, whole, wanted, beside.bits), zone)
            for zone in self._zones
            if (zone.bits & bits).bit_count() >= wanted
        ]
        return sorted(keyed)

    def _key(self, zone: _Zone, free: int, whole: int, wanted: int, beside: int) -> tuple[int, ...]:
        """Return the values of KEYS."""
        here = zone.bits & free
        by_node, by_cache = apartness(self._machine, here, beside)
        pairs = wanted - wanted % self._machine.threads_per_core
        split = max(0, pairs - (zone.bits & whole).bit_count())
        left = here.bit_count() - wanted
        nodes = self._fewest_nodes(here, wanted)
        return (nodes, by_node, split, zone.level, by_cache, left, zone.unit)

    def _fewest_nodes(self, here: int, wanted: int) -> int:
        counts = sorted((bits & here).bit_count() for bits in self._machine.nodes.values())
        nodes = 0
        while wanted > 0:
            wanted -= counts.pop()
            nodes += 1
        return nodes

    def _inside(self, zone: _Zone, free: CpuSet, wanted: int, beside: CpuSet) -> CpuSet:
        """Return `wanted` free CPUs of a zone, node by node: as few and near nodes as possible."""
        here = free & CpuSet.from_bits(zone.bits)
        taken = EMPTY
        while len(taken) < wanted:
            missing = wanted - len(taken)
            node = self._next_node(here, missing, taken or beside)
            part = here & self._topology.nodes[node]
            taken |= take_packed(self._machine, part, min(missing, len(part)), WHOLE_CORES)
            here -= part
        return taken

    def _next_node(self, here: CpuSet, missing: int, around: CpuSet) -> int:
        """Return the nearest node with enough CPUs, else the one with the most.

        Among equally near ones the tightest fit.
        """
        far = {node: n for n, node in enumerate(nodes_by_distance(self._topology, around))}
        sizes = {node: len(here & cpus) for node, cpus in self._topology.nodes.items()}
        enough = [node for node, size in sizes.items() if size >= missing]
        if enough:
            rank = far if around else dict.fromkeys(far, 0)
            return min(enough, key=lambda node: (rank[node], sizes[node], node))
        return min(sizes, key=lambda node: (-sizes[node], far[node]))


def _zones(machine: Machine) -> Iterator[_Zone]:
    """Yield every zone; a unit with the same CPUs as a narrower one is left out."""
    seen: set[int] = set()
    levels = (("llc", machine.llcs), ("node", machine.nodes), ("package", machine.packages))
    for level, (name, masks) in enumerate(levels):
        for unit, bits in masks.items():
            if bits not in seen:
                seen.add(bits)
                yield _Zone(level, name, unit, bits)
    if machine.bits not in seen:
        yield _Zone(3, "host", 0, machine.bits)


# The policies by name: `static`, `annotation`, `topology`, and those of other packages.


def _kubelets(_: HostTopology, machine: Machine, options: StaticOptions, settings: Alloc) -> Choice:
    return KubeletChoice(machine, options, settings.topology_manager)


def _by_zones(topology: HostTopology, machine: Machine, _: StaticOptions, __: Alloc) -> Choice:
    return ZoneChoice(topology, machine)


BUILTIN: Final[Mapping[str, Factory]] = {
    # eligible containers get exclusive CPUs, as in the kubelet
    "static": partial(PooledPolicy, "static", static_demand, _kubelets, follows_memory=False),
    # pods choose none, share or exclusive if allowed
    "annotation": partial(
        PooledPolicy, "annotation", annotated_demand, _kubelets, follows_memory=True
    ),
    # narrow zones, whole cores, pods close together, fractions
    "topology": partial(PooledPolicy, "topology", topology_demand, _by_zones, follows_memory=True),
}


def create(
    name: str,
    topology: HostTopology,
    settings: Alloc,
    third: Mapping[str, Factory] | None = None,
) -> Policy:
    """Return the policy of that name, ours before a third one (`policy.GROUP`).

    Raises ConfigError for an unknown name, and for settings that do not suit the host.
    """
    known = {**(third or {}), **BUILTIN}
    if name not in known:
        raise ConfigError(f"unknown policy {name!r}; known: {', '.join(known)}", key="policy")
    return known[name](topology, settings)
