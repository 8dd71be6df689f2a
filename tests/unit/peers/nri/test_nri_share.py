"""What a runtime that floods gets of the daemon's event loop, counted on a clock of the test."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import cast

import pytest

from kata_pin.linux import sockets
from kata_pin.peers import ttrpc
from kata_pin.peers.nri import messages as nri
from kata_pin.peers.nri import session
from kata_pin.peers.nri.messages import EventKind
from kata_pin.peers.nri.session import BURST_S, LOOP_PART, PIECE, Listener, NriSession
from kata_pin.peers.ttrpc import TtrpcRequest
from tests.support.nriruntime import container, pb, pod

PER_SECOND = 1000
FLOOD_S = 10.0
EVENT_S = 0.002
"""What an event costs the daemon here: twice as much as it has at that rate."""


class Flood(asyncio.Transport):
    """The daemon's loop, the runtime's socket, and a listener that only takes time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.now, self.taken, self.turns = time.monotonic(), 0, list[int]()
        self._paused = False
        self._timers: list[tuple[float, object]] = []
        clock = SimpleNamespace(
            monotonic=lambda: self.now,
            clock_gettime=time.clock_gettime,
            clock_gettime_ns=time.clock_gettime_ns,
            CLOCK_BOOTTIME=time.CLOCK_BOOTTIME,
        )
        for module in (session, sockets):
            monkeypatch.setattr(module, "time", clock)
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(
            loop, "call_later", lambda s, call: self._timers.append((self.now + s, call))
        )
        listener = SimpleNamespace(receive=lambda *_: self._take())
        self.session = NriSession(cast("Listener", listener), None)
        self.session.connection_made(self)

    def _take(self) -> int:
        self.now += EVENT_S
        self.taken += 1
        return 0

    async def run(self, frames: list[bytes]) -> None:
        """Send the frames at their rate; between two pieces the loop serves others."""
        began, sent, waiting = self.now, 0, b""
        while self.now < began + FLOOD_S:
            due = int((self.now - began) * PER_SECOND)
            waiting += b"".join(frames[number % len(frames)] for number in range(sent, due))
            sent = due
            self._fire()
            await asyncio.sleep(0)
            if self._paused or not waiting:
                self.now += 0.001
                continue
            buffer, before = self.session.get_buffer(-1), self.taken
            piece = waiting[: len(buffer)]
            buffer[: len(piece)] = piece
            waiting = waiting[len(piece) :]
            self.session.buffer_updated(len(piece))
            self.turns.append(self.taken - before)

    def _fire(self) -> None:
        due = [call for at, call in self._timers if at <= self.now]
        self._timers = [(at, call) for at, call in self._timers if at > self.now]
        for call in due:
            assert callable(call)
            call()

    def pause_reading(self) -> None:
        """Take no more of the runtime."""
        self._paused = True

    def resume_reading(self) -> None:
        """Take the runtime's bytes again."""
        self._paused = False

    def is_closing(self) -> bool:
        """Never."""
        return False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Drop an answer."""

    def get_write_buffer_size(self) -> int:
        """Nothing waits."""
        return 0

    def abort(self) -> None:
        """End the flood: the session refused it."""
        raise AssertionError("the connection was ended")


def _frames() -> list[bytes]:
    sandbox, found = pod("flood"), []
    for number in range(50):
        started = container(f"c{number}", sandbox.id, cpus=str(number % 2))
        payload = pb.EventRequest(pod=sandbox, container=started).SerializeToString()
        request = TtrpcRequest(nri.PLUGIN_SERVICE, EventKind.POST_START_CONTAINER.method, payload)
        frame = ttrpc.encode_request(1 + 2 * number, request)
        found.append(ttrpc.MUX_HEADER.pack(ttrpc.PLUGIN, len(frame)) + frame)
    return found


async def test_a_flood_gets_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 1,000 events a second: a few in one turn of the loop, a quarter of its time for long."""
    frames = _frames()
    with monkeypatch.context() as patched:
        flood = Flood(patched)
        await flood.run(frames)
    most = PIECE // min(map(len, frames)) + 1
    assert max(flood.turns) <= most
    assert most * EVENT_S < 0.25, "a hook that comes meanwhile is in its budget"
    share = flood.taken * EVENT_S
    assert share <= BURST_S + FLOOD_S * LOOP_PART + most * EVENT_S
    assert share >= FLOOD_S * LOOP_PART / 2, "it is served, too"
