"""Which memory of a VMM should move to its vCPUs' NUMA nodes, where to, and when that ends. Pure.

Only memory that a guest may have is moved: anonymous memory, memfd, /dev/shm and huge pages. Files
such as libraries and Kata's image belong to every process that maps them. Where the VMM itself
bound memory (numa(7): bind, interleave), its nodes were chosen, so that stays.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from errno import EACCES, EBUSY, EFAULT, ENOENT, ENOMEM
from typing import Final, NamedTuple

from kata_pin.model.cpuset import EMPTY, CpuSet, union
from kata_pin.model.measured.memory import Extent, FreeMemory, Placed
from kata_pin.model.placement import Placement
from kata_pin.model.thread import Thread, ThreadRole
from kata_pin.model.topology import HostTopology

REMOTE_PERCENT: Final = 10.0
"""Share of remote memory from which on it is worth a warning and a move: each such access takes up
to twice as long."""

NEGLIGIBLE_PERCENT: Final = 1.0
"""Share of remote memory that may be left by a move without a word."""

KEPT_PERCENT: Final = 5
"""Share of a node's memory that no move takes."""

MAX_REGIONS: Final = 1024
"""Most mappings of a VMM that are moved, those with most remote memory first."""

_OF_GUESTS: Final = ("/memfd:", "/dev/shm/", "/dev/zero")  # noqa: S108 - of the VMM's mappings
_POLICY: Final = re.compile(r"(bind|(?:weighted)?interleave)(?:=[a-z|]{1,40})?:([0-9,-]{1,4000})\Z")
_REASONS: Final = {
    EACCES: "shared with other processes",
    EBUSY: "busy, or pinned for a device (VFIO)",
    EFAULT: "not ordinary memory",
    ENOENT: "gone meanwhile",
    ENOMEM: "no memory on the node",
}


class Region(NamedTuple):
    """A mapping with remote memory: where it is, its page size, where its pages may go."""

    start: int
    end: int
    page_size: int
    shared: bool
    huge: bool
    nodes: CpuSet
    remote: int


@dataclass(frozen=True)
class MovePlan:
    """What there is to move, in bytes; `bound` is what the VMM's own policy keeps, and which."""

    regions: tuple[Region, ...] = ()
    total: int = 0
    remote: int = 0
    bound: int = 0
    policy: str = ""
    sources: CpuSet = EMPTY

    @property
    def worthwhile(self) -> bool:
        """Whether so much is remote that it is worth a move."""
        return self.remote * 100 >= self.total * REMOTE_PERCENT and self.remote > 0

    @property
    def negligible(self) -> bool:
        """Whether so little is left that no reason has to be given."""
        return self.remote * 100 <= self.total * NEGLIGIBLE_PERCENT


def near_nodes(
    threads: Iterable[Thread], placement: Placement | None, topology: HostTopology
) -> CpuSet | None:
    """Return the NUMA nodes of a sandbox's vCPUs; None while they are not where they should be.

    Of a sandbox with exclusive pCPUs only: of its paired vCPUs, or of all where none is paired.
    Empty for any other.
    """
    if placement is None or not placement.mask.exclusive:
        return EMPTY
    paired: list[CpuSet] = []
    others: list[CpuSet] = []
    for thread in threads:
        desired = placement.desired.get(thread.key)
        if thread.role.role is not ThreadRole.VCPU or desired is None or desired.release:
            continue
        if thread.task.affinity != desired.applied:
            return None
        (paired if desired.paired else others).append(desired.applied)
    cpus = union(paired or others)
    return CpuSet(node for cpu in cpus if (node := topology.node_of(cpu)) is not None)


def plan_moves(
    placed: Iterable[Placed], extents: Iterable[Extent], near: CpuSet, allowed: CpuSet
) -> MovePlan:
    """Return what should move to the nodes `near`, of which the process may use `allowed`."""
    by_start = {one.start: one for one in extents}
    regions: list[Region] = []
    total = bound = 0
    policy, sources = "", EMPTY
    for one in placed:
        extent = by_start.get(one.start)
        if extent is None or not _is_guests(one, extent):
            continue
        total += sum(one.pages.values()) * one.page_size
        far = {node: pages for node, pages in one.pages.items() if node not in near and pages}
        if not far:
            continue
        remote = sum(far.values()) * one.page_size
        nodes = near & allowed & _bound_nodes(one.policy, near)
        if not nodes:
            bound, policy = bound + remote, one.policy
            continue
        end = extent.end - (extent.end - extent.start) % one.page_size
        regions.append(
            Region(extent.start, end, one.page_size, extent.shared, one.huge, nodes, remote)
        )
        sources |= CpuSet(far)
    regions.sort(key=lambda region: (-region.remote, region.start))
    chosen = tuple(regions[:MAX_REGIONS])
    return MovePlan(chosen, total, sum(region.remote for region in chosen), bound, policy, sources)


class Aim(NamedTuple):
    """A node with memory for some more pages, or why there is none."""

    node: int = -1
    pages: int = 0
    problem: str = ""


def choose_node(region: Region, free: Mapping[int, FreeMemory], most: int) -> Aim:
    """Return the node of a region's that has most free memory, and for how many pages, up to most.

    KEPT_PERCENT of a node's memory is left; huge pages must be in its pool.
    """
    room = {
        node: found.huge.get(region.page_size, 0)
        if region.huge
        else max(0, found.available - found.total * KEPT_PERCENT // 100) // region.page_size
        for node in region.nodes
        if (found := free.get(node)) is not None
    }
    node = max(room, key=lambda one: (room[one], -one), default=-1)
    if node < 0 or not room[node]:
        what = "free huge pages" if region.huge else "free memory"
        return Aim(problem=f"NUMA node {region.nodes} has no more {what}")
    return Aim(node, min(most, room[node]))


def pages_in(page_size: int, rate: int, most: int) -> int:
    """Return how many pages of a size `rate` bytes are, at least one and at most `most`."""
    return max(1, min(most, rate // page_size))


def why_refused(errnos: Mapping[int, int]) -> str:
    """Return why pages were not moved, by how many each errno of move_pages(2) has."""
    if not errnos:
        return "the kernel does not say why"
    errno = max(errnos, key=lambda one: (errnos[one], one))
    return _REASONS.get(errno, f"error {errno}")


def _is_guests(one: Placed, extent: Extent) -> bool:
    """Whether a mapping may be a guest's memory."""
    if one.huge:
        return True
    return not extent.shared if not one.file else one.file.startswith(_OF_GUESTS)


def _bound_nodes(policy: str, near: CpuSet) -> CpuSet:
    """Return those of `near` that a mapping's policy permits."""
    match = _POLICY.match(policy)
    if match is None:
        return near
    return CpuSet.parse(match[2]) & near if match[1] == "bind" else EMPTY
