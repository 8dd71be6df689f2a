"""The reporter: the node's object, Events on its pods, answers to probes and Prometheus."""

from __future__ import annotations

import asyncio
import hashlib
import http.client
import logging
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Final

from msgspec.structs import replace

from kata_pin.base.documents.measured import WatchDocument
from kata_pin.base.documents.state import State
from kata_pin.base.errors import DaemonError, KataPinError, RemoteProtocolError, reason_of
from kata_pin.linux.sockets import Clients, send
from kata_pin.options.cluster.api import ApiRefused, ApiServer, Backoff
from kata_pin.options.cluster.decide import (
    NOTHING_KNOWN,
    clip,
    node_status,
    pod_events,
    topology_zones,
)
from kata_pin.options.cluster.values import Condition, NodeStatus, PodEvent, Zone, is_object_name
from kata_pin.peers.pages import MAX_HEAD, TEXT, Page, Pages, answer, tcp_listener
from kata_pin.service import protocol
from kata_pin.service.exchange import DaemonAway, DaemonSilent, read_metrics
from kata_pin.service.protocol import ask

log = logging.getLogger(__name__)


# Events on pods: one per kind and sandbox, repeated as a series.
#
# An Event is created when something begins, and counted again when it comes back, or every half
# hour while it lasts (the API server forgets Events after an hour). Its name follows from kind and
# sandbox, so a restarted reporter goes on with the same one.

LASTS_S: Final = 1800.0
"""How often an Event that lasts is counted again."""

AGAIN_S: Final = 60.0
"""An Event that comes back sooner is not counted again."""

MOST: Final = 1024
"""Most Events that are remembered."""

MOST_AT_ONCE: Final = 16
"""Most requests of one turn; the others' turn comes next time."""

_ABOUT_IT: Final = frozenset(
    {
        http.client.FORBIDDEN,  # its namespace is being deleted
        http.client.NOT_FOUND,  # its namespace is gone
        http.client.UNPROCESSABLE_ENTITY,
    }
)
"""Refusals that are about one Event, and must not hold up the others."""

Key = tuple[str, str]
"""Kind and sandbox."""


@dataclass
class _Reported:
    at: float
    lasts: bool = True


@dataclass
class Series:
    """What was reported on pods of one node."""

    api: ApiServer
    node: str
    _known: dict[Key, _Reported] = field(default_factory=dict)

    async def report(self, events: Sequence[PodEvent]) -> None:
        """Report what holds now; raises ApiRefused and StateError of the first that fails."""
        now = time.monotonic()
        due = [one for one in events if self._is_due((one.kind, one.sandbox), now)]
        holds = {(one.kind, one.sandbox) for one in events}
        for key, known in self._known.items():
            known.lasts = key in holds
        for event in due[:MOST_AT_ONCE]:
            await self._write(event)
            self._known.pop((event.kind, event.sandbox), None)
            self._known[event.kind, event.sandbox] = _Reported(now)
        while len(self._known) > MOST:
            del self._known[next(iter(self._known))]

    def _is_due(self, key: Key, now: float) -> bool:
        known = self._known.get(key)
        return known is None or now - known.at >= (LASTS_S if known.lasts else AGAIN_S)

    async def _write(self, event: PodEvent) -> None:
        name, when = event_name(event), _now("microseconds")
        if not name:
            log.debug("no Event: %r is no pod's name", event.pod)
            return
        try:
            await self._create_or_repeat(event, name, when)
        except ApiRefused as error:
            if error.status not in _ABOUT_IT:
                raise
            log.warning("Event %s not reported: %s", name, error)

    async def _create_or_repeat(self, event: PodEvent, name: str, when: str) -> None:
        try:
            await self.api.report(event, name=name, node=self.node, when=when)
        except ApiRefused as error:
            if error.status != http.client.CONFLICT:
                raise
            await self.api.repeat(event, name=name, when=when)


def event_name(event: PodEvent) -> str:
    """Return the name of an Event's object; empty if its pod can have none."""
    namespace, _, pod = event.pod.partition("/")
    if not is_object_name(pod) or not is_object_name(namespace):
        return ""
    digest = hashlib.sha256(f"{event.kind} {event.sandbox}".encode()).hexdigest()[:16]
    return f"{pod[:230].rstrip('-.')}.{digest}"


