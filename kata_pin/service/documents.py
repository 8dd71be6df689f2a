"""The documents that the daemon answers with, gathered from the last passes (D19)."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from kata_pin.base import placement
from kata_pin.base.cpuset import CpuSet, pcpus_are
from kata_pin.base.documents.answers import HistoryDocument, Names, SandboxName
from kata_pin.base.documents.document import Daemon
from kata_pin.base.documents.pools import Allocation
from kata_pin.base.documents.state import KeptQuiet, Kubelet, Node, State
from kata_pin.base.documents.state import Thread as ThreadRow
from kata_pin.base.errors import DaemonError
from kata_pin.base.placement import Node as PlacementNode
from kata_pin.base.placement import Report
from kata_pin.base.sandbox import Sandbox, Thread
from kata_pin.base.steps import Steps, finish
from kata_pin.base.threads import ThreadKey
from kata_pin.base.values import Mode, NoteLevel
from kata_pin.engine.counters import Slices
from kata_pin.engine.sandbox_cache import SandboxCache
from kata_pin.guest.cpus import GuestPlan
from kata_pin.guest.manager import Guests
from kata_pin.linux.tasks import moved_since, with_usage
from kata_pin.placement.explain import explain
from kata_pin.placement.masks import conflicts
from kata_pin.records.history import History, NodeEvents
from kata_pin.service import protocol
from kata_pin.service.options import Core
from kata_pin.service.sandbox_document import (
    KnownSandbox,
    guest_report,
    notes,
    sandbox_report,
    thread_reports,
    vcpu_reports,
)

NAMED: Final = 3
"""Most sandboxes that a note about a conflict names."""

Conflicts = Mapping[str, Sequence[placement.Note]]
"""Notes by the id of the sandbox whose exclusive pCPUs others claim too."""


def state_report(
    *,
    node: placement.Node,
    mode: Mode,
    daemon: Daemon,
    node_notes: Iterable[placement.Note] = (),
    allocation: Allocation | None = None,
    kept_quiet: KeptQuiet | None = None,
) -> State:
    """Return the state document without sandboxes."""
    return State(
        time=utc(time.time()),
        daemon=daemon,
        node=_node(node, mode),
        sandboxes=(),
        allocation=allocation,
        notes=notes(node_notes),
        kept_quiet=kept_quiet,
    )


def with_sandboxes(state: State, every: Iterable[KnownSandbox], found: Conflicts) -> State:
    """Return the state document with these sandboxes."""
    made = (sandbox_report(facts, found.get(facts.sandbox.id, ())) for facts in every)
    return replace(state, sandboxes=tuple(made))


async def in_slices(state: State, sandboxes: Iterable[bytes | None]) -> bytes:
    """Return the state document with these encoded sandboxes; other tasks run in between."""
    items = []
    slices = Slices()
    for encoded in sandboxes:
        if encoded is not None:
            items.append(encoded)
        await slices.breathe()
    return protocol.with_items(protocol.encode(state), "sandboxes", items)


def conflict_notes(
    placements: Mapping[str, placement.Placement], pod_of: Callable[[str], str]
) -> Conflicts:
    """Return the notes about exclusive pCPUs that several sandboxes claim."""
    found: dict[str, list[placement.Note]] = {}
    for conflict in conflicts(placements):
        named = [(one, pod_of(one)) for one in conflict.sandboxes[: NAMED + 1]]
        for sandbox_id in conflict.sandboxes:
            others = [pod for one, pod in named if one != sandbox_id][:NAMED]
            more = len(conflict.sandboxes) - 1 - len(others)
            listed = ", ".join(others) + (f" and {more} more" if more else "")
            text = f"exclusive {pcpus_are(conflict.cpus)} also claimed by {listed}"
            note = placement.Note("conflict-exclusive", text, NoteLevel.WARNING)
            found.setdefault(sandbox_id, []).append(note)
    return found


def _node(known: placement.Node, mode: Mode) -> Node:
    topology, kubelet = known.topology, known.kubelet
    return Node(
        hostname=socket.gethostname(),
        kernel=os.uname().release,
        online=str(topology.online),
        present=str(topology.present),
        isolated=str(topology.isolated),
        nohz_full=str(topology.nohz_full),
        cpus=topology.cpus,
        kubelet=None if kubelet is None else Kubelet(kubelet.policy, str(kubelet.default)),
        thread_events=known.live_threads,
        mode=mode,
        assigned=str(known.assigned),
    )


def history_report(
    history: History, events: NodeEvents, name: str, *, since_s: int | None, limit: int
) -> HistoryDocument:
    """Return the `history` document: of all, or of the sandboxes that a name means."""
    changes = history.changes(name, since_s=since_s, limit=limit)
    naming = {one.sandbox for one in changes} if name else None
    found = events.newest(limit, since_s=since_s, naming=naming)
    return HistoryDocument(time=utc(time.time()), changes=changes, events=found)


def utc(seconds: float) -> str:
    """Return a Unix time as documents have it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


