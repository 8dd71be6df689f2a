"""Quiet pCPUs: interrupts and kernel work that are kept off exclusive ones (`quiet`)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from msgspec import Struct

from kata_pin.base.config.tree import Config
from kata_pin.base.cpuset import EMPTY, HostTopology
from kata_pin.base.documents.answers import NodeEventKind
from kata_pin.base.errors import KataPinError, reason_of
from kata_pin.base.placement import Note, PassOutcome
from kata_pin.base.values import count, listed
from kata_pin.engine.counters import MetricRow, Shown, readings
from kata_pin.linux.files import HostRoot
from kata_pin.linux.interrupts import Interrupt, InterruptTable, default_mask
from kata_pin.linux.process import vfio_devices
from kata_pin.options.quiet.claims import (
    PodFacts,
    QuietClaims,
    QuietStatus,
    kept_quiet,
    node_notes,
    quiet_notes,
    quiet_sandbox,
)
from kata_pin.options.quiet.decide import (
    first_mask,
    interrupt_goals,
    quiet_state,
)
from kata_pin.options.quiet.findings import NAMED
from kata_pin.options.quiet.kernel_work import (
    FOLDER,
    WORK_KINDS,
    IrqbalanceProcesses,
    KernelWork,
    write_tunables,
)
from kata_pin.options.quiet.read import processes
from kata_pin.options.quiet.services import read_crio, read_tuned, socket_changes
from kata_pin.options.quiet.tuner import Tunables, Tuner, TunerOutcome, Writer
from kata_pin.options.quiet.values import (
    ENDING,
    Crio,
    Goal,
    Include,
    KeepOff,
    Observed,
    QuietClaim,
    QuietState,
    TunableKey,
    TunableRecord,
    Tuned,
    Unknown,
)
from kata_pin.records.history import NodeEvents
from kata_pin.rights.broker.tunables import TunableKind
from kata_pin.service.options import Core, Running

log = logging.getLogger(__name__)


# Which programs may have written a value of the kernel beside kata-pin.
#
# The kernel does not record who writes these files, so this names programs that run and are known
# to write such values. Facts are in irqbalance, activate.c; tuned's plugins scheduler, cpu and
# sysctl; cri-o, internal/runtimehandlerhooks.

_OF_IRQBALANCE: Final = frozenset({TunableKind.INTERRUPT})
_OF_ISOLATING: Final = frozenset(
    {TunableKind.INTERRUPT, TunableKind.DEFAULT_MASK, TunableKind.KERNEL_THREAD}
)
"""What tuned writes if its profile has isolated cores."""

_OF_TUNED: Final = frozenset(
    {
        *(TunableKind.WORKQUEUES, TunableKind.WATCHDOG),
        *(TunableKind.IDLE_LIMIT, TunableKind.GOVERNOR),
    }
)
_OF_CRIO: Final = frozenset(
    {TunableKind.DEFAULT_MASK, TunableKind.IDLE_LIMIT, TunableKind.GOVERNOR}
)


class Writers(Struct, frozen=True):
    """Programs that write such values: pids of irqbalance, tuned and CRI-O if they run."""

    irqbalance: tuple[int, ...]
    tuned: Tuned | Unknown | None
    crio: Crio | Unknown | None


def suspects(kind: TunableKind, writers: Writers) -> str:
    """Return in words who may have written a value of this kind."""
    names = list(_of(kind, writers))
    if not names:
        return "no program runs here that is known to write it, and the kernel records no writer"
    return f"perhaps {listed(names, NAMED)}: the kernel records no writer"


def _of(kind: TunableKind, writers: Writers) -> Iterator[str]:
    if kind in _OF_IRQBALANCE:
        for pid in writers.irqbalance:
            yield f"irqbalance (pid {pid})"
    tuned, crio = writers.tuned, writers.crio
    if isinstance(tuned, Tuned):
        unknown = isinstance(tuned.profile, Unknown)
        if kind in _OF_TUNED or (kind in _OF_ISOLATING and (tuned.isolates or unknown)):
            profile = "" if unknown else f", profile {tuned.profile}"
            yield f"tuned (pid {tuned.pid}{profile})"
    if isinstance(crio, Crio) and kind in _OF_CRIO and crio.hooks:
        yield f"CRI-O's hooks (pid {crio.pid})"


# What operators are told of quiet pCPUs: in the log, and as events of the node.


class QuietNotices:
    """Reports each thing once, until it is gone."""

    def __init__(self, root: HostRoot, events: NodeEvents) -> None:
        self._root = root
        self._events = events
        self._known: frozenset[str] = frozenset()

    def changed(self, before: QuietState, status: QuietStatus) -> None:
        """Report other quiet pCPUs than before, and those that cannot be."""
        state, outcome = status.state, status.outcome
        if (state.quiet, state.full) != (before.quiet, before.full):
            self._events.report(
                NodeEventKind.QUIET_CHANGED,
                "quiet pCPUs: %s, before: %s; %s set, %s restored",
                _named(state),
                _named(before),
                count(outcome.written, "value"),
                count(outcome.given_back, "value"),
                level=logging.INFO,
                cpus=str(state.quiet),
            )
        for one in state.spared:
            if one not in before.spared:
                log.warning("pCPU %d is not quiet: %s", one.cpu, one.reason)

    def problems(self, found: Mapping[str, str]) -> None:
        """Report why something cannot be written, each reason once until it is gone."""
        reasons = frozenset(found.values())
        for what, why in found.items():
            if why not in self._known:
                self._known |= {why}
                self._events.report(NodeEventKind.QUIET_FAILED, "cannot set %s: %s", what, why)
        self._known = reasons

    async def overridden(self, found: Sequence[Observed], irqbalance: Sequence[int]) -> None:
        """Report what another writer set too often, and who that may be."""
        if not found:
            return
        writers = await asyncio.to_thread(self._writers, tuple(irqbalance))
        for seen in found:
            self._events.report(
                NodeEventKind.QUIET_WRITER,
                "%s: another writer set %s again and again; kata-pin leaves it for now; %s",
                seen.label or str(seen.key),
                seen.value,
                suspects(seen.key.kind, writers),
            )

    def _writers(self, irqbalance: tuple[int, ...]) -> Writers:
        """Return who writes such values on this node; reads every process once."""
        every = processes(self._root)
        names = {} if isinstance(every, Unknown) else {pid: one.comm for pid, one in every.items()}
        return Writers(irqbalance, read_tuned(self._root, names), read_crio(self._root, names))


def _named(state: QuietState) -> str:
    if not state.quiet:
        return "none"
    return f"{state.quiet} (in full: {state.full})" if state.full else str(state.quiet)


# Keeps interrupts off quiet pCPUs: one desired state for the node, brought about again and again.
#
# Passes only wake it, and nothing waits for it. It looks at the node anew each time: after passes,
# in its audits, when irqbalance starts, when pCPUs come or go. pCPUs that become quiet wait a
# little, so that pods that start together cost irqbalance one round; pCPUs that are free again are
# given back at once.

NARROW_S: Final = 1.5
"""How long pCPUs that become quiet wait for others that do."""

START_S: Final = 60.0
"""Longest wait for the first passes of a start: until then nobody knows who is still there."""

_DEFAULT: Final = TunableKey(TunableKind.DEFAULT_MASK)


_Desired = tuple[HostTopology, QuietState, Sequence[QuietClaim], Config]
"""All that goals are made of but for what is observed."""


class _Lines(NamedTuple):
    """The node's interrupts, as tunables too; `nodes` are their NUMA nodes."""

    version: int
    interrupts: Sequence[Interrupt]
    observed: Sequence[Observed]
    nodes: frozenset[int]
    vfio: bool


