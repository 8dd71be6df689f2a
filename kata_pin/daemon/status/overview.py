"""What documents show of each sandbox, gathered from its last pass."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Generic, TypeVar

from kata_pin.daemon.guests.manager import Guests
from kata_pin.daemon.guests.status import GuestPlan
from kata_pin.daemon.reconcile.engine import Engine
from kata_pin.daemon.reconcile.sandbox_cache import SandboxCache
from kata_pin.daemon.reconcile.sandboxes import Sandboxes
from kata_pin.daemon.status.documents import Conflicts, conflict_notes
from kata_pin.daemon.status.sandbox import (
    SandboxFacts,
    guest_report,
    sandbox_report,
    thread_reports,
    vcpu_reports,
)
from kata_pin.daemon.store.containers import Registry
from kata_pin.daemon.store.pins import Pins
from kata_pin.errors import DaemonError
from kata_pin.host.root import HostRoot
from kata_pin.host.tasks import moved_since, with_usage
from kata_pin.model.cpuset import CpuSet
from kata_pin.model.node import Node
from kata_pin.model.placement import Note, Report
from kata_pin.model.reports.names import Names, SandboxName
from kata_pin.model.reports.quiet import QuietSandbox
from kata_pin.model.reports.sandbox import Cache, Memory
from kata_pin.model.reports.sandbox import Thread as ThreadRow
from kata_pin.model.sandbox import Sandbox
from kata_pin.model.steps import Steps, finish
from kata_pin.model.thread import Thread, ThreadKey
from kata_pin.policy.explain.sandbox import explain
from kata_pin.wire import reports

Value = TypeVar("Value")

ROWS: Final = 128
"""Threads whose rows are made at once."""


class Memo(Generic[Value]):
    """Keeps one value per sandbox for as long as what it was made from is equal."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[tuple[object, ...], Value]] = {}

    def get(
        self, sandbox_id: str, made_from: tuple[object, ...], make: Callable[[], Value]
    ) -> Value:
        """Return the value, made again if something of `made_from` changed."""
        if not self.holds(sandbox_id, made_from):
            self.keep(sandbox_id, made_from, make())
        return self.value(sandbox_id)

    def holds(self, sandbox_id: str, made_from: tuple[object, ...]) -> bool:
        """Whether the value that is kept was made from this."""
        known = self._known.get(sandbox_id)
        return known is not None and known[0] == made_from

    def keep(self, sandbox_id: str, made_from: tuple[object, ...], value: Value) -> None:
        """Keep a value, and what it was made from."""
        self._known[sandbox_id] = made_from, value

    def value(self, sandbox_id: str) -> Value:
        """Return the value that `get` returned last."""
        return self._known[sandbox_id][1]

    def keep_only(self, sandbox_ids: Collection[str]) -> None:
        """Drop the values of sandboxes that have ended."""
        if len(self._known) > len(sandbox_ids):
            self._known = {one: self._known[one] for one in sandbox_ids if one in self._known}


@dataclass(frozen=True)
class _Seen:
    """What the last pass over a sandbox found: its model, its threads' states, encoded rows."""

    sandbox: Sandbox
    states: tuple[str, ...]
    threads: bytes


