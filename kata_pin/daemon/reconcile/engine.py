"""One pass over one sandbox: observe, decide, act, read back, report (D1, D2).

Affinities are read from the kernel in each pass; a SandboxCache keeps only what cannot change while
a thread lives, or what makes the next pass cheaper. No timers, no sockets, no tasks: the daemon
calls it from supervisors, the command line calls it once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Final

from kata_pin.daemon.reconcile.kata_pinning import KataPinningReader
from kata_pin.daemon.reconcile.node import NodeWatch
from kata_pin.daemon.reconcile.other_writers import OtherWriters
from kata_pin.daemon.reconcile.sandbox_cache import SandboxCache
from kata_pin.daemon.reconcile.thread_finder import ThreadFinder
from kata_pin.daemon.store.pins import Pins
from kata_pin.errors import TaskGone, VmmError
from kata_pin.host.affinity import apply_all
from kata_pin.host.cpuset import CpusetReader
from kata_pin.host.process import ProcessIndex, is_alive
from kata_pin.host.root import HostRoot
from kata_pin.host.tasks import TaskReader
from kata_pin.model.count_noun import count
from kata_pin.model.cpuset import EMPTY, CpuSet
from kata_pin.model.node import Node
from kata_pin.model.placement import (
    Action,
    ActionResult,
    Note,
    NoteLevel,
    Outcome,
    Placement,
    Report,
)
from kata_pin.model.sandbox import Container, Sandbox, Vmm
from kata_pin.model.thread import Thread, ThreadKey, ThreadRole
from kata_pin.policy.alloc.allotment import Allotment, nothing_allotted
from kata_pin.policy.placement import precedence
from kata_pin.policy.placement.drift import find_drift, make_plan
from kata_pin.policy.placement.place import pairs as pairs_of
from kata_pin.policy.placement.place import place, relevant
from kata_pin.policy.placement.release import undo
from kata_pin.vmm.find import VmmFinder
from kata_pin.vmm.roles import MAX_THREADS

log = logging.getLogger(__name__)

MAX_ROUNDS: Final = 5
"""Rounds of one pass: new threads or a cpuset that changed meanwhile need another round.

A sandbox with more than MAX_THREADS gets one round, so that the others get their passes.
"""

_AGAIN: Final = frozenset({Outcome.CLIPPED, Outcome.REFUSED})
_GONE: Final = frozenset({Outcome.GONE, Outcome.REUSED})
_NOT_RESTORED: Final = frozenset({Outcome.CLIPPED, Outcome.REFUSED, Outcome.DENIED})

Allot = Callable[[Sequence[Container]], Allotment]
"""Returns what our own allocator gave to a sandbox's containers."""


