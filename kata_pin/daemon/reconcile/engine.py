"""One pass over one sandbox: observe, decide, act, read back, report (D1, D2).

Affinities are read from the kernel in each pass; a SandboxCache keeps only what cannot change while
a thread lives, or what makes the next pass cheaper. No timers, no sockets, no tasks: the daemon
calls it from supervisors, the command line calls it once.

The threads of one sandbox may be thousands, so a pass runs in steps, between which other sandboxes
are served. What it saw at first may have changed at its end: `has_all` looks for new threads, and
whatever else changes asks for the next pass.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Final

from kata_pin.daemon.reconcile.kata_pinning import KataPinningReader
from kata_pin.daemon.reconcile.node import NodeWatch
from kata_pin.daemon.reconcile.rounds import (
    Round,
    after_actions,
    all_restored,
    crowd_notes,
    first_masks,
    obstacle_notes,
)
from kata_pin.daemon.reconcile.sandbox_cache import SandboxCache
from kata_pin.daemon.reconcile.thread_finder import ThreadFinder
from kata_pin.daemon.reconcile.vmm_search import VmmSearch
from kata_pin.daemon.store.pins import Pins
from kata_pin.errors import TaskGone
from kata_pin.host.affinity import apply_all
from kata_pin.host.cpuset import CpusetReader
from kata_pin.host.process import ProcessIndex
from kata_pin.host.root import HostRoot
from kata_pin.host.tasks import TaskReader
from kata_pin.model.cpuset import EMPTY, CpuSet
from kata_pin.model.node import Node
from kata_pin.model.placement import (
    Action,
    ActionResult,
    Drift,
    Outcome,
    Report,
)
from kata_pin.model.sandbox import Container, Sandbox, Vmm
from kata_pin.model.steps import Steps, finish
from kata_pin.model.thread import ThreadKey, ThreadRole
from kata_pin.policy.alloc.allotment import Allotment, nothing_allotted
from kata_pin.policy.placement import precedence
from kata_pin.policy.placement.cautious import without_gains
from kata_pin.policy.placement.drift import find_drift
from kata_pin.policy.placement.place import pairs as pairs_of
from kata_pin.policy.placement.place import place, place_in_steps, relevant
from kata_pin.vmm.roles import MAX_THREADS

log = logging.getLogger(__name__)

MAX_ROUNDS: Final = 5
"""Rounds of one pass: new threads or a cpuset that changed meanwhile need another round.

A sandbox with more than MAX_THREADS gets one round, so that the others get their passes.
"""

MAX_AT_ONCE: Final = 512
"""Threads whose affinity is set without a pause, between two listings of their process."""

_AGAIN: Final = frozenset({Outcome.CLIPPED, Outcome.REFUSED})

Allot = Callable[[Sequence[Container]], Allotment]
"""Returns what our own allocator gave to a sandbox's containers."""


