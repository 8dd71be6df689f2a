"""Keeps interrupts off quiet pCPUs: one desired state for the node, brought about again and again.

Passes only wake it, and nothing waits for it. It looks at the node anew each time: after passes, in
its audits, when irqbalance starts, when pCPUs come or go. pCPUs that become quiet wait a little, so
that pods that start together cost irqbalance one round; pCPUs that are free again are given back at
once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Protocol

from kata_pin.calls import TunableWrite
from kata_pin.daemon.live_config import LiveConfig
from kata_pin.daemon.quiet.claims import PodFacts, QuietClaims
from kata_pin.daemon.quiet.irqbalance import FOLDER, Irqbalance
from kata_pin.daemon.quiet.status import QuietStatus
from kata_pin.daemon.quiet.tuner import Outcome, Tuner, Write, Writer, Written
from kata_pin.daemon.reconcile.node import NodeWatch
from kata_pin.daemon.reconcile.ports import Observer
from kata_pin.daemon.store.node_events import NodeEvents
from kata_pin.daemon.store.tunables import Tunables
from kata_pin.errors import KataPinError, ParseError, reason_of
from kata_pin.host.interrupts import InterruptTable, default_mask
from kata_pin.host.root import HostRoot
from kata_pin.model.count_noun import count
from kata_pin.model.cpuset import EMPTY, CpuSet
from kata_pin.model.pass_outcome import PassOutcome
from kata_pin.model.quiet.interrupts import Interrupt
from kata_pin.model.quiet.tunables import (
    Goal,
    Observed,
    QuietClaim,
    QuietState,
    TunableKey,
    TunableKind,
)
from kata_pin.model.reports.history import NodeEventKind
from kata_pin.model.topology import HostTopology
from kata_pin.policy.quiet.state import (
    default_mask_goal,
    interrupt_goals,
    irqbalance_goal,
    quiet_state,
)
from kata_pin.sources.irqbalance import socket_changes
from kata_pin.wire.kernel.masks import parse_mask, render_mask

log = logging.getLogger(__name__)

NARROW_S: Final = 1.5
"""How long pCPUs that become quiet wait for others that do."""

START_S: Final = 60.0
"""Longest wait for the first passes of a start: until then nobody knows who is still there."""

_DEFAULT: Final = TunableKey(TunableKind.DEFAULT_MASK)


class TunableSource(Protocol):
    """More tunables than interrupts, for other levels than `irq`.

    `kinds` are its own; what is recorded of them and no longer there is forgotten.
    """

    kinds: Mapping[TunableKind, Writer]

    async def observe(self) -> Sequence[Observed]:
        """Return what there is now; raises KataPinError."""

    def goals(
        self, topology: HostTopology, state: QuietState, seen: Sequence[Observed]
    ) -> Mapping[TunableKey, Goal]:
        """Return how they must be; those without a goal are given back."""


class QuietKeeper(Observer):
    """See the module."""

    def __init__(
        self,
        root: HostRoot,
        node: NodeWatch,
        live: LiveConfig,
        *,
        store: Tunables,
        events: NodeEvents,
        facts: PodFacts,
        sources: Sequence[TunableSource] = (),
    ) -> None:
        """Raises StateError."""
        self._root = root
        self._node = node
        self._live = live
        self._events = events
        self._claims = QuietClaims(live, facts)
        self._table = InterruptTable(root)
        self._lines: dict[int, tuple[CpuSet, Observed]] = {}
        self._irqbalance = Irqbalance(root)
        self._sources = sources
        writers: dict[TunableKind, Writer] = {
            TunableKind.INTERRUPT: self._write_files,
            TunableKind.DEFAULT_MASK: self._write_files,
            TunableKind.IRQBALANCE: self._irqbalance.write,
        }
        for source in sources:
            writers |= source.kinds
        self._tuner = Tuner(store, writers)
        self._wake = asyncio.Event()
        self._turn = asyncio.Lock()
        self._online = EMPTY
        self._narrow_at: float | None = None
        self._problems: frozenset[str] = frozenset()
        self.status = QuietStatus()

    def passed(self, outcome: PassOutcome) -> None:
        """See what a sandbox has now."""
        reloaded = self.status.level != self._live.now.quiet.value
        if self._claims.passed(outcome) or reloaded:
            self._wake.set()

    def ended(self, outcome: PassOutcome) -> None:
        """Give back what a sandbox had."""
        if self._claims.ended(outcome.sandbox_id):
            self._wake.set()

    def look(self) -> None:
        """Look again soon: something of the node changed."""
        self._wake.set()

    async def run(self, settled: Callable[[], bool]) -> None:
        """Keep the node as it should be until cancelled.

        `settled` returns whether every recorded sandbox has had a pass, or has ended: what an
        earlier daemon wrote must not be given back before that.
        """
        until = time.monotonic() + START_S if self._tuner.records else 0.0
        while time.monotonic() < until and not settled():
            self._wake.clear()
            await self._woken(0.2)
        while True:
            self._wake.clear()
            try:
                await self.round()
            except KataPinError as error:
                self._report_problems({"quiet": error.message})
            except Exception as error:  # a fault barrier: the next round looks again
                log.error("quiet pCPUs: %s", reason_of(error))
                log.debug("quiet pCPUs", exc_info=True)
            await self._next()

    async def follow_irqbalance(self) -> None:
        """Look again whenever irqbalance starts or ends."""
        async for _ in socket_changes(self._root.path(FOLDER)):
            self._wake.set()

    async def give_back(self) -> list[str]:
        """Give everything back; return what could not be, and why. Raises KataPinError."""
        if not self._tuner.records:
            return []
        topology = self._node.current().topology
        outcome = await self._apply(topology, QuietState(), (), self._table.read())
        return [f"{what}: {why}" for what, why in sorted(outcome.problems.items())]

    async def round(self) -> None:
        """Look at the node once and do what is due; raises KataPinError."""
        level = self._live.now.quiet
        if not self._live.acts or (not level.acts and not self._tuner.records):
            self.status = QuietStatus(level=level.value)
            self._narrow_at = None
            return
        topology = self._node.current().topology
        if topology.online != self._online:
            self._tuner.forgive()
            self._online = topology.online
        interrupts = self._table.read()
        vfio = any(one.row.vfio for one in interrupts)
        claims = self._coalesced(topology, self._claims.all(topology, vfio=vfio), interrupts)
        state = _state(topology, claims, interrupts)
        outcome = await self._apply(topology, state, claims, interrupts)
        if self._live.acts:  # it was not uninstalled meanwhile
            self._note(state, interrupts, outcome)

    async def _apply(
        self,
        topology: HostTopology,
        state: QuietState,
        claims: Sequence[QuietClaim],
        interrupts: Sequence[Interrupt],
    ) -> Outcome:
        """Bring every tunable to its goal: irqbalance first, then new interrupts, then the rest."""
        async with self._turn:  # an uninstall restores while a round may be under way
            return await self._apply_now(topology, state, claims, interrupts)

    async def _apply_now(
        self,
        topology: HostTopology,
        state: QuietState,
        claims: Sequence[QuietClaim],
        interrupts: Sequence[Interrupt],
    ) -> Outcome:
        seen = list(await self._irqbalance.observe())
        goals: dict[TunableKey, Goal] = {}
        ban = irqbalance_goal(state)
        if ban is not None:
            goals |= {one.key: ban for one in seen}
        running = [TunableKey(TunableKind.IRQBALANCE, str(n)) for n in self._irqbalance.running]
        self._tuner.drop_gone(running, [TunableKind.IRQBALANCE])
        default = default_mask_goal(topology, state)
        if default is not None:
            goals[_DEFAULT] = default
        seen.append(Observed(_DEFAULT, "", str(default_mask(self._root)), "default mask"))
        goals |= interrupt_goals(topology, state, interrupts, claims, self._live.now.quiet_vfio)
        lines = [self._observed(one) for one in interrupts]
        self._tuner.drop_gone([one.key for one in lines], [TunableKind.INTERRUPT])
        seen += lines
        for source in self._sources:
            changed = any(key.kind in source.kinds for key in self._tuner.records)
            if not state.full and not changed:
                continue
            more = await source.observe()
            self._tuner.drop_gone([one.key for one in more], source.kinds)
            goals |= source.goals(topology, state, more)
            seen += more
        return await self._tuner.apply(seen, goals)

    def _observed(self, one: Interrupt) -> Observed:
        """Return an interrupt as a tunable: the same object as long as nothing of it changed."""
        mask, seen = self._lines.get(one.number, (None, None))
        if seen is None or mask is not one.mask or seen.identity != one.row.text:
            key = TunableKey(TunableKind.INTERRUPT, str(one.number))
            label = f"interrupt {one.number} ({one.row.name})"
            seen = Observed(key, one.row.text, str(one.mask), label, one.managed)
            self._lines[one.number] = (one.mask, seen)
        return seen

    def _coalesced(
        self,
        topology: HostTopology,
        claims: tuple[QuietClaim, ...],
        interrupts: Sequence[Interrupt],
    ) -> tuple[QuietClaim, ...]:
        """Return the claims that count now: new ones only after a moment."""
        applied = self.status.state.quiet
        fresh = _state(topology, claims, interrupts).quiet - applied
        now = time.monotonic()
        if not fresh or self.status.rounds == 0:
            self._narrow_at = None
            return claims
        if self._narrow_at is None:
            self._narrow_at = now + NARROW_S
        if now >= self._narrow_at:
            self._narrow_at = None
            return claims
        return tuple(one._replace(cpus=one.cpus & applied) for one in claims)

    async def _next(self) -> None:
        """Wait until something happens, the next audit is due, or new pCPUs have waited enough."""
        wait_s = self._live.now.audit.affinity_s
        if self._narrow_at is not None:
            wait_s = min(wait_s, max(0.01, self._narrow_at - time.monotonic()))
        await self._woken(wait_s)

    async def _woken(self, most_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(most_s):
                await self._wake.wait()

    async def _write_files(self, writes: Sequence[Write]) -> Sequence[Written]:
        """Write masks of interrupts; the event loop gets a turn between parts."""
        root, done = self._root, []
        prefix = "" if root.live else root.path("").rstrip("/")
        for at in range(0, len(writes), 64):
            part = [_file_write(one) for one in writes[at : at + 64]]
            for asked, answer in zip(part, root.calls.write_tunables(part, prefix), strict=True):
                done.append(Written(answer.errno, _value(asked.kind, answer.value)))
            await asyncio.sleep(0)
        return done

    def _note(self, state: QuietState, interrupts: Sequence[Interrupt], outcome: Outcome) -> None:
        before = self.status
        self.status = before.after(
            level=self._live.now.quiet.value,
            state=state,
            interrupts=interrupts,
            outcome=outcome,
            irqbalance=self._irqbalance.running,
        )
        if state.quiet != before.state.quiet:
            self._events.report(
                NodeEventKind.QUIET_CHANGED,
                "quiet pCPUs: %s, before: %s; %s set, %s restored",
                str(state.quiet) or "none",
                str(before.state.quiet) or "none",
                count(outcome.written, "value"),
                count(outcome.given_back, "value"),
                level=logging.INFO,
                cpus=str(state.quiet),
            )
        for one in state.spared:
            if one not in before.state.spared:
                log.warning("pCPU %d is not quiet: %s", one.cpu, one.reason)
        for seen in outcome.overridden:
            self._events.report(
                NodeEventKind.QUIET_WRITER,
                "%s: another writer (%s) set %s again and again; left to it for now",
                seen.label or str(seen.key),
                self._suspects(),
                seen.value,
            )
        problems = dict(outcome.problems)
        if self._irqbalance.problem and state.quiet:
            problems["irqbalance"] = self._irqbalance.problem
        self._report_problems(problems)

    def _suspects(self) -> str:
        """Name who may have written: irqbalance, if it runs."""
        running = self._irqbalance.running
        return f"perhaps irqbalance, pid {running[0]}" if running else "not known which"

    def _report_problems(self, problems: Mapping[str, str]) -> None:
        """Log each reason once until it is gone."""
        reasons = frozenset(problems.values())
        for what, why in problems.items():
            if why not in self._problems:
                self._problems |= {why}
                self._events.report(NodeEventKind.QUIET_FAILED, "cannot set %s: %s", what, why)
        self._problems = reasons
        self.status.problems = tuple(sorted(f"{what}: {why}" for what, why in problems.items()))


def _state(
    topology: HostTopology, claims: Iterable[QuietClaim], interrupts: Iterable[Interrupt]
) -> QuietState:
    return quiet_state(topology, claims, {one.node for one in interrupts})


def _file_write(one: Write) -> TunableWrite:
    """Return the write of a mask, in the form that its file takes."""
    value = one.value
    if one.key.kind is TunableKind.DEFAULT_MASK:
        value = render_mask(CpuSet.parse(value))
    return TunableWrite(one.key.kind.value, one.key.name, value)


def _value(kind: str, text: str) -> str | None:
    """Return what a file has, as a CPU list; None for what makes no sense."""
    with contextlib.suppress(ParseError):
        if kind == TunableKind.DEFAULT_MASK:
            return str(parse_mask(text.encode(), kind))
        return str(CpuSet.parse(text))
    return None
