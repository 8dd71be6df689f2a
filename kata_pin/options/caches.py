"""Groups of resctrl: what each sandbox uses of caches and memory bandwidth (`resctrl`)."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from errno import EACCES, EBUSY, EINVAL, ENOENT, ENOSPC, EPERM, EROFS, ESRCH, ESTALE
from typing import Any, Final, NamedTuple

from kata_pin.base.allocation import RDT_KEY
from kata_pin.base.config.alloc import Resctrl
from kata_pin.base.counters import CacheUse
from kata_pin.base.documents.state import Cache
from kata_pin.base.errors import HostError, ParseError, StateError, reason_of
from kata_pin.base.placement import RELEASED, Note, PassOutcome
from kata_pin.base.sandbox import Sandbox, Thread
from kata_pin.base.settings import AllowRule
from kata_pin.base.values import NoteLevel, ThreadRole, count
from kata_pin.engine.counters import MetricRow, Shown, readings
from kata_pin.linux import resctrl
from kata_pin.records.database import Database
from kata_pin.rights.broker.protocol import AffinityChange
from kata_pin.rights.calls import Calls
from kata_pin.service.options import Core, Running

log = logging.getLogger(__name__)


# Which class of resctrl a sandbox gets: by the administrator's rules, or by its pod's choice.

_MAX_SHOWN: Final = 40


class CacheClass(NamedTuple):
    """A class, empty for none, and why it is not what the pod asked for (empty: it is)."""

    name: str
    problem: str = ""


def cache_class(
    value: str | None,
    assigned: str,
    known: Collection[str],
    allow: Iterable[AllowRule],
    *,
    namespace: str,
    handler: str,
) -> CacheClass:
    """Return the class of a sandbox whose pod has this value of the annotation RDT_KEY.

    `assigned` is the class by the rules, `known` are those of the settings. A pod gets another one
    only if a rule of alloc.allow names it for the pod (D17).
    """
    if not value or value == assigned:
        return CacheClass(assigned)
    offered = (rule.rdt for rule in allow if rule.matches(namespace, handler))
    shown = f"annotation {RDT_KEY}: {value[:_MAX_SHOWN]!r} ignored"
    if not any(value in one for one in offered):
        return CacheClass(assigned, f"{shown}: no rule of alloc.allow names it")
    if value not in known:
        return CacheClass(assigned, f"{shown}: no class of resctrl.classes")
    return CacheClass(value)


# Which groups of resctrl are ours: those that were made for sandboxes, with their classes.

_TABLE: Final = """CREATE TABLE IF NOT EXISTS cache_groups (
    sandbox_id TEXT NOT NULL, class TEXT NOT NULL,
    PRIMARY KEY (sandbox_id, class)) WITHOUT ROWID"""


class CacheGroupTable:
    """Reads and writes the table; every method raises StateError when the file cannot be used."""

    def __init__(self, db: Database) -> None:
        """Make the table where it is missing."""
        self._db = db
        db.run(_TABLE)

    def all(self) -> list[tuple[str, str]]:
        """Return every group as sandbox id and class, which is empty for none."""
        return [(row[0], row[1]) for row in self._db.rows("SELECT * FROM cache_groups")]

    def keep(self, sandbox_id: str, class_name: str) -> None:
        """Remember a group; called before it is made, so that a kill leaves none behind."""
        values = sandbox_id, class_name
        self._db.run("INSERT OR IGNORE INTO cache_groups VALUES (?, ?)", values)

    def forget(self, sandbox_id: str, class_name: str) -> None:
        """Forget a group that was removed."""
        values = sandbox_id, class_name
        self._db.run("DELETE FROM cache_groups WHERE sandbox_id = ? AND class = ?", values)


# Keeps a monitoring group of resctrl for each sandbox, with all of its threads in it.
#
# A new thread inherits its creator's group, so a group stays complete by itself; what is missing
# all the same is moved after passes and audits. Groups are few: when no more can be made that is
# said once, and tried again only after one was removed or after AGAIN_S.

AGAIN_S: Final = 300.0
"""How long nothing is tried again after a refusal."""

MOST_RETURNS: Final = 3
"""How often threads are put back before it is clear that somebody else moves them."""

_GONE: Final = frozenset({ESRCH, ESTALE})
_WHY: Final = {
    ENOSPC: "no more groups: every RMID or class of the CPU is in use",
    EBUSY: "no free RMID yet: those of removed groups still have data in the caches",
    EROFS: "/sys/fs/resctrl is read-only for the service: run `kata-pin install` again",
    EPERM: "resctrl takes threads from root only: run `kata-pin install` again",
    EACCES: "not permitted, or no class of the settings that the daemon was started with",
}
_WHY_OUTSIDE: Final = _WHY | {
    EINVAL: "another program has them in a control group of its own",
    EACCES: "their process was not verified",
}


@dataclass
class _Held:
    """What is known of one sandbox; `rests_until` is CLOCK_MONOTONIC in seconds.

    `not_chosen`: why it does not have the class that its pod chose.
    """

    class_name: str
    made: bool = False
    problem: str = ""
    not_chosen: str = ""
    rests_until: float = 0.0
    moved: set[int] = field(default_factory=set)
    returns: int = 0


class CacheGroups(Running):
    """Observes passes, and finds after each audit what no pass shows."""

    def __init__(self, core: Core) -> None:
        """Raises StateError."""
        self._root = core.root
        self._live = core.live
        self._table = CacheGroupTable(core.registry)
        self._sandboxes = core.sandboxes
        self._containers = core.registry.containers
        self._annotations = core.kata_pinning.annotations
        self.held: dict[str, _Held] = {}
        self._full_until = 0.0
        self._reported = ""

    @property
    def settings(self) -> Resctrl:
        """The settings in force."""
        return self._live.now.resctrl

    def catch_up(self, recorded: Collection[str]) -> None:
        """Remove the groups of sandboxes that ended while no daemon ran, or all if switched off."""
        for sandbox_id, class_name in self._table.all():
            if not self.settings.enabled or sandbox_id not in recorded:
                self._remove(sandbox_id, class_name)

    def passed(self, outcome: PassOutcome) -> None:
        """Hold what a pass found; give up the group of a sandbox that is left alone."""
        if not self.settings.enabled:
            return
        if outcome.state == RELEASED or not self._live.acts:
            self._drop(outcome.sandbox_id)
        else:
            self._hold(outcome.sandbox_id, outcome.report.threads)

    def ended(self, outcome: PassOutcome) -> None:
        """Remove the group of a sandbox that has ended."""
        self._drop(outcome.sandbox_id)

    def look(self) -> None:
        """Make sure that every group is complete."""
        for sandbox_id in self.held.keys() & set(self._sandboxes.ids):
            cache = self._sandboxes.cache(sandbox_id)
            if cache is not None and cache.report is not None and not cache.passing:
                self._hold(sandbox_id, cache.report.threads)

    def facts(self, sandbox_id: str) -> Mapping[str, Any]:
        """Return the group of a sandbox."""
        held = self.held.get(sandbox_id)
        if held is None:
            return {"cache": None}
        group = resctrl.group_of(held.class_name, sandbox_id) if held.made else ""
        return {"cache": Cache(group=group, class_name=held.class_name, problem=held.problem)}

    def notes(self, sandbox_id: str) -> Iterator[Note]:
        """Yield why a sandbox is not counted in full, or not in the class that its pod chose."""
        held = self.held.get(sandbox_id)
        if held is not None and held.not_chosen:
            yield Note("cache-class", held.not_chosen, NoteLevel.WARNING)
        if held is not None and held.problem:
            yield Note("caches", f"caches not counted in full: {held.problem}", NoteLevel.WARNING)

    def use(self, sandbox_id: str) -> CacheUse | None:
        """Return what a sandbox uses now, None without a group."""
        held = self.held.get(sandbox_id)
        if held is None or not held.made:
            return None
        return resctrl.cache_use(self._root, resctrl.group_of(held.class_name, sandbox_id))

    def metrics(self) -> Iterable[Shown]:
        """Return how many sandboxes are counted, and what the first `metrics.sandboxes` use."""
        return readings(METRICS, self) if self.settings.enabled else ()

    def groups(self) -> Mapping[str, float]:
        """Return the number of groups by state."""
        incomplete = sum(1 for held in self.held.values() if held.problem)
        return {"complete": len(self.held) - incomplete, "incomplete": incomplete}

    def uses(
        self, amounts: Callable[[CacheUse], Mapping[tuple[str, ...], float | None]]
    ) -> Mapping[tuple[str, ...], float] | None:
        """Return amounts of the first `metrics.sandboxes`, by sandbox, pod and further labels."""
        first = sorted(self.held)[: self._live.now.metrics.sandboxes]
        used = {one: use for one in first if (use := self.use(one)) is not None}
        if not self._live.now.metrics.sandboxes:
            return None
        return {
            (one, Sandbox(one, self._containers(one)).pod, *labels): amount
            for one, use in used.items()
            for labels, amount in amounts(use).items()
            if amount is not None
        }

    async def give_back(self, ids: Collection[str] | None) -> Mapping[str, Any]:
        """Remove groups; the record of one that cannot be removed stays for the next daemon."""
        for sandbox_id, class_name in self._table.all():
            if ids is None or sandbox_id in ids:
                with suppress(OSError):
                    remove_group(self._table, self._root.calls, sandbox_id, class_name)
        return {}

    # ---- one group -----------------------------------------------------------------------

    def _hold(self, sandbox_id: str, threads: Iterable[Thread]) -> None:
        """Have a group with these threads in it, as far as resctrl permits."""
        wanted = {one.key.tid: one for one in threads if one.role.role is not ThreadRole.SHIM}
        if not wanted:
            return
        of = Sandbox(sandbox_id, self._containers(sandbox_id))
        namespace = next((one.pod_namespace for one in of.containers if one.pod_namespace), "")
        class_name, problem = cache_class(
            self._annotations(sandbox_id, of.containers).get(RDT_KEY),
            self.settings.class_of(namespace, of.handler),
            self.settings.classes,
            self._live.now.alloc.allow,
            namespace=namespace,
            handler=of.handler,
        )
        held = self.held.get(sandbox_id)
        if held is None or held.class_name != class_name:
            self._drop(sandbox_id, but=class_name)  # the former daemon's has what was counted
            held = self.held[sandbox_id] = _Held(class_name)
        if problem and problem != held.not_chosen:
            log.warning("sandbox %s: %s", sandbox_id, problem)
        held.not_chosen = problem
        if time.monotonic() < held.rests_until:
            return
        try:
            if not held.made and not self._make(sandbox_id, held):
                return
            held.problem = self._complete(sandbox_id, held, wanted)
            if held.problem:
                self._rest(sandbox_id, held)
        except (OSError, HostError, ParseError, StateError) as error:
            if getattr(error, "errno", 0) == ENOENT:  # removed by somebody, or unmounted
                held.made = False
            self._refuse(sandbox_id, held, error)

    def _make(self, sandbox_id: str, held: _Held) -> bool:
        """Make a group; False while that is pointless."""
        missing = resctrl.missing(self._root)
        if missing or time.monotonic() < self._full_until:
            held.problem = missing or _WHY[ENOSPC]
            self._tell(missing)
            return False
        self._table.keep(sandbox_id, held.class_name)
        try:
            self._root.calls.make_group(held.class_name, sandbox_id)
        except OSError as error:
            self._table.forget(sandbox_id, held.class_name)
            if error.errno in {ENOSPC, EBUSY}:
                self._full_until = time.monotonic() + AGAIN_S
            raise
        held.made, held.moved, held.returns = True, set(), 0
        return True

    def _complete(self, sandbox_id: str, held: _Held, wanted: dict[int, Thread]) -> str:
        """Move the threads that are not in the group yet; return why some stay outside."""
        group = resctrl.group_of(held.class_name, sandbox_id)
        present = resctrl.tids_in(self._root, group)
        strays = [wanted[tid] for tid in sorted(wanted.keys() - present)]
        if held.moved & {one.key.tid for one in strays}:
            held.returns += 1
        held.moved &= wanted.keys()
        if held.returns > MOST_RETURNS:
            held.returns, held.moved = 0, set()
            return f"another program moves {count(len(strays), 'thread')} out again and again"
        if not strays:
            return ""
        changes = [AffinityChange(*one.key, 0, frozenset()) for one in strays]
        done = self._root.calls.join_group(held.class_name, sandbox_id, changes)
        failed = [one.errno for one in done if one.errno and one.errno not in _GONE]
        moved = zip(strays, done, strict=True)
        held.moved |= {one.key.tid for one, changed in moved if not changed.errno}
        if not failed:
            return ""
        why = _WHY_OUTSIDE.get(failed[0], os.strerror(failed[0]))
        return f"{len(failed)} of {len(wanted)} threads stay outside: {why}"

    def _refuse(self, sandbox_id: str, held: _Held, error: Exception) -> None:
        """Note why a sandbox has no group."""
        number = getattr(error, "errno", 0) or 0
        said = resctrl.why_refused(self._root) if number == EINVAL else ""
        held.problem = _WHY.get(number) or said or reason_of(error)
        self._rest(sandbox_id, held)

    def _rest(self, sandbox_id: str, held: _Held) -> None:
        """Say once why a sandbox has no complete group, and leave it for some time."""
        held.rests_until = time.monotonic() + AGAIN_S
        self._tell(f"sandbox {sandbox_id}: caches are not counted in full: {held.problem}")

    def _tell(self, text: str) -> None:
        """Log what is wrong, unless it was the last thing that was logged."""
        if text and text != self._reported:
            log.warning("resctrl: %s", text)
            self._reported = text

    def _drop(self, sandbox_id: str, *, but: str | None = None) -> None:
        """Remove the groups of a sandbox, but for that of one class."""
        self.held.pop(sandbox_id, None)
        for known, class_name in self._table.all():
            if known == sandbox_id and class_name != but:
                self._remove(sandbox_id, class_name)

    def _remove(self, sandbox_id: str, class_name: str) -> None:
        try:
            remove_group(self._table, self._root.calls, sandbox_id, class_name)
            self._full_until = 0.0
        except (OSError, StateError) as error:  # the record stays: the next start tries again
            self._tell(f"the group of sandbox {sandbox_id} was not removed: {reason_of(error)}")


def remove_group(table: CacheGroupTable, calls: Calls, sandbox_id: str, class_name: str) -> None:
    """Remove a recorded group, and its class's if that was the last in it; raises OSError."""
    calls.remove_group(class_name, sandbox_id)
    table.forget(sandbox_id, class_name)
    if class_name and class_name not in {one for _, one in table.all()}:
        calls.remove_group(class_name, "")


def start(core: Core) -> CacheGroups:
    """Return the option at work; raises StateError."""
    return CacheGroups(core)


METRICS: Final[tuple[MetricRow[CacheGroups], ...]] = (
    MetricRow(
        "kata_pin_cache_groups",
        "Sandboxes whose caches resctrl counts, and those where that fails, at least in part.",
        CacheGroups.groups,
        {"state": ("complete", "incomplete")},
        "`show` says why.",
    ),
    MetricRow(
        "kata_pin_sandbox_l3_bytes",
        "Bytes of the L3 caches that a sandbox's threads fill.",
        lambda caches: caches.uses(lambda use: {(): use.occupancy}),
        {"sandbox": (), "pod": ()},
        "Only with `metrics.sandboxes`.",
    ),
    MetricRow(
        "kata_pin_sandbox_memory_bytes_total",
        "Bytes between the L3 caches and memory for a sandbox, in all and on the same NUMA node.",
        lambda caches: caches.uses(lambda use: {("total",): use.total, ("local",): use.local}),
        {"sandbox": (), "pod": (), "scope": ("total", "local")},
        "Since the sandbox's group was made; only with `metrics.sandboxes`.",
    ),
)
