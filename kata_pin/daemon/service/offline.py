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
from collections.abc import Collection, Iterable, Iterator

from kata_pin.config.tree import Config
from kata_pin.daemon.allocation.pass_view import granted
from kata_pin.daemon.allocation.restore import kept_cpusets
from kata_pin.daemon.guests.manager import restore_guests
from kata_pin.daemon.guests.probe import kernel_facts
from kata_pin.daemon.guests.status import GuestView, plan_guest
from kata_pin.daemon.intake.records import Intake
from kata_pin.daemon.isolation.cache_groups import remove_group
from kata_pin.daemon.isolation.realtime import restore
from kata_pin.daemon.live_config import LiveConfig
from kata_pin.daemon.reconcile.sandbox_cache import SandboxCache
from kata_pin.daemon.service.compose import Components, compose, quiet_keeper
from kata_pin.daemon.service.runtime_dir import held_registry, only_one, registry_copy
from kata_pin.daemon.status.allocation import allocation_report
from kata_pin.daemon.status.documents import (
    conflict_notes,
    history_report,
    state_report,
    with_sandboxes,
)
from kata_pin.daemon.status.sandbox import (
    SandboxFacts,
    applied,
    guest_report,
    thread_reports,
    vcpu_reports,
)
from kata_pin.daemon.store.cache_groups import CacheGroupTable
from kata_pin.daemon.store.containers import Registry
from kata_pin.daemon.store.history import History
from kata_pin.daemon.store.node_events import NodeEvents
from kata_pin.daemon.store.pins import Pins
from kata_pin.daemon.store.rt_threads import RtThreads
from kata_pin.errors import DaemonError, ParseError
from kata_pin.model.cpuset import EMPTY, CpuSet, union
from kata_pin.model.pass_outcome import Cause, outcome_of
from kata_pin.model.placement import Report
from kata_pin.model.reports.applied import Applied
from kata_pin.model.reports.daemon import Daemon
from kata_pin.model.reports.explain import Explanation
from kata_pin.model.reports.history import HistoryDocument
from kata_pin.model.reports.state import State
from kata_pin.model.sandbox import Sandbox
from kata_pin.policy.alloc.allotment import sandbox_of
from kata_pin.policy.explain.guest import guest_lines
from kata_pin.policy.explain.sandbox import explain as explain_lines
from kata_pin.policy.placement.cautious import OthersCpus
from kata_pin.policy.placement.mask import sandbox_mask
from kata_pin.policy.placement.others import claims_of_others, entries_of_others
from kata_pin.policy.placement.precedence import settled
from kata_pin.sources.spool import Spool


