"""The service: everything composed, one TaskGroup, clean start and stop.

Start: sockets are bound before anything slow, so that hooks wait in the backlog instead of
spooling; then the registry's sandboxes and the spool are taken in. Stop (SIGTERM, SIGINT): sockets
are closed, supervisors are cancelled, masks stay (DESIGN D15): undo is `kata-pin unpin`.
SIGHUP reads the configuration again; one that is wrong is reported and the old one stays.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import grp
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from functools import partial
from typing import Final

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
from kata_pin.daemon.journal import CONFIGURATION_REFUSED, STARTED, about
from kata_pin.daemon.reconcile.audit import Auditor
from kata_pin.daemon.reconcile.counters import Counters
from kata_pin.daemon.reconcile.passes import PassRunner
from kata_pin.daemon.reconcile.sandboxes import Sandboxes
from kata_pin.daemon.service.commands import Commands
from kata_pin.daemon.service.compose import Components, boot_id, compose
from kata_pin.daemon.service.control import ControlServer
from kata_pin.daemon.service.lock import locked
from kata_pin.daemon.service.logging_setup import set_level, set_up
from kata_pin.daemon.service.systemd import Notifier
from kata_pin.daemon.status.allocation import allocation_report
from kata_pin.daemon.status.connections import metrics_report, nri_report
from kata_pin.daemon.status.documents import encoded_state, state_report
from kata_pin.daemon.status.overview import Overview
from kata_pin.daemon.status.scrape import MetricsServer
from kata_pin.daemon.store.database import Registry
from kata_pin.daemon.store.history import History
from kata_pin.errors import ConfigError, DaemonError, KataPinError
from kata_pin.host.root import HOST
from kata_pin.model.reports.daemon import Daemon as DaemonReport
from kata_pin.sources.bundles import BundleReader
from kata_pin.sources.hooks import HookServer
from kata_pin.sources.nri import NriPlugin
from kata_pin.sources.spool import Spool
from kata_pin.sources.state_watch import StateWatch

log = logging.getLogger(__name__)

BOUND: Final = (
    *("runtime_dir", "group", "paths", "hypervisors", "new_threads", "changes", "nri", "metrics"),
    "alloc",
)
"""Settings and sections that the parts are made of: changing them needs a restart."""


class Daemon:
    """The service of one node; `run` returns after SIGTERM or SIGINT."""

    def __init__(self, config: Config, *, reread: Callable[[], Config], notifier: Notifier) -> None:
        """`reread` gives the configuration anew on SIGHUP; raises ConfigError when it is wrong."""
        self._config = config
        self._reread = reread
        self._notifier = notifier
        self._started = time.monotonic()
        self._stop = asyncio.Event()
        self._retimed = asyncio.Event()
        self._nri: NriPlugin | None = None

    async def run(self) -> None:
        """Serve until told to stop.

        Raises DaemonError when another daemon serves the runtime directory, StateError or OSError
        when it cannot be used.
        """
        os.makedirs(self._config.runtime_dir, mode=0o750, exist_ok=True)
        with locked(self._config.runtime_dir), contextlib.ExitStack() as closing:
            registry = Registry(self._path("registry.db"), boot_id=boot_id(HOST))
            closing.callback(registry.close)
            self._sandboxes = Sandboxes()
            self._pending = PendingPasses(self._sandboxes)
            parts = compose(self._config, registry, self._pending)
            spool = Spool(self._path("spool"))
            spool.prepare()
            async with asyncio.TaskGroup() as tasks:
                await self._serve(parts, spool, tasks)

    async def _serve(self, parts: Components, spool: Spool, tasks: asyncio.TaskGroup) -> None:
        """Compose what the parts make possible, run it, and end it all when told to stop."""
        self._parts = parts
        self._live = parts.live
        self._readers = _readers(self._live.now.group)
        self._running: set[asyncio.Task[object]] = set()
        paths = self._live.now.paths
        watch = StateWatch(vc=paths.vc, kata=paths.kata, kubelet=paths.kubelet_state)
        self._watch = watch
        self._history = History(parts.registry, self._live)
        self._counters = Counters()

        def start(work: Coroutine[object, object, None]) -> None:
            self._spawn(tasks, work)

        self._guests = Guests(parts, live=self._live, vmm_of=self._sandboxes.known_vmm, start=start)
        self._nri = self._nri_plugin()
        self._allocation = Coordinator(
            parts.allocator,
            self._pending,
            self._nri,
            node=parts.node,
            root=parts.root,
            registry=parts.registry,
        )
        self._allocation.catch_up()
        cgroups = CgroupWatch(parts, watch)
        self._passes = PassRunner(
            parts.root,
            self._sandboxes,
            parts.engine,
            parts.registry,
            self._live,
            start=start,
            ask=ExtraMonitor(parts.kata, self._live).ask,
            guests=self._guests,
            observers=(self._history, self._counters, cgroups, self._allocation, self._guests),
        )
        self._overview = Overview(self._sandboxes, parts.engine, parts.registry, self._guests)
        self._file_events = FileEvents(parts, self._sandboxes, watch)
        self._auditor = Auditor(parts.root, self._sandboxes)
        intake = Intake(parts.registry, BundleReader(self._live.now.paths.bundle_roots))
        self._hook_service = HookService(
            live=self._live,
            registry=parts.registry,
            intake=intake,
            sandboxes=self._sandboxes,
            spool=spool,
            counters=self._counters,
            find_vmm=self._passes.find_vmm,
        )
        hooks = HookServer(self._path("hook.sock"), self._hook_service.hook)
        self._metrics = self._metrics_server()
        loop = asyncio.get_running_loop()
        with _signals(loop, self._stop, self._reload), contextlib.closing(hooks):
            hooks.bind()
            async with self._control_sockets():
                for sandbox_id in parts.registry.sandboxes():
                    self._sandboxes.mark(sandbox_id, "start")
                self._hook_service.take_spool()
                with left_to_audits():
                    self._file_events.look_around()
                for work in (
                    self._passes.run(),
                    hooks.serve(),
                    self._hook_service.follow_spool(),
                    ThreadEvents(
                        parts, self._sandboxes, self._live.now.new_threads, self._counters
                    ).follow(),
                    *self._followed(),
                    self._follow_nri(),
                    self._allocation.follow_orders(),
                    self._allocation.follow_pods(),
                    self._allocation.push(),
                    self._audits(),
                    self._serve_metrics(),
                    self._report_to_systemd(),
                ):
                    self._spawn(tasks, work)
                started = about(STARTED)
                log.info(
                    "kata-pin %s serves %s", __version__, self._live.now.runtime_dir, extra=started
                )
                await self._stop.wait()
                self._notifier.stopping()
                for task in list(self._running):
                    task.cancel()

    def _spawn(self, tasks: asyncio.TaskGroup, work: Coroutine[object, object, None]) -> None:
        """Run something until the end, or until it returns by itself."""
        if self._stop.is_set():  # nobody would end it any more
            work.close()
            return
        task = tasks.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def _path(self, name: str) -> str:
        return os.path.join(self._config.runtime_dir, name)

    # ---- what runs until the end ---------------------------------------------------------

    async def _audits(self) -> None:
        """Audit affinities, and deeply every so often; the periods follow the configuration."""
        deep_at = time.monotonic() + self._live.now.audit.deep_s
        while True:
            if await self._periods_changed(self._live.now.audit.affinity_s):
                deep_at = time.monotonic() + self._live.now.audit.deep_s
                continue
            try:
                if time.monotonic() < deep_at:
                    await self._auditor.affinity()
                else:
                    deep_at = time.monotonic() + self._live.now.audit.deep_s
                    await self._deep_audit()
                self._counters.audited()
            except Exception as error:  # the next round looks again
                self._counters.failed("audit", error)
                log.error("audit failed: %s", error)
                log.debug("audit failed", exc_info=True)

    async def _periods_changed(self, seconds: float) -> bool:
        """Wait for the next audit; return at once, and True, when its period is another one."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._retimed.wait()
        changed = self._retimed.is_set()
        self._retimed.clear()
        return changed

    async def _deep_audit(self) -> None:
        self._parts.index.refresh(full=True)
        self._hook_service.take_spool()
        if self._parts.node.changed():
            self._sandboxes.mark_all("the node changed")
        for sandbox_id in self._sandboxes.without_vmm:
            self._sandboxes.mark(sandbox_id, "still without a VMM", event=False)
        self._file_events.rearm()
        self._file_events.look_around()
        await self._auditor.deep()
        self._allocation.audit()
        self._guests.audit()

    def _followed(self) -> Iterator[Coroutine[object, object, None]]:
        """Yield what follows changes by events, unless audits are to find them."""
        if self._live.now.changes is Changes.EVENTS:
            yield self._file_events.follow()
            yield self._file_events.follow_cpus()

    def _nri_plugin(self) -> NriPlugin | None:
        """Return the NRI plugin, None where it is off: then persist.json reports updates."""
        nri = self._live.now.nri
        if nri.enabled is NriEnabled.NO:
            return None
        allocator, intake = self._parts.allocator, NriIntake(self._parts, self._sandboxes)
        decider = nri_decider(intake, allocator, self._parts.registry, self._pending)
        return NriPlugin(
            decider or intake,
            socket_path=nri.socket,
            name=nri.name,
            index=plugin_index(allocator, nri.index),
            wanted=nri.enabled is NriEnabled.YES,
            decider=decider,
        )

    async def _follow_nri(self) -> None:
        if self._nri is not None:
            await self._nri.run()

    async def _serve_metrics(self) -> None:
        """Answer Prometheus, unless nobody is to ask."""
        if self._metrics is not None:
            await self._metrics.serve()

    async def _report_to_systemd(self) -> None:
        """Say that start-up is done, then feed the watchdog as long as the loop turns."""
        self._notifier.ready(self._status())
        period = self._notifier.watchdog_s
        while period is not None:
            await asyncio.sleep(period)
            self._notifier.alive()
            self._notifier.status(self._status())

    def _status(self) -> str:
        return f"{len(self._sandboxes.ids)} sandboxes, mode {self._live.now.mode.value}"

    def _metrics_server(self) -> MetricsServer | None:
        """Return who answers Prometheus; what that takes is imported where it is wanted."""
        settings = self._live.now.metrics
        if settings.listen.kind is EndpointKind.NONE:
            return None
        from kata_pin.daemon.status.allocation_metrics import alloc_metrics  # noqa: PLC0415
        from kata_pin.daemon.status.metrics import Metrics  # noqa: PLC0415 - 40 ms, 3 MiB

        metrics = Metrics(
            self._counters,
            self._sandboxes,
            self._parts.registry,
            self._history,
            lambda: self._parts.node.current().topology.online,
            overruns=lambda: self._watch.overruns,
            single=settings.sandboxes,
            more=partial(alloc_metrics, self._parts.allocator, self._allocation.pusher),
        )
        path = self._path("metrics.sock")
        return MetricsServer(settings.listen, path=path, text=metrics.text, readers=self._readers)

    # ---- control -------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _control_sockets(self) -> AsyncIterator[None]:
        verbs = Commands(
            sandboxes=self._sandboxes,
            passes=self._passes,
            registry=self._parts.registry,
            overview=self._overview,
            state=self._state,
            reload=self._reload,
            restore_cpusets=self._allocation.restore,
            live=self._live,
            look_around=self._file_events.look_around,
            history=self._history,
            guests=self._guests,
        )
        gid, mode = self._readers
        control = ControlServer(self._path("control.sock"), verbs.all)
        status = ControlServer(self._path("status.sock"), verbs.reading, mode=mode, gid=gid)
        await control.start()
        await status.start()
        try:
            yield
        finally:
            await control.close()
            await status.close()

    async def _state(self, sandbox_id: str) -> bytes:
        """Return the encoded state document, of one sandbox if one is named."""
        state = state_report(
            node=self._parts.node.current(),
            mode=self._live.now.mode.value,
            daemon=DaemonReport(
                running=True,
                pid=os.getpid(),
                version=__version__,
                uptime_s=round(time.monotonic() - self._started, 3),
                nri=nri_report(self._nri),
                metrics=metrics_report(self._metrics),
            ),
            node_notes=(*self._parts.node.notes, *self._parts.allocator.notes),
            allocation=allocation_report(
                self._parts.allocator, self._allocation.problems, self._allocation.pusher
            ),
        )
        chosen = [sandbox_id] if sandbox_id else None
        return await encoded_state(state, self._overview.facts(chosen), self._overview.conflicts())

    def _reload(self) -> str:
        """Read the configuration again; return what is wrong with it, empty when it is in force."""
        self._notifier.reloading()
        try:
            fresh = self._reread()
            for key in BOUND:
                if getattr(fresh, key) != getattr(self._live.now, key):
                    raise ConfigError("cannot change while the daemon runs", key=key)
        except ConfigError as error:
            refused = about(CONFIGURATION_REFUSED)
            log.error("configuration not reloaded: %s", error, extra=refused)
            return str(error)
        else:
            if fresh.log_level is not self._live.now.log_level:
                set_level(fresh.log_level.value)
            if fresh.audit != self._live.now.audit:
                self._retimed.set()
            self._live.replace(fresh)
            self._sandboxes.mark_all("configuration reloaded", event=True)
            log.info("configuration reloaded")
            return ""
        finally:
            self._notifier.ready(self._status())