class QuietKeeper(Running):
    """Keeps interrupts and the kernel's own work off quiet pCPUs."""

    def __init__(self, core: Core, facts: PodFacts) -> None:
        """Raises StateError."""
        self._root = root = core.root
        self._node = core.node
        self._live = live = core.live
        self._sandboxes = core.sandboxes
        self._notices = QuietNotices(root, core.events)
        self._claims = QuietClaims(live, facts)
        self._table = InterruptTable(root)
        self._lines = _Lines(-1, (), (), frozenset(), vfio=False)
        self._irqbalance = IrqbalanceProcesses(root)
        self._work = KernelWork(root, live)
        writers: dict[TunableKind, Writer] = dict.fromkeys(
            TunableKind, partial(write_tunables, root)
        )
        self._tuner = Tuner(
            Tunables(core.registry), writers | {TunableKind.IRQBALANCE: self._irqbalance.write}
        )
        self._wake = asyncio.Event()
        self._turn = asyncio.Lock()
        self._online = EMPTY
        self._narrow_at: float | None = None
        self._desired: _Desired | None = None
        self._inputs: tuple[object, ...] = ()
        self._goals: Mapping[TunableKey, Goal] = {}
        """Made of `_inputs`."""
        self._look_at = 0.0
        """When the kernel's own work is read again, whether something is due or not."""
        self._refused: dict[str, list[str]] = {}
        """By sandbox what idle states and governors it does not get, as of their last reading."""
        self.status = QuietStatus()

    def passed(self, outcome: PassOutcome) -> None:
        """See what a sandbox has now."""
        reloaded = self.status.level is not self._live.now.quiet
        if self._claims.passed(outcome) or reloaded:
            self._wake.set()

    def ended(self, outcome: PassOutcome) -> None:
        """Give back what a sandbox had."""
        if self._claims.ended(outcome.sandbox_id):
            self._wake.set()

    def tasks(self) -> Iterator[Coroutine[object, object, None]]:
        """Yield the rounds, and what wakes them."""
        yield self._run()
        yield self._follow_irqbalance()

    def notes(self, sandbox_id: str) -> Iterator[Note]:
        """Yield why pCPUs of a sandbox are not quiet."""
        return quiet_notes(self.status, sandbox_id)

    def node_notes(self) -> Iterator[Note]:
        """Yield what could not be written."""
        return node_notes(self.status)

    def facts(self, sandbox_id: str) -> Mapping[str, Any]:
        """Return which pCPUs of a sandbox are quiet."""
        exclusive = self._claims.exclusive(sandbox_id)
        return {"quiet": quiet_sandbox(self.status, sandbox_id, exclusive)}

    def state(self) -> Mapping[str, Any]:
        """Return what is kept quiet on the node."""
        return {"kept_quiet": kept_quiet(self.status)}

    def metrics(self) -> Iterable[Shown]:
        """Return what the last round found; nothing while `quiet` is `off` or `report`."""
        return readings(METRICS, self.status) if self.status.acts else ()

    async def give_back(self, ids: Collection[str] | None) -> Mapping[str, Any]:
        """Restore all values if no sandboxes are named: they are the node's."""
        if ids is not None:
            return {}
        problems: Mapping[str, str] = {}
        with contextlib.closing(self):
            if self._tuner.records:
                topology = self._node.current().topology
                lines = self._read(topology)
                problems = (await self._apply(topology, QuietState(), (), lines)).problems
        return {"quiet_kept": tuple(f"{what}: {why}" for what, why in sorted(problems.items()))}

    async def _run(self) -> None:
        """Keep the node as it should be until cancelled.

        What an earlier daemon wrote must not be given back before the first passes.
        """
        with contextlib.closing(self):
            until = time.monotonic() + START_S if self._tuner.records else 0.0
            while time.monotonic() < until and not self._is_settled():
                self._wake.clear()
                await self._woken(0.2)
            while True:
                self._wake.clear()
                try:
                    await self.round()
                except KataPinError as error:
                    self._notices.problems({"quiet": error.message})
                except Exception as error:  # a fault barrier: the next round looks again
                    log.error("quiet pCPUs: %s", reason_of(error))
                    log.debug("quiet pCPUs", exc_info=True)
                await self._next()

    def _is_settled(self) -> bool:
        """Whether every sandbox has had a pass since the start, or has ended."""
        caches = map(self._sandboxes.cache, self._sandboxes.ids)
        return all(cache is None or cache.report is not None for cache in caches)

    async def _follow_irqbalance(self) -> None:
        """Look again whenever irqbalance starts or ends."""
        async for _ in socket_changes(self._root.path(FOLDER)):
            self._wake.set()

    def close(self) -> None:
        """Close the files that are read in each round."""
        self._table.close()

    async def round(self) -> None:
        """Look at the node once and do what is due; raises KataPinError."""
        level = self._live.now.quiet
        if not self._live.acts or (not level.acts and not self._tuner.records):
            self.status = QuietStatus(level=level)
            self._narrow_at = None
            self.close()
            return
        topology = self._node.current().topology
        if topology.online != self._online:
            self._tuner.forgive()
            self._online = topology.online
        lines = self._read(topology)
        claims = self._claims.all(topology, vfio=lines.vfio)
        claims = self._coalesced(topology, claims, lines.nodes)
        state = quiet_state(topology, claims, lines.nodes)
        outcome = await self._apply(topology, state, claims, lines)
        if self._live.acts:  # it was not uninstalled meanwhile
            await self._note(state, claims, lines.interrupts, outcome)

    def _read(self, topology: HostTopology) -> _Lines:
        """Return the interrupts; what is made of them stays until more than counters changes."""
        interrupts = self._table.read()
        if self._lines.version >= 0:  # at first nobody knows what is new
            born = [_observed(one) for one in self._table.born]
            self._tuner.forget([one.key for one in born])
            default = self._tuner.records.get(_DEFAULT)
            if default is not None:
                self._tuner.adopt([*_born_of(default, topology, self._table.born)])
        if self._lines.version != self._table.version:
            observed = tuple(map(_observed, interrupts))
            self._tuner.drop_gone([one.key for one in observed], [TunableKind.INTERRUPT])
            vfio = any(one.row.vfio for one in interrupts)
            nodes = frozenset(one.node for one in interrupts)
            self._lines = _Lines(self._table.version, interrupts, observed, nodes, vfio)
        return self._lines._replace(interrupts=interrupts)

    async def _apply(
        self,
        topology: HostTopology,
        state: QuietState,
        claims: Sequence[QuietClaim],
        lines: _Lines,
    ) -> TunerOutcome:
        """Bring every tunable to its goal: irqbalance first, then new interrupts, then the rest."""
        async with self._turn:  # an uninstall restores while a round may be under way
            banned = await self._irqbalance.observe()
            running = [TunableKey(TunableKind.IRQBALANCE, str(n)) for n in self._irqbalance.running]
            self._tuner.drop_gone(running, [TunableKind.IRQBALANCE])
            default = Observed(_DEFAULT, "", str(default_mask(self._root)), "default mask")
            desired = (topology, state, claims, self._live.now)
            more = await self._observe_work(desired)
            inputs = (desired, lines.version, [one.key for one in banned], more)
            if inputs != self._inputs:
                self._goals = self._all_goals(desired, lines, banned, more)
                self._inputs = inputs
            seen = [*banned, default, *lines.observed, *more]
            return await self._tuner.apply(seen, self._goals)

    async def _observe_work(self, desired: _Desired) -> Sequence[Observed]:
        """Return the kernel's own work: read now if something is due, else as it was read last."""
        _, state, claims, config = desired
        now = time.monotonic()
        fresh = desired != self._desired or not self._tuner.calm or now >= self._look_at
        if fresh:
            self._desired, self._look_at = desired, now + config.audit.deep_s
            self._refused = {}
        wanted = state.full or any(one.idle or one.governor for one in claims)
        if not wanted and not any(key.kind in WORK_KINDS for key in self._tuner.records):
            return ()
        seen = await self._work.observe(fresh=fresh)
        if fresh:
            self._tuner.drop_gone([one.key for one in seen], ENDING)
            for sandbox_id, why in self._work.problems(state, claims, seen):
                self._refused.setdefault(sandbox_id, []).append(why)
        return seen

    def _all_goals(
        self,
        desired: _Desired,
        lines: _Lines,
        banned: Sequence[Observed],
        more: Sequence[Observed],
    ) -> Mapping[TunableKey, Goal]:
        topology, state, claims, config = desired
        goals: dict[TunableKey, Goal] = {}
        off = state.quiet - state.crio  # CRI-O sets both for its pCPUs itself
        if off:
            goals |= {one.key: Include(off) for one in banned}
            goals[_DEFAULT] = KeepOff(off, topology.online, (state.housekeeping,))
        goals |= interrupt_goals(topology, state, lines.interrupts, claims, config.quiet_vfio)
        goals |= self._work.goals(topology, state, claims, more)
        return goals

    def _coalesced(
        self,
        topology: HostTopology,
        claims: tuple[QuietClaim, ...],
        nodes: Collection[int],
    ) -> tuple[QuietClaim, ...]:
        """Return the claims that count now: new ones only after a moment."""
        applied = self.status.state.quiet
        fresh = quiet_state(topology, claims, nodes).quiet - applied
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

    async def _note(
        self,
        state: QuietState,
        claims: Sequence[QuietClaim],
        interrupts: Sequence[Interrupt],
        outcome: TunerOutcome,
    ) -> None:
        """Take down what a round found and did, and report what is new."""
        before = self.status
        refusals = dict(self._claims.problems)
        for sandbox_id, why in self._refused.items():
            refusals[sandbox_id] = (*refusals.get(sandbox_id, ()), *why)
        self.status = now = QuietStatus(
            level=self._live.now.quiet,
            state=state,
            claims=claims,
            refusals=refusals,
            interrupts=interrupts,
            outcome=outcome,
            held=Counter(key.kind for key in self._tuner.records),
            irqbalance=self._irqbalance.running,
        )
        now.count(before, self._table.fired)
        problems = dict(outcome.problems)
        if self._irqbalance.problem and state.quiet:
            problems["irqbalance"] = self._irqbalance.problem
        now.problems = tuple(sorted(f"{what}: {why}" for what, why in problems.items()))
        self._notices.changed(before.state, now)
        self._notices.problems(problems)
        await self._notices.overridden(outcome.overridden, self._irqbalance.running)


