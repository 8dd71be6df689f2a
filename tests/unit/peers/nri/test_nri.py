"""The NRI plugin against a runtime played here: both event styles, deadlines, hostility, ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from kata_pin.peers import ttrpc
from kata_pin.peers.nri import messages as nri
from kata_pin.peers.nri import session as source
from kata_pin.peers.nri.messages import MAX_PARTS, Event, EventKind, Snapshot
from kata_pin.peers.nri.plugin import NriPlugin
from kata_pin.peers.proto import nri_pb2 as pb
from kata_pin.peers.ttrpc import Code
from tests.support.nriruntime import Peer, Runtime, container, pod


class Told:
    """A listener that records its calls; `fails` is raised once, `free` lets waits end."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.snapshots: list[Snapshot] = []
        self.stamps: list[int] = []
        self.fails: Exception | None = None
        self.free = asyncio.Event()
        self.rebuilt = asyncio.Event()
        self.waits = False

    async def rebuild(self, snapshot: Snapshot, stamp_ns: int) -> None:
        self.snapshots.append(snapshot)
        self.stamps.append(stamp_ns)
        self.rebuilt.set()

    def receive(self, event: Event, stamp_ns: int) -> int:
        if self.fails is not None:
            fails, self.fails = self.fails, None
            raise fails
        self.events.append(event)
        self.stamps.append(stamp_ns)
        return int(self.waits)

    async def placed(self, event: Event, ticket: int) -> None:
        await self.free.wait()


@pytest.fixture
async def told() -> Told:
    return Told()


@contextlib.asynccontextmanager
async def running(told: Told, path: Path, *, wanted: bool = True) -> AsyncIterator[NriPlugin]:
    """Run the plugin meanwhile."""
    plugin = NriPlugin(told, socket_path=str(path), name="kata-pin", index="95", wanted=wanted)
    task = asyncio.create_task(plugin.run())
    try:
        yield plugin
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@pytest.fixture
async def peer(told: Told, runtime: Runtime, path: Path) -> AsyncIterator[Peer]:
    """The plugin, registered with a runtime that has no pods."""
    async with running(told, path):
        one = await runtime.plugin()
        await one.ready()
        yield one


async def _until(condition: object) -> None:
    """Let the loop turn until a condition holds; what was sent is on its way."""
    assert callable(condition)
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


async def test_registration_and_first_words(told: Told, runtime: Runtime, path: Path) -> None:
    """The plugin names itself, asks for an observer's events, and takes in what there is."""
    async with running(told, path):
        peer = await runtime.plugin()
        registered = await peer.registered()
        assert (registered.plugin_name, registered.plugin_idx) == ("kata-pin", "95")
        assert await peer.configure() == 0x767
        assert not await peer.synchronize([pod()], [container(cpus="1")])
        await _until(lambda: told.snapshots)
        (snapshot,) = told.snapshots
        assert [one.id for one in snapshot.pods] == ["p1"]
        assert [one.cpu.cpus for one in snapshot.containers] == ["1"]


async def test_configure_may_come_first(told: Told, runtime: Runtime, path: Path) -> None:
    """A runtime that calls before it has answered the registration is answered too."""
    async with running(told, path):
        peer = await runtime.plugin()
        assert await peer.configure() == 0x767
        await peer.registered()
        await peer.synchronize()


async def test_synchronize_in_parts(told: Told, runtime: Runtime, path: Path) -> None:
    """Each part is answered with its own `more`; the listener gets one whole."""
    async with running(told, path):
        peer = await runtime.plugin()
        await peer.registered()
        await peer.configure()
        assert await peer.synchronize([pod("p1")], more=True)
        assert await peer.synchronize([pod("p2")], [container("c1")], more=True)
        assert told.snapshots == []
        assert not await peer.synchronize([], [container("c2", "p2")])
        await _until(lambda: told.snapshots)
        (snapshot,) = told.snapshots
        assert [one.id for one in snapshot.pods] == ["p1", "p2"]
        assert [one.id for one in snapshot.containers] == ["c1", "c2"]


