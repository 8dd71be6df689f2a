"""One connection of the NRI plugin.

It answers the runtime's calls, makes our calls to it, and asks the ports that decide.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final, Protocol

from kata_pin.base.errors import (
    KataPinError,
    ParseError,
    RemoteProtocolError,
    StateError,
    reason_of,
)
from kata_pin.linux.sockets import Credit
from kata_pin.peers import ttrpc
from kata_pin.peers.cri import DEADLINE_S
from kata_pin.peers.nri import messages, replies
from kata_pin.peers.nri.messages import (
    Configuration,
    Event,
    EventKind,
    Snapshot,
    SnapshotParts,
    updates_problem,
)
from kata_pin.peers.nri.replies import Cpuset, NriAnswer, Update
from kata_pin.peers.ttrpc import Code, Frame, FrameDecoder, Response, TtrpcRequest

log = logging.getLogger(__name__)


# Our own calls on an NRI connection: RegisterPlugin and UpdateContainers of the service Runtime.
#
# Streams are odd and increase (ttrpc's PROTOCOL.md). An answer that no caller waits for any more is
# dropped. Lives as long as its connection.


class RuntimeCalls:
    """Calls the runtime; `send` writes a frame to the connection."""

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send = send
        self._next = 1
        self._waiting: dict[int, asyncio.Future[Response]] = {}
        self._ended: Exception | None = None

    async def call(self, method: str, payload: bytes, *, deadline_s: float) -> Response:
        """Return the answer, whatever its status; raises the error of `end`, or TimeoutError."""
        if self._ended is not None:
            raise self._ended
        stream, self._next = self._next, self._next + 2
        answer: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        self._waiting[stream] = answer
        request = TtrpcRequest(
            messages.RUNTIME_SERVICE, method, payload, timeout_ns=int(deadline_s * 1e9)
        )
        try:
            self._send(ttrpc.encode_request(stream, request))
            async with asyncio.timeout(deadline_s):
                return await answer
        finally:
            del self._waiting[stream]

    def receive(self, frame: Frame) -> None:
        """Hand an answer to its call; raises ParseError or RemoteProtocolError."""
        answer = self._waiting.get(frame.stream)
        if answer is None or answer.done():
            return
        if frame.data is None:
            raise RemoteProtocolError("the runtime's answer is too long")
        answer.set_result(ttrpc.parse_response(frame.data))

    def end(self, error: Exception) -> None:
        """Fail every call, later ones too: the connection has ended."""
        self._ended = error
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(error)


# The NRI plugin's ports: what it reports events to, and what decides cpusets for it.


class Listener(Protocol):
    """Receives events. An exception ends the connection, and the next one reports everything again.

    `stamp_ns` is when the message was received (CLOCK_BOOTTIME).
    """

    async def rebuild(self, snapshot: Snapshot, stamp_ns: int) -> None:
        """Take all pods and containers of now. Events that come before this returns are newer."""

    def receive(self, event: Event, stamp_ns: int) -> int:
        """Record an event; return a ticket for `placed`, 0 if nothing is awaited. Never blocks."""

    async def placed(self, event: Event, ticket: int) -> None:
        """Return once the pins that an event asks for are applied; may be cancelled."""


class CreationRefused(KataPinError):  # noqa: N818 - refused by a rule, not failed
    """A container may not be created; the runtime reports the reason."""


class Decider(Protocol):
    """Decides cpusets. Every method answers at once, with its decision recorded."""

    def adopt(self, snapshot: Snapshot) -> tuple[Update, ...]:
        """Take all pods and containers of now; return the changes.

        The listener gets the same snapshot afterwards.
        """

    def decide(self, event: Event, stamp_ns: int) -> NriAnswer:
        """Take a creation, an update or an end; return the changes. Raises CreationRefused.

        The listener gets these events only where this raised anything else.
        """

    def ended(self) -> None:
        """Note that the connection has ended: no answer or update arrives any more."""


# One connection of the NRI plugin: answers to the runtime's calls, and our calls to it.
#
# Answers go out before anything else is done, except for a StartContainer that waits for its pins.
# A bad message, or an error of the listener, ends the connection, and the plugin (plugin.py)
# connects again.

REGISTER_S: Final = 30.0  # the runtime takes plugins one at a time

SHARE: Final = 0.2
"""The part of the runtime's timeout that StartContainer may wait, leaving room for the answer."""