@contextlib.contextmanager
def _signals(
    loop: asyncio.AbstractEventLoop, stop: asyncio.Event, reload: Callable[[], object]
) -> Iterator[None]:
    handlers: dict[signal.Signals, Callable[[], object]] = {
        signal.SIGTERM: stop.set,
        signal.SIGINT: stop.set,
        signal.SIGHUP: reload,
    }
    for number, handler in handlers.items():
        loop.add_signal_handler(number, handler)
    try:
        yield
    finally:
        for number in handlers:
            loop.remove_signal_handler(number)


def _readers(group: str) -> tuple[int | None, int]:
    """Return the group of sockets that only read, and their mode: root's alone without it."""
    try:
        return grp.getgrnam(group).gr_gid, 0o660
    except KeyError:
        log.info("no group %s: the status socket is root's alone", group)
        return None, 0o600


def calm_collector() -> None:
    """Make Python's collector of reference cycles rare: a full one holds up a pass by 15 ms.

    What is loaded by now is never garbage, and passes make none with cycles.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 100)


def serve(config: Config, reread: Callable[[], Config], *, debug: bool = False) -> None:
    """Run the daemon in the foreground until SIGTERM or SIGINT; raises KataPinError."""
    set_up("debug" if debug else config.log_level.value, os.environ)
    daemon = Daemon(config, reread=reread, notifier=Notifier(os.environ))
    calm_collector()
    try:
        asyncio.run(daemon.run())
    except (KataPinError, OSError, ExceptionGroup) as error:
        cause = _cause(error)
        if isinstance(cause, OSError):
            raise DaemonError(f"cannot serve {config.runtime_dir}: {cause}") from error
        raise cause from error


def _cause(error: Exception) -> Exception:
    """Return the first error of a TaskGroup's, which may be a group's again."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error
