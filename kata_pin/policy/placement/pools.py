"""The exclusive CPUs of a sandbox as pools, one a container, and how they are cut into runs.

A run is what one vCPU is paired with: one pCPU when the VM has vCPUs enough, several of the same
container otherwise (D10).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kata_pin.model.cpuset import EMPTY, CpuSet
from kata_pin.model.placement import SandboxMask
from kata_pin.model.topology import HostTopology


class Pool(NamedTuple):
    """The exclusive CPUs of one container, in topology order."""

    container_id: str
    cpus: tuple[int, ...]


class Run(NamedTuple):
    """The CPUs that one vCPU is paired with, and their container."""

    cpus: CpuSet
    container_id: str


@dataclass(frozen=True, slots=True)
class Pools:
    """What can be paired, in record order, and what was taken out before.

    `reserved` carries overhead (`reserve:k`), in the same order; `emptied` names containers that it
    left without any; `overlap` is claimed by two containers (the first in record order keeps it),
    `offline` is exclusive but off. `exclusive` counts what there was before the reserve was taken.
    """

    pools: tuple[Pool, ...]
    exclusive: int = 0
    reserved: tuple[int, ...] = ()
    emptied: tuple[str, ...] = ()
    overlap: CpuSet = EMPTY
    offline: CpuSet = EMPTY

    @property
    def size(self) -> int:
        """Return x of D10: how many pCPUs can be paired."""
        return sum(len(pool.cpus) for pool in self.pools)


def exclusive_pools(mask: SandboxMask, topology: HostTopology, reserve: int) -> Pools:
    """Return the pools of the sandbox after `reserve` CPUs were taken from the end.

    The order is that of pairing: container by container in record order, each in topology order.
    A CPU is in one pool only, whatever the claims say, and offline CPUs are in none.
    """
    taken = overlap = EMPTY
    pools: list[Pool] = []
    for claim in mask.claims:
        overlap |= claim.exclusive & taken
        own = (claim.exclusive - taken) & topology.online
        taken |= claim.exclusive
        if own:
            pools.append(Pool(claim.container_id, tuple(topology.in_order(own))))
    left = _without_last(pools, reserve)
    exclusive = [cpu for pool in pools for cpu in pool.cpus]
    return Pools(
        pools=tuple(pool for pool in left if pool.cpus),
        exclusive=len(exclusive),
        reserved=tuple(exclusive[-reserve:]) if reserve > 0 else (),
        emptied=tuple(pool.container_id for pool in left if not pool.cpus),
        overlap=overlap,
        offline=taken - topology.online,
    )


def _without_last(pools: Sequence[Pool], count: int) -> list[Pool]:
    left: list[Pool] = []
    for pool in reversed(pools):
        cut = min(max(0, count), len(pool.cpus))
        count -= cut
        left.append(pool._replace(cpus=pool.cpus[: len(pool.cpus) - cut]))
    return left[::-1]


def runs(pools: Sequence[Pool], vcpus: int) -> list[Run]:
    """Cut the pools into at most `vcpus` runs, container by container.

    With enough vCPUs every run is one pCPU. Otherwise each pool is dealt over its share of vCPUs
    as runs that do not overlap and never cross a container. `vcpus` must not be less than the
    number of pools.
    """
    total = sum(len(pool.cpus) for pool in pools)
    if vcpus >= total:
        return [Run(CpuSet((cpu,)), pool.container_id) for pool in pools for cpu in pool.cpus]
    shares = apportion([len(pool.cpus) for pool in pools], vcpus)
    return [
        Run(cpus, pool.container_id)
        for pool, share in zip(pools, shares, strict=True)
        for cpus in _cut(pool.cpus, share)
    ]


def apportion(sizes: Sequence[int], vcpus: int) -> list[int]:
    """Share `vcpus` out over pools of these sizes: proportional, at least one each.

    Each gets max(1, floor(vcpus * size / total)); what is left goes to the largest remainders,
    ties in record order. Where the ones that were raised to 1 make too many, the largest share
    gives one back, the smallest remainder first, ties from the end. Needs
    len(sizes) <= vcpus < sum(sizes).
    """
    total = sum(sizes)
    remainders = [vcpus * size % total for size in sizes]
    shares = [max(1, vcpus * size // total) for size in sizes]
    order = range(len(sizes))
    left = vcpus - sum(shares)
    raised = [i for i in order if vcpus * sizes[i] < total]
    takers = sorted((i for i in order if i not in raised), key=lambda i: (-remainders[i], i))
    for i in takers[: max(0, left)]:
        shares[i] += 1
    for _ in range(-left):
        giver = max(order, key=lambda i: (shares[i], -remainders[i], i))
        shares[giver] -= 1
    return shares


def _cut(cpus: tuple[int, ...], parts: int) -> list[CpuSet]:
    """Cut into `parts` consecutive pieces, the longer ones first."""
    size, longer = divmod(len(cpus), parts)
    pieces: list[CpuSet] = []
    start = 0
    for part in range(parts):
        end = start + size + (part < longer)
        pieces.append(CpuSet(cpus[start:end]))
        start = end
    return pieces
