"""Which exclusive pCPUs should be quiet, and what still fires there and why."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

from msgspec import Struct

from kata_pin.base.config.tree import LiveConfig
from kata_pin.base.cpuset import EMPTY, CpuSet, HostTopology, union
from kata_pin.base.documents.state import KeptQuiet, QuietSandbox, QuietSpared
from kata_pin.base.placement import RELEASED, Note, PassOutcome
from kata_pin.base.sandbox import Container, Sandbox
from kata_pin.base.values import NoteLevel, QuietLevel, listed
from kata_pin.linux.interrupts import Interrupt, InterruptRow, RowCounts
from kata_pin.options.quiet.decide import (
    power_wish,
    quiet_part,
    wish,
)
from kata_pin.options.quiet.tuner import TunerOutcome
from kata_pin.options.quiet.values import QuietClaim, QuietState
from kata_pin.rights.broker.tunables import TunableKind

log = logging.getLogger(__name__)


_CRIO: str = "/containers/storage/"
"""Part of the bundles' paths of CRI-O."""


class PodFacts(Struct, frozen=True):
    """What is known of pods beside their passes, by sandbox; `devices` takes the VMM's pid."""

    containers: Callable[[str], tuple[Container, ...]]
    annotations: Callable[[str, Iterable[Container]], Mapping[str, str]]
    devices: Callable[[int], frozenset[str]]


class _Placed(Struct, frozen=True):
    """What the last pass left: exclusive pCPUs by container, and the VMM's pid."""

    exclusive: Mapping[str, CpuSet]
    vmm: int


@dataclass
class QuietClaims:
    """Takes the outcomes of passes.

    `problems` are why sandboxes do not get what their annotations ask for, as of the last `all`.
    """

    _live: LiveConfig
    _facts: PodFacts
    _placed: dict[str, _Placed] = field(default_factory=dict)
    problems: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def passed(self, outcome: PassOutcome) -> bool:
        """Take a pass; return whether something changed."""
        decided = outcome.report.placement
        mine: dict[str, CpuSet] = {}
        if decided is not None and decided.desired and outcome.state != RELEASED:
            mine = {one.container_id: one.exclusive for one in decided.mask.claims if one.exclusive}
        pids = {thread.key.tgid for thread in outcome.report.threads}
        before = self._placed.get(outcome.sandbox_id)
        self._placed[outcome.sandbox_id] = _Placed(mine, min(pids, default=0))
        return (before.exclusive if before is not None else {}) != mine

    def ended(self, sandbox_id: str) -> bool:
        """Drop a sandbox; return whether something changed."""
        self.problems.pop(sandbox_id, None)
        before = self._placed.pop(sandbox_id, None)
        return before is not None and bool(before.exclusive)

    def all(self, topology: HostTopology, *, vfio: bool) -> tuple[QuietClaim, ...]:
        """Return what should be quiet now; with `vfio` also which devices sandboxes have."""
        before, self.problems = self.problems, {}
        if not self._live.now.quiet.acts:
            return ()
        found = tuple(
            claim
            for sandbox_id, placed in self._placed.items()
            if placed.exclusive
            for claim in self._of(sandbox_id, placed, topology, vfio=vfio)
        )
        for sandbox_id, problems in self.problems.items():
            pod = Sandbox(sandbox_id, self._facts.containers(sandbox_id), None).pod
            named = f"sandbox {sandbox_id}" + (f", pod {pod}" if pod != sandbox_id else "")
            for one in problems:
                if one not in before.get(sandbox_id, ()):
                    log.warning("%s: %s", named, one)
        return found

    def exclusive(self, sandbox_id: str) -> CpuSet:
        """Return the exclusive pCPUs of a sandbox, as its last pass left it."""
        placed = self._placed.get(sandbox_id)
        return EMPTY if placed is None else union(placed.exclusive.values())

    def _of(
        self, sandbox_id: str, placed: _Placed, topology: HostTopology, *, vfio: bool
    ) -> Iterator[QuietClaim]:
        settings = self._live.now
        containers = self._facts.containers(sandbox_id)
        annotations = self._facts.annotations(sandbox_id, containers)
        records = {one.id: one for one in containers if one.id in placed.exclusive}
        from_crio = {one.id for one in records.values() if _CRIO in one.bundle}
        quiet, full, crio = EMPTY, EMPTY, EMPTY
        problems: dict[str, None] = {}
        for container_id, cpus in placed.exclusive.items():
            record = records.get(container_id)
            found = wish(
                annotations,
                record.name if record else "",
                level=settings.quiet,
                pods=settings.quiet_pods,
                allowed=self._is_allowed(record),
            )
            if found.problem:
                problems[found.problem] = None
            part = quiet_part(cpus, topology, found)
            quiet |= part
            full |= part if found.level is QuietLevel.FULL else EMPTY
            crio |= part if found.crio and container_id in from_crio else EMPTY
        some = next(iter(records.values()), None)
        power = power_wish(
            annotations,
            level=settings.quiet,
            allowed=self._is_allowed(some),
            crio=bool(from_crio),
        )
        if problems or power.problems:
            self.problems[sandbox_id] = (*problems, *power.problems)
        if quiet or power.idle or power.governor:
            own = union(placed.exclusive.values())
            devices = self._facts.devices(placed.vmm) if vfio else frozenset()
            yield QuietClaim(
                sandbox_id, quiet, full, crio, own, devices, power.idle, power.governor,
                bool(from_crio),
            )  # fmt: skip

    def _is_allowed(self, record: Container | None) -> bool:
        """Whether a rule lets pods of its namespace and runtime handler choose."""
        namespace, handler = (record.pod_namespace, record.handler) if record else ("", "")
        return any(rule.matches(namespace, handler) for rule in self._live.now.alloc.allow)