async def test_synchronize_again(told: Told, peer: Peer) -> None:
    """A second Synchronize on one connection is a whole of its own."""
    await peer.synchronize([pod("p1")])
    await peer.synchronize([pod("p2")])
    await _until(lambda: len(told.snapshots) == 3)
    assert [[one.id for one in snapshot.pods] for snapshot in told.snapshots] == [
        [],
        ["p1"],
        ["p2"],
    ]


@pytest.mark.parametrize("change", [False, True])
async def test_every_event_in_both_styles(told: Told, peer: Peer, change: bool) -> None:
    """Each event gets an empty answer and is reported once, in order, with increasing stamps."""
    for kind in nri.OBSERVED:
        response = await peer.event(
            kind, pod(), None if kind.of_pod else container(), change=change
        )
        assert (response.code, response.payload) == (Code.OK, b"")
    await _until(lambda: len(told.events) == len(nri.OBSERVED))
    assert [event.kind for event in told.events] == list(nri.OBSERVED)
    assert told.stamps == sorted(told.stamps)


async def test_start_container_waits_for_the_pins(told: Told, peer: Peer) -> None:
    """StartContainer is answered when the pins stand; other calls are answered meanwhile."""
    told.waits = True
    request = pb.EventRequest(pod=pod(), container=container()).SerializeToString()
    stream = peer.begin("StartContainer", request)
    await peer.event(EventKind.POST_UPDATE_CONTAINER, pod("p2"), container("c2", "p2"))
    assert stream not in peer._answers
    told.free.set()
    assert (await peer.answer(stream)).code == Code.OK


@pytest.mark.parametrize("timeout_ms", [400, 2000])
async def test_start_container_waits_within_bounds(
    told: Told, runtime: Runtime, path: Path, timeout_ms: int
) -> None:
    """Pins that never stand hold the container for less than a quarter of the timeout."""
    told.waits = True
    async with running(told, path):
        peer = await runtime.plugin()
        await peer.ready(timeout_ms=timeout_ms)
        began = time.monotonic()
        response = await peer.event(EventKind.START_CONTAINER, pod(), container())
        waited = time.monotonic() - began
        assert response.code == Code.OK
        assert timeout_ms / 1000 * 0.19 < waited < timeout_ms / 1000  # a busy machine is slow
        assert source.SHARE < 0.25


async def test_nothing_to_wait_for_is_answered_at_once(told: Told, peer: Peer) -> None:
    """StartContainer of a pod without pins does not wait."""
    assert (await peer.event(EventKind.START_CONTAINER, pod(), container())).code == Code.OK


