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
import math
import time
from collections.abc import Callable, Collection, Sequence
from copy import deepcopy
from functools import partial
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from kata_pin.base.cpuset import EMPTY, CpuSet
from kata_pin.base.errors import TaskGone
from kata_pin.base.placement import Action, ActionResult, Binding, Drift, Node, Report
from kata_pin.base.sandbox import Container, Sandbox, Thread, Vmm
from kata_pin.base.steps import Steps
from kata_pin.base.threads import ThreadKey
from kata_pin.base.values import Outcome, ThreadRole
from kata_pin.engine.node import NodeWatch
from kata_pin.engine.observe import ThreadFinder, VmmSearch
from kata_pin.engine.rounds import (
    FirstMasks,
    Round,
    after_actions,
    all_restored,
    obstacle_notes,
    undo_notes,
)
from kata_pin.engine.sandbox_cache import KataPinningReader, SandboxCache
from kata_pin.linux.affinity import apply_all
from kata_pin.linux.cgroups import CpusetReader
from kata_pin.linux.files import HostRoot
from kata_pin.linux.process import ProcessIndex
from kata_pin.linux.tasks import TaskReader
from kata_pin.placement import masks
from kata_pin.placement.drift import KataPinningMode, find_drift
from kata_pin.placement.masks import Allotment, nothing_allotted
from kata_pin.placement.notes import UNBOUND, note
from kata_pin.placement.place import are_placed_alike, place, without_gains
from kata_pin.placement.place import pairs as pairs_of
from kata_pin.records.pins import Pins
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


