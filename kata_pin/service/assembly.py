"""The daemon's objects, built in order: each takes what was built before it.

The metrics endpoint and the connections that the state document shows are here too.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import grp
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

from kata_pin import __version__
from kata_pin.base.config.tree import Changes, Config, Endpoint, EndpointKind
from kata_pin.base.documents.document import Daemon, Metrics, Nri
from kata_pin.base.errors import KataPinError, reason_of
from kata_pin.engine.audit import Auditor
from kata_pin.engine.counters import Counters, Observer, Slices
from kata_pin.engine.node import ExclusiveConflicts
from kata_pin.engine.runner import PassRunner
from kata_pin.engine.sandboxes import Sandboxes
from kata_pin.follow.files import CgroupWatch, FileEvents, StateWatch, left_to_audits
from kata_pin.follow.hooks import ExtraMonitor, HookService
from kata_pin.follow.reports import NriIntake
from kata_pin.follow.threads import ThreadEvents
from kata_pin.guest.manager import Guests
from kata_pin.linux import sockets
from kata_pin.linux.files import HostRoot
from kata_pin.linux.sockets import BACKLOG, Clients, send
from kata_pin.peers.nri.plugin import NriPlugin
from kata_pin.peers.pages import MAX_HEAD, Page, answer, tcp_listener
from kata_pin.records.bundles import Intake
from kata_pin.records.containers import Registry
from kata_pin.records.history import History
from kata_pin.records.hooks import HookServer, Spool
from kata_pin.rights.broker.libc import libc
from kata_pin.service.audits import AuditLoop, Reload
from kata_pin.service.bindings import Bindings
from kata_pin.service.commands import Commands, ControlServer
from kata_pin.service.documents import Overview, in_slices, state_report
from kata_pin.service.options import Serving, compose, guarded, is_due, nri_plugin
from kata_pin.service.process import Background, Notifier, OwnCpus, ServiceStatus

log = logging.getLogger(__name__)

START_S: Final = 1.0
"""How long a start, a deep audit or an operator waits for processes that do not answer, and a start
for the passes over what is recorded."""

# Answers Prometheus: GET /metrics over HTTP/1.0, on a unix socket or a loopback port.
#
# One request per connection, a bounded head, a deadline for each step, few connections at once, and
# a text that is reused for a moment, so that nobody can make work by asking. A port that is taken
# is tried again.

MAX_CLIENTS: Final = 8
ANSWER_S: Final = 10.0
"""Longest time that the text may take to be made, and to be taken."""
FRESH_S: Final = 0.2
"""For so long the same text is given again."""
RETRY_S: Final = 30.0
"""Between tries to have a port that is taken."""

Text = Callable[[], Awaitable[bytes]]
"""Makes what is answered."""


@dataclass
class MetricsServer:
    """Serves one endpoint until cancelled; `problem` says why it cannot, empty while it does.

    `make` returns what makes the answers; it is called beside the event loop for the first request,
    because it may have much to import. `path`, `mode` and `gid` are the unix socket's.
    """

    endpoint: Endpoint
    path: str
    make: Callable[[], Text]
    gid: int | None = None
    mode: int = 0o600
    problem: str = "not started"
    _text: Text | None = None
    _made: bytes = b""
    _made_at: float = -FRESH_S

    @property
    def address(self) -> str:
        """Where it serves, for people."""
        unix = self.endpoint.kind is EndpointKind.UNIX
        return f"unix:{self.path}" if unix else f"http://{self.endpoint}/metrics"

    async def serve(self) -> None:
        """Serve until cancelled."""
        clients = Clients("metrics client", MAX_CLIENTS, self._talk, limit=MAX_HEAD)
        path = self.path if self.endpoint.kind is EndpointKind.UNIX else ""
        while True:
            try:
                listener = self._listener()
            except OSError as error:
                self._complain(error)
                await asyncio.sleep(RETRY_S)
                continue
            async with clients.served(listener, path):
                self.problem = ""
                log.info("metrics: %s", self.address)
                await asyncio.get_running_loop().create_future()

    def _listener(self) -> socket.socket:
        if self.endpoint.kind is EndpointKind.UNIX:
            return sockets.listen(self.path, backlog=BACKLOG, mode=self.mode, gid=self.gid)
        return tcp_listener(self.endpoint.host, self.endpoint.port)

    def _complain(self, error: OSError) -> None:
        """Say once what is wrong."""
        problem = f"{self.address}: {error.strerror or reason_of(error)}"
        if error.errno == errno.EAFNOSUPPORT:
            problem += "; the service's RestrictAddressFamilies= forbids it"
        if problem != self.problem:
            log.error("metrics not served: %s", problem)
        self.problem = problem

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await send(writer, await answer(reader, {b"/metrics": self._page}), ANSWER_S)

    async def _page(self) -> Page:
        async with asyncio.timeout(ANSWER_S):
            return Page(await self._fresh_text())

    async def _fresh_text(self) -> bytes:
        if time.monotonic() - self._made_at >= FRESH_S:
            if self._text is None:
                self._text = await asyncio.to_thread(self.make)
            self._made = await self._text()
            self._made_at = time.monotonic()
        return self._made


# The daemon's own connections as the state document shows them: NRI and the metrics endpoint.


def nri_report(plugin: NriPlugin | None) -> Nri | None:
    """Return the plugin's connection; None if NRI is disabled."""
    if plugin is None:
        return None
    since = plugin.connected_at
    return Nri(
        socket=plugin.socket_path,
        runtime="" if since is None else plugin.runtime,
        connected_s=None if since is None else round(time.monotonic() - since, 3),
        problem=plugin.problem,
    )


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
        root: HostRoot,
        broker: int,
    ) -> None:
        """`reread` returns the configuration as it is now, `broker` is the broker's pid.

        Raises KataPinError or OSError.
        """
        self._started = time.monotonic()
        self._background = background
        self._serving = False
        self.sandboxes = sandboxes = Sandboxes()
        self._components = one = compose(config, registry, root, sandboxes)
        live, node, pins = one.live, one.node, one.pins
        self._counters, self._history = Counters(), History(registry, live)
        paths = config.paths
        self._watch = StateWatch(
            vc=paths.vc,
            kata=paths.kata,
            kubelet=paths.kubelet_state,
            claims=paths.cdi,
            calls=root.calls,
        )
        self._guests = guests = Guests(
            one.agents, registry, pins, node, sandboxes, background.start
        )
        nri_intake = NriIntake(
            registry, one.finder, one.index, one.kata_pinning, sandboxes, one.survey
        )
        self._nri = nri_plugin(config, nri_intake, one.root.calls)
        one.serving = Serving(guests, self._nri, nri_intake, background.start)
        self.options = one.options
        cgroups = CgroupWatch(node, self._watch)
        own_cpus = OwnCpus(config.runtime_dir, node, root.calls, broker, one.options.exclusive)
        self._observers: list[Observer] = [
            self._history,
            self._counters,
            one.neighbours,
            cgroups,
        ]
        self._each: list[Callable[[], object]] = [registry.keep]
        self._before_deep: list[Callable[[], object]] = []
        self._after_deep: list[Callable[[], object]] = []
        self._start_options()
        self._observers += [guests, own_cpus]
        self._after_deep += [guests.audit, own_cpus.look, libc().trim]
        self.passes = PassRunner(
            one.root,
            sandboxes,
            one.engine,
            registry,
            pins,
            live,
            background.start,
            ExtraMonitor(one.kata, live, one.root.calls).ask,
            guests.before,
            self._observers,
        )
        self._bindings = Bindings(one, self.passes)
        self._observers.append(self._bindings)
        self._file_events = FileEvents(
            node, registry, one.adoption, sandboxes, self._watch, one.survey
        )
        self._thread_events = ThreadEvents(
            one.root, live, node, pins, sandboxes, self._counters, one.index,
            one.finder.claims.may_serve, self._file_events.vmm_started,
        )  # fmt: skip
        spool = Spool(self._path("spool"))
        spool.prepare()
        intake, find_vmm = Intake(registry, one.bundles), self.passes.find_vmm
        self.hook_service = HookService(
            live,
            pins,
            registry,
            intake,
            sandboxes,
            spool,
            self._counters,
            find_vmm,
            one.root.calls,
        )
        self.hooks = HookServer(self._path("hook.sock"), self.hook_service.hook)
        self.auditor = Auditor(one.root, sandboxes)
        self._each.append(ExclusiveConflicts(one.owners, one.events).look)
        self._before_deep[:0] = [
            self._read_processes,
            self.hook_service.take_spool,
            self._file_events.look_at_node,
            self._watch.rearm,
            self._file_events.look_around,
        ]
        self.audits = AuditLoop(
            live,
            self.auditor,
            self._counters,
            self._before_deep,
            self._after_deep,
            self._each,
        )
        gid, mode = _readers(config.group)
        self._status = ServiceStatus(notifier, sandboxes, live)
        self.reload = Reload(one, reread, self.audits, self._status, self._reloaded)
        self._metrics = self._metrics_server(gid, mode)
        self._overview = Overview(one, guests)
        commands = Commands(
            core=one,
            passes=self.passes,
            overview=self._overview,
            state=self._state,
            reload=self.reload,
            look_around=self._look_around,
            history=self._history,
            guests=guests,
            bindings=self._bindings,
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
        for option in self.options:
            option.catch_up(recorded)
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
                    await self.sandboxes.wait_for_pass(sandbox_id, ticket)
        await one.survey.all(patience_s=START_S)
        one.survey.afterwards(partial(self.sandboxes.mark_all, "start"))
        for sandbox_id in recorded:
            self.sandboxes.mark(sandbox_id, "start")
        with left_to_audits():
            await self._file_events.look_around()

    def _start_options(self) -> None:
        """Start the options that the settings switch on, or that have something to restore."""
        core = self._components
        for option in self.options.start(
            core, lambda row: is_due(row, core.live.now, core.registry)
        ):
            self._observers.append(option)
            self._before_deep.append(option.before_deep_audit)
            self._after_deep.append(option.after_deep_audit)
            self._each.append(option.look)
            if self._serving:
                for task in option.tasks():
                    self._background.start(guarded(task))

    def _reloaded(self) -> None:
        """Start what a reload has switched on."""
        try:
            self._start_options()
        except (KataPinError, OSError) as error:
            log.error("an option was not started: %s", reason_of(error))

    async def _look_around(self) -> None:
        await self._components.survey.all(patience_s=START_S)
        await self._file_events.look_around()

    async def _read_processes(self) -> None:
        """Look at every process again, for deep audits."""
        one = self._components
        await Slices().run(one.index.refresh_in_steps(full=True))
        await one.survey.all(patience_s=START_S)

    def works(self) -> Iterator[Coroutine[object, object, None]]:
        """Yield what the daemon does until it ends, beside what `take_in` starts."""
        yield self.hook_service.follow_spool()
        yield self._thread_events.follow()
        yield self._file_events.follow_starts()
        if self._components.live.now.changes is Changes.EVENTS:
            yield self._file_events.follow()
            yield self._file_events.follow_cpus()
        if self._nri is not None:
            yield self._nri.run()
        yield self.audits.run()
        yield self._bindings.run()
        self._serving = True
        for option in self.options:
            yield from map(guarded, option.tasks())
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
        from kata_pin.service import metrics  # noqa: PLC0415 - 40 ms, 4 MiB

        return metrics.DaemonMetrics(
            self._components,
            self._counters,
            self._history,
            overruns=lambda: self._watch.overruns,
            refused=lambda: self.reload.refused is not None,
        ).text

    async def _state(self, sandbox_id: str) -> bytes:
        """Return the encoded `state` document as of now, of one sandbox if one is named."""
        node, metrics = self._components.node, self._metrics
        state = state_report(
            node=node.current(),
            mode=node.config.mode,
            daemon=Daemon(
                running=True,
                pid=os.getpid(),
                version=__version__,
                uptime_s=round(time.monotonic() - self._started, 3),
                nri=nri_report(self._nri),
                metrics=None if metrics is None else Metrics(metrics.address, metrics.problem),
                refused=self.reload.refused,
            ),
            node_notes=(
                *(*node.notes, *self._components.survey.notes),
                *self._components.registry.notes,
                *self.options.node_notes(),
            ),
            **self.options.state(),
        )
        overview = self._overview
        chosen = overview.encoded_now(sandbox_id) if sandbox_id else overview.encoded()
        return await in_slices(state, chosen)


def _readers(group: str) -> tuple[int | None, int]:
    """Return the group of sockets that only read, and their mode: root's alone without it."""
    try:
        return grp.getgrnam(group).gr_gid, 0o660
    except KeyError:
        log.info("no group %s: only root can connect to the status socket", group)
        return None, 0o600