@dataclass(frozen=True)
class Engine:
    """Runs passes.

    `_index` is the process table that `_threads` and `_finder` use. `_allot` first lets the
    allocator decide about new containers, `_granted` only returns what it has granted so far.
    """

    _root: HostRoot
    _node: NodeWatch
    _pins: Pins
    _index: ProcessIndex
    _threads: ThreadFinder
    _finder: VmmFinder
    _kata_pinning: KataPinningReader
    _allot: Allot = nothing_allotted
    _granted: Allot = nothing_allotted

    def node(self) -> Node:
        """Return the node's facts as of now."""
        return self._node.current()

    def forget(self, sandbox_id: str) -> None:
        """Drop what is remembered of a sandbox that ended."""
        self._kata_pinning.forget(sandbox_id)

    def runs_without_vmm(self, containers: Iterable[Container]) -> bool:
        """Whether the hooks' pids show that another runtime than Kata runs these containers.

        Kata's hooks report the VMM's pid or a thread of its shim (with both runtimes); those of
        runc and crun the container's first process. False if those processes are gone.
        """
        hints = {one.pid_hint for one in containers if one.pid_hint}
        answers = [self._finder.is_kata(pid) for pid in hints]
        return bool(answers) and all(answer is False for answer in answers)

    def is_claimed(self, sandbox_id: str, containers: Iterable[Container]) -> bool:
        """Whether a process says that it is the sandbox's VMM, although it is not accepted."""
        hints = [one.pid_hint for one in containers if one.pid_hint]
        return self._finder.is_claimed(sandbox_id, hints)

    def believed(
        self, containers: Sequence[Container], cache: SandboxCache
    ) -> tuple[Container, ...]:
        """Return the containers with the cpusets that passes use."""
        kubelet = self._node.kubelet
        return precedence.settled(containers, kubelet=kubelet, configured=cache.configured)

    def find(
        self, sandbox_id: str, containers: Sequence[Container], cache: SandboxCache
    ) -> Vmm | None:
        """Return the sandbox's VMM as of now; sets nothing."""
        self._index.refresh()
        vmm, _ = self._find(sandbox_id, containers, cache)
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
        """Run a pass over one sandbox, which sets what differs if `act`; return its report.

        `release` restores every affinity instead (D18). `foreseen`: the allocator decides nothing.
        Threads that exit meanwhile are left out; a VMM that is not found is a report without
        threads, `cache.problem` says why.
        """
        started = time.perf_counter_ns()
        self._index.refresh()
        cache.vmm, cache.problem = self._find(sandbox_id, containers, cache)
        cache.configured = self._configured(sandbox_id, containers, cache)
        containers = self.believed(containers, cache)
        node, allotment = self._node.current(), nothing_allotted(containers)
        if release:
            node, allotment = replace(node, kubelet=None), Allotment()
        elif cache.vmm is not None:  # containers of other runtimes come here too
            allotment = self._granted(containers) if foreseen else self._allot(containers)
        sandbox = Sandbox(sandbox_id, allotment.containers, cache.vmm)
        try:
            report = self._observe_and_act(sandbox, node, allotment, cache, act=act)
        except TaskGone as gone:
            cache.vmm, cache.problem = None, f"the VMM exited during the pass ({gone})"
            report = Report(sandbox_id=sandbox_id)
        report = replace(report, duration_ns=time.perf_counter_ns() - started)
        cache.report, cache.checked_at = report, time.monotonic()
        return report

    def foresee(
        self, sandbox_id: str, containers: Sequence[Container], cache: SandboxCache
    ) -> Report:
        """Return what a pass would decide now; sets nothing and changes nothing of `cache`."""
        copied = replace(
            cache,
            roles=deepcopy(cache.roles),
            tasks=TaskReader(),
            other_writers=deepcopy(cache.other_writers),
        )
        return self.run(sandbox_id, containers, copied, act=False, foreseen=True)

    def _find(
        self, sandbox_id: str, containers: Sequence[Container], cache: SandboxCache
    ) -> tuple[Vmm | None, str]:
        """Return the VMM, the known one while it lives, or why there is none."""
        if cache.vmm is not None and is_alive(self._root, cache.vmm.process):
            process = self._index.get(cache.vmm.process.pid)
            if process is None or process.ppid == cache.vmm.parent:
                return cache.vmm, ""
            # its shim has died: find it again, now as an orphan
        hints = [c.pid_hint for c in containers if c.pid_hint]
        try:
            return self._finder.find(sandbox_id, hints), ""
        except VmmError as error:
            return None, str(error)

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
    ) -> Report:
        """Observe and apply until no new thread appears and nothing is left to set."""
        given, pool = allotment.allocated, allotment.pool
        if sandbox.vmm is None:
            placement = place(sandbox, (), node, allocated=given, pool=pool)
            return Report(sandbox_id=sandbox.id, placement=placement)
        seen = self._observe(sandbox, sandbox.vmm, node, allotment, cache)
        known = {t.key for t in cache.report.threads} if cache.report else None
        now = time.monotonic()
        backed_off = cache.other_writers.backed_off(now)
        drifts = find_drift(seen.placement, seen.threads, known=known, backed_off=backed_off)
        results: dict[ThreadKey, ActionResult] = {}
        rounds = 1
        while act and (actions := seen.plan(backed_off)):
            self._remember(seen, node.release_mask)
            done = apply_all(self._root, actions, cache.tasks)
            results |= {one.action.key: one for one in done}
            seen.threads = _after(seen.threads, done)
            settled = not any(one.outcome in _AGAIN for one in done)
            last = rounds == MAX_ROUNDS or len(seen.threads) > MAX_THREADS
            if last or (settled and self._threads.has_all(seen.threads, sandbox.vmm)):
                break
            rounds += 1
            seen = self._observe(sandbox, sandbox.vmm, node, allotment, cache)
        if (
            act
            and seen.released
            and _all_restored(seen, results, backed_off)
            and self._threads.has_all(seen.threads, sandbox.vmm)
        ):
            self._pins.keep(sandbox.id, pairs={}, first_seen={})
        alive = {t.key for t in seen.threads}
        cache.roles.prune()
        cache.other_writers.keep_only(alive)
        return Report(
            sandbox_id=sandbox.id,
            threads=tuple(seen.threads),
            placement=seen.placement,
            drifts=drifts,
            results=tuple(results.values()),
            notes=tuple(_notes(results.values(), backed_off, cache.other_writers, now)),
            rounds=rounds,
        )

    def _observe(
        self, sandbox: Sandbox, vmm: Vmm, node: Node, allotment: Allotment, cache: SandboxCache
    ) -> Round:
        """Read the threads and decide where they should run."""
        threads = self._threads.find(sandbox.id, vmm, cache)
        pairs = self._pins.pairs(sandbox.id)
        first_seen = self._pins.first_seen(sandbox.id)
        cache.kata = self._kata_pinning.of(sandbox.id, sandbox.containers, vmm)
        parts = relevant(threads, node.topology)
        inputs = (sandbox, parts, node, pairs, first_seen, allotment, cache.kata)
        if cache.decided is None or cache.decided[0] != inputs:
            placement = place(
                sandbox,
                threads,
                node,
                kept=pairs,
                first_seen=first_seen,
                allocated=allotment.allocated,
                pool=allotment.pool,
                kata=cache.kata,
            )
            cache.decided = inputs, placement
        return Round(threads, cache.decided[1], pairs, first_seen)

    def _remember(self, seen: Round, free: CpuSet) -> None:
        """Store the new pairs, and what a release restores, before anything is pinned.

        `free` is the affinity of an unconfined thread.
        """
        pairs = pairs_of(seen.placement)
        if seen.first_seen and pairs == seen.pairs:
            return
        first_seen = seen.first_seen or _first_masks(seen.threads, free)
        self._pins.keep(seen.placement.sandbox_id, pairs=pairs, first_seen=first_seen)