class Engine(Struct, frozen=True):
    """Runs passes.

    `_index` is the process table that `_threads` and `search` use. `_allot` first lets the
    allocator decide about new containers, `_granted` only returns what it has granted so far.
    `_beside` returns what other sandboxes have exclusively.
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
    _beside: Callable[[str, Node], CpuSet] = lambda _id, _node: EMPTY

    def forget(self, sandbox_id: str) -> None:
        """Drop what is remembered of a sandbox that ended."""
        self.search.forget(sandbox_id)
        self._kata_pinning.forget(sandbox_id)

    def believed(
        self, containers: Sequence[Container], cache: SandboxCache
    ) -> tuple[Container, ...]:
        """Return the containers with the cpusets that passes use."""
        kubelet = self._node.kubelet
        return masks.resolve_cpusets(containers, kubelet=kubelet, configured=cache.configured)

    async def find(
        self, sandbox_id: str, containers: Sequence[Container], cache: SandboxCache
    ) -> Vmm | None:
        """Return the sandbox's VMM as of now, which the next pass need not find again."""
        asked = time.monotonic()
        await self.search.prepare(sandbox_id, containers, cache.vmm)
        self._index.refresh(since=asked)
        cache.vmm, cache.problem = self.search.find(sandbox_id, containers, cache.vmm)
        return cache.vmm

    def steps(
        self,
        sandbox_id: str,
        containers: Sequence[Container],
        cache: SandboxCache,
        *,
        act: bool,
        release: bool = False,
        foreseen: bool = False,
        threads_only: bool = False,
        as_of: float = math.inf,
    ) -> Steps[Report]:
        """Run a pass over one sandbox, which sets what differs if `act`; return its report.

        `release` restores every affinity instead (D18). `foreseen`: the allocator decides nothing.
        `threads_only`: processes are as they were in the pass before, if that placed the sandbox.
        `as_of`: the process table is recent enough if it was read after this (CLOCK_MONOTONIC).
        Threads that exit meanwhile are left out; a VMM that is not found is a report without
        threads, `cache.problem` says why.
        """
        started = time.perf_counter_ns()
        cache.passing = True
        cache.same_processes = threads_only and cache.report is not None and cache.report.all_placed
        try:
            if not cache.same_processes and not self.search.is_without(sandbox_id):
                self._index.refresh(since=as_of)
            cache.vmm, cache.problem = self.search.find(sandbox_id, containers, cache.vmm)
            cache.configured = self._configured(sandbox_id, containers, cache)
            containers = self.believed(containers, cache)
            node, allotment = self._node.current(), nothing_allotted(containers)
            if not release and cache.vmm is not None:  # containers of other runtimes come here too
                allotment = self._granted(containers) if foreseen else self._allot(containers)
            sandbox = Sandbox(sandbox_id, allotment.containers, cache.vmm)
            try:
                report = yield from self._observe_and_act(
                    sandbox, node, allotment, cache, act=act, release=release
                )
            except TaskGone as gone:
                cache.vmm, cache.problem = None, f"the VMM exited during the pass ({gone})"
                report = Report(sandbox_id=sandbox_id)
        finally:
            cache.passing = False
        report = replace(report, duration_ns=time.perf_counter_ns() - started)
        cache.report, cache.checked_at = report, time.monotonic()
        return report

    def saw_all(self, sandbox_id: str, cache: SandboxCache) -> bool:
        """Whether the pass that has ended saw every thread and helper that there is by now."""
        self._index.refresh()
        try:
            return self._threads.saw_all(sandbox_id, cache)
        except TaskGone:
            return False

    def foresee(
        self,
        sandbox_id: str,
        containers: Sequence[Container],
        cache: SandboxCache,
        trial: Binding | None = None,
    ) -> Steps[Report]:
        """Return what a pass would decide now; sets nothing and changes nothing of `cache`.

        `trial` is a binding that it goes by, in place of the one that holds.
        """
        copied = replace(
            cache,
            roles=deepcopy(cache.roles),
            tasks=TaskReader(),
            other_writers=deepcopy(cache.other_writers),
            trial=trial,
        )
        return self.steps(sandbox_id, containers, copied, act=False, foreseen=True)

    def _configured(
        self, sandbox_id: str, containers: Sequence[Container], cache: SandboxCache
    ) -> CpuSet:
        """Return the cpuset written to the sandbox's cgroup, where a record needs it."""
        if cache.vmm is None or not any(masks.is_stale(one) for one in containers):
            return EMPTY
        return self._written(sandbox_id, cache.vmm, cache.report.threads if cache.report else ())

    def _written(self, sandbox_id: str, vmm: Vmm, threads: Sequence[Thread]) -> CpuSet:
        """Return the cpuset configured for the sandbox's cgroup, EMPTY where none is known.

        That is the cgroup of vCPU threads, where they are known, or the VMM's: with version 1 Kata
        moves vCPU threads only. Its name contains the sandbox's id.
        """
        vcpus = [one.key for one in threads if one.role.role is ThreadRole.VCPU]
        pid = vmm.process.pid
        tgid, tid = (vcpus[0].tgid, vcpus[0].tid) if vcpus else (pid, pid)
        try:
            reader = CpusetReader(self._root, self._node.cgroup_mounts)
            cgroup, cpus = reader.configured(tgid, tid)
        except TaskGone:
            return EMPTY
        return cpus if sandbox_id in cgroup else EMPTY

    def _observe_and_act(
        self,
        sandbox: Sandbox,
        node: Node,
        allotment: Allotment,
        cache: SandboxCache,
        *,
        act: bool,
        release: bool,
    ) -> Steps[Report]:
        """Observe and apply until no new thread appears and nothing is left to set."""
        observe = partial(self._observe, sandbox, node, allotment, cache, release=release)
        given, pool = allotment.allocated, allotment.pool
        if sandbox.vmm is None:
            placement = yield from place(
                sandbox, (), node, allocated=given, pool=pool, released=release
            )
            return Report(sandbox_id=sandbox.id, placement=placement)
        seen = yield from observe(sandbox.vmm)
        now = time.monotonic()
        backed_off = cache.other_writers.backed_off(now)
        drifts = _drifts(seen, cache.report, backed_off)
        yield
        results: dict[ThreadKey, ActionResult] = {}
        mounts, free = self._node.cgroup_mounts, node.release_mask
        first = FirstMasks(self._root, mounts, sandbox, free, cache.kata, cache.report)
        rounds = 1
        ended = self._end_binding(seen, (), act=act)
        while act and (actions := seen.plan(backed_off, cache.other_writers.asked)):
            self._remember(seen, first)
            done = yield from self._apply(actions, cache.tasks)
            results |= {one.action.key: one for one in done}
            cache.other_writers.applied(done)
            if why := self._end_binding(seen, done, act=act):
                ended = why  # the next round undoes what was set of it
                seen = yield from observe(sandbox.vmm)
                continue
            seen.threads = after_actions(seen.threads, done)
            settled = not any(one.outcome in _AGAIN for one in done)
            last = rounds == MAX_ROUNDS or len(seen.threads) > MAX_THREADS
            if last or (settled and self._threads.has_all(seen.threads, sandbox.vmm)):
                break
            rounds += 1
            seen = yield from observe(sandbox.vmm)
        if (
            act
            and seen.released
            and all_restored(seen, results)
            and self._threads.has_all(seen.threads, sandbox.vmm)
        ):
            self._pins.keep(sandbox.id, pairs={}, first_seen={})
        elif act and not results:
            self._remember(seen, first)  # the pins of a daemon before, or vCPUs left to Kata
        early, cache.confined = {one.action.key: one for one in cache.confined}, []
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
            results=tuple({**early, **results}.values()),
            notes=(
                *seen.notes,
                *obstacle_notes(
                    results.values(), backed_off, cache.other_writers, now, cache.tasks.left_out
                ),
                *(undo_notes(seen, free) if act and release else ()),
                *((note(UNBOUND, why=ended),) if ended else ()),
            ),
            rounds=rounds,
        )

    def _end_binding(self, seen: Round, done: Sequence[ActionResult], *, act: bool) -> str:
        """Forget a binding that cannot be applied whole, and return why; empty if it holds."""
        why = seen.failed_binding(done) if act else ""
        if why:
            self._pins.bind(seen.placement.sandbox_id, None)
        return why

    def _apply(self, actions: Sequence[Action], reader: TaskReader) -> Steps[list[ActionResult]]:
        """Apply actions, so many at a time that no tid can be used again meanwhile (D5)."""
        done: list[ActionResult] = []
        for start in range(0, len(actions), MAX_AT_ONCE):
            done += apply_all(self._root, actions[start : start + MAX_AT_ONCE], reader)
            yield
        return done

    def _observe(
        self,
        sandbox: Sandbox,
        node: Node,
        allotment: Allotment,
        cache: SandboxCache,
        vmm: Vmm,
        *,
        release: bool,
    ) -> Steps[Round]:
        """Read the threads and decide where they should run."""
        threads = yield from self._threads.find(sandbox.id, vmm, cache)
        yield
        pairs = self._pins.pairs(sandbox.id)
        first_seen = self._pins.first_seen(sandbox.id)
        cache.kata = self._kata_pinning.of(sandbox.id, sandbox.containers, vmm)
        if cache.kata.mode is KataPinningMode.COUNT:
            cache.kata = replace(cache.kata, written=self._written(sandbox.id, vmm, threads))
        has_cpuset = any(one.cpus for one in sandbox.containers)
        binding = None if release else self._binding(sandbox.id, cache)
        beside = EMPTY if has_cpuset and binding is None else self._beside(sandbox.id, node)
        given = allotment.allocated, allotment.pool, allotment.others, beside, binding
        inputs = (sandbox.decisive, node, pairs, first_seen, given, cache.kata, release)
        before = cache.decided
        if (
            before is not None
            and before[0] == inputs
            and are_placed_alike(before[1], threads, node.topology, before[2], pairs)
        ):
            placement = before[2]
        else:
            yield
            placement = yield from place(
                sandbox,
                threads,
                node,
                kept=pairs,
                first_seen=first_seen,
                allocated=allotment.allocated,
                pool=allotment.pool,
                others=allotment.others,
                beside=beside,
                kata=cache.kata,
                released=release,
                binding=binding,
            )
            yield
        cache.decided = inputs, threads, placement
        decided = Round(threads, placement, pairs, first_seen)
        if cache.others is None:
            return decided
        limited = without_gains(decided.placement, threads, pairs, cache.others)
        return Round(threads, limited[0], pairs, first_seen, limited[1])

    def _binding(self, sandbox_id: str, cache: SandboxCache) -> Binding | None:
        """Return the CPUs that an administrator named, while their time has not ended."""
        binding = cache.trial or self._pins.binding(sandbox_id)
        until = None if binding is None else binding.until_ns
        ended = until is not None and time.clock_gettime_ns(time.CLOCK_BOOTTIME) >= until
        return None if ended else binding

    def _remember(self, seen: Round, first: FirstMasks) -> None:
        """Store the new pairs, and what a release restores, before anything is pinned."""
        pairs, first_seen = pairs_of(seen.placement), first.of(seen)
        if seen.placement.binding is not None:  # its end brings the pairs before it back
            alive = {one.key for one in seen.threads}
            pairs = {key: cpu for key, cpu in seen.pairs.items() if key in alive}
        if (pairs, first_seen) != (seen.pairs, seen.first_seen):
            self._pins.keep(seen.placement.sandbox_id, pairs=pairs, first_seen=first_seen)


def _drifts(
    seen: Round, last: Report | None, backed_off: Collection[ThreadKey]
) -> tuple[Drift, ...]:
    """Return what differs; before the first pass only threads that were pinned can have drifted."""
    known: Collection[ThreadKey] | None = None if seen.first_seen else ()
    before = None
    if last is not None:
        known = {thread.key for thread in last.threads}
        before = last.placement.desired if last.placement is not None else {}
    return find_drift(
        seen.placement, seen.threads, known=known, before=before, backed_off=backed_off
    )
