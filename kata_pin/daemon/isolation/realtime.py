"""Makes paired vCPUs real-time threads where the setting `rt.vcpus` says so, and undoes it.

The first class of each thread is recorded before it is changed, and restored when the thread is no
longer paired, when the sandbox is released or the setting is taken back, also by the next daemon.
What somebody else changed meanwhile is left.
"""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from errno import EACCES, EPERM, ESRCH, ESTALE
from typing import Final

from kata_pin.calls import Calls, Change
from kata_pin.daemon.live_config import LiveConfig
from kata_pin.daemon.reconcile.sandboxes import Sandboxes
from kata_pin.daemon.store.rt_threads import RtThreads
from kata_pin.errors import KataPinError, reason_of
from kata_pin.host.process import ProcessIndex
from kata_pin.host.root import HostRoot
from kata_pin.host.scheduling import rt_node, scheduling
from kata_pin.model.measured.scheduling import FIFO, RtNode, Scheduling
from kata_pin.model.pass_outcome import RELEASED, PassOutcome
from kata_pin.model.placement import Note, NoteLevel, Report
from kata_pin.model.thread import ThreadKey
from kata_pin.policy.isolation.realtime import RtChoice, choose

log = logging.getLogger(__name__)

_GONE: Final = frozenset({ESRCH, ESTALE})
_WHY: Final = {
    EPERM: "not permitted: run `kata-pin install` again, or its cgroup has no real-time budget "
    "(CONFIG_RT_GROUP_SCHED)",
    EACCES: "the broker does not take it for a vCPU with a pCPU of its own",
}


@dataclass
class RealtimeVcpus:
    """An observer of passes; `look` checks the conditions again after each audit."""

    _root: HostRoot
    _live: LiveConfig
    _table: RtThreads
    _sandboxes: Sandboxes
    _index: ProcessIndex
    _managed: set[str] = field(default_factory=set)
    _refusals: dict[str, tuple[str, ...]] = field(default_factory=dict)
    _given: dict[str, int] = field(default_factory=dict)

    def passed(self, outcome: PassOutcome) -> None:
        """Set the classes that a pass makes possible, restore those that it ends."""
        managed = outcome.state != RELEASED and self._live.acts
        (self._managed.add if managed else self._managed.discard)(outcome.sandbox_id)
        wanted = managed and self._live.now.rt.priority
        node = self._node([outcome.report]) if wanted else None
        self._settle(outcome.sandbox_id, outcome.report, node)

    def ended(self, outcome: PassOutcome) -> None:
        """Forget the threads of a sandbox that has ended."""
        self._managed.discard(outcome.sandbox_id)
        self._refusals.pop(outcome.sandbox_id, None)
        self._given.pop(outcome.sandbox_id, None)
        for key in self._table.of(outcome.sandbox_id):
            self._table.forget(key)

    def failed(self, operation: str, error: Exception) -> None:
        """Keep what the former pass left."""

    def look(self) -> None:
        """Check the conditions again: what somebody changed on the node needs no pass."""
        reports = {}
        for sandbox_id in self._managed & set(self._sandboxes.ids):
            cache = self._sandboxes.cache(sandbox_id)
            if cache is not None and cache.report is not None and not cache.passing:
                reports[sandbox_id] = cache.report
        if reports and self._live.now.rt.priority:
            node = self._node(reports.values())
            for sandbox_id, report in reports.items():
                self._settle(sandbox_id, report, node)

    def _node(self, reports: Iterable[Report]) -> RtNode:
        """Return what the node says of the pCPUs that a thread has for itself."""
        masks = {thread.task.affinity for report in reports for thread in report.threads}
        cpus = {mask.first for mask in masks if len(mask) == 1}
        return rt_node(self._root, self._index.all(), cpus)

    def notes(self, sandbox_id: str) -> Iterator[Note]:
        """Yield what an operator should know of a sandbox."""
        setting = self._live.now.rt.vcpus
        given = self._given.get(sandbox_id)
        if given:
            yield Note("rt", f"vCPUs with scheduling class {setting}: {given}")
        for refusal in self._refusals.get(sandbox_id, ()):
            yield Note("rt-refused", f"rt.vcpus {setting} refused: {refusal}", NoteLevel.WARNING)

    def _settle(self, sandbox_id: str, report: Report, node: RtNode | None) -> None:
        """Give and take back classes; `node` is None where no vCPU may have one."""
        priority = self._live.now.rt.priority
        first = self._table.of(sandbox_id)
        if not first and node is None:
            self._refusals.pop(sandbox_id, None)
            return
        choice = RtChoice()
        if node is not None:
            choice = choose(report.threads, report.placement, priority, node)
        refusals = list(choice.refusals)
        try:
            refusals += restore(
                self._root, self._table, {k: v for k, v in first.items() if k not in choice.threads}
            )
            refusals += self._give(sandbox_id, choice.threads, Scheduling(FIFO, priority))
        except (OSError, KataPinError) as error:
            refusals.append(reason_of(error))
        said = tuple(refusals)
        if said and said != self._refusals.get(sandbox_id):
            log.warning("sandbox %s: real-time vCPUs refused: %s", sandbox_id, "; ".join(said))
        self._refusals[sandbox_id] = said
        self._given[sandbox_id] = len(self._table.of(sandbox_id))

    def _give(
        self, sandbox_id: str, threads: Iterable[ThreadKey], wanted: Scheduling
    ) -> Iterator[str]:
        """Give threads the class; yield why some do not get it."""
        todo = []
        for key in threads:
            now = scheduling(self._root, key)
            if now is not None and now[:2] != wanted[:2]:
                self._table.keep(sandbox_id, key, now)
                todo.append(key)
        yield from _changed(self._root.calls, todo, wanted, self._root.proc())


def restore(
    root: HostRoot, table: RtThreads, first: Mapping[ThreadKey, Scheduling]
) -> Iterator[str]:
    """Give threads their first class back, unless somebody else changed it; yield what fails."""
    by_class: dict[Scheduling, list[ThreadKey]] = defaultdict(list)
    for key, was in first.items():
        now = scheduling(root, key)
        if now is None or now.policy != FIFO or now[:2] == was[:2]:
            table.forget(key)
        else:
            by_class[was._replace(starttime=0)].append(key)
    for was, keys in by_class.items():
        yield from _changed(root.calls, keys, was, root.proc())
        for key in keys:
            now = scheduling(root, key)
            if now is None or now[:2] == was[:2]:
                table.forget(key)


def _changed(
    calls: Calls, keys: Iterable[ThreadKey], wanted: Scheduling, proc: str
) -> Iterator[str]:
    changes = [Change(*key, 0, frozenset()) for key in keys]
    if not changes:
        return
    done = calls.set_classes(changes, wanted.policy, wanted.priority, proc)
    failed = {one.errno for one in done if one.errno and one.errno not in _GONE}
    for number in sorted(failed):
        yield f"{wanted.text}: {_WHY.get(number, os.strerror(number))}"
