"""The daemon's objects, built in order: each takes what was built before it."""

from __future__ import annotations

import asyncio
import contextlib
import grp
import logging
import os
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from functools import partial
from typing import Final

from kata_pin import __version__
from kata_pin.calls import Calls
from kata_pin.config.metrics import EndpointKind
from kata_pin.config.tree import Changes, Config
from kata_pin.daemon.allocation.coordinator import Coordinator
from kata_pin.daemon.allocation.pending_passes import PendingPasses
from kata_pin.daemon.guests.manager import Guests
from kata_pin.daemon.intake.file_events import CgroupWatch, FileEvents, left_to_audits
from kata_pin.daemon.intake.hook_service import HookService
from kata_pin.daemon.intake.nri_events import NriIntake
from kata_pin.daemon.intake.qmp import ExtraMonitor
from kata_pin.daemon.intake.records import Intake
from kata_pin.daemon.intake.thread_events import ThreadEvents
from kata_pin.daemon.isolation.cache_groups import CacheGroups
from kata_pin.daemon.isolation.claims import Claims
from kata_pin.daemon.isolation.memory import MemoryMover
from kata_pin.daemon.isolation.realtime import RealtimeVcpus
from kata_pin.daemon.isolation.watch import Watch
from kata_pin.daemon.reconcile.audit import Auditor
from kata_pin.daemon.reconcile.counters import Counters
from kata_pin.daemon.reconcile.passes import PassRunner
from kata_pin.daemon.reconcile.sandboxes import Sandboxes
from kata_pin.daemon.reconcile.slices import Slices
from kata_pin.daemon.service.audits import AuditLoop
from kata_pin.daemon.service.background import Background
from kata_pin.daemon.service.commands import Commands
from kata_pin.daemon.service.compose import Components, compose, nri_plugin, quiet_keeper
from kata_pin.daemon.service.control import ControlServer
from kata_pin.daemon.service.own_cpus import OwnCpus
from kata_pin.daemon.service.reload import Reload
from kata_pin.daemon.service.systemd import Notifier, ServiceStatus
from kata_pin.daemon.status.allocation import allocation_report
from kata_pin.daemon.status.connections import metrics_report, nri_report
from kata_pin.daemon.status.documents import in_slices, state_report
from kata_pin.daemon.status.overview import Overview
from kata_pin.daemon.status.quiet import kept_quiet, node_notes, quiet_notes, quiet_sandbox
from kata_pin.daemon.status.scrape import MetricsServer
from kata_pin.daemon.status.watch import watch_report
from kata_pin.daemon.store.cache_groups import CacheGroupTable
from kata_pin.daemon.store.containers import Registry
from kata_pin.daemon.store.history import History
from kata_pin.daemon.store.rt_threads import RtThreads
from kata_pin.model.cpuset import CpuSet, union
from kata_pin.model.placement import Note
from kata_pin.model.reports.daemon import Daemon
from kata_pin.model.reports.watch import WatchDocument
from kata_pin.policy.alloc.allotment import sandbox_of
from kata_pin.sources.hooks import HookServer
from kata_pin.sources.spool import Spool
from kata_pin.sources.state_watch import StateWatch

START_S: Final = 1.0
"""How long a start, a deep audit or an operator waits for processes that do not answer, and a start
for the passes over what is recorded."""

log = logging.getLogger(__name__)