def start(core: Core) -> QuietKeeper:
    """Return the option at work; raises StateError."""
    facts = PodFacts(
        core.registry.containers, core.kata_pinning.annotations, partial(vfio_devices, core.root)
    )
    return QuietKeeper(core, facts)


METRICS: Final[tuple[MetricRow[QuietStatus], ...]] = (
    MetricRow(
        "kata_pin_quiet_cpus",
        "Exclusive pCPUs that are kept quiet, by level; spared: those that cannot be.",
        lambda status: {
            "irq": len(status.state.quiet - status.state.full),
            "full": len(status.state.full),
            "spared": len(status.state.spared),
        },
        {"level": ("irq", "full", "spared")},
        "`irq`: of interrupts only, `full`: of the kernel's own work too ([quiet.md](quiet.md)).",
    ),
    MetricRow(
        "kata_pin_quiet_values",
        "Masks and other values that are changed to keep pCPUs quiet, by kind.",
        lambda status: {kind: status.held[kind] for kind in TunableKind},
        {"kind": TunableKind},
    ),
    MetricRow(
        "kata_pin_quiet_write_failures_total",
        "Failed writes of such values, by kind.",
        lambda status: {kind: status.failed[kind] for kind in TunableKind},
        {"kind": TunableKind},
        "`doctor` says why.",
    ),
    MetricRow(
        "kata_pin_quiet_managed_interrupts",
        "Managed interrupts that may fire on quiet pCPUs: the kernel places them.",
        lambda status: status.managed_on(status.state.quiet),
    ),
    MetricRow(
        "kata_pin_quiet_interrupts_total",
        "Interrupts of devices that fired on quiet pCPUs, by whether they can be moved.",
        lambda status: {"movable": status.movable_fired, "managed": status.managed_fired},
        {"kind": ("movable", "managed")},
        "One that is movable may still fire on its former pCPU after a move.",
    ),
)


def _born_of(
    default: TunableRecord, topology: HostTopology, born: Iterable[Interrupt]
) -> Iterator[TunableRecord]:
    """Yield records of new interrupts that have their masks from the narrowed default mask."""
    for one in born:
        first = first_mask(topology, default, one)
        if first:
            seen = _observed(one)
            yield TunableRecord(seen.key, seen.identity, first, seen.value)


def _observed(one: Interrupt) -> Observed:
    """Return an interrupt as a tunable."""
    key = TunableKey(TunableKind.INTERRUPT, str(one.number))
    label = f"interrupt {one.number} ({one.row.name})"
    return Observed(key, one.row.text, str(one.mask), label, one.managed)