MAX_WAIT_S: Final = 1.0  # longest wait of StartContainer, whatever the runtime's timeout
MAX_WAITING: Final = 64  # StartContainers that may wait at once; a runtime has one at a time
MAX_NAME: Final = 120  # longest name and version of a runtime that is shown

MAX_UNREAD: Final = 1 << 20
"""Most bytes of answers that a runtime may leave unread before it is disconnected."""


LOOP_PART: Final = 0.25
"""The part of the daemon's time that a runtime's messages may take for long."""

BURST_S: Final = 0.25
"""Seconds of work that a runtime has at once: a node's pods that start together."""

PIECE: Final = 8192
"""Bytes taken in one turn of the event loop: a few events, between which hooks are served."""


class NriSession(asyncio.BufferedProtocol):
    """Serves Plugin on one connection, and registers there.

    `synchronized` resolves to a summary for the log once the listener has taken everything.
    `closed` fails with the error that ended the connection. `end` ends both.
    """

    def __init__(self, listener: Listener, decider: Decider | None) -> None:
        loop = asyncio.get_running_loop()
        self._listener = listener
        self._decider = decider
        self._kinds = messages.OBSERVED if decider is None else tuple(EventKind)
        self._methods = frozenset(kind.method for kind in self._kinds)
        self._batch: bytearray | None = None
        self._answered: list[tuple[Event, int]] = []
        self._calls = RuntimeCalls(lambda frame: self._send(ttrpc.RUNTIME, frame))
        self.synchronized: asyncio.Future[str] = loop.create_future()
        self.closed: asyncio.Future[None] = loop.create_future()
        self._trunk = ttrpc.MuxDecoder()
        self._frames = {ttrpc.PLUGIN: FrameDecoder(), ttrpc.RUNTIME: FrameDecoder()}
        self._transport: asyncio.Transport | None = None
        self._runtime = Configuration("", "", messages.REQUEST_MS / 1000)
        self._parts = SnapshotParts()
        self._parts_since_ns = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._unanswered: set[int] = set()
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._credit = Credit(LOOP_PART, BURST_S)
        self._buffer = bytearray(PIECE)

    @property
    def runtime(self) -> str:
        """The runtime's name and version, as it reports them."""
        return f"{self._runtime.runtime} {self._runtime.version}".strip()[:MAX_NAME]

    async def register(self, name: str, index: str) -> None:
        """Register; raises RemoteProtocolError if refused, ConnectionError if disconnected."""
        request = replies.register_request(name, index)
        response = await self._calls.call("RegisterPlugin", request, deadline_s=REGISTER_S)
        if response.code != Code.OK:
            raise RemoteProtocolError(f"registration refused: {response.message[:200]}")

    @property
    def updates_problem(self) -> str:
        """Why this runtime may not be sent unsolicited updates, empty if it may."""
        return updates_problem(self._runtime)

    async def update(self, container_id: str, cpuset: Cpuset) -> Response:
        """Send an unsolicited update between two events; raises KataPinError or OSError."""
        request = replies.update_request([Update(container_id, cpuset, must=True)])
        async with asyncio.timeout(DEADLINE_S):
            await self._quiet.wait()
            return await self._calls.call("UpdateContainers", request, deadline_s=DEADLINE_S)

    async def end(self) -> None:
        """Close the connection and cancel its tasks."""
        self._stop(ConnectionResetError("ended"))
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---- the transport -------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the connection."""
        assert isinstance(transport, asyncio.Transport), "a stream socket has a Transport"
        self._transport = transport

    def get_buffer(self, sizehint: int) -> bytearray:
        """Return room for the next bytes."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Take the peer's bytes, and no more for a while if they took too much time."""
        began = time.monotonic()
        self.data_received(bytes(self._buffer[:nbytes]))
        wait_s = self._credit.wait_after(time.monotonic() - began)
        if wait_s and self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()
            asyncio.get_running_loop().call_later(wait_s, self._read_on)

    def _read_on(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        """Take the peer's bytes; an error ends the connection."""
        self._batch = bytearray()
        try:
            try:
                for connection, piece in self._trunk.feed(data):
                    self._take_piece(connection, piece)
            finally:
                self._pass_on()
        except Exception as error:  # noqa: BLE001 - a bad message or the listener: connect again
            self._stop(error)

    def connection_lost(self, exc: Exception | None) -> None:
        """Note that the connection has ended."""
        self._stop(exc or ConnectionResetError("the runtime closed the connection"))

    def _stop(self, error: Exception) -> None:
        """Close the connection; the first error is the one that waiting callers get."""
        if self._transport is not None:
            self._transport.abort()
        expected = isinstance(error, KataPinError | OSError)
        if not expected and not self.closed.done():
            log.debug("NRI: unexpected error", exc_info=error)
        reason = (
            error
            if expected
            else RemoteProtocolError(f"{type(error).__name__}: {reason_of(error)}")
        )
        self._calls.end(reason)
        for future in (self.synchronized, self.closed):
            if not future.done():
                future.set_exception(reason)
                future.exception()  # mark it as retrieved: perhaps no caller waits for it

    def _send(self, connection: int, frame: bytes) -> None:
        """Send a frame; answers to one piece of data are one write: cheaper with a backlog."""
        data = ttrpc.encode(connection, frame)
        if self._batch is None:
            self._write(data)
        else:
            self._batch += data

    def _write(self, data: bytes | bytearray) -> None:
        if not data or self._transport is None or self._transport.is_closing():
            return
        self._transport.write(data)
        if self._transport.get_write_buffer_size() > MAX_UNREAD:
            raise RemoteProtocolError("the runtime does not read our answers")

    def _pass_on(self) -> None:
        """Write the answers so far, then give the listener the events that they answer."""
        batch, self._batch = self._batch, None
        events, self._answered = self._answered, []
        self._write(batch or b"")
        for event, stamp_ns in events:
            self._listener.receive(event, stamp_ns)

    # ---- calls ---------------------------------------------------------------------------

    def _take_piece(self, connection: int, piece: bytes) -> None:
        decoder = self._frames.get(connection)
        if decoder is None:  # an unknown connection: ignored, as Go's side does
            return
        for frame in decoder.feed(piece):
            if connection == ttrpc.PLUGIN and frame.kind == ttrpc.REQUEST:
                self._answer(frame)
            elif connection == ttrpc.RUNTIME and frame.kind == ttrpc.RESPONSE:
                self._calls.receive(frame)

    def _answer(self, frame: Frame) -> None:
        stream = frame.stream
        if frame.data is None:
            self._refuse(stream, Code.RESOURCE_EXHAUSTED, "message too long")
            return
        request = ttrpc.parse_request(frame.data)
        if request.service != messages.PLUGIN_SERVICE:
            self._refuse(stream, Code.UNIMPLEMENTED, f"service {request.service[:80]}")
        elif request.method == "Configure":
            self._runtime = messages.parse_configure(request.payload)
            self._reply(stream, replies.configure_reply(self._kinds))
        elif request.method == "Synchronize":
            self._pass_on()
            self._synchronize(stream, request.payload)
        elif request.method in _NOT_SUBSCRIBED and request.method not in self._methods:
            self._reply(stream)
        elif (event := self._read(stream, request)) is None:
            return
        elif self._decider is not None and request.method in _DECIDED:
            self._decide(stream, event, self._decider)
        else:
            self._report(stream, event)

    def _decide(self, stream: int, event: Event, decider: Decider) -> None:
        """Answer with the decision; the listener gets an end that could not be decided."""
        self._pass_on()
        stamp_ns = _now_ns()
        try:
            answer = decider.decide(event, stamp_ns)
        except CreationRefused as refused:
            self._refuse(stream, Code.RESOURCE_EXHAUSTED, refused.message)
        except Exception as error:  # a fault of the decider must not fail a container
            log.error("NRI: cannot decide %s: %s", event.kind.method, reason_of(error))
            log.debug("NRI: cannot decide", exc_info=True)
            self._reply(stream)
            if event.kind not in messages.ASKED:
                self._listener.receive(event, stamp_ns)
        else:
            created = event.kind is EventKind.CREATE_CONTAINER
            reply = replies.create_reply if created else replies.update_reply
            self._reply(stream, reply(answer))

    def _synchronize(self, stream: int, payload: bytes) -> None:
        """Take one part of a snapshot, and act on it once the last one is here."""
        if not self._parts:
            self._parts_since_ns = _now_ns()
        whole = self._parts.feed(payload)
        if whole is None:
            self._reply(stream, replies.synchronize_reply(more=True))
            return
        self._reply(stream, replies.synchronize_reply(self._adopted(whole)))
        self._parts = SnapshotParts()
        self._start(self._rebuild(whole, self._parts_since_ns))

    def _adopted(self, whole: Snapshot) -> tuple[Update, ...]:
        """Return what is to change; a StateError ends the connection, to begin again later."""
        if self._decider is None:
            return ()
        try:
            return self._decider.adopt(whole)
        except StateError:
            raise
        except Exception as error:  # the node stays as it is
            log.error("NRI: cannot decide Synchronize: %s", reason_of(error))
            log.debug("NRI: cannot decide", exc_info=True)
            return ()

    def _report(self, stream: int, event: Event) -> None:
        """Answer, then pass the event on; the other way round where the workload waits."""
        if event.kind is EventKind.START_CONTAINER and len(self._tasks) < MAX_WAITING:
            self._pass_on()
            ticket = self._listener.receive(event, _now_ns())
            if ticket:
                self._unanswered.add(stream)
                self._quiet.clear()
                self._start(self._answer_when_placed(stream, event, ticket))
            else:
                self._reply(stream)
        else:
            self._reply(stream)
            self._answered.append((event, _now_ns()))

    def _read(self, stream: int, request: TtrpcRequest) -> Event | None:
        """Return the event of a call; None if it is not one to act on, and then answered here."""
        try:
            event = messages.parse_event(request.method, request.payload, self._kinds)
        except ParseError as error:  # our failure to read it must not fail a container
            log.warning("NRI: cannot read %s: %s", request.method[:80], error)
            self._reply(stream)
            return None
        if event is None and request.method != "StateChange":
            self._refuse(stream, Code.UNIMPLEMENTED, f"method {request.method[:80]}")
        elif event is None:
            self._reply(stream)
        return event

    async def _answer_when_placed(self, stream: int, event: Event, ticket: int) -> None:
        budget_s = min(MAX_WAIT_S, SHARE * self._runtime.request_s)
        try:
            async with asyncio.timeout(budget_s):
                await self._listener.placed(event, ticket)
        except TimeoutError:
            log.warning(
                "NRI: pod %s: pins not applied within %.1f s; the container starts without them",
                event.pod.id,
                budget_s,
            )
        self._reply(stream)
        self._unanswered.discard(stream)
        if not self._unanswered:
            self._quiet.set()

    async def _rebuild(self, snapshot: Snapshot, stamp_ns: int) -> None:
        await self._listener.rebuild(snapshot, stamp_ns)
        if not self.synchronized.done():
            found = f"{len(snapshot.pods)} pods, {len(snapshot.containers)} containers"
            self.synchronized.set_result(f"{self.runtime} reports {found}")

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a task for this connection; its failure ends the connection."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            self._stop(error)

    def _reply(self, stream: int, payload: bytes = b"") -> None:
        self._send(ttrpc.PLUGIN, ttrpc.encode_response(stream, Response(payload)))

    def _refuse(self, stream: int, code: Code, message: str) -> None:
        self._send(ttrpc.PLUGIN, ttrpc.encode_response(stream, Response(b"", code, message)))


_NOT_SUBSCRIBED: Final = frozenset(
    {
        "Shutdown",
        "CreateContainer",
        "PostCreateContainer",
        "UpdateContainer",
        "UpdatePodSandbox",
        "PostUpdatePodSandbox",
        "ValidateContainerAdjustment",
    }
)
"""Methods that get an empty answer if a runtime calls them although we did not subscribe."""

_DECIDED: Final = frozenset({"CreateContainer", "UpdateContainer", "StopContainer"})
"""Methods whose answer may change containers."""


def _now_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)
