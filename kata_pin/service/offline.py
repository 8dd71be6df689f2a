"""The daemon's work once, without a daemon (D19): what commands fall back to.

Reading functions work on a copy of the registry in memory, read the spool without removing it, and
set nothing. `pin` and `unpin` write the registry's file itself, so that a later daemon knows of
them; the runtime directory's lock keeps the two apart.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from typing import Any

from kata_pin.base.config.tree import Config, LiveConfig
from kata_pin.base.cpuset import EMPTY, CpuSet, union
from kata_pin.base.documents.answers import Applied, Explanation, HistoryDocument
from kata_pin.base.documents.document import Daemon
from kata_pin.base.documents.state import State
from kata_pin.base.errors import DaemonError, ParseError
from kata_pin.base.placement import Cause, Report, outcome_of
from kata_pin.base.sandbox import Sandbox
from kata_pin.base.steps import finish
from kata_pin.engine.sandbox_cache import SandboxCache
from kata_pin.guest.cpus import GuestView, guest_lines, plan_guest
from kata_pin.guest.manager import restore_guests
from kata_pin.guest.probe import kernel_facts
from kata_pin.linux.files import HostRoot
from kata_pin.placement.exclusive import claims_of_others, entries_of_others
from kata_pin.placement.explain import explain as explain_lines
from kata_pin.placement.masks import resolve_cpusets, sandbox_mask
from kata_pin.placement.place import OthersCpus
from kata_pin.records.bundles import Intake
from kata_pin.records.containers import Registry
from kata_pin.records.history import History, NodeEvents
from kata_pin.records.hooks import Spool
from kata_pin.records.pins import Pins
from kata_pin.service.documents import conflict_notes, history_report, state_report, with_sandboxes
from kata_pin.service.options import Core, compose, has_rows, is_due
from kata_pin.service.privileges import CheckedCalls
from kata_pin.service.runtime_dir import held_registry, only_one, registry_copy
from kata_pin.service.sandbox_document import (
    KnownSandbox,
    applied,
    guest_report,
    thread_reports,
    vcpu_reports,
)


def state(config: Config) -> State:
    """Return the state document as of now; sets nothing. Raises KataPinError."""
    with _reading(config) as parts:
        every = list(_look(parts, act=False))
        state = state_report(
            node=parts.node.current(),
            mode=config.mode,
            daemon=Daemon(running=False, reason="the daemon was not asked"),
            node_notes=parts.node.notes,
            **parts.options.state(),
        )
        placements = {one.sandbox.id: one.placement for one in every if one.placement is not None}
        pods = {one.sandbox.id: one.sandbox.pod for one in every}
        return with_sandboxes(state, every, conflict_notes(placements, pods.__getitem__))


def explain(config: Config, sandbox_id: str) -> Explanation:
    """Return the `explain` document of one sandbox; raises DaemonError when there is none."""
    with _reading(config) as parts:
        for facts in _look(parts, _chosen(parts, sandbox_id), act=False):
            report, sandbox = facts.report, facts.sandbox
            if report is None or report.placement is None:
                continue
            view = _guest(parts, sandbox, report)
            guest = guest_lines(sandbox, view.plan.map, view.plan.cpusets) if view else ()
            lines = explain_lines(
                sandbox,
                report.threads,
                report.placement,
                parts.node.current(),
                guest=list(guest),
                now_ns=time.clock_gettime_ns(time.CLOCK_BOOTTIME),
            )
            return Explanation(sandbox=sandbox_id, lines=lines)
    raise DaemonError(f"no sandbox {sandbox_id!r}", hint="kata-pin show lists them")


def history(config: Config, name: str, *, since_s: int | None, limit: int) -> HistoryDocument:
    """Return the `history` document as the registry's file has it; raises KataPinError."""
    with contextlib.closing(registry_copy(config.runtime_dir)) as registry:
        history = History(registry, LiveConfig(config))
        return history_report(history, NodeEvents(registry), name, since_s=since_s, limit=limit)


def pin(config: Config, sandbox_id: str | None) -> Applied:
    """Set the pins of one sandbox, or of all, once; return the `pin` document."""
    with _writing(config) as parts:
        chosen = _chosen(parts, sandbox_id)
        parts.pins.set_released(chosen, released=False)
        return Applied(kind="pin", sandboxes=applied(list(_act(parts, "pin", chosen))))


def unpin(config: Config, sandbox_id: str | None) -> Applied:
    """Restore the affinities of one sandbox, or of all; return the `unpin` document."""
    with _writing(config) as parts:
        chosen = _chosen(parts, sandbox_id)
        parts.pins.set_released(chosen, released=True)
        done, kept = _undo(parts, "unpin", chosen)
        return Applied(kind="unpin", sandboxes=applied(done), **kept)


def release_all(config: Config) -> Applied:
    """Restore every affinity: what uninstall does where no daemon runs.

    Unlike unpin this is not remembered: a daemon that is installed again pins again.
    """
    with _writing(config) as parts:
        done, kept = _undo(parts, "release")
        return Applied(kind="unpin", sandboxes=applied(done), **kept)


@contextlib.contextmanager
def _reading(config: Config) -> Iterator[Core]:
    with contextlib.closing(registry_copy(config.runtime_dir)) as registry:
        yield _gathered(config, registry)


@contextlib.contextmanager
def _writing(config: Config) -> Iterator[Core]:
    with only_one(config), held_registry(config) as registry:
        Pins(registry).set_live_threads(live=False)  # no daemon runs to see new threads
        root = HostRoot(debugfs=config.paths.debugfs, calls=CheckedCalls(config))
        yield _gathered(config, registry, root)