def state(config: Config) -> State:
    """Return the state document as of now; sets nothing. Raises KataPinError."""
    with _reading(config) as parts:
        every = list(_look(parts, act=False))
        state = state_report(
            node=parts.node.current(),
            mode=config.mode.value,
            daemon=Daemon(running=False, reason="the daemon was not asked"),
            node_notes=parts.node.notes,
            allocation=allocation_report(parts.allocator),
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
        found = History(registry, LiveConfig(config))
        events = [] if name else NodeEvents(registry).newest(limit, since_s=since_s)
        return history_report(found.changes(name, since_s=since_s, limit=limit), events)


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
        return Applied(kind="unpin", sandboxes=applied(_undo(parts, "unpin", chosen)))


def release_all(config: Config) -> Applied:
    """Restore every affinity: what uninstall does where no daemon runs.

    Unlike unpin this is not remembered: a daemon that is installed again pins again.
    """
    with _writing(config) as parts:
        done = applied(_undo(parts, "release"))
        kept = kept_cpusets(parts.allocator, parts.registry)
        with contextlib.closing(quiet_keeper(parts)) as keeper:
            noisy = asyncio.run(keeper.give_back())
        return Applied(kind="unpin", sandboxes=done, cpusets_kept=kept, quiet_kept=tuple(noisy))


@contextlib.contextmanager
def _reading(config: Config) -> Iterator[Components]:
    with contextlib.closing(registry_copy(config.runtime_dir)) as registry:
        yield _gathered(config, registry)


@contextlib.contextmanager
def _writing(config: Config) -> Iterator[Components]:
    with only_one(config), held_registry(config) as registry:
        Pins(registry).set_live_threads(live=False)  # no daemon runs to see new threads
        yield _gathered(config, registry)


def _gathered(config: Config, registry: Registry) -> Components:
    """Return the components with everything recorded that is known without hooks."""
    parts = compose(config, registry)
    intake = Intake(registry, parts.bundles)
    for message in Spool(os.path.join(config.runtime_dir, "spool")).peek():
        with contextlib.suppress(ParseError):
            intake.take(message, spooled=True)
    asyncio.run(parts.survey.all())
    parts.adoption.all()
    return parts


def _chosen(parts: Components, sandbox_id: str | None) -> list[str]:
    known = _known(parts)
    if sandbox_id is None:
        return known
    if sandbox_id not in known:
        raise DaemonError(f"no sandbox {sandbox_id!r}", hint="kata-pin show lists them")
    return [sandbox_id]


def _known(parts: Components) -> list[str]:
    return sorted({*parts.registry.sandboxes(), *parts.finder.sandboxes()})


def _undo(parts: Components, verb: str, ids: Iterable[str] | None = None) -> list[SandboxFacts]:
    """Restore affinities, then the cpusets in guests."""
    done = list(_act(parts, verb, ids, release=True))
    _remove_groups(parts, {one.sandbox.id for one in done} if ids is not None else None)
    classes = RtThreads(parts.registry)
    for sandbox_id in classes.sandboxes() if ids is None else (one.sandbox.id for one in done):
        list(restore(parts.root, classes, classes.of(sandbox_id)))
    passes = [(one.sandbox, one.report) for one in done if one.report is not None]
    node = parts.node.current()
    asyncio.run(restore_guests(parts.agents, parts.registry, node, passes))
    return done


def _remove_groups(parts: Components, ids: Collection[str] | None) -> None:
    """Remove the groups of resctrl of these sandboxes, or all that were made."""
    table = CacheGroupTable(parts.registry)
    for sandbox_id, class_name in table.all():
        if ids is None or sandbox_id in ids:
            with contextlib.suppress(OSError):  # the record stays: the next daemon tries again
                remove_group(table, parts.root.calls, sandbox_id, class_name)


def _act(
    parts: Components, verb: str, ids: Iterable[str] | None = None, *, release: bool = False
) -> Iterator[SandboxFacts]:
    """Run a pass that sets pins over each sandbox, and record it in the history."""
    history = History(parts.registry, parts.live)
    cause = Cause((f"{verb}, without a daemon",), time.monotonic())
    for facts in _look(parts, ids, act=True, release=release):
        if facts.report is not None:
            history.passed(outcome_of(facts.sandbox, facts.report, cause, released=facts.released))
        yield facts


async def _prepare(parts: Components, ids: Iterable[str]) -> None:
    """Read what passes need of processes."""
    for sandbox_id in ids:
        await parts.engine.search.prepare(sandbox_id, parts.registry.containers(sandbox_id), None)


def _guest(parts: Components, sandbox: Sandbox, report: Report) -> GuestView | None:
    """Return the map of a sandbox; only a daemon asks the guest."""
    if sandbox.vmm is None:
        return None
    facts = kernel_facts(parts.root, sandbox.vmm)
    inferred = parts.node.config.guest.act_on_inferred
    plan = plan_guest(sandbox, report, parts.node.current(), facts, inferred=inferred)
    return GuestView(plan, detail="not asked: the daemon is not running") if plan else None


def _others(parts: Components, sandbox_id: str) -> OthersCpus:
    """Return what is stored of all other sandboxes' exclusive CPUs, and what is not known."""
    node, registry = parts.node.current(), parts.registry
    exclusive: list[CpuSet] = []
    unknown = [note.text for note in parts.node.notes]
    for other in _known(parts):
        records = registry.containers(other)
        if other == sandbox_id:
            exclusive.append(entries_of_others(records, node.kubelet))
            exclusive.append(claims_of_others(records, node.claims))
        elif any(one.state.counts for one in records):
            believed = settled(records, kubelet=node.kubelet, configured=EMPTY)
            allotment = granted(parts.allocator, believed)
            sandbox = Sandbox(other, allotment.containers)
            mask = sandbox_mask(sandbox, node, allocated=allotment.allocated)
            exclusive.append(mask.exclusive)
        else:
            unknown.append(f"nothing is recorded of sandbox {other}, whose VM runs")
    if parts.allocator.decides:
        grants = parts.allocator.now.grants.values()
        exclusive += [one.exclusive for one in grants if sandbox_of(one.request.pod) != sandbox_id]
    return OthersCpus(union(exclusive), "; ".join(unknown))


def _look(
    parts: Components, ids: Iterable[str] | None = None, *, act: bool, release: bool = False
) -> Iterator[SandboxFacts]:
    """Run a pass over each sandbox; those of other runtimes, without a VMM, are left out."""
    released = parts.pins.released()
    chosen = _known(parts) if ids is None else list(ids)
    asyncio.run(_prepare(parts, chosen))
    for sandbox_id in chosen:
        cache = SandboxCache(others=_others(parts, sandbox_id) if act and not release else None)
        containers = parts.registry.containers(sandbox_id)
        may_act = act and (release or sandbox_id not in released)
        report = parts.engine.run(sandbox_id, containers, cache, act=may_act, release=release)
        if cache.vmm is None and parts.engine.search.runs_without_vmm(containers):
            continue
        sandbox = Sandbox(sandbox_id, parts.engine.believed(containers, cache), cache.vmm)
        view = _guest(parts, sandbox, report)
        threads = thread_reports(report, released=sandbox_id in released)
        yield SandboxFacts(
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