@dataclass(frozen=True)
class Engine:
    """Runs passes.

    `_index` is the process table that `_threads` and `search` use. `_allot` first lets the
    allocator decide about new containers, `_granted` only returns what it has granted so far.
    """

    _root: HostRoot
    _node: NodeWatch
    _pins: Pins
    _index: ProcessIndex
    _threads: ThreadFinder
    search: VmmSearch
    _kata_pinning: KataPinningReader
    _allot: Allot = nothing_allotted
    _granted: Allot = nothing_allotted

    def node(self) -> Node:
        """Return the node's facts as of now."""
        return self._node.current()

    def forget(self, sandbox_id: str) -> None:
        """Drop what is remembered of a sandbox that ended."""
        self.search.forget(sandbox_id)
        self._kata_pinning.forget(sandbox_id)

    def believed(
        self, containers: Sequence[Container], cache: SandboxCache
    ) -> tuple[Container, ...]:
        """Return the containers with the cpusets that passes use."""
        kubelet = self._node.kubelet
        return precedence.settled(containers, kubelet=kubelet, configured=cache.configured)

    async def find(
        self, sandbox_id: str, containers: Sequence[Container], cache: SandboxCache
    ) -> Vmm | None:
        """Return the sandbox's VMM as of now; sets nothing."""
        await self.search.prepare(sandbox_id, containers, cache.vmm)
        self._index.refresh()
        vmm, _ = self.search.find(sandbox_id, containers, cache.vmm)
        return vmm

    def run(
        self,
        sandbox_id: str,
        containers: Sequence[Container],
        cache: SandboxCache,
        *,
        act: bool,
        release: bool = False,
        foreseen: bool = False,
    ) -> Report:
        """Run a pass over one sandbox at once; see `steps`."""
        return finish(
            self.steps(sandbox_id, containers, cache, act=act, release=release, foreseen=foreseen)
        )

    def steps(
        self,
        sandbox_id: str,
        containers: Sequence[Container],
        cache: SandboxCache,
        *,
        act: bool,
        release: bool = False,
        foreseen: bool = False,
    ) -> Steps[Report]:
        """Run a pass over one sandbox, which sets what differs if `act`; return its report.

        `release` restores every affinity instead (D18). `foreseen`: the allocator decides nothing.
        Threads that exit meanwhile are left out; a VMM that is not found is a report without
        threads, `cache.problem` says why.
        """
        started = time.perf_counter_ns()
        cache.passing = True
        try:
            report = yield from self._pass(
                sandbox_id, containers, cache, act=act, release=release, foreseen=foreseen
            )
        finally:
            cache.passing = False
        report = replace(report, duration_ns=time.perf_counter_ns() - started)
        cache.report, cache.checked_at = report, time.monotonic()
        return report

    def _pass(
        self,
        sandbox_id: str,
        containers: Sequence[Container],
        cache: SandboxCache,
        *,
        act: bool,
        release: bool,
        foreseen: bool,
    ) -> Steps[Report]:
        self._index.refresh()
        cache.vmm, cache.problem = self.search.find(sandbox_id, containers, cache.vmm)
        cache.configured = self._configured(sandbox_id, containers, cache)
        containers = self.believed(containers, cache)
        node, allotment = self._node.current(), nothing_allotted(containers)
        if release:
            node, allotment = replace(node, kubelet=None), Allotment()
        elif cache.vmm is not None:  # containers of other runtimes come here too
            allotment = self._granted(containers) if foreseen else self._allot(containers)
        sandbox = Sandbox(sandbox_id, allotment.containers, cache.vmm)
        try:
            return (yield from self._observe_and_act(sandbox, node, allotment, cache, act=act))
        except TaskGone as gone:
            cache.vmm, cache.problem = None, f"the VMM exited during the pass ({gone})"
            return Report(sandbox_id=sandbox_id)

    def foresee(
        self, sandbox_id: str, containers: Sequence[Container], cache: SandboxCache
    ) -> Steps[Report]:
        """Return what a pass would decide now; sets nothing and changes nothing of `cache`."""
        copied = replace(
            cache,
            roles=deepcopy(cache.roles),
            tasks=TaskReader(),
            other_writers=deepcopy(cache.other_writers),
        )
        return self.steps(sandbox_id, containers, copied, act=False, foreseen=True)

    def _configured(
        self, sandbox_id: str, containers: Sequence[Container], cache: SandboxCache
    ) -> CpuSet:
        """Return the cpuset configured for the sandbox's cgroup, EMPTY where it is not needed.

        That is the cgroup of vCPU threads, known from the previous pass, or the VMM's: with version
        1 Kata moves vCPU threads only. Its name contains the sandbox's id.
        """
        if cache.vmm is None or not any(precedence.is_stale(one) for one in containers):
            return EMPTY
        threads = cache.report.threads if cache.report else ()
        vcpus = [one.key for one in threads if one.role.role is ThreadRole.VCPU]
        pid = cache.vmm.process.pid
        tgid, tid = (vcpus[0].tgid, vcpus[0].tid) if vcpus else (pid, pid)
        try:
            reader = CpusetReader(self._root, self._node.cgroup_mounts)
            cgroup, cpus = reader.configured(tgid, tid)
        except TaskGone:
            return EMPTY
        return cpus if sandbox_id in cgroup else EMPTY

    def _observe_and_act(
        self, sandbox: Sandbox, node: Node, allotment: Allotment, cache: SandboxCache, *, act: bool
    ) -> Steps[Report]:
        """Observe and apply until no new thread appears and nothing is left to set."""
        given, pool = allotment.allocated, allotment.pool
        if sandbox.vmm is None:
            placement = place(sandbox, (), node, allocated=given, pool=pool)
            return Report(sandbox_id=sandbox.id, placement=placement)
        seen = yield from self._observe(sandbox, sandbox.vmm, node, allotment, cache)
        now = time.monotonic()
        backed_off = cache.other_writers.backed_off(now)
        drifts = _drifts(seen, cache.report, backed_off)
        yield
        results: dict[ThreadKey, ActionResult] = {}
        rounds = 1
        while act and (actions := seen.plan(backed_off, cache.other_writers.asked)):
            self._remember(seen, node.release_mask)
            done = yield from self._apply(actions, cache.tasks)
            results |= {one.action.key: one for one in done}
            cache.other_writers.clipped(done)
            seen.threads = after_actions(seen.threads, done)
            settled = not any(one.outcome in _AGAIN for one in done)
            last = rounds == MAX_ROUNDS or len(seen.threads) > MAX_THREADS
            if last or (settled and self._threads.has_all(seen.threads, sandbox.vmm)):
                break
            rounds += 1
            seen = yield from self._observe(sandbox, sandbox.vmm, node, allotment, cache)
        if (
            act
            and seen.released
            and all_restored(seen, results, backed_off)
            and self._threads.has_all(seen.threads, sandbox.vmm)
        ):
            self._pins.keep(sandbox.id, pairs={}, first_seen={})
        yield
        alive = {t.key for t in seen.threads}
        cache.roles.prune()
        cache.other_writers.keep_only(alive)
        if act:
            cache.other_writers.given(seen.placement, seen.threads)
        return Report(
            sandbox_id=sandbox.id,
            threads=tuple(seen.threads),
            placement=seen.placement,
            drifts=drifts,
            results=tuple(results.values()),
            notes=(
                *seen.notes,
                *obstacle_notes(results.values(), backed_off, cache.other_writers, now),
                *crowd_notes(cache.tasks.left_out),
            ),
            rounds=rounds,
        )

    def _apply(self, actions: Sequence[Action], reader: TaskReader) -> Steps[list[ActionResult]]:
        """Apply actions, so many at a time that no tid can be used again meanwhile (D5)."""
        done: list[ActionResult] = []
        for start in range(0, len(actions), MAX_AT_ONCE):
            done += apply_all(self._root, actions[start : start + MAX_AT_ONCE], reader)
            yield
        return done

    def _observe(
        self, sandbox: Sandbox, vmm: Vmm, node: Node, allotment: Allotment, cache: SandboxCache
    ) -> Steps[Round]:
        """Read the threads and decide where they should run."""
        threads = yield from self._threads.find(sandbox.id, vmm, cache)
        yield
        pairs = self._pins.pairs(sandbox.id)
        first_seen = self._pins.first_seen(sandbox.id)
        cache.kata = self._kata_pinning.of(sandbox.id, sandbox.containers, vmm)
        parts = relevant(threads, node.topology)
        inputs = (sandbox, parts, node, pairs, first_seen, allotment, cache.kata)
        if cache.decided is None or cache.decided[0] != inputs:
            yield
            placement = yield from place_in_steps(
                sandbox,
                threads,
                node,
                kept=pairs,
                first_seen=first_seen,
                allocated=allotment.allocated,
                pool=allotment.pool,
                others=allotment.others,
                kata=cache.kata,
            )
            cache.decided = inputs, placement
            yield
        decided = Round(threads, cache.decided[1], pairs, first_seen)
        if cache.others is None:
            return decided
        limited = without_gains(decided.placement, threads, pairs, cache.others)
        return Round(threads, limited[0], pairs, first_seen, limited[1])

    def _remember(self, seen: Round, free: CpuSet) -> None:
        """Store the new pairs, and what a release restores, before anything is pinned.

        `free` is the affinity of an unconfined thread.
        """
        pairs = pairs_of(seen.placement)
        if seen.first_seen and pairs == seen.pairs:
            return
        first_seen = seen.first_seen or first_masks(seen.threads, free)
        self._pins.keep(seen.placement.sandbox_id, pairs=pairs, first_seen=first_seen)


def _drifts(
    seen: Round, last: Report | None, backed_off: Collection[ThreadKey]
) -> tuple[Drift, ...]:
    """Return what differs; before the first pass only threads that were pinned can have drifted."""
    if last is None:
        known = None if seen.first_seen else ()
        return find_drift(seen.placement, seen.threads, known=known, backed_off=backed_off)
    return find_drift(
        seen.placement,
        seen.threads,
        known={thread.key for thread in last.threads},
        before=last.placement.desired if last.placement is not None else {},
        backed_off=backed_off,
    )
