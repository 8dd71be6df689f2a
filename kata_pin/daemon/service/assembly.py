"""The daemon's objects, built in order: each takes what was built before it."""

from __future__ import annotations

import grp
import logging
import os
import time
from collections.abc import Callable, Coroutine, Iterator
from functools import partial

from kata_pin import __version__
from kata_pin.config.metrics import EndpointKind
from kata_pin.config.tree import Changes, Config, NriEnabled
from kata_pin.daemon.allocation.coordinator import Coordinator
from kata_pin.daemon.allocation.nri_decider import nri_decider, plugin_index
from kata_pin.daemon.allocation.pending_passes import PendingPasses
from kata_pin.daemon.guests.manager import Guests
from kata_pin.daemon.intake.file_events import CgroupWatch, FileEvents, left_to_audits
from kata_pin.daemon.intake.hook_service import HookService
from kata_pin.daemon.intake.nri_events import NriIntake
from kata_pin.daemon.intake.qmp import ExtraMonitor
from kata_pin.daemon.intake.records import Intake
from kata_pin.daemon.intake.thread_events import ThreadEvents
from kata_pin.daemon.reconcile.audit import Auditor
from kata_pin.daemon.reconcile.counters import Counters
from kata_pin.daemon.reconcile.passes import PassRunner
from kata_pin.daemon.reconcile.sandboxes import Sandboxes
from kata_pin.daemon.service.audits import AuditLoop
from kata_pin.daemon.service.background import Background
from kata_pin.daemon.service.commands import Commands
from kata_pin.daemon.service.compose import Components, compose
from kata_pin.daemon.service.control import ControlServer
from kata_pin.daemon.service.reload import Reload
from kata_pin.daemon.service.systemd import Notifier, ServiceStatus
from kata_pin.daemon.status.allocation import allocation_report
from kata_pin.daemon.status.connections import metrics_report, nri_report
from kata_pin.daemon.status.documents import in_slices, state_report
from kata_pin.daemon.status.overview import Overview
from kata_pin.daemon.status.scrape import MetricsServer
from kata_pin.daemon.store.containers import Registry
from kata_pin.daemon.store.history import History
from kata_pin.model.reports.daemon import Daemon
from kata_pin.sources.hooks import HookServer
from kata_pin.sources.nri import NriPlugin
from kata_pin.sources.spool import Spool
from kata_pin.sources.state_watch import StateWatch

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
    ) -> None:
        """`reread` returns the configuration as it is now. Raises KataPinError or OSError."""
        self._started = time.monotonic()
        self.sandboxes = sandboxes = Sandboxes()
        pending = PendingPasses(sandboxes)
        self._components = one = compose(config, registry, pending)
        live, node, pins = one.live, one.node, one.pins
        self._counters, self._history = Counters(), History(registry, live)
        paths = config.paths
        self._watch = StateWatch(vc=paths.vc, kata=paths.kata, kubelet=paths.kubelet_state)
        guests = Guests(one.agents, registry, pins, node, sandboxes, background.start)
        nri_intake = NriIntake(registry, one.finder, one.index, one.kata_pinning, sandboxes)
        self._nri = _nri_plugin(config, nri_intake, one, pending)
        self._coordinator = Coordinator(
            one.allocator, pending, self._nri, node=node, root=one.root, registry=registry
        )
        self._coordinator.catch_up()
        cgroups = CgroupWatch(node, self._watch)
        self.passes = PassRunner(
            one.root,
            sandboxes,
            one.engine,
            registry,
            pins,
            live,
            background.start,
            ExtraMonitor(one.kata, live).ask,
            guests,
            (self._history, self._counters, cgroups, self._coordinator, guests),
        )
        self._file_events = FileEvents(node, registry, one.adoption, sandboxes, self._watch)
        self._thread_events = ThreadEvents(one.root, node, pins, sandboxes, self._counters)
        spool = Spool(self._path("spool"))
        spool.prepare()
        intake, find_vmm = Intake(registry, one.bundles), self.passes.find_vmm
        self.hook_service = HookService(
            live, pins, intake, sandboxes, spool, self._counters, find_vmm
        )
        self.hooks = HookServer(self._path("hook.sock"), self.hook_service.hook)
        self.auditor = Auditor(one.root, sandboxes)
        self.audits = AuditLoop(
            live,
            self.auditor,
            self._counters,
            (
                partial(one.index.refresh, full=True),
                self.hook_service.take_spool,
                self._file_events.look_at_node,
                self._file_events.rearm,
                self._file_events.look_around,
            ),
            (self._coordinator.audit, guests.audit),
        )
        gid, mode = _readers(config.group)
        self._metrics = self._metrics_server(gid, mode)
        self._status = ServiceStatus(notifier, sandboxes, live)
        self.reload = Reload(live, reread, sandboxes, self.audits, self._status)
        self._overview = Overview(one.root, sandboxes, one.engine, registry, pins, guests)
        commands = Commands(
            sandboxes=sandboxes,
            passes=self.passes,
            pins=pins,
            overview=self._overview,
            state=self._state,
            reload=self.reload,
            restore_cpusets=self._coordinator.restore,
            live=live,
            look_around=self._file_events.look_around,
            history=self._history,
            guests=guests,
        )
        self.controls = (
            ControlServer(self._path("control.sock"), commands.all),
            ControlServer(self._path("status.sock"), commands.reading, mode=mode, gid=gid),
        )

    def take_in(self) -> None:
        """Ask for passes over what is known, and take in what came while no daemon ran."""
        for sandbox_id in self._components.registry.sandboxes():
            self.sandboxes.mark(sandbox_id, "start")
        self.hook_service.take_spool()
        with left_to_audits():
            self._file_events.look_around()

    def works(self) -> Iterator[Coroutine[object, object, None]]:
        """Yield what the daemon does until it ends."""
        yield self.passes.run()
        yield self.hooks.serve()
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
        yield self.audits.run()
        if self._metrics is not None:
            yield self._metrics.serve()
        yield self._status.run()

    def _path(self, name: str) -> str:
        return os.path.join(self._components.live.now.runtime_dir, name)

    def _metrics_server(self, gid: int | None, mode: int) -> MetricsServer | None:
        """Return who answers Prometheus; what that takes is imported where it is wanted."""
        one, settings = self._components, self._components.live.now.metrics
        if settings.listen.kind is EndpointKind.NONE:
            return None
        from kata_pin.daemon.status import metrics  # noqa: PLC0415 - 40 ms, 3 MiB

        made = metrics.Metrics(
            self._counters,
            self.sandboxes,
            self._history,
            lambda: one.node.current().topology.online,
            registry=one.registry,
            pins=one.pins,
            overruns=lambda: self._watch.overruns,
            single=settings.sandboxes,
            more=partial(metrics.alloc_metrics, one.allocator, self._coordinator.pusher),
        )
        path = self._path("metrics.sock")
        return MetricsServer(settings.listen, path, made.text, gid, mode)

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
            ),
            node_notes=(*node.notes, *allocator.notes),
            allocation=allocation_report(
                allocator, self._coordinator.problems, self._coordinator.pusher
            ),
        )
        overview = self._overview
        chosen = overview.encoded_now(sandbox_id) if sandbox_id else overview.encoded()
        return await in_slices(state, chosen)


def _nri_plugin(
    config: Config, intake: NriIntake, one: Components, pending: PendingPasses
) -> NriPlugin | None:
    """Return the NRI plugin; without one updates are found in Kata's state."""
    nri = config.nri
    if nri.enabled is NriEnabled.NO:
        return None
    decider = nri_decider(intake, one.allocator, one.registry, pending)
    return NriPlugin(
        decider or intake,
        socket_path=nri.socket,
        name=nri.name,
        index=plugin_index(one.allocator, nri.index),
        wanted=nri.enabled is NriEnabled.YES,
        decider=decider,
    )


def _readers(group: str) -> tuple[int | None, int]:
    """Return the group of sockets that only read, and their mode: root's alone without it."""
    try:
        return grp.getgrnam(group).gr_gid, 0o660
    except KeyError:
        log.info("no group %s: only root can connect to the status socket", group)
        return None, 0o600