Value = TypeVar("Value")

ROWS: Final = 128
"""Threads whose rows are made at once."""


class Memo(Generic[Value]):
    """Keeps one value per sandbox for as long as what it was made from is equal."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[tuple[object, ...], Value]] = {}

    def made(self, sandbox_id: str, made_from: tuple[object, ...]) -> Value | None:
        """Return the value if it was made from this."""
        known = self._known.get(sandbox_id)
        return known[1] if known is not None and known[0] == made_from else None

    def keep(self, sandbox_id: str, made_from: tuple[object, ...], value: Value) -> Value:
        """Keep a value, and what it was made from; return it."""
        self._known[sandbox_id] = made_from, value
        return value

    def value(self, sandbox_id: str) -> Value:
        """Return the value that was kept last."""
        return self._known[sandbox_id][1]

    def keep_only(self, sandbox_ids: Collection[str]) -> None:
        """Drop the values of sandboxes that have ended."""
        if len(self._known) > len(sandbox_ids):
            self._known = {one: self._known[one] for one in sandbox_ids if one in self._known}


class _Seen(Struct, frozen=True):
    """What the last pass over a sandbox found: its model, its threads' states, encoded rows."""

    sandbox: Sandbox
    states: tuple[str, ...]
    threads: bytes


@dataclass
class Overview:
    """Gathers; of each sandbox it keeps what changes with passes and messages only."""

    _core: Core
    _guests: Guests
    _seen: Memo[_Seen] = field(default_factory=Memo)
    _plans: Memo[tuple[GuestPlan, bytes] | None] = field(default_factory=Memo)

    def encoded(self) -> Iterator[bytes | None]:
        """Yield the report of every sandbox; last CPUs and CPU times are those of its last pass.

        Affinities are read now, as they are for every document.
        None is a moment at which others may run.
        """
        conflicts = self.conflicts()
        for steps in self._all_facts(self._core.sandboxes.ids):
            facts = yield from steps
            yield self._encoded(facts, conflicts, self._seen.value(facts.sandbox.id).threads)

    def encoded_now(self, sandbox_id: str) -> Iterator[bytes | None]:
        """Yield the report of one sandbox, with last CPUs, times and moves as of now; or None."""
        for steps in self._all_facts([sandbox_id]):
            facts = yield from steps
            rows = []
            for part in _parts(facts.report):
                fresh = with_usage(self._core.root, part)
                found = thread_reports(fresh, released=facts.released, backed_off=facts.backed_off)
                rows.append(protocol.encode_items(map(self._with_options, found)))
                yield None
            yield self._encoded(facts, self.conflicts(), b",".join(rows))

    def _with_options(self, row: ThreadRow) -> ThreadRow:
        fields = self._core.options.thread(ThreadKey(row.tgid, row.tid, row.starttime))
        return replace(row, **fields) if fields else row

    def facts(self, ids: Iterable[str]) -> Iterator[KnownSandbox]:
        """Yield what is known of these sandboxes, without rows of threads and vCPUs."""
        yield from map(finish, self._all_facts(ids))

    def _all_facts(self, ids: Iterable[str]) -> Iterator[Steps[KnownSandbox]]:
        for memo in (self._seen, self._plans):
            memo.keep_only(self._core.sandboxes.ids)
        node, released, now = (
            self._core.node.current(),
            self._core.pins.released(),
            time.monotonic(),
        )
        for sandbox_id in ids:
            cache = self._core.sandboxes.cache(sandbox_id)
            if cache is not None:  # it may have ended a moment ago
                yield self._facts(sandbox_id, cache, node, now, released=sandbox_id in released)

    def _facts(
        self,
        sandbox_id: str,
        cache: SandboxCache,
        node: PlacementNode,
        now: float,
        *,
        released: bool,
    ) -> Steps[KnownSandbox]:
        decided = cache.report
        moved = yield from self._moved(cache)
        containers = self._core.registry.containers(sandbox_id)
        backed_off = frozenset(key.tid for key in cache.other_writers.backed_off(now))
        report = None if decided is None else _elsewhere(decided, moved)
        made_from = (
            *(decided, moved, released, backed_off, containers),
            *(cache.vmm, cache.configured, node.kubelet),
        )
        seen = self._seen.made(sandbox_id, made_from)
        if seen is None:
            sandbox, states, rows = self._sandbox(sandbox_id, cache), [], []
            for part in _parts(report):
                found = thread_reports(part, released=released, backed_off=backed_off)
                states += [one.state for one in found]
                rows.append(protocol.encode_items(found))
                yield
            seen = _Seen(sandbox, tuple(states), b",".join(rows))
            self._seen.keep(sandbox_id, made_from, seen)
        plan = None if decided is None else self._plan(seen.sandbox, decided, node)
        return KnownSandbox(
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
            more_notes=tuple(self._core.options.notes(sandbox_id)),
            **self._core.options.facts(sandbox_id),
        )

    def _moved(self, cache: SandboxCache) -> Steps[dict[ThreadKey, CpuSet]]:
        """Return where threads are now that are not where the last pass left them.

        Nothing while a pass moves them itself.
        """
        report = cache.report
        if report is None or cache.passing:
            return {}
        moved = yield from moved_since(self._core.root, report.threads)
        return moved if cache.report is report and not cache.passing else {}

    def _plan(
        self, sandbox: Sandbox, report: Report, node: PlacementNode
    ) -> tuple[GuestPlan, bytes] | None:
        made_from = (sandbox, report, self._guests.facts(sandbox.id), node)
        known = self._plans.made(sandbox.id, made_from)
        if known is not None:
            return known
        plan = self._guests.plan(sandbox, report)
        rows = None if plan is None else (plan, protocol.encode_items(vcpu_reports(plan)))
        return self._plans.keep(sandbox.id, made_from, rows)

    def _encoded(self, facts: KnownSandbox, conflicts: Conflicts, threads: bytes) -> bytes:
        known = facts.sandbox.id
        data = protocol.encode(sandbox_report(facts, conflicts.get(known, ())))
        plan = self._plans.value(known) if facts.guest is not None else None
        if plan is not None:
            data = protocol.with_items(data, "vcpus", [plan[1]])
        return protocol.with_items(data, "threads", [threads])

    def conflicts(self) -> Conflicts:
        """Return the notes about exclusive pCPUs that several sandboxes claim."""
        passes = {
            one: self._core.sandboxes.entry(one).cache.report for one in self._core.sandboxes.ids
        }
        placements = {
            one: report.placement
            for one, report in passes.items()
            if report is not None and report.placement is not None
        }
        return conflict_notes(placements, self._pod)

    def names(self) -> Names:
        """Return the id and pod of every sandbox."""
        ids = self._core.sandboxes.ids
        return Names(sandboxes=tuple(SandboxName(one, self._pod(one)) for one in ids))

    def explanation(self, sandbox_id: str) -> tuple[str, ...]:
        """Return the lines that explain a sandbox's last pass; DaemonError before the first."""
        cache = self._core.sandboxes.entry(sandbox_id).cache
        if cache.report is None or cache.report.placement is None:
            raise DaemonError(f"no pass over sandbox {sandbox_id} has ended yet")
        sandbox = self._sandbox(sandbox_id, cache)
        placement = cache.report.placement
        placement = replace(
            placement, notes=(*placement.notes, *self._core.options.notes(sandbox_id))
        )
        return explain(
            sandbox,
            _elsewhere(cache.report, finish(self._moved(cache))).threads,
            placement,
            self._core.node.current(),
            guest=self._guests.lines(sandbox, cache.report),
            now_ns=time.clock_gettime_ns(time.CLOCK_BOOTTIME),
        )

    def _pod(self, sandbox_id: str) -> str:
        return Sandbox(sandbox_id, self._core.registry.containers(sandbox_id)).pod

    def _sandbox(self, sandbox_id: str, cache: SandboxCache) -> Sandbox:
        """Return a sandbox as its passes go by it."""
        containers = self._core.registry.containers(sandbox_id)
        return Sandbox(sandbox_id, self._core.engine.believed(containers, cache), cache.vmm)


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