def _now(unit: str) -> str:
    return datetime.now(tz=UTC).isoformat(timespec=unit).replace("+00:00", "Z")


# What a reporter does beside its own object, where the chart's values say so.
#
# Both need a right on objects that others own, so both are off by default: removing a startup taint
# from the node, and publishing the allocator's free pCPUs as a NodeResourceTopology.


@dataclass
class StartupTaint:
    """A taint that keeps pods away until the node is ready; removed once per run."""

    api: ApiServer
    node: str
    key: str
    _done: bool = False

    async def run(self, *, ready: bool) -> None:
        """Remove the taint if the node is ready; raises ApiRefused, StateError."""
        if self._done or not ready:
            return
        if await self.api.remove_taint(self.node, self.key):
            log.info("removed the taint %s of node %s", self.key, self.node)
        self._done = True


@dataclass
class Topology:
    """The node's NodeResourceTopology, unless somebody else writes its zones."""

    api: ApiServer
    node: str
    node_uid: str
    other_writer: str = ""
    """Who writes the object; nothing is written from then on."""
    _zones: tuple[Zone, ...] = ()
    _written: tuple[Zone, ...] = ()
    _checked: bool = field(default=False, init=False)

    def look(self, state: State) -> None:
        """Take in the daemon's state; where it allocates no more, nothing is free by it."""
        nothing_free = tuple(replace(one, available=0) for one in self._written)
        self._zones = topology_zones(state) or nothing_free

    async def run(self) -> None:
        """Write the zones if they changed; raises ApiRefused, StateError."""
        if self.other_writer or not self._zones or self._zones == self._written:
            return
        try:
            # the object of another writer is not even merged with: it may list zones by name
            if not self._checked:
                self.other_writer = await self.api.topology_writer(self.node)
                self._checked = True
            if not self.other_writer:
                await self.api.apply_topology(self.node, self.node_uid, self._zones)
                self._written = self._zones
        except ApiRefused as error:
            if error.status == http.client.NOT_FOUND:
                log.warning("the cluster has no NodeResourceTopology: its definition is missing")
                self._written = self._zones  # tried again when something changes
                return
            if error.status != http.client.CONFLICT:
                raise
            self.other_writer = "another manager of its fields"
        if self.other_writer:
            log.warning(
                "NodeResourceTopology of %s is written by %s: kata-pin leaves it alone",
                self.node,
                self.other_writer,
            )


# What the reporter asks the node's daemon, over sockets that its group may use.
#
# Requests block, so each runs in a thread; the sockets' own deadlines end it.

ANSWER_S: Final = 10.0
"""Longest wait for a document: group members are served after hooks and root."""


@dataclass(frozen=True)
class NodeDaemon:
    """The daemon that serves a runtime directory."""

    runtime_dir: str

    async def state(self) -> State:
        """Return the state document; raises KataPinError."""
        data = await self._ask("state")
        return await asyncio.to_thread(protocol.decode, data, State)

    async def watch(self) -> WatchDocument | None:
        """Return what was seen of exclusive pCPUs; None where the daemon does not say."""
        try:
            return protocol.decode(await self._ask("watch"), WatchDocument)
        except (DaemonAway, DaemonSilent):
            raise
        except DaemonError:  # an older daemon
            return None

    async def is_stuck(self) -> bool:
        """Whether a daemon accepts connections, and does not answer."""
        try:
            await self._ask("ping")
        except DaemonSilent:
            return True
        except KataPinError:  # it is away, or answers something else
            return False
        return False

    async def metrics(self) -> bytes:
        """Return the daemon's metrics; raises DaemonError, RemoteProtocolError."""
        path = os.path.join(self.runtime_dir, "metrics.sock")
        try:
            return await asyncio.to_thread(read_metrics, socket.AF_UNIX, path, f"unix:{path}")
        except OSError as error:
            raise DaemonError(f"no metrics from unix:{path}: {error.strerror}") from error

    async def _ask(self, verb: str) -> memoryview:
        path = os.path.join(self.runtime_dir, "status.sock")
        try:
            return await asyncio.to_thread(ask, path, verb, {}, ANSWER_S)
        except ValueError as error:  # a path that is too long for a socket
            raise RemoteProtocolError(f"{path}: {error}") from error


# The loop: read the daemon, write the node's object on change, report Events on pods.

PERIOD_S: Final = 10.0
"""Time between two looks at the daemon, and shortest time between two writes."""