class Wire(asyncio.Transport):
    """A transport that counts what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += len(data)

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return False

    def abort(self) -> None:
        pass


async def test_events_are_answered_before_they_are_taken(told: Told) -> None:
    """The runtime holds its lock until the answer: recording an event must not delay it."""
    wire, session, written = Wire(), source.NriSession(told, None), list[int]()
    session.connection_made(wire)
    receive = told.receive

    def taking(event: Event, stamp_ns: int) -> int:
        written.append(wire.written)
        return receive(event, stamp_ns)

    told.receive = taking  # type: ignore[method-assign]
    kinds = (EventKind.RUN_POD_SANDBOX, EventKind.START_CONTAINER, EventKind.STOP_CONTAINER)
    data = b""
    for number, kind in enumerate(kinds):
        payload = pb.EventRequest(pod=pod(), container=container()).SerializeToString()
        request = ttrpc.TtrpcRequest(nri.PLUGIN_SERVICE, kind.method, payload)
        data += ttrpc.encode(ttrpc.PLUGIN, ttrpc.encode_request(1 + 2 * number, request))
    session.data_received(data)
    assert [event.kind for event in told.events] == [*kinds]
    one = wire.written // len(kinds)
    assert written == [one, one, 3 * one]  # StartContainer is taken before its answer


async def test_what_is_not_ours(told: Told, peer: Peer) -> None:
    """Other services and methods are unimplemented, events not asked for are answered empty."""
    other = await peer.call("Configure", pb.ConfigureRequest(), service="a.B")
    assert other.code == Code.UNIMPLEMENTED
    assert (await peer.call("Nonsense", pb.ConfigureRequest())).code == Code.UNIMPLEMENTED
    for method in ("CreateContainer", "UpdateContainer", "ValidateContainerAdjustment"):
        response = await peer.call(method, pb.EventRequest(pod=pod(), container=container()))
        assert (response.code, response.payload) == (Code.OK, b"")
    assert (await peer.call("StateChange", pb.StateChangeEvent(event=99, pod=pod()))).code == 0
    assert told.events == []


async def test_a_bad_event_fails_nobody(told: Told, peer: Peer) -> None:
    """An event that cannot be read is answered with success: an error would fail the container."""
    bad = await peer.event(EventKind.START_CONTAINER, pod("../p"), container())
    assert bad.code == Code.OK
    assert (await peer.event(EventKind.RUN_POD_SANDBOX, pod())).code == Code.OK
    assert [event.kind for event in told.events] == [EventKind.RUN_POD_SANDBOX]


async def test_a_message_that_is_too_long(told: Told, peer: Peer) -> None:
    """It is refused, and the connection goes on."""
    length = ttrpc.MAX_DATA + 1
    header = ttrpc.HEADER.pack(length, 99, ttrpc.REQUEST, 0)
    peer.send(ttrpc.PLUGIN, header)
    for start in range(0, length, 1 << 20):
        peer.send(ttrpc.PLUGIN, bytes(min(1 << 20, length - start)))
    assert (await peer.answer(99)).code == Code.RESOURCE_EXHAUSTED
    assert (await peer.event(EventKind.RUN_POD_SANDBOX, pod())).code == Code.OK


async def test_unknown_connections_are_ignored(told: Told, peer: Peer) -> None:
    """Bytes of an unknown connection are dropped, as Go's side does."""
    peer.send(77, b"\xff" * 1000)
    assert (await peer.event(EventKind.RUN_POD_SANDBOX, pod())).code == Code.OK


async def _again(told: Told, runtime: Runtime, peer: Peer) -> None:
    """Expect the plugin to disconnect, reconnect, and take a whole snapshot again."""
    assert await peer.gone()
    before = len(told.snapshots)
    fresh = await runtime.plugin()
    await fresh.ready()
    await _until(lambda: len(told.snapshots) == before + 1)
    assert (await fresh.event(EventKind.RUN_POD_SANDBOX, pod())).code == Code.OK


@pytest.mark.parametrize(
    "data",
    [
        b"\xff" * 8,  # a frame of 4 GiB
        ttrpc.encode(1, ttrpc.HEADER.pack(2, 1, ttrpc.REQUEST, 0) + b"\xff\xff"),
        ttrpc.encode(
            1,
            ttrpc.encode_request(
                1, ttrpc.TtrpcRequest(nri.PLUGIN_SERVICE, "Synchronize", b"\x0a\xff")
            ),
        ),
    ],
)
async def test_garbage_begins_anew(told: Told, runtime: Runtime, peer: Peer, data: bytes) -> None:
    """Bytes that no runtime sends end the connection, and only that."""
    peer.writer.write(data)
    await _again(told, runtime, peer)


async def test_an_event_that_cannot_be_taken_is_told_again(
    told: Told, runtime: Runtime, peer: Peer
) -> None:
    """A listener that fails loses the connection, and gets everything by the next Synchronize."""
    told.fails = OSError("the disk is full")
    await peer.event(EventKind.RUN_POD_SANDBOX, pod())
    await _again(told, runtime, peer)


async def test_a_synchronize_without_end(told: Told, runtime: Runtime, path: Path) -> None:
    """Parts without end are not collected without end."""
    async with running(told, path):
        peer = await runtime.plugin()
        await peer.registered()
        message = pb.SynchronizeRequest(more=True).SerializeToString()
        for _ in range(MAX_PARTS + 1):
            peer.begin("Synchronize", message)
        assert await peer.gone()


