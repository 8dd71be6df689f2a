"""The daemon's objects, built in order: each takes what was built before it."""

from __future__ import annotations

import grp
import logging
import os
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from functools import partial

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
from kata_pin.daemon.service.daemon_state import DaemonState
from kata_pin.daemon.service.reload import Reload
from kata_pin.daemon.service.systemd import Notifier, ServiceStatus
from kata_pin.daemon.status.overview import Overview
from kata_pin.daemon.status.scrape import MetricsServer
from kata_pin.daemon.store.containers import Registry
from kata_pin.daemon.store.history import History
from kata_pin.sources.hooks import HookServer
from kata_pin.sources.nri import NriPlugin
from kata_pin.sources.spool import Spool
from kata_pin.sources.state_watch import StateWatch

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Assembly:
    """The daemon ready to run."""

    config: Config
    registry: Registry
    sandboxes: Sandboxes
    passes: PassRunner
    auditor: Auditor
    audits: AuditLoop
    hook_service: HookService
    hooks: HookServer
    file_events: FileEvents
    thread_events: ThreadEvents
    coordinator: Coordinator
    nri: NriPlugin | None
    metrics: MetricsServer | None
    controls: tuple[ControlServer, ...]
    status: ServiceStatus
    reload: Reload

    def take_in(self) -> None:
        """Ask for passes over what is known, and take in what came while no daemon ran."""
        for sandbox_id in self.registry.sandboxes():
            self.sandboxes.mark(sandbox_id, "start")
        self.hook_service.take_spool()
        with left_to_audits():
            self.file_events.look_around()

    def works(self) -> Iterator[Coroutine[object, object, None]]:
        """Yield what the daemon does until it ends."""
        yield self.passes.run()
        yield self.hooks.serve()
        yield self.hook_service.follow_spool()
        yield self.thread_events.follow()
        if self.config.changes is Changes.EVENTS:
            yield self.file_events.follow()
            yield self.file_events.follow_cpus()
        if self.nri is not None:
            yield self.nri.run()
        yield self.coordinator.follow_orders()
        yield self.coordinator.follow_pods()
        yield self.coordinator.push()
        yield self.audits.run()
        if self.metrics is not None:
            yield self.metrics.serve()
        yield self.status.run()


def assemble(
    config: Config,
    registry: Registry,
    background: Background,
    *,
    reread: Callable[[], Config],
    notifier: Notifier,
) -> Assembly:
    """Return the daemon's objects.

    `reread` returns the configuration as it is now. Raises KataPinError or OSError.
    """
    sandboxes = Sandboxes()
    pending = PendingPasses(sandboxes)
    one = compose(config, registry, pending)
    live, node, allocator = one.live, one.node, one.allocator
    counters, history = Counters(), History(registry, live)
    watch = StateWatch(
        vc=config.paths.vc, kata=config.paths.kata, kubelet=config.paths.kubelet_state
    )
    guests = Guests(
        one.agents, registry, one.pins, node, live=live, sandboxes=sandboxes, start=background.start
    )
    nri_intake = NriIntake(registry, one.finder, one.index, one.kata_pinning, sandboxes)
    nri = _nri_plugin(config, nri_intake, one, pending)
    coordinator = Coordinator(allocator, pending, nri, node=node, root=one.root, registry=registry)
    coordinator.catch_up()
    passes = PassRunner(
        one.root,
        sandboxes,
        one.engine,
        registry=registry,
        pins=one.pins,
        live=live,
        start=background.start,
        ask=ExtraMonitor(one.kata, live).ask,
        guests=guests,
        observers=(history, counters, CgroupWatch(node, watch), coordinator, guests),
    )
    file_events = FileEvents(node, registry, one.adoption, sandboxes, watch)
    spool = Spool(os.path.join(config.runtime_dir, "spool"))
    spool.prepare()
    hook_service = HookService(
        live=live,
        pins=one.pins,
        intake=Intake(registry, one.bundles),
        sandboxes=sandboxes,
        spool=spool,
        counters=counters,
        find_vmm=passes.find_vmm,
    )
    auditor = Auditor(one.root, sandboxes)
    audits = AuditLoop(
        live,
        auditor,
        counters,
        before=(
            partial(one.index.refresh, full=True),
            hook_service.take_spool,
            file_events.look_at_node,
            file_events.rearm,
            file_events.look_around,
        ),
        after=(coordinator.audit, guests.audit),
    )
    readers = _readers(config.group)
    metrics = _metrics_server(
        one, readers, sandboxes=sandboxes, counters=counters, history=history,
        coordinator=coordinator, watch=watch,
    )  # fmt: skip
    status = ServiceStatus(notifier, sandboxes, live)
    reload = Reload(live, reread, sandboxes, audits, status)
    overview = Overview(
        one.root, sandboxes, one.engine, registry=registry, pins=one.pins, guests=guests
    )
    commands = Commands(
        sandboxes=sandboxes,
        passes=passes,
        pins=one.pins,
        overview=overview,
        state=DaemonState(node, overview, allocator, coordinator, nri=nri, metrics=metrics),
        reload=reload,
        restore_cpusets=coordinator.restore,
        live=live,
        look_around=file_events.look_around,
        history=history,
        guests=guests,
    )
    gid, mode = readers
    controls = (
        ControlServer(os.path.join(config.runtime_dir, "control.sock"), commands.all),
        ControlServer(
            os.path.join(config.runtime_dir, "status.sock"), commands.reading, mode=mode, gid=gid
        ),
    )

    return Assembly(
        config=config,
        registry=registry,
        sandboxes=sandboxes,
        passes=passes,
        auditor=auditor,
        audits=audits,
        hook_service=hook_service,
        hooks=HookServer(os.path.join(config.runtime_dir, "hook.sock"), hook_service.hook),
        file_events=file_events,
        thread_events=ThreadEvents(one.root, node, one.pins, sandboxes, counters),
        coordinator=coordinator,
        nri=nri,
        metrics=metrics,
        controls=controls,
        status=status,
        reload=reload,
    )


def _nri_plugin(
    config: Config, intake: NriIntake, one: Components, pending: PendingPasses
) -> NriPlugin | None:
    """Return the NRI plugin; without one Kata's state tells of updates."""
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


def _metrics_server(
    one: Components,
    readers: tuple[int | None, int],
    *,
    sandboxes: Sandboxes,
    counters: Counters,
    history: History,
    coordinator: Coordinator,
    watch: StateWatch,
) -> MetricsServer | None:
    """Return who answers Prometheus; what that takes is imported where it is wanted."""
    config = one.live.now
    if config.metrics.listen.kind is EndpointKind.NONE:
        return None
    from kata_pin.daemon.status.allocation_metrics import alloc_metrics  # noqa: PLC0415
    from kata_pin.daemon.status.metrics import Metrics  # noqa: PLC0415 - 40 ms, 3 MiB

    metrics = Metrics(
        counters,
        sandboxes,
        history,
        lambda: one.node.current().topology.online,
        registry=one.registry,
        pins=one.pins,
        overruns=lambda: watch.overruns,
        single=config.metrics.sandboxes,
        more=partial(alloc_metrics, one.allocator, coordinator.pusher),
    )
    path = os.path.join(config.runtime_dir, "metrics.sock")
    return MetricsServer(config.metrics.listen, path=path, text=metrics.text, readers=readers)


def _readers(group: str) -> tuple[int | None, int]:
    """Return the group of sockets that only read, and their mode: root's alone without it."""
    try:
        return grp.getgrnam(group).gr_gid, 0o660
    except KeyError:
        log.info("no group %s: only root can connect to the status socket", group)
        return None, 0o600