class Fired(NamedTuple):
    """An interrupt that fired on quiet pCPUs since the round before: how often, and on which."""

    interrupt: Interrupt
    cpus: CpuSet
    times: int

    @staticmethod
    def on(cpus: CpuSet, fired: Sequence[tuple[InterruptRow, Interrupt]]) -> tuple[Fired, ...]:
        """Return those that fired on these pCPUs; `fired` has each with its row before."""
        numbers, found = tuple(cpus), []
        for before, one in fired if numbers else ():
            counts = one.row.counts
            grown = counts.since(before.counts, numbers) if isinstance(counts, RowCounts) else {}
            if grown:
                found.append(Fired(one, CpuSet(grown), sum(grown.values())))
        return tuple(found)


@dataclass
class QuietStatus:
    """What the last round found: which pCPUs are quiet, and what still fires there and why.

    `settled` were quiet in the round before this one too.

    `refusals` are by sandbox what it does not get, and why. `held` counts the values that are
    changed now, `failed` the writes that failed; these and the following are since the start.
    `movable_fired` counts what fired on quiet pCPUs although it can be moved.
    """

    level: QuietLevel = QuietLevel.OFF
    state: QuietState = field(default_factory=QuietState)
    claims: Sequence[QuietClaim] = ()
    refusals: Mapping[str, Sequence[str]] = field(default_factory=dict)
    settled: CpuSet = EMPTY
    interrupts: Sequence[Interrupt] = ()
    outcome: TunerOutcome = field(default_factory=TunerOutcome)
    fired: tuple[Fired, ...] = ()
    irqbalance: tuple[int, ...] = ()
    problems: tuple[str, ...] = ()
    held: Counter[TunableKind] = field(default_factory=Counter)
    rounds: int = 0
    failed: Counter[TunableKind] = field(default_factory=Counter)
    written: int = 0
    restored: int = 0
    movable_fired: int = 0
    managed_fired: int = 0

    @property
    def acts(self) -> bool:
        """Return whether pCPUs are kept quiet, or values that were changed for that are left."""
        return self.level.acts or bool(self.held)

    def managed_on(self, cpus: CpuSet) -> int:
        """Return how many managed interrupts may fire on one of these pCPUs."""
        if not cpus:
            return 0
        return sum(count for mask, count in self._managed.items() if mask & cpus)

    @cached_property
    def _managed(self) -> Counter[CpuSet]:
        """How many managed interrupts have a mask, by the mask: most have one of a few."""
        return Counter(one.mask for one in self.interrupts if one.managed)

    def count(self, before: QuietStatus, fired: Sequence[tuple[InterruptRow, Interrupt]]) -> None:
        """Go on with the counts of the round before; `fired` is all that fired since then."""
        self.settled = self.state.quiet & before.state.quiet
        self.fired = Fired.on(self.state.quiet & before.settled, fired)
        managed = sum(one.times for one in self.fired if one.interrupt.managed)
        self.rounds = before.rounds + 1
        self.failed = before.failed + self.outcome.failed
        self.written = before.written + self.outcome.written
        self.restored = before.restored + self.outcome.given_back
        self.managed_fired = before.managed_fired + managed
        self.movable_fired = before.movable_fired + sum(one.times for one in self.fired) - managed