async def test_a_synchronize_that_is_too_large(
    told: Told, runtime: Runtime, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is refused with a line that says why, and the next connection is served."""
    async with running(told, path) as plugin:
        peer = await runtime.plugin()
        await peer.registered()
        peer.begin("Synchronize", b"\x12\x00" * 20_000)
        assert await peer.gone()
        fresh = await runtime.plugin()
        assert "more than 4096 pods or 16384 containers are too many" in plugin.problem
        await fresh.ready()
    lines = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert lines == [f"NRI: {path}: {TOO_MANY}"]


TOO_MANY = "NRI Synchronize: more than 4096 pods or 16384 containers are too many"


async def test_answers_that_nobody_reads(told: Told, peer: Peer) -> None:
    """A runtime that calls and never reads is given up before its answers fill the memory."""
    request = ttrpc.TtrpcRequest("x" * 80, "y")
    call = ttrpc.encode(ttrpc.PLUGIN, ttrpc.encode_request(1, request))
    peer.writer.transport.pause_reading()  # type: ignore[attr-defined] # a stream's transport
    with contextlib.suppress(ConnectionError):
        for _ in range(200):
            peer.writer.write(call * 200)
            await peer.writer.drain()
        raise AssertionError("the plugin kept 40,000 answers")


async def test_refused(
    told: Told, runtime: Runtime, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A refused registration is tried again, and the reason is logged once."""
    async with running(told, path):
        for _ in range(2):
            peer = await runtime.plugin()
            await peer.registered(Code.INVALID_ARGUMENT, "no such index")
            assert await peer.gone()
        await (await runtime.plugin()).ready()
        await _until(lambda: told.snapshots)
    refusals = [r for r in caplog.records if "registration refused" in r.getMessage()]
    assert [r.levelno for r in refusals] == [logging.WARNING]


async def test_a_runtime_that_comes_later(
    told: Told, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a socket the plugin waits, quietly unless it is wanted, and connects in time."""
    caplog.set_level(logging.INFO)
    async with running(told, path, wanted=False):
        await _until(lambda: "No such file" in caplog.text)
        assert {record.levelno for record in caplog.records} == {logging.INFO}
        async with Runtime(path) as runtime:
            await (await runtime.plugin()).ready()
            await _until(lambda: told.snapshots)


LISTENER = """
import os, socket, sys
os.setuid(65534)
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
print("ready", flush=True)
peer = listener.accept()[0]
print(len(peer.recv(100)), flush=True)
"""


@pytest.mark.root
async def test_a_runtime_of_somebody_else(
    told: Told, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A socket that neither root nor we listen on is not registered at."""
    path.parent.chmod(0o777)
    listener = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", LISTENER, str(path)), stdout=asyncio.subprocess.PIPE
    )
    assert listener.stdout is not None
    assert await listener.stdout.readline() == b"ready\n"
    async with running(told, path):
        assert await listener.stdout.readline() == b"0\n"
    assert "runs as uid 65534" in caplog.text
    await listener.wait()


async def test_how_the_connection_stands(told: Told, path: Path) -> None:
    """Why there is none, then the runtime and since when, then why it ended."""

    async def until(stands: Callable[[], bool]) -> None:
        async with asyncio.timeout(5):
            while not stands():
                await asyncio.sleep(0.001)

    async with running(told, path) as plugin:
        assert plugin.connected_at is None
        await until(lambda: "No such file" in plugin.problem)
        async with Runtime(path) as runtime:
            peer = await runtime.plugin()
            await peer.ready(version="v1.7.24")
            await told.rebuilt.wait()
            await until(lambda: plugin.connected_at is not None)
            assert (plugin.runtime, plugin.problem) == ("containerd v1.7.24", "")
            peer.writer.close()
            await until(lambda: plugin.connected_at is None)
            assert "closed" in plugin.problem
