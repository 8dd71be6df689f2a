"""The NRI plugin with a decider: what is answered, refused, or answered with nothing."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kata_pin.base.cpuset import CpuSet
from kata_pin.base.errors import HostError, StateError
from kata_pin.peers import ttrpc
from kata_pin.peers.nri import replies
from kata_pin.peers.nri.messages import Event, EventKind, Snapshot
from kata_pin.peers.nri.plugin import NriPlugin
from kata_pin.peers.nri.replies import Cpuset, NriAnswer, Update
from kata_pin.peers.nri.session import CreationRefused
from kata_pin.peers.proto import nri_pb2 as pb
from kata_pin.peers.ttrpc import Code, FrameDecoder, MuxDecoder
from tests.support.nriruntime import Peer, Runtime, container, pod

DATA = Path(__file__).resolve().parents[3] / "data/nri"
ADJUST = NriAnswer(Cpuset(CpuSet.parse("2-5")), (Update("c9", Cpuset(CpuSet.parse("0-1"))),))
ANSWERED = (EventKind.CREATE_CONTAINER, EventKind.UPDATE_CONTAINER, EventKind.STOP_CONTAINER)


class Told:
    """A listener and decider; what it decides is `answer`, or raised."""

    def __init__(self) -> None:
        self.events: list[EventKind] = []
        self.decided: list[EventKind] = []
        self.adopted: list[Snapshot] = []
        self.answer: NriAnswer | Exception = NriAnswer()
        self.ends = 0

    async def rebuild(self, snapshot: Snapshot, stamp_ns: int) -> None:
        pass

    def receive(self, event: Event, stamp_ns: int) -> int:
        self.events.append(event.kind)
        return 0

    async def placed(self, event: Event, ticket: int) -> None:
        pass

    def adopt(self, snapshot: Snapshot) -> tuple[Update, ...]:
        self.adopted.append(snapshot)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer.updates

    def decide(self, event: Event, stamp_ns: int) -> NriAnswer:
        self.decided.append(event.kind)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def ended(self) -> None:
        self.ends += 1


@pytest.fixture
async def told() -> Told:
    return Told()


@contextlib.asynccontextmanager
async def connected(told: Told, path: Path, *, acts: bool = True) -> AsyncIterator[Peer]:
    """Run the plugin at a runtime; it is registered."""
    async with Runtime(path) as runtime:
        decider = told if acts else None
        plugin = NriPlugin(
            told, socket_path=str(path), name="kata-pin", index="95", wanted=True, decider=decider
        )
        task = asyncio.create_task(plugin.run())
        try:
            peer = await runtime.plugin()
            await peer.registered()
            yield peer
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


@pytest.fixture
async def peer(told: Told, path: Path) -> AsyncIterator[Peer]:
    async with connected(told, path) as one:
        assert await one.configure() == 0x7FF
        await one.synchronize()
        yield one


async def _call(peer: Peer, kind: EventKind) -> ttrpc.Response:
    return await peer.event(kind, pod(), container())


async def test_answers_that_act(told: Told, peer: Peer) -> None:
    """A creation is adjusted and others are updated; an update and an end update others."""
    told.answer = ADJUST
    created = await _call(peer, EventKind.CREATE_CONTAINER)
    assert created.payload == replies.create_reply(ADJUST) != b""
    for kind in ANSWERED[1:]:
        assert (await _call(peer, kind)).payload == replies.update_reply(ADJUST) != b""
    assert told.decided == list(ANSWERED)
    assert told.events == []  # who decides has recorded them


async def test_synchronize_is_answered_with_its_last_part(told: Told, peer: Peer) -> None:
    """Parts that are followed by others get no updates, or the runtime ends the connection."""
    told.answer = ADJUST
    told.adopted.clear()
    for more, payload in ((True, b"\x10\x01"), (False, replies.synchronize_reply(ADJUST.updates))):
        message = pb.SynchronizeRequest(pods=[pod()], more=more)
        assert (await peer.call("Synchronize", message)).payload == payload
    assert [len(one.pods) for one in told.adopted] == [2]


@pytest.mark.parametrize("change", [False, True])
async def test_a_creation_that_succeeded_is_told(told: Told, peer: Peer, change: bool) -> None:
    """PostCreateContainer comes to who decides, in both styles, and changes nothing."""
    kind = EventKind.POST_CREATE_CONTAINER
    response = await peer.event(kind, pod(), container(), change=change)
    assert (response.code, response.payload, told.events) == (Code.OK, b"", [kind])


async def test_a_refused_creation(told: Told, peer: Peer) -> None:
    """The runtime gets an error with the reason; the connection goes on."""
    told.answer = CreationRefused("not enough CPUs")
    response = await _call(peer, EventKind.CREATE_CONTAINER)
    assert (response.code, response.message) == (Code.RESOURCE_EXHAUSTED, "not enough CPUs")
    told.answer = ADJUST
    assert (await _call(peer, EventKind.CREATE_CONTAINER)).code == Code.OK


async def test_a_deciders_fault_is_no_containers(
    told: Told, peer: Peer, caplog: pytest.LogCaptureFixture
) -> None:
    """Unexpected errors are logged and answered with nothing; an end still reaches the listener."""
    told.answer = HostError("read", "/proc/1", 5)
    with caplog.at_level(logging.ERROR):
        for kind in ANSWERED:
            response = await _call(peer, kind)
            assert (response.code, response.payload) == (Code.OK, b"")
        assert (await peer.call("Synchronize", pb.SynchronizeRequest())).payload == b""
    assert caplog.text.count("cannot decide") == 4
    assert told.events == [EventKind.STOP_CONTAINER]


async def test_what_could_not_be_stored_is_told_anew(told: Told, path: Path) -> None:
    """A full disk at Synchronize ends the connection: each begins with everything there is."""
    told.answer = StateError("disk full")
    async with connected(told, path) as peer:
        await peer.configure()
        peer.begin("Synchronize", pb.SynchronizeRequest(pods=[pod()]).SerializeToString())
        assert await peer.gone()
        assert len(told.adopted) == 1


async def test_what_cannot_be_read_is_answered_with_nothing(told: Told, peer: Peer) -> None:
    """A creation that cannot be read gets an empty answer."""
    response = await peer.event(EventKind.CREATE_CONTAINER, pod("../p"), container())
    assert (response.code, response.payload) == (Code.OK, b"")
    assert told.decided == []


async def test_the_end_of_a_connection_is_told(told: Told, path: Path) -> None:
    """Who decides knows when nothing is delivered any more."""
    async with connected(told, path) as peer:
        await peer.configure()
        await peer.synchronize()
        assert told.ends == 0
    assert told.ends == 1


@pytest.mark.parametrize("acts", [False, True])
async def test_without_decisions_every_byte_is_the_observers(
    told: Told, path: Path, acts: bool
) -> None:
    """The recorded calls of containerd 1.7 get the recorded bytes; only a decider's mask differs.

    The decider decides nothing here; without one, nothing of it is in any answer.
    """
    async with connected(told, path, acts=acts) as peer:
        answers = [await peer.answer(_begin(peer, frame)) for frame in _recorded("from-containerd")]
    recorded = [ttrpc.parse_response(frame) for frame in _recorded("from-plugin")]
    if acts:
        assert answers.pop(0).payload == replies.configure_reply(EventKind)
        recorded.pop(0)
    assert answers == recorded


def _recorded(name: str) -> list[bytes]:
    """Return the messages on the plugin's connection of one side of the recording."""
    decoder = FrameDecoder()
    return [
        frame.data
        for connection, piece in MuxDecoder().feed((DATA / f"{name}.bin").read_bytes())
        if connection == ttrpc.PLUGIN
        for frame in decoder.feed(piece)
        if frame.data is not None
    ]


def _begin(peer: Peer, frame: bytes) -> int:
    call = ttrpc.parse_request(frame)
    return peer.begin(call.method, call.payload)