# What the state document has of quiet pCPUs, as of the keeper's last round.


def kept_quiet(status: QuietStatus) -> KeptQuiet | None:
    """Return the node's part; None where nothing is kept quiet and nothing is to be restored."""
    state = status.state
    if not status.acts:
        return None
    return KeptQuiet(
        level=status.level,
        cpus=str(state.quiet),
        full=str(state.full),
        crio=str(state.crio),
        spared=tuple(QuietSpared(one.cpu, one.reason) for one in state.spared),
        changed={kind.value: count for kind, count in sorted(status.held.items())},
        failed_writes={kind.value: count for kind, count in sorted(status.failed.items())},
        managed=status.managed_on(state.quiet),
        movable_fired=status.movable_fired,
        managed_fired=status.managed_fired,
        irqbalance=status.irqbalance if state.quiet else (),
        left=tuple(one.label or str(one.key) for one in status.outcome.left),
        problems=status.problems,
    )


def quiet_sandbox(status: QuietStatus, sandbox_id: str, exclusive: CpuSet) -> QuietSandbox | None:
    """Return a sandbox's part; `exclusive` are its exclusive pCPUs."""
    if not status.acts or not exclusive:
        return None
    claim = next((one for one in status.claims if one.sandbox == sandbox_id), None)
    state = status.state
    quiet = claim.cpus & state.quiet if claim is not None else EMPTY
    level: Literal["off", "irq", "full"] = "off"
    if quiet:
        level = "full" if quiet & state.full else "irq"
    return QuietSandbox(
        level=level,
        cpus=str(quiet),
        not_quiet=str(exclusive - quiet),
        idle_limit=claim.idle if claim is not None else "",
        governor=claim.governor if claim is not None else "",
        managed=status.managed_on(quiet),
        problems=tuple(_problems(status, sandbox_id)),
    )


def quiet_notes(status: QuietStatus, sandbox_id: str) -> Iterator[Note]:
    """Yield what an operator should know of a sandbox's quiet pCPUs."""
    for why in _problems(status, sandbox_id):
        yield Note("quiet", why, NoteLevel.WARNING)


def node_notes(status: QuietStatus) -> Iterator[Note]:
    """Yield what could not be written, one note per reason."""
    by_reason: dict[str, list[str]] = {}
    for problem in status.problems:
        what, _, why = problem.rpartition(": ")
        by_reason.setdefault(why, []).append(what)
    for why, failed in by_reason.items():
        text = f"cannot set {listed(failed, 1)}: {why}; kata-pin doctor names the remedy"
        yield Note("quiet-failed", f"quiet pCPUs: {text}", NoteLevel.WARNING)


def _problems(status: QuietStatus, sandbox_id: str) -> Iterator[str]:
    yield from status.refusals.get(sandbox_id, ())
    wanted = union(one.cpus for one in status.claims if one.sandbox == sandbox_id)
    for one in status.state.spared:
        if one.cpu in wanted:
            yield f"pCPU {one.cpu} is not quiet: {one.reason}"
