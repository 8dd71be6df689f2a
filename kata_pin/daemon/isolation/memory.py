"""Moves the memory of sandboxes to the NUMA nodes of their vCPUs, with `memory: migrate`.

One sandbox after another, window by window: at most so many bytes per second, and nothing while a
hook or a pass waits. What a window moved is in the kernel, so nothing is recorded: after a restart
of the daemon the rest is found again. A sandbox whose memory cannot be moved is left until its
vCPUs run elsewhere, or for a long time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from errno import EACCES, ENODEV, EPERM
from typing import Final, NamedTuple

from kata_pin.broker.pages import MAX_PAGES, PageWindow
from kata_pin.daemon.live_config import LiveConfig
from kata_pin.daemon.reconcile.node import NodeWatch
from kata_pin.daemon.reconcile.sandboxes import Sandboxes
from kata_pin.daemon.store.node_events import NodeEvents
from kata_pin.errors import KataPinError, ParseError, reason_of
from kata_pin.host.memory import allowed_nodes, free_memory, mappings, nodes_with_memory
from kata_pin.host.process import is_alive
from kata_pin.host.root import HostRoot
from kata_pin.model.cpuset import EMPTY, CpuSet
from kata_pin.model.pass_outcome import RELEASED, PassOutcome
from kata_pin.model.placement import Note, NoteLevel, Provenance
from kata_pin.model.reports.history import NodeEventKind
from kata_pin.model.reports.sandbox import Memory
from kata_pin.model.sandbox import Container
from kata_pin.model.settings import MemoryMode
from kata_pin.model.thread import ProcessKey
from kata_pin.policy.memory import (
    MovePlan,
    Region,
    choose_node,
    near_nodes,
    pages_in,
    plan_moves,
    why_refused,
)

log = logging.getLogger(__name__)

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


class Goal(NamedTuple):
    """Whose memory should be where: the VMM, its vCPUs' nodes, and those of its containers' mems.

    `mems` is empty where no container is confined.
    """

    process: ProcessKey
    near: CpuSet
    mems: CpuSet


@dataclass
class _Held:
    """A sandbox; `due` is when it is examined (CLOCK_MONOTONIC, seconds)."""

    goal: Goal
    view: Memory
    due: float = 0.0


class _Stop(Exception):  # noqa: N818 - not an error
    """A move ends here; `problem` is empty where the next one goes on."""

    def __init__(self, problem: str = "", rest_s: float = AGAIN_S) -> None:
        super().__init__(problem)
        self.problem = problem
        self.rest_s = rest_s


@dataclass
class MemoryMover:
    """An observer of passes, and a task that moves."""

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
        goal = Goal(vmm.process, near, self._mems(outcome))
        if held is None or held.goal != goal:
            moved = held.view.moved_bytes if held is not None else 0
            view = Memory("waiting", str(near), None, moved, "")
            self._held[outcome.sandbox_id] = _Held(goal, view)
            self._wake.set()

    def ended(self, outcome: PassOutcome) -> None:
        """Forget a sandbox."""
        self._held.pop(outcome.sandbox_id, None)

    def failed(self, operation: str, error: Exception) -> None:
        """Keep what the former pass left."""

    def seen(self, sandbox_id: str) -> Memory | None:
        """Return what the state document says of a sandbox."""
        held = self._held.get(sandbox_id)
        if held is not None:
            return held.view
        return Memory("waiting", "", None, 0, "") if self.migrates else None

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
        began, before, plan = time.monotonic(), held.view.moved_bytes, MovePlan()
        problem, rest_s = "", AGAIN_S
        try:
            plan = await self._plan(sandbox_id, held)
            if plan.worthwhile:
                self._begin(sandbox_id, held, plan)
                problem, rest_s = await self._move(sandbox_id, held, plan)
            elif plan.bound * 10 >= plan.total and plan.bound:
                problem = (
                    f"the VMM itself placed {_mib(plan.bound)} there (policy {plan.policy}): see "
                    "host-nodes of its memory backends, numactl and enable_numa of Kata"
                )
                rest_s = LONG_S
            else:
                rest_s = NEAR_S
        except _Stop as stop:
            problem, rest_s = stop.problem, stop.rest_s
        except TimeoutError:
            problem, rest_s = f"process {held.goal.process.pid} does not answer in time", LONG_S
        except OSError as error:
            # a VMM that ends is the next pass's business; a zombie is refused as a stranger is
            gone = not is_alive(self._root, held.goal.process)
            problem = "" if gone else _WHY.get(error.errno or 0, reason_of(error))
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
            most = pages_in(region.page_size, rate, pages)
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