@dataclass
class Round:
    """What one round saw and decided; `pairs` and `first_seen` are what was remembered."""

    threads: list[Thread]
    placement: Placement
    pairs: Mapping[ThreadKey, int]
    first_seen: Mapping[ThreadRole, CpuSet]

    def plan(self, backed_off: Collection[ThreadKey]) -> tuple[Action, ...]:
        """Return what is to be set; nothing without a mask where we never set any."""
        if self.released:
            return undo(self.placement, self.threads, skip=backed_off)
        if self.placement.mask.mask is None:
            return ()
        return make_plan(self.placement, self.threads, skip=backed_off)

    @property
    def released(self) -> bool:
        """Whether this round restores affinities that kata-pin had set."""
        return self.placement.mask.mask is None and bool(self.first_seen)


def _all_restored(
    seen: Round, results: Mapping[ThreadKey, ActionResult], skipped: Collection[ThreadKey]
) -> bool:
    """Whether every thread that lives has its former affinity back.

    If not, what is needed to restore it is kept for the next attempt.
    """
    tried = seen.placement.desired
    return not any(
        one.key in skipped
        or (one.key in tried and one.key not in results)
        or (one.key in results and results[one.key].outcome in _NOT_RESTORED)
        for one in seen.threads
    )


def _first_masks(threads: Iterable[Thread], free: CpuSet) -> dict[ThreadRole, CpuSet]:
    """Return each role's affinity before the first pin: all of them where threads differ.

    They may be pinned one by one already, by Kata or by a daemon that lost its registry: one
    thread's affinity would later put all of them on one CPU. A thread that may use the whole cpuset
    of its cgroup has no affinity of its own, so `free` is added: cpusets grow.
    """
    masks: dict[ThreadRole, CpuSet] = {}
    for thread in threads:
        role, task = thread.role.role, thread.task
        own = free if task.cpuset and task.cpuset <= task.affinity else EMPTY
        masks[role] = masks.get(role, EMPTY) | task.affinity | own
    return masks


def _after(threads: Iterable[Thread], done: Iterable[ActionResult]) -> list[Thread]:
    """Return the threads as they are after the actions, without those that exited."""
    by_key = {one.action.key: one for one in done}
    after: list[Thread] = []
    for thread in threads:
        task, role = thread
        result = by_key.get(task.key)
        if result is not None and result.after is not None:
            moved = task.moved(result.after, task.cpuset, task.cgroup)
            after.append(Thread(moved, role))
        elif result is None or result.outcome not in _GONE:
            after.append(thread)
    return after


def _notes(
    results: Iterable[ActionResult],
    backed_off: Collection[ThreadKey],
    others: OtherWriters,
    now: float,
) -> Iterator[Note]:
    """Yield what kept threads from being pinned, one note per kind."""
    outcomes = [one.outcome for one in results]
    for outcome, text in _OBSTACLES.items():
        number = outcomes.count(outcome)
        if number:
            said = f"{count(number, 'thread')}: {text}"
            yield Note(f"affinity-{outcome.value}", said, NoteLevel.WARNING)
    writer = others.writer(now) if backed_off else None
    if writer is not None:
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - (writer.since_s or 0.0)))
        text = (
            f"another process changed {count(len(backed_off), 'affinity', 'affinities')}"
            f" {count(writer.count, 'time')} since {since}; backing off, retrying in"
            f" {max(0.0, others.retry_at() - now):.0f} s"
        )
        yield Note("other-writer", text, NoteLevel.WARNING)


_OBSTACLES: Final = {
    Outcome.REFUSED: "cannot be pinned: their cgroup allows none of the CPUs (EINVAL)",
    Outcome.DENIED: "cannot be pinned: the daemon lacks CAP_SYS_NICE (EPERM)",
    Outcome.CLIPPED: "the kernel allows other CPUs than asked for: the cpuset is changing",
    Outcome.FIXED: "cannot be pinned: kernel threads with a fixed affinity",
}