def _gathered(config: Config, registry: Registry, root: HostRoot | None = None) -> Core:
    """Return the components with everything recorded that is known without hooks."""
    parts = compose(config, registry, root)
    parts.options.start(parts, lambda row: row.places and is_due(row, config, registry))
    intake = Intake(registry, parts.bundles)
    for message in Spool(os.path.join(config.runtime_dir, "spool")).peek():
        with contextlib.suppress(ParseError):
            intake.record(message, spooled=True)
    asyncio.run(parts.survey.all())
    finish(parts.adoption.all())
    return parts


def _chosen(parts: Core, sandbox_id: str | None) -> list[str]:
    known = _known(parts)
    if sandbox_id is None:
        return known
    if sandbox_id not in known:
        raise DaemonError(f"no sandbox {sandbox_id!r}", hint="kata-pin show lists them")
    return [sandbox_id]


def _known(parts: Core) -> list[str]:
    return sorted({*parts.registry.sandboxes(), *finish(parts.finder.sandboxes())})


def _undo(
    parts: Core, verb: str, ids: Iterable[str] | None = None
) -> tuple[list[KnownSandbox], dict[str, Any]]:
    """Restore affinities, what options changed, then the cpusets in guests.

    Returns the sandboxes, and what options could not restore by fields of Applied.
    """
    done = list(_act(parts, verb, ids, release=True))
    chosen = None if ids is None else {one.sandbox.id for one in done}
    parts.options.start(parts, lambda row: has_rows(row, parts.registry))
    kept = asyncio.run(parts.options.give_back(chosen))
    passes = [(one.sandbox, one.report) for one in done if one.report is not None]
    node = parts.node.current()
    asyncio.run(restore_guests(parts.agents, parts.registry, node, passes))
    return done, kept


def _act(
    parts: Core, verb: str, ids: Iterable[str] | None = None, *, release: bool = False
) -> Iterator[KnownSandbox]:
    """Run a pass that sets pins over each sandbox, and record it in the history."""
    history = History(parts.registry, parts.live)
    cause = Cause((f"{verb}, without a daemon",), time.monotonic())
    for facts in _look(parts, ids, act=True, release=release):
        if facts.report is not None:
            history.passed(outcome_of(facts.sandbox, facts.report, cause, released=facts.released))
        yield facts


async def _prepare(parts: Core, ids: Iterable[str]) -> None:
    """Read what passes need of processes."""
    for sandbox_id in ids:
        await parts.engine.search.prepare(sandbox_id, parts.registry.containers(sandbox_id), None)


def _guest(parts: Core, sandbox: Sandbox, report: Report) -> GuestView | None:
    """Return the map of a sandbox; only a daemon asks the guest."""
    if sandbox.vmm is None:
        return None
    facts = kernel_facts(parts.root, sandbox.vmm)
    inferred = parts.node.config.guest.act_on_inferred
    plan = plan_guest(sandbox, report, parts.node.current(), facts, inferred=inferred)
    return GuestView(plan, detail="not asked: the daemon is not running") if plan else None


def _others(parts: Core, sandbox_id: str) -> OthersCpus:
    """Return what is stored of all other sandboxes' exclusive CPUs, and what is not known."""
    node, registry = parts.node.current(), parts.registry
    exclusive: list[CpuSet] = []
    unknown = [note.text for note in parts.node.notes]
    for other in _known(parts):
        records = registry.containers(other)
        if other == sandbox_id:
            exclusive.append(entries_of_others(records, node.kubelet))
            exclusive.append(parts.options.granted(records).others)
            exclusive.append(claims_of_others(records, node.claims))
        elif any(one.state.counts for one in records):
            believed = resolve_cpusets(records, kubelet=node.kubelet, configured=EMPTY)
            allotment = parts.options.granted(believed)
            sandbox = Sandbox(other, allotment.containers)
            mask = sandbox_mask(sandbox, node, allocated=allotment.allocated)
            exclusive.append(mask.exclusive)
        else:
            unknown.append(f"nothing is recorded of sandbox {other}, whose VM runs")
    return OthersCpus(union(exclusive), "; ".join(unknown))


def _look(
    parts: Core, ids: Iterable[str] | None = None, *, act: bool, release: bool = False
) -> Iterator[KnownSandbox]:
    """Run a pass over each sandbox; those of other runtimes, without a VMM, are left out."""
    released = parts.pins.released()
    chosen = _known(parts) if ids is None else list(ids)
    asyncio.run(_prepare(parts, chosen))
    for sandbox_id in chosen:
        cache = SandboxCache(others=_others(parts, sandbox_id) if act and not release else None)
        containers = parts.registry.containers(sandbox_id)
        may_act = act and (release or sandbox_id not in released)
        report = finish(
            parts.engine.steps(sandbox_id, containers, cache, act=may_act, release=release)
        )
        if cache.vmm is None and parts.engine.search.runs_without_vmm(containers):
            continue
        sandbox = Sandbox(sandbox_id, parts.engine.believed(containers, cache), cache.vmm)
        view = _guest(parts, sandbox, report)
        threads = thread_reports(report, released=sandbox_id in released)
        yield KnownSandbox(
            sandbox=sandbox,
            report=report,
            states=tuple(one.state for one in threads),
            threads=threads,
            guest=None if view is None else guest_report(view, sandbox, vcpu_reports(view.plan)),
            checked_s=0.0,
            problem=cache.problem,
            released=sandbox_id in released,
            writers=cache.writers(time.monotonic()),
        )