@dataclass
class Overview:
    """Gathers; of each sandbox it keeps what changes with passes and messages only."""

    _root: HostRoot
    _sandboxes: Sandboxes
    _engine: Engine
    _registry: Registry
    _pins: Pins
    _guests: Guests
    _cache: Callable[[str], Cache | None]
    _memory: Callable[[str], Memory | None]
    _notes: Callable[[str], Iterable[Note]]
    _quiet: Callable[[str], QuietSandbox | None]
    _unmoved_s: Callable[[ThreadKey], float | None]
    _seen: Memo[_Seen] = field(default_factory=Memo)
    _plans: Memo[tuple[GuestPlan, bytes] | None] = field(default_factory=Memo)

    def encoded(self) -> Iterator[bytes | None]:
        """Yield the report of every sandbox; last CPUs and CPU times are those of its last pass.

        Affinities are read now, as they are for every document.
        None is a moment at which others may run.
        """
        conflicts = self.conflicts()
        for steps in self._all_facts(self._sandboxes.ids):
            facts = yield from steps
            yield self._encoded(facts, conflicts, self._seen.value(facts.sandbox.id).threads)

    def encoded_now(self, sandbox_id: str) -> Iterator[bytes | None]:
        """Yield the report of one sandbox, with last CPUs, times and moves as of now; or None."""
        for steps in self._all_facts([sandbox_id]):
            facts = yield from steps
            rows = []
            for part in _parts(facts.report):
                fresh = with_usage(self._root, part)
                found = thread_reports(fresh, released=facts.released, backed_off=facts.backed_off)
                rows.append(reports.encode_items(map(self._with_moves, found)))
                yield None
            yield self._encoded(facts, self.conflicts(), b",".join(rows))

    def _with_moves(self, row: ThreadRow) -> ThreadRow:
        unmoved_s = self._unmoved_s(ThreadKey(row.tgid, row.tid, row.starttime))
        return row if unmoved_s is None else replace(row, unmoved_s=round(unmoved_s, 3))

    def facts(self, ids: Iterable[str]) -> Iterator[SandboxFacts]:
        """Yield what is known of these sandboxes, without rows of threads and vCPUs."""
        yield from map(finish, self._all_facts(ids))

    def _all_facts(self, ids: Iterable[str]) -> Iterator[Steps[SandboxFacts]]:
        for memo in (self._seen, self._plans):
            memo.keep_only(self._sandboxes.ids)
        node, released, now = self._engine.node(), self._pins.released(), time.monotonic()
        for sandbox_id in ids:
            cache = self._sandboxes.cache(sandbox_id)
            if cache is not None:  # it may have ended a moment ago
                yield self._facts(sandbox_id, cache, node, now, released=sandbox_id in released)

    def _facts(
        self, sandbox_id: str, cache: SandboxCache, node: Node, now: float, *, released: bool
    ) -> Steps[SandboxFacts]:
        decided = cache.report
        moved = yield from self._moved(cache)
        containers = self._registry.containers(sandbox_id)
        backed_off = frozenset(key.tid for key in cache.other_writers.backed_off(now))
        report = None if decided is None else _elsewhere(decided, moved)
        made_from = (
            *(decided, moved, released, backed_off, containers),
            *(cache.vmm, cache.configured, node.kubelet),
        )
        if not self._seen.holds(sandbox_id, made_from):
            sandbox, states, rows = self._sandbox(sandbox_id, cache), [], []
            for part in _parts(report):
                found = thread_reports(part, released=released, backed_off=backed_off)
                states += [one.state for one in found]
                rows.append(reports.encode_items(found))
                yield
            self._seen.keep(sandbox_id, made_from, _Seen(sandbox, tuple(states), b",".join(rows)))
        seen = self._seen.value(sandbox_id)
        plan = None if decided is None else self._plan(seen.sandbox, decided, node)
        return SandboxFacts(
            sandbox=seen.sandbox,
            report=report,
            states=seen.states,
            checked_s=now - cache.checked_at if report else None,
            problem=cache.problem,
            released=released,
            backed_off=backed_off,
            guest=(
                None
                if plan is None
                else guest_report(self._guests.view(sandbox_id, plan[0]), seen.sandbox)
            ),
            writers=cache.writers(now),
            cache=self._cache(sandbox_id),
            memory=self._memory(sandbox_id),
            more_notes=tuple(self._notes(sandbox_id)),
            quiet=self._quiet(sandbox_id),
        )

    def _moved(self, cache: SandboxCache) -> Steps[dict[ThreadKey, CpuSet]]:
        """Return where threads are now that are not where the last pass left them.

        Nothing while a pass moves them itself.
        """
        report = cache.report
        if report is None or cache.passing:
            return {}
        moved = yield from moved_since(self._root, report.threads)
        return moved if cache.report is report and not cache.passing else {}

    def _plan(self, sandbox: Sandbox, report: Report, node: Node) -> tuple[GuestPlan, bytes] | None:
        def make() -> tuple[GuestPlan, bytes] | None:
            plan = self._guests.plan(sandbox, report)
            return None if plan is None else (plan, reports.encode_items(vcpu_reports(plan)))

        made_from = (sandbox, report, self._guests.facts(sandbox.id), node)
        return self._plans.get(sandbox.id, made_from, make)

    def _encoded(self, facts: SandboxFacts, conflicts: Conflicts, threads: bytes) -> bytes:
        known = facts.sandbox.id
        data = reports.encode(sandbox_report(facts, conflicts.get(known, ())))
        plan = self._plans.value(known) if facts.guest is not None else None
        if plan is not None:
            data = reports.with_items(data, "vcpus", plan[1])
        return reports.with_items(data, "threads", threads)

    def conflicts(self) -> Conflicts:
        """Return the notes about exclusive pCPUs that several sandboxes claim."""
        passes = {one: self._sandboxes.entry(one).cache.report for one in self._sandboxes.ids}
        placements = {
            one: report.placement
            for one, report in passes.items()
            if report is not None and report.placement is not None
        }
        return conflict_notes(placements, self._pod)

    def names(self) -> Names:
        """Return the id and pod of every sandbox."""
        ids = self._sandboxes.ids
        return Names(sandboxes=tuple(SandboxName(one, self._pod(one)) for one in ids))

    def explanation(self, sandbox_id: str) -> tuple[str, ...]:
        """Return the lines that explain a sandbox's last pass; DaemonError before the first."""
        cache = self._sandboxes.entry(sandbox_id).cache
        if cache.report is None or cache.report.placement is None:
            raise DaemonError(f"no pass over sandbox {sandbox_id} has ended yet")
        sandbox = self._sandbox(sandbox_id, cache)
        placement = cache.report.placement
        placement = replace(placement, notes=(*placement.notes, *self._notes(sandbox_id)))
        return explain(
            sandbox,
            _elsewhere(cache.report, finish(self._moved(cache))).threads,
            placement,
            self._engine.node(),
            guest=self._guests.lines(sandbox, cache.report),
            now_ns=time.clock_gettime_ns(time.CLOCK_BOOTTIME),
        )

    def _pod(self, sandbox_id: str) -> str:
        return Sandbox(sandbox_id, self._registry.containers(sandbox_id)).pod

    def _sandbox(self, sandbox_id: str, cache: SandboxCache) -> Sandbox:
        """Return a sandbox as its passes go by it."""
        containers = self._registry.containers(sandbox_id)
        return Sandbox(sandbox_id, self._engine.believed(containers, cache), cache.vmm)


def _elsewhere(report: Report, moved: Mapping[ThreadKey, CpuSet]) -> Report:
    """Return a report with other affinities for some of its threads."""
    if not moved:
        return report

    def now(thread: Thread) -> Thread:
        task, affinity = thread.task, moved.get(thread.key)
        if affinity is None:
            return thread
        return thread._replace(task=task.moved(affinity, task.cpuset, task.cgroup))

    return replace(report, threads=tuple(map(now, report.threads)))


def _parts(report: Report | None) -> Iterator[Report]:
    """Yield a report in parts of so many threads that one takes about 2 ms."""
    threads = () if report is None else report.threads
    for start in range(0, len(threads), ROWS):
        assert report is not None, "it has threads"
        yield replace(report, threads=threads[start : start + ROWS])