HEARTBEAT_S: Final = 300.0
"""An object that does not change is written this often, for its `lastAudit`."""

REFUSED_S: Final = 600.0
"""An allocation that was refused this long before our start is not reported any more."""


@dataclass
class Publisher:
    """Shows one node to the cluster; `run` ends when it is cancelled.

    `node` is the node's name, `node_uid` its object's uid, and `pod` the pod of daemon and
    reporter; the last two are empty where they are not known.
    """

    daemon: NodeDaemon
    api: ApiServer
    node: str
    node_uid: str
    pod: str = ""
    period_s: float = PERIOD_S
    taint: StartupTaint | None = None
    topology: Topology | None = None
    problem: str = "the daemon was not asked yet"
    """Why the daemon does not answer; empty: it does."""
    api_problem: str = ""
    """Why the newest request to the API server failed; empty: it did not."""
    requests: Counter[str] = field(default_factory=Counter)
    """Rounds of requests to the API server by outcome: `ok`, an HTTP status, or `no-answer`."""
    status: NodeStatus = NOTHING_KNOWN
    _series: Series = field(init=False)
    _backoff: Backoff = field(default_factory=Backoff)
    _written: NodeStatus | None = None
    _written_at: float = 0.0
    _not_before: float = 0.0

    def __post_init__(self) -> None:
        """Make the memory of Events."""
        self._series = Series(self.api, self.node)

    @property
    def is_ready(self) -> bool:
        """Whether the daemon serves: it checked every sandbox, and the runtime is connected."""
        return any(one.status == "True" for one in self.status.conditions)

    async def run(self) -> None:
        """Look and write until cancelled."""
        since = time.time() - REFUSED_S
        while True:
            events = await self.look(since)
            if time.monotonic() >= self._not_before:
                await self.publish(events)
            await asyncio.sleep(self.period_s)

    async def look(self, since: float = 0.0) -> tuple[PodEvent, ...]:
        """Ask the daemon; return what is to be reported on pods.

        An allocation that was refused before the Unix time `since` is not reported.
        """
        try:
            state = await self.daemon.state()
            watch = await self.daemon.watch()
        except KataPinError as error:
            if error.message != self.problem:
                log.warning("cannot read this node's state: %s", error)
            self.problem = error.message
            away = Condition("Ready", "False", "DaemonAway", clip(error.message), "")
            self.status = replace(self.status, conditions=(self._dated(away),))
            return ()
        if self.problem:
            log.info("kata-pin %s serves this node", state.daemon.version)
        self.problem = ""
        if self.topology is not None:
            self.topology.look(state)
        status = node_status(state, watch)
        self.status = replace(status, conditions=tuple(map(self._dated, status.conditions)))
        return pod_events(state, watch, since=since)

    async def publish(self, events: Sequence[PodEvent] = ()) -> None:
        """Write what is due; a failure of one part is logged and waited out, and stops no other."""
        failure: KataPinError | None = None
        parts: list[Callable[[], Awaitable[None]]] = [partial(self._write, events)]
        if self.taint is not None:
            parts.insert(0, partial(self.taint.run, ready=self.is_ready))
        if self.topology is not None:
            parts.append(self.topology.run)
        for part in parts:
            try:
                await part()
            except KataPinError as error:
                failure = failure or error
        if isinstance(failure, ApiRefused):
            self._failed(str(failure.status), failure, failure.after_s)
            return
        if failure is not None:
            self._failed("no-answer", failure)
            return
        if self.api_problem:
            log.info("the API server accepts this node's object again")
        self.api_problem = ""
        self._backoff.succeeded()

    async def _write(self, events: Sequence[PodEvent]) -> None:
        """Write the node's object if it is due, and the Events."""
        if self._is_due():
            status = replace(self.status, daemon_pod=self.pod or None)
            await self.api.apply(self.node, self.node_uid, status)
            self._written, self._written_at = self.status, time.monotonic()
            self.requests["ok"] += 1
        await self._series.report(events)

    def _is_due(self) -> bool:
        """Whether something changed, or was not written for long; audits alone are no change."""
        if self._written is None or time.monotonic() - self._written_at >= HEARTBEAT_S:
            return True
        return replace(self.status, last_audit=self._written.last_audit) != self._written

    def _failed(self, outcome: str, error: KataPinError, after_s: float = 0.0) -> None:
        wait_s = self._backoff.failed(after_s)
        self._not_before = time.monotonic() + wait_s
        self.requests[outcome] += 1
        if error.message != self.api_problem:
            log.warning(
                "reporting to the cluster failed: %s; trying again in %.0f s", error, wait_s
            )
        self.api_problem = error.message

    def _dated(self, condition: Condition) -> Condition:
        """Return a condition with the time of its last change."""
        for known in self.status.conditions:
            if known.type == condition.type and known.status == condition.status:
                return replace(condition, last_transition_time=known.last_transition_time)
        return replace(condition, last_transition_time=_now("seconds"))


