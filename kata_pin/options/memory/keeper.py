"""Memory that moves to the NUMA nodes of its vCPUs (`memory: migrate`)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from errno import EACCES, EBUSY, EFAULT, ENODEV, ENOENT, ENOMEM, EPERM
from typing import Any, Final, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from kata_pin.base.config.tree import LiveConfig
from kata_pin.base.counters import Extent, FreeMemory, Placed
from kata_pin.base.cpuset import EMPTY, CpuSet, HostTopology, union
from kata_pin.base.documents.answers import NodeEventKind
from kata_pin.base.documents.state import Memory
from kata_pin.base.errors import KataPinError, ParseError, reason_of
from kata_pin.base.placement import RELEASED, Note, PassOutcome, Placement
from kata_pin.base.sandbox import Container, ProcessKey, Thread
from kata_pin.base.settings import REMOTE_PERCENT, MemoryMode
from kata_pin.base.values import NoteLevel, Provenance, ThreadRole
from kata_pin.engine.counters import MetricRow, Shown, readings
from kata_pin.engine.node import NodeWatch
from kata_pin.engine.sandboxes import Sandboxes
from kata_pin.linux.files import HostRoot
from kata_pin.linux.memory import allowed_nodes, free_memory, mappings, nodes_with_memory
from kata_pin.linux.process import is_alive
from kata_pin.records.history import NodeEvents
from kata_pin.rights.broker.pages import MAX_PAGES, PageWindow
from kata_pin.service.options import Core, Running

log = logging.getLogger(__name__)


# Which memory of a VMM should move to its vCPUs' NUMA nodes, where to, and when that ends: decided
# by pure functions.
#
# Only memory that a guest may have is moved: anonymous memory, memfd, /dev/shm and huge pages.
# Files such as libraries and Kata's image belong to every process that maps them. Where the VMM
# itself bound memory (numa(7): bind, interleave), its nodes were chosen, so that stays.

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


class MovePlan(Struct, frozen=True):
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


# One sandbox after another, window by window: at most so many bytes per second, and nothing while a
# hook or a pass waits. What a window moved is in the kernel, so nothing is recorded: after a
# restart of the daemon the rest is found again. A sandbox whose memory cannot be moved is left
# until its vCPUs run elsewhere, or for a long time.

MIB: Final = 1024 * 1024

WINDOW_S: Final = 10.0
"""Longest wait for one window; the kernel waits for every CPU in it."""

MAPS_S: Final = 30.0
"""Longest wait for what a VMM has mapped: some 1.5 TiB of small pages."""

PAUSE_S: Final = 0.25
"""Shortest time between two windows: each costs a work item of the kernel on every CPU."""

LOOK_S: Final = 0.05
"""Time between two looks whether passes have ended: they take milliseconds."""

PASSES_S: Final = 5.0
"""Longest wait for passes that no hook waits for: a VMM may cause them without end."""

AGAIN_S: Final = 600.0
"""When a sandbox is examined again whose memory could not be moved for a reason that may pass."""

NEAR_S: Final = 3600.0
"""The same where nothing was wrong: reading what it has mapped is not free."""

LONG_S: Final = 6 * 3600.0
"""The same after pages refused to move."""

ROUNDS: Final = 4
"""How often pages that did not move are tried, as long as others still do."""

REFUSALS: Final = 3
"""Windows in a row without a page that moved, after which a mapping is left."""

_WHY: Final = {
    EPERM: "not permitted: the broker needs CAP_SYS_NICE and CAP_SYS_PTRACE, and a system call "
    "filter that allows move_pages (run `kata-pin install` again)",
    EACCES: "its cpuset does not allow the node any more, or its process was not verified",
    ENODEV: "the node has no memory any more",
}


class MemoryGoal(NamedTuple):
    """Whose memory should be where: the VMM, its vCPUs' nodes, and those of its containers' mems.

    `mems` is empty where no container is confined.
    """

    process: ProcessKey
    near: CpuSet
    mems: CpuSet


@dataclass
class _Held:
    """A sandbox; `due` is when it is examined (CLOCK_MONOTONIC, seconds)."""

    goal: MemoryGoal
    view: Memory
    due: float = 0.0


class _Stop(Exception):  # noqa: N818 - not an error
    """A move ends here; `problem` is empty where the next one goes on."""

    def __init__(self, problem: str = "", rest_s: float = AGAIN_S) -> None:
        super().__init__(problem)
        self.problem = problem
        self.rest_s = rest_s


@dataclass
class MemoryMover(Running):
    """Observes passes, and moves memory in a task; it restores nothing."""

    _root: HostRoot
    _live: LiveConfig
    _node: NodeWatch
    _sandboxes: Sandboxes
    _containers: Callable[[str], tuple[Container, ...]]
    _events: NodeEvents
    _sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    _held: dict[str, _Held] = field(default_factory=dict)
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    moved_bytes: int = 0
    """Memory that was moved, of all sandboxes."""

    @property
    def migrates(self) -> bool:
        """Whether memory is moved at all."""
        return self._live.acts and self._live.now.memory is MemoryMode.MIGRATE

    @property
    def remote_bytes(self) -> int:
        """Memory that was far from its vCPUs when its sandbox was examined last."""
        return sum(one.view.remote_bytes or 0 for one in self._held.values())

    def passed(self, outcome: PassOutcome) -> None:
        """Note where a sandbox's vCPUs should be now; while they are not there, nothing changes."""
        vmm = self._sandboxes.known_vmm(outcome.sandbox_id)
        if not self.migrates or vmm is None or outcome.state == RELEASED:
            self._held.pop(outcome.sandbox_id, None)
            return
        topology = self._node.last.topology
        near = near_nodes(outcome.report.threads, outcome.report.placement, topology)
        held = self._held.get(outcome.sandbox_id)
        if near is None:
            return
        if not near or len(topology.distances) < 2:
            self._held.pop(outcome.sandbox_id, None)
            return
        goal = MemoryGoal(vmm.process, near, self._mems(outcome))
        if held is None or held.goal != goal:
            moved = held.view.moved_bytes if held is not None else 0
            view = Memory("waiting", str(near), None, moved, "")
            self._held[outcome.sandbox_id] = _Held(goal, view)
            self._wake.set()

    def ended(self, outcome: PassOutcome) -> None:
        """Forget a sandbox."""
        self._held.pop(outcome.sandbox_id, None)

    def facts(self, sandbox_id: str) -> Mapping[str, Any]:
        """Return where the memory of a sandbox is."""
        held = self._held.get(sandbox_id)
        if held is not None:
            return {"memory": held.view}
        return {"memory": Memory("waiting", "", None, 0, "") if self.migrates else None}

    def metrics(self) -> Iterable[Shown]:
        """Return how much was moved, and how much stays elsewhere."""
        return readings(METRICS, self) if self.migrates else ()

    def tasks(self) -> Iterator[Coroutine[object, object, None]]:
        """Yield what moves memory."""
        yield self.run()

    def notes(self, sandbox_id: str) -> Iterator[Note]:
        """Yield why memory of a sandbox stays far from its vCPUs."""
        held = self._held.get(sandbox_id)
        if held is not None and held.view.problem:
            text = f"memory stays on other NUMA nodes than its vCPUs: {held.view.problem}"
            yield Note("memory-remote", text, NoteLevel.WARNING)

    async def run(self) -> None:
        """Move what is due, one sandbox at a time, until cancelled."""
        while True:
            self._wake.clear()
            await self.round()
            now = time.monotonic()
            wait_s = min((one.due for one in self._held.values()), default=now + LONG_S) - now
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(PAUSE_S, wait_s)):
                    await self._wake.wait()

    async def round(self) -> None:
        """Move what is due now, one sandbox at a time."""
        for sandbox_id in list(self._held):
            held = self._held.get(sandbox_id)
            if held is not None and held.due <= time.monotonic() and self.migrates:
                await self._settle(sandbox_id, held)

    def _mems(self, outcome: PassOutcome) -> CpuSet:
        """Return the NUMA nodes that others gave containers memory of, empty if they did not.

        What our own allocator chose follows the pCPUs.
        """
        placement, found = outcome.report.placement, EMPTY
        claims = placement.mask.claims if placement is not None else ()
        ours = {one.container_id for one in claims if one.provenance is Provenance.ALLOCATOR}
        for one in self._containers(outcome.sandbox_id):
            if one.state.counts and one.mems and one.id not in ours:
                with contextlib.suppress(ParseError):
                    found |= CpuSet.parse(one.mems)
        return found

    async def _settle(self, sandbox_id: str, held: _Held) -> None:
        """Move a sandbox's memory as far as that goes; never raises."""
        began, before, rest_s = time.monotonic(), held.view.moved_bytes, AGAIN_S
        try:
            problem, rest_s = await self._planned_and_moved(sandbox_id, held)
        except KataPinError as error:
            problem = error.message
        except Exception as error:  # a fault barrier: other sandboxes are moved all the same
            log.error("sandbox %s: memory was not moved: %s", sandbox_id, reason_of(error))
            log.debug("sandbox %s: memory was not moved", sandbox_id, exc_info=True)
            problem = reason_of(error)
        was_moving = held.view.state == "moving"
        known = problem == held.view.problem
        held.view = replace(held.view, state="stopped" if problem else "near", problem=problem)
        held.due = time.monotonic() + rest_s
        moved = held.view.moved_bytes - before
        if was_moving or (problem and not known):
            self._events.report(
                NodeEventKind.MEMORY_MOVED if not problem else NodeEventKind.MEMORY_STAYS,
                "sandbox %s: %s of memory moved to NUMA node %s in %.0f s%s",
                sandbox_id,
                _mib(moved),
                str(held.goal.near),
                time.monotonic() - began,
                f"; the rest stays: {problem}" if problem else "",
                level=logging.WARNING if problem else logging.INFO,
                sandbox=sandbox_id,
            )

    async def _planned_and_moved(self, sandbox_id: str, held: _Held) -> tuple[str, float]:
        """Return why memory stays, empty if none does, and when to look again."""
        try:
            plan = await self._plan(sandbox_id, held)
            if plan.worthwhile:
                self._begin(sandbox_id, held, plan)
                return await self._move(sandbox_id, held, plan)
            if plan.bound * 10 >= plan.total and plan.bound:
                problem = (
                    f"the VMM itself placed {_mib(plan.bound)} there (policy {plan.policy}): see "
                    "host-nodes of its memory backends, numactl and enable_numa of Kata"
                )
                return problem, LONG_S
        except _Stop as stop:
            return stop.problem, stop.rest_s
        except TimeoutError:
            return f"process {held.goal.process.pid} does not answer in time", LONG_S
        except OSError as error:
            # a VMM that ends is the next pass's business; a zombie is refused as a stranger is
            gone = not is_alive(self._root, held.goal.process)
            return "" if gone else _WHY.get(error.errno or 0, reason_of(error)), AGAIN_S
        return "", NEAR_S

    def _begin(self, sandbox_id: str, held: _Held, plan: MovePlan) -> None:
        held.view = replace(held.view, state="moving", problem="")
        self._events.report(
            NodeEventKind.MEMORY_MOVING,
            "sandbox %s: moving %s of memory from NUMA node %s to %s, %d MiB per second at most",
            sandbox_id,
            _mib(plan.remote),
            str(plan.sources),
            str(held.goal.near),
            self._live.now.memory_rate_mib,
            level=logging.INFO,
            sandbox=sandbox_id,
        )

    async def _plan(self, sandbox_id: str, held: _Held) -> MovePlan:
        """Examine what a VMM has mapped; raises OSError, KataPinError, or _Stop."""
        goal, pid = held.goal, held.goal.process.pid
        allowed = allowed_nodes(self._root, pid) & nodes_with_memory(self._root)
        if not goal.near & allowed:
            raise _Stop(
                f"its cgroup's cpuset.mems allows NUMA node {allowed} alone: add {goal.near}, or "
                "let the kubelet align CPUs and memory (topologyManagerPolicy single-numa-node)"
            )
        if goal.mems and not goal.near & goal.mems:
            raise _Stop(
                f"its containers were given memory of NUMA node {goal.mems} (kubelet's memory "
                "manager, or the allocator), which is not changed"
            )
        allowed &= goal.mems or allowed
        placed, extents = await mappings(self._root, pid, MAPS_S)
        plan = await asyncio.to_thread(plan_moves, placed, extents, goal.near, allowed)
        self._require_held(sandbox_id, held)
        held.view = replace(held.view, remote_bytes=plan.remote + plan.bound)
        return plan

    async def _move(self, sandbox_id: str, held: _Held, plan: MovePlan) -> tuple[str, float]:
        """Move what a plan says, and again what refused; return why the rest stays, and a rest."""
        refused: Counter[int] = Counter()
        for _ in range(ROUNDS):
            before = held.view.moved_bytes
            refused.clear()
            short = ""
            for region in plan.regions:
                short = await self._move_region(sandbox_id, held, region, refused) or short
            plan = await self._plan(sandbox_id, held)
            if short:
                return short, AGAIN_S
            if plan.negligible:
                return "", NEAR_S
            if held.view.moved_bytes == before:
                break
        return f"{_mib(plan.remote)} cannot be moved: {why_refused(refused)}", LONG_S

    async def _move_region(
        self, sandbox_id: str, held: _Held, region: Region, refused: Counter[int]
    ) -> str:
        """Move one mapping's pages; return why that ended early. Raises OSError or _Stop."""
        address, in_vain = region.start, 0
        while address < region.end and in_vain < REFUSALS:
            await self._let_others()
            self._require_held(sandbox_id, held)
            rate = self._live.now.memory_rate_mib * MIB
            pages = min(MAX_PAGES, (region.end - address) // region.page_size)
            most = max(1, min(pages, rate // region.page_size))
            free = {node: free_memory(self._root, node) for node in region.nodes}
            aim = choose_node(region, free, most)
            if aim.problem:
                return aim.problem
            window = PageWindow(
                *held.goal.process, address, region.page_size, pages, aim.pages,
                frozenset(held.goal.near), aim.node, region.shared,
            )  # fmt: skip
            done = await self._root.calls.move_pages(window, WINDOW_S)
            moved = done.moved * region.page_size
            self.moved_bytes += moved
            view = held.view
            left = max(0, (view.remote_bytes or 0) - moved)
            held.view = replace(view, moved_bytes=view.moved_bytes + moved, remote_bytes=left)
            if done.refused:
                refused[done.errno] += done.refused
            in_vain = 0 if done.moved else in_vain + bool(done.refused)
            address += done.examined * region.page_size
            touched = done.moved or done.refused
            await self._sleep(max(PAUSE_S, moved / rate) if touched else 0)
        return ""

    def _require_held(self, sandbox_id: str, held: _Held) -> None:
        """Raise _Stop if a sandbox ended or has another goal by now, or nothing is moved at all."""
        if self._held.get(sandbox_id) is not held or not self.migrates:
            raise _Stop

    async def _let_others(self) -> None:
        """Wait until no hook waits for a pass, and for passes a while."""
        until = time.monotonic() + PASSES_S
        while self._sandboxes.any_awaited or (self._sandboxes.any_due and time.monotonic() < until):
            await self._sleep(LOOK_S)


def _mib(number: int) -> str:
    return f"{math.ceil(number / MIB)} MiB"


METRICS: Final[tuple[MetricRow[MemoryMover], ...]] = (
    MetricRow(
        "kata_pin_memory_moved_bytes_total",
        "Memory moved to the NUMA nodes of vCPUs.",
        lambda mover: mover.moved_bytes,
    ),
    MetricRow(
        "kata_pin_memory_remote_bytes",
        "Memory of sandboxes that was on other NUMA nodes than their vCPUs when last examined.",
        lambda mover: mover.remote_bytes,
    ),
)


def start(core: Core) -> MemoryMover:
    """Return the option at work."""
    containers = core.registry.containers
    return MemoryMover(core.root, core.live, core.node, core.sandboxes, containers, core.events)
