"""Makes paired vCPUs real-time threads where the setting `rt.vcpus` says so, and undoes it."""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from errno import EACCES, EPERM, ESRCH, ESTALE
from typing import Any, Final

from msgspec import Struct, field

from kata_pin.base.counters import FIFO, RtNode, Scheduling
from kata_pin.base.errors import KataPinError, reason_of
from kata_pin.base.placement import RELEASED, Note, PassOutcome, Placement, Report
from kata_pin.base.sandbox import Thread
from kata_pin.base.threads import ThreadKey
from kata_pin.base.values import NoteLevel, ThreadRole
from kata_pin.linux.affinity import rt_node, scheduling
from kata_pin.records.database import Database
from kata_pin.rights.broker.protocol import AffinityChange
from kata_pin.service.options import Core, Running

log = logging.getLogger(__name__)


# Which vCPUs may be real-time threads without starving what else has to run.
#
# A thread of SCHED_FIFO that never sleeps leaves its pCPU to nobody of a lower class. So a vCPU
# gets that class only if it is alone on its pCPU, if the pCPU's ksoftirqd and RCU threads are of a
# higher priority, and if the kernel keeps a part of the time for everybody else: before Linux 6.12
# by sched_rt_runtime_us, since then by the fair server (kernel/sched/rt.c, deadline.c).


class RtChoice(Struct, frozen=True):
    """The vCPUs that get the class, with their pCPUs, and why others do not."""

    threads: Mapping[ThreadKey, int] = field(default_factory=dict)
    refusals: tuple[str, ...] = ()


def choose(
    threads: tuple[Thread, ...], placement: Placement | None, priority: int, node: RtNode
) -> RtChoice:
    """Return which of a sandbox's threads get SCHED_FIFO of this priority."""
    if placement is None:
        return RtChoice()
    paired = {
        one.key: one
        for one in threads
        if one.role.role is ThreadRole.VCPU
        and (desired := placement.desired.get(one.key)) is not None
        and desired.paired
        and not desired.release
        and len(desired.applied) == 1
        and one.task.affinity == desired.applied
    }
    why = _no_net(node)
    if why or not paired:
        return RtChoice(refusals=(why,) if why and paired else ())
    chosen: dict[ThreadKey, int] = {}
    refusals: list[str] = []
    for key, vcpu in paired.items():
        cpu = vcpu.task.affinity.first
        beside = [one for one in threads if one.key != key and cpu in one.task.affinity]
        refusal = _refusal(cpu, beside, priority, node)
        if refusal:
            refusals.append(f"{vcpu.label} on pCPU {cpu}: {refusal}")
        else:
            chosen[key] = cpu
    return RtChoice(chosen, tuple(refusals))


def _no_net(node: RtNode) -> str:
    """Return why nothing keeps time for other threads, empty if something does."""
    if node.fair_server:
        return ""
    if node.runtime_us is None or node.period_us is None:
        return "kernel.sched_rt_runtime_us cannot be read"
    if node.runtime_us < 0 or node.runtime_us >= node.period_us:
        return (
            "kernel.sched_rt_runtime_us leaves no time to other threads, and this kernel has no "
            "fair server (Linux 6.12): a busy vCPU would block its pCPU permanently"
        )
    if node.runtime_us == 0:
        return "kernel.sched_rt_runtime_us is 0: real-time threads get no time"
    return ""


def _refusal(cpu: int, beside: list[Thread], priority: int, node: RtNode) -> str:
    """Return why a vCPU may not be real-time on this pCPU, empty if it may."""
    if cpu in node.unserved:
        return "the kernel's fair server is switched off there"
    if beside:
        others = ", ".join(sorted({one.label for one in beside}))
        return (
            f"threads of the sandbox may run there too ({others}): set overhead_roles to other "
            "pCPUs"
        )
    guards = node.guards.get(cpu)
    if guards is None:
        return f"ksoftirqd/{cpu} was not found"
    for name, its in sorted(guards.items()):
        if its <= priority:
            has = f"has priority {its}" if its else "is no real-time thread"
            return f"{name} {has} and would starve: give it a priority above {priority} (chrt -f)"
    return ""


# Which threads were made real-time ones, and the class that each had before.

_TABLE: Final = """CREATE TABLE IF NOT EXISTS rt_threads (
    sandbox_id TEXT NOT NULL, tgid INTEGER NOT NULL, tid INTEGER NOT NULL,
    starttime INTEGER NOT NULL, policy INTEGER NOT NULL, priority INTEGER NOT NULL,
    PRIMARY KEY (tgid, tid, starttime)) WITHOUT ROWID"""