class Assembly:
    """The daemon ready to run; each object takes those before it."""

    def __init__(
        self,
        config: Config,
        registry: Registry,
        background: Background,
        reread: Callable[[], Config],
        notifier: Notifier,
        *,
        calls: Calls,
        broker: int,
    ) -> None:
        """`reread` returns the configuration as it is now, `broker` is the broker's pid.

        Raises KataPinError or OSError.
        """
        self._started = time.monotonic()
        self._background = background
        self.sandboxes = sandboxes = Sandboxes()
        pending = PendingPasses(sandboxes)
        self._components = one = compose(config, registry, pending, calls)
        live, node, pins = one.live, one.node, one.pins
        self._counters, self._history = Counters(), History(registry, live)
        paths = config.paths
        self._watch = StateWatch(
            vc=paths.vc,
            kata=paths.kata,
            kubelet=paths.kubelet_state,
            claims=paths.cdi,
            calls=calls,
        )
        self._guests = guests = Guests(
            one.agents, registry, pins, node, sandboxes, background.start
        )
        nri_intake = NriIntake(
            registry, one.finder, one.index, one.kata_pinning, sandboxes, one.survey
        )
        self._nri = nri_plugin(config, nri_intake, one, pending)
        self._coordinator = Coordinator(
            one.allocator, pending, self._nri, node=node, root=one.root, registry=registry
        )
        self._coordinator.catch_up()
        cgroups = CgroupWatch(node, self._watch)
        self._cache_groups = cache_groups = CacheGroups(
            one.root, live, CacheGroupTable(registry), sandboxes, registry.containers,
            one.kata_pinning.annotations,
        )  # fmt: skip
        self._realtime = RealtimeVcpus(one.root, live, RtThreads(registry), sandboxes, one.index)
        self._memory = memory = MemoryMover(
            one.root, live, node, sandboxes, registry.containers, one.events
        )
        own_cpus = OwnCpus(config.runtime_dir, node, calls, broker, partial(_granted, one))
        self.quiet = quiet_keeper(one)
        self.passes = PassRunner(
            one.root,
            sandboxes,
            one.engine,
            registry,
            pins,
            live,
            background.start,
            ExtraMonitor(one.kata, live, one.root.calls).ask,
            guests,
            (
                self._history,
                self._counters,
                cgroups,
                self._coordinator,
                guests,
                own_cpus,
                cache_groups,
                self._realtime,
                memory,
                self.quiet,
            ),
        )
        self._file_events = FileEvents(
            node, registry, one.adoption, sandboxes, self._watch, one.survey
        )
        self._thread_events = ThreadEvents(
            one.root, node, pins, sandboxes, self._counters, one.index,
            one.finder.claims.may_serve, self._file_events.vmm_started,
        )  # fmt: skip
        spool = Spool(self._path("spool"))
        spool.prepare()
        intake, find_vmm = Intake(registry, one.bundles), self.passes.find_vmm
        self.hook_service = HookService(
            live, pins, intake, sandboxes, spool, self._counters, find_vmm, one.root.calls
        )
        self.hooks = HookServer(self._path("hook.sock"), self.hook_service.hook)
        self.auditor = Auditor(one.root, sandboxes)
        self._claims = Claims(sandboxes, registry.containers)
        self.watch = Watch(
            one.root, self._claims, live, one.events, background.start,
            lambda: node.last.topology.online - node.last.assigned - _granted(one),
        )  # fmt: skip
        self.audits = AuditLoop(
            live,
            self.auditor,
            self._counters,
            (
                self._read_processes,
                self.hook_service.take_spool,
                self._file_events.look_at_node,
                self._file_events.rearm,
                self._file_events.look_around,
                self._coordinator.ask_runtime,
            ),
            (self._coordinator.audit, guests.audit, own_cpus.look),
            self._after_audit,
        )
        gid, mode = _readers(config.group)
        self._status = ServiceStatus(notifier, sandboxes, live)
        self.reload = Reload(live, reread, sandboxes, self.audits, self._status, one.events)
        self._metrics = self._metrics_server(gid, mode)
        self._overview = Overview(
            one.root,
            sandboxes,
            one.engine,
            registry,
            pins,
            guests,
            cache_groups.seen,
            memory.seen,
            self._notes,
            lambda one: quiet_sandbox(self.quiet.status, one, self.quiet.exclusive(one)),
            self.watch.unmoved_s,
        )
        commands = Commands(
            sandboxes=sandboxes,
            passes=self.passes,
            pins=pins,
            overview=self._overview,
            state=self._state,
            reload=self.reload,
            events=one.events,
            restore_cpusets=self._coordinator.restore,
            restore_quiet=self.quiet.give_back,
            live=live,
            look_around=self._look_around,
            history=self._history,
            guests=guests,
            watch=self._watched,
        )
        self.controls = (
            ControlServer(self._path("control.sock"), commands.all),
            ControlServer(self._path("status.sock"), commands.reading, mode=mode, gid=gid),
        )

    async def take_in(self) -> None:
        """Pin what is recorded, serve hooks, then take in what came while no daemon ran.

        Threads of recorded sandboxes may be where they must not be by now, so their VMMs are
        confirmed, and they are pinned, before anything is read of processes that none of them
        named: there may be thousands.
        """
        one = self._components
        recorded = one.registry.sandboxes()
        self._cache_groups.catch_up(recorded)
        running = filter(one.engine.search.was_accepted, recorded)
        tickets = {
            sandbox_id: self._file_events.take_recorded(sandbox_id) for sandbox_id in running
        }
        self.hook_service.take_spool()  # before any pass: it may say what the records do not
        self._background.start(self.passes.run())
        self._background.start(self.hooks.serve())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_S):
                for sandbox_id, ticket in tickets.items():
                    await self.sandboxes.settled(sandbox_id, ticket)
        await one.survey.all(patience_s=START_S)
        one.survey.afterwards(partial(self.sandboxes.mark_all, "start"))
        for sandbox_id in recorded:
            self.sandboxes.mark(sandbox_id, "start")
        with left_to_audits():
            self._file_events.look_around()

    def _passes_done(self) -> bool:
        """Whether every sandbox has had a pass since the start."""
        caches = map(self.sandboxes.cache, self.sandboxes.ids)
        return all(cache is None or cache.report is not None for cache in caches)

    def _watched(self) -> WatchDocument:
        limit = self._components.live.now.isolation.max_foreign
        return watch_report(self.watch, self._claims, limit)

    def _notes(self, sandbox_id: str) -> Iterator[Note]:
        """Yield what an operator should know of a sandbox beside its pins."""
        yield from self._cache_groups.notes(sandbox_id)
        yield from self._realtime.notes(sandbox_id)
        yield from quiet_notes(self.quiet.status, sandbox_id)
        yield from self._memory.notes(sandbox_id)

    async def _after_audit(self) -> None:
        """Look at what no pass shows."""
        self._cache_groups.look()
        self._realtime.look()
        await self.watch.look()

    async def _look_around(self) -> None:
        await self._components.survey.all(patience_s=START_S)
        self._file_events.look_around()

    async def _read_processes(self) -> None:
        """Look at every process again, for deep audits."""
        one = self._components
        await Slices().run(one.index.refresh_in_steps(full=True))
        await one.survey.all(patience_s=START_S)

    def works(self) -> Iterator[Coroutine[object, object, None]]:
        """Yield what the daemon does until it ends, beside what `take_in` starts."""
        yield self.hook_service.follow_spool()
        yield self._thread_events.follow()
        if self._components.live.now.changes is Changes.EVENTS:
            yield self._file_events.follow()
            yield self._file_events.follow_cpus()
        if self._nri is not None:
            yield self._nri.run()
        yield self._coordinator.follow_orders()
        yield self._coordinator.follow_pods()
        yield self._coordinator.push()
        yield self._coordinator.write_placements(
            lambda one: self._guests.cpus_of(sandbox_of(one.request.pod), one.container_id)
        )
        yield self.audits.run()
        yield self._memory.run()
        yield self.quiet.run(self._passes_done)
        yield self.quiet.follow_irqbalance()
        if self._metrics is not None:
            yield self._metrics.serve()
        yield self._components.survey.run()
        yield self._status.run()

    def _path(self, name: str) -> str:
        return os.path.join(self._components.live.now.runtime_dir, name)

    def _metrics_server(self, gid: int | None, mode: int) -> MetricsServer | None:
        """Return who answers Prometheus, None if nobody shall."""
        settings = self._components.live.now.metrics
        if settings.listen.kind is EndpointKind.NONE:
            return None
        path = self._path("metrics.sock")
        return MetricsServer(settings.listen, path, self._make_metrics, gid, mode)

    def _make_metrics(self) -> Callable[[], Awaitable[bytes]]:
        """Return what makes the metrics; until the first scrape nothing of that is imported."""
        from kata_pin.daemon.status import isolation_metrics, metrics  # noqa: PLC0415 - 40 ms, 4 MiB
        from kata_pin.daemon.status.cache_metrics import (  # noqa: PLC0415 - as above
            cache_metrics,
            memory_metrics,
        )
        from kata_pin.daemon.status.quiet_metrics import quiet_metrics  # noqa: PLC0415 - as above

        one, settings = self._components, self._components.live.now.metrics
        return metrics.Metrics(
            self._counters,
            self.sandboxes,
            self._history,
            lambda: one.node.current().topology.online,
            registry=one.registry,
            pins=one.pins,
            overruns=lambda: self._watch.overruns,
            locked=lambda: one.survey.locked,
            single=settings.sandboxes,
            more=lambda: (
                *metrics.alloc_metrics(one.allocator, self._coordinator.pusher),
                *cache_metrics(self._cache_groups, one.registry, settings.sandboxes),
                *quiet_metrics(self.quiet.status),
                *memory_metrics(self._memory),
            ),
            events=one.events.counts,
            refused=lambda: self.reload.refused is not None,
            isolation=isolation_metrics.IsolationMetrics(
                one.root, self.sandboxes, self._claims, self.watch, one.index, self._nri
            ),
        ).text

    async def _state(self, sandbox_id: str) -> bytes:
        """Return the encoded `state` document as of now, of one sandbox if one is named."""
        node, allocator = self._components.node, self._components.allocator
        state = state_report(
            node=node.current(),
            mode=node.config.mode.value,
            daemon=Daemon(
                running=True,
                pid=os.getpid(),
                version=__version__,
                uptime_s=round(time.monotonic() - self._started, 3),
                nri=nri_report(self._nri),
                metrics=metrics_report(self._metrics),
                refused=self.reload.refused,
            ),
            node_notes=(
                *(*node.notes, *allocator.notes, *self._components.survey.notes),
                *node_notes(self.quiet.status),
            ),
            allocation=allocation_report(
                allocator, self._coordinator.problems, self._coordinator.pusher
            ),
            kept_quiet=kept_quiet(self.quiet.status),
        )
        overview = self._overview
        chosen = overview.encoded_now(sandbox_id) if sandbox_id else overview.encoded()
        return await in_slices(state, chosen)


def _granted(one: Components) -> CpuSet:
    """Return what the allocator gave to containers exclusively."""
    return union(grant.exclusive for grant in one.allocator.effective.grants.values())


def _readers(group: str) -> tuple[int | None, int]:
    """Return the group of sockets that only read, and their mode: root's alone without it."""
    try:
        return grp.getgrnam(group).gr_gid, 0o660
    except KeyError:
        log.info("no group %s: only root can connect to the status socket", group)
        return None, 0o600