# The process `kata-pin reporter`: the loop, and the pages that probes and Prometheus read.
#
# `/healthz` says that this process lives, `/readyz` that the daemon serves, `/livez` that the
# daemon is not stuck, `/metrics` relays the daemon's metrics with a few of our own.

MAX_CLIENTS: Final = 16
SEND_S: Final = 10.0


@dataclass
class Reporter:
    """Serves until SIGTERM or SIGINT; without `writes` nothing is sent to the API server."""

    daemon: NodeDaemon
    publisher: Publisher
    address: tuple[str, int]
    writes: bool = True

    async def run(self) -> None:
        """Serve; raises KataPinError where the address cannot be had."""
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        try:
            listener = tcp_listener(*self.address)
        except (OSError, OverflowError) as error:
            where = "{}:{}".format(*self.address)
            raise KataPinError(f"cannot serve {where}: {reason_of(error)}") from error
        clients = Clients("client", MAX_CLIENTS, self._talk, limit=MAX_HEAD)
        async with clients.served(listener):
            host, port = listener.getsockname()[:2]
            log.info("reporting node %s; http://%s:%d", self.publisher.node, host, port)
            work = asyncio.create_task(self._work())
            ended = asyncio.create_task(stop.wait())
            try:
                await asyncio.wait({work, ended}, return_when=asyncio.FIRST_COMPLETED)
                if work.done():
                    work.result()
            finally:
                for task in (work, ended):
                    task.cancel()
                await asyncio.gather(work, ended, return_exceptions=True)

    async def _work(self) -> None:
        if self.writes:
            await self.publisher.run()
        while True:
            await self.publisher.look()
            await asyncio.sleep(self.publisher.period_s)

    @property
    def pages(self) -> Pages:
        """What is served."""
        return {
            b"/healthz": self._healthz,
            b"/livez": self._livez,
            b"/readyz": self._readyz,
            b"/metrics": self._metrics,
        }

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await send(writer, await answer(reader, self.pages), SEND_S)

    async def _healthz(self) -> Page:
        return Page(b"ok\n", kind=TEXT)

    async def _livez(self) -> Page:
        if await self.daemon.is_stuck():
            return Page(b"the daemon accepts connections, but does not answer\n", 503, TEXT)
        return Page(b"ok\n", kind=TEXT)

    async def _readyz(self) -> Page:
        publisher = self.publisher
        said = [f"{one.reason}: {one.message}" for one in publisher.status.conditions]
        text = "\n".join([*(said or [publisher.problem]), *filter(None, [publisher.api_problem])])
        body = text.encode("utf-8", "backslashreplace") + b"\n"
        return Page(body, 200 if publisher.is_ready else 503, TEXT)

    async def _metrics(self) -> Page:
        try:
            text = await self.daemon.metrics()
        except KataPinError as error:
            return Page(f"{error.message}\n".encode("utf-8", "backslashreplace"), 503, TEXT)
        return Page(text + self._own_metrics())

    def _own_metrics(self) -> bytes:
        lines = [
            "# HELP kata_pin_reporter_requests_total Writes to the API server, by outcome.",
            "# TYPE kata_pin_reporter_requests_total counter",
        ]
        for outcome, count in sorted(self.publisher.requests.items()):
            lines.append(f'kata_pin_reporter_requests_total{{outcome="{outcome}"}} {count}')
        return "\n".join([*lines, ""]).encode()


def serve(reporter: Reporter, *, debug: bool) -> None:
    """Run the reporter in the foreground until SIGTERM or SIGINT; raises KataPinError."""
    level = logging.DEBUG if debug else logging.INFO
    logging.basicConfig(level=level, format="%(levelname)s %(message)s")
    asyncio.run(reporter.run())