class RtThreads:
    """Reads and writes the table; every method raises StateError when the file cannot be used."""

    def __init__(self, db: Database) -> None:
        """Make the table where it is missing."""
        self._db = db
        db.run(_TABLE)

    def of(self, sandbox_id: str) -> dict[ThreadKey, Scheduling]:
        """Return the threads of a sandbox with their first class."""
        query = "SELECT tgid, tid, starttime, policy, priority FROM rt_threads WHERE sandbox_id = ?"
        rows = self._db.rows(query, (sandbox_id,))
        return {ThreadKey(*row[:3]): Scheduling(row[3], row[4], row[2]) for row in rows}

    def keep(self, sandbox_id: str, key: ThreadKey, first: Scheduling) -> None:
        """Remember a thread before its class is changed; the first one that is told stays."""
        values = (sandbox_id, *key, first.policy, first.priority)
        self._db.run("INSERT OR IGNORE INTO rt_threads VALUES (?, ?, ?, ?, ?, ?)", values)

    def forget(self, key: ThreadKey) -> None:
        """Forget a thread that has its first class again, or ended."""
        self._db.run(
            "DELETE FROM rt_threads WHERE tgid = ? AND tid = ? AND starttime = ?", tuple(key)
        )

    def sandboxes(self) -> list[str]:
        """Return the sandboxes that have such threads."""
        return [row[0] for row in self._db.rows("SELECT DISTINCT sandbox_id FROM rt_threads")]


# The first class of each thread is recorded before it is changed, and restored when the thread is
# no longer paired, when the sandbox is released or the setting is taken back, also by the next
# daemon. What somebody else changed meanwhile is left.

_GONE: Final = frozenset({ESRCH, ESTALE})
_WHY: Final = {
    EPERM: "not permitted: run `kata-pin install` again, or its cgroup has no real-time budget "
    "(CONFIG_RT_GROUP_SCHED)",
    EACCES: "the broker does not take it for a vCPU with a pCPU of its own",
}


class RealtimeVcpus(Running):
    """Observes passes, and checks the conditions again after each audit."""

    def __init__(self, core: Core) -> None:
        """Raises StateError."""
        self._root = core.root
        self._live = core.live
        self._table = RtThreads(core.registry)
        self._sandboxes = core.sandboxes
        self._index = core.index
        self._managed: set[str] = set()
        self._refusals: dict[str, tuple[str, ...]] = {}
        self._given: dict[str, int] = {}

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
            others = {key: was for key, was in first.items() if key not in choice.threads}
            refusals += self._restore(others)
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
        yield from self._change(todo, wanted)

    def _restore(self, first: Mapping[ThreadKey, Scheduling]) -> Iterator[str]:
        """Give threads their first class, unless somebody else changed it; yield what fails."""
        by_class: dict[Scheduling, list[ThreadKey]] = defaultdict(list)
        for key, was in first.items():
            now = scheduling(self._root, key)
            if now is None or now.policy != FIFO or now[:2] == was[:2]:
                self._table.forget(key)
            else:
                by_class[was._replace(starttime=0)].append(key)
        for was, keys in by_class.items():
            yield from self._change(keys, was)
            for key in keys:
                now = scheduling(self._root, key)
                if now is None or now[:2] == was[:2]:
                    self._table.forget(key)

    def _change(self, keys: Iterable[ThreadKey], wanted: Scheduling) -> Iterator[str]:
        changes = [AffinityChange(*key, 0, frozenset()) for key in keys]
        if not changes:
            return
        done = self._root.calls.set_classes(
            changes, wanted.policy, wanted.priority, self._root.proc()
        )
        failed = {one.errno for one in done if one.errno and one.errno not in _GONE}
        for number in sorted(failed):
            yield f"{wanted.text}: {_WHY.get(number, os.strerror(number))}"

    async def give_back(self, ids: Collection[str] | None) -> Mapping[str, Any]:
        """Restore classes; what cannot be restored is for the next daemon."""
        for sandbox_id in self._table.sandboxes():
            if ids is None or sandbox_id in ids:
                list(self._restore(self._table.of(sandbox_id)))
        return {}


def start(core: Core) -> RealtimeVcpus:
    """Return the option at work; raises StateError."""
    return RealtimeVcpus(core)
