"""Unsolicited updates: to which runtimes, when, and their outcomes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kata_pin.base.cpuset import CpuSet
from kata_pin.peers.cri import ContainerUnknown, RuntimeUnavailable, UpdateRefused
from kata_pin.peers.nri import plugin as source
from kata_pin.peers.nri import session as nrisession
from kata_pin.peers.nri.messages import Event, EventKind, Snapshot
from kata_pin.peers.nri.plugin import NriPlugin
from kata_pin.peers.nri.replies import Cpuset, NriAnswer, Update
from kata_pin.peers.proto import nri_pb2 as pb
from kata_pin.peers.ttrpc import Code
from tests.support.nriruntime import Peer, Runtime, container, pod

CPUS = Cpuset(CpuSet.parse("0-1"))


class Told:
    """A listener and decider that changes nothing; a start waits until it is released."""

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.released = asyncio.Event()

    async def rebuild(self, snapshot: Snapshot, stamp_ns: int) -> None:
        pass

    def receive(self, event: Event, stamp_ns: int) -> int:
        return 1

    async def placed(self, event: Event, ticket: int) -> None:
        if event.container is not None and event.container.id == "quick":
            return
        self.started.set()
        await self.released.wait()

    def adopt(self, snapshot: Snapshot) -> tuple[Update, ...]:
        return ()

    def decide(self, event: Event, stamp_ns: int) -> NriAnswer:
        return NriAnswer()

    def ended(self) -> None:
        pass


@pytest.fixture
async def told() -> Told:
    return Told()


@pytest.fixture
async def plugin(told: Told, runtime: Runtime, path: Path) -> AsyncIterator[NriPlugin]:
    one = NriPlugin(
        told, socket_path=str(path), name="kata-pin", index="99", wanted=True, decider=told
    )
    task = asyncio.create_task(one.run())
    yield one
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def _connected(plugin: NriPlugin, runtime: Runtime, version: str = "v2.4.2") -> Peer:
    """Do what comes before events; the plugin knows that it is connected."""
    peer = await runtime.plugin()
    await peer.ready(version=version)
    async with asyncio.timeout(5):
        while plugin.connected_at is None:
            await asyncio.sleep(0)
    return peer


async def _updated(plugin: NriPlugin, peer: Peer, payload: bytes = b"", code: int = Code.OK) -> int:
    """Update a container and answer it; return the stream."""
    task = asyncio.create_task(plugin.update("c1", CPUS))
    stream, name, cpus = await peer.update()
    assert (name, cpus) == ("c1", "0-1")
    peer.reply(stream, payload, code, "so it is")
    async with asyncio.timeout(5):
        await task
    return stream


async def test_an_update_is_sent_and_answered(plugin: NriPlugin, runtime: Runtime) -> None:
    """One container a call, so that a failure is known; streams are odd and increase."""
    peer = await _connected(plugin, runtime)
    assert plugin.updates_problem == ""
    assert [await _updated(plugin, peer) for _ in range(3)] == [3, 5, 7]


@pytest.mark.parametrize("version", ["v1.7.24~ds1", "v2.3.7", "2.4.0-rc.1", ""])
async def test_an_unsafe_runtime_is_told_apart(
    plugin: NriPlugin, runtime: Runtime, version: str
) -> None:
    """The versions that the runtime reports in Configure count."""
    assert plugin.updates_problem == "NRI is not connected"
    await _connected(plugin, runtime, version)
    assert "containerd" in plugin.updates_problem


async def test_never_while_the_runtime_waits_for_us(
    plugin: NriPlugin, runtime: Runtime, told: Told
) -> None:
    """A StartContainer that waits for its pins is answered before an update is sent."""
    peer = await _connected(plugin, runtime)
    start = pb.EventRequest(pod=pod(), container=container())
    stream = peer.begin("StartContainer", start.SerializeToString())
    await told.started.wait()
    quick = pb.EventRequest(pod=pod(), container=container("quick"))
    assert (await peer.call("StartContainer", quick)).code == Code.OK
    update = asyncio.create_task(plugin.update("c1", CPUS))
    assert await peer.quiet()
    told.released.set()
    assert (await peer.answer(stream)).code == Code.OK
    call, *_ = await peer.update()
    peer.reply(call)
    await update


async def test_what_the_runtime_refuses(plugin: NriPlugin, runtime: Runtime) -> None:
    """A status, or a place in the list of failures; the connection goes on."""
    peer = await _connected(plugin, runtime)
    with pytest.raises(UpdateRefused, match="so it is"):
        await _updated(plugin, peer, code=2)
    with pytest.raises(ContainerUnknown):
        await _updated(plugin, peer, code=Code.NOT_FOUND)
    failed = pb.UpdateContainersResponse(failed=[pb.ContainerUpdate(container_id="c1")])
    with pytest.raises(UpdateRefused, match="could not"):
        await _updated(plugin, peer, failed.SerializeToString())
    await _updated(plugin, peer)


async def test_events_go_on_while_an_update_is_under_way(
    plugin: NriPlugin, runtime: Runtime
) -> None:
    """An event that comes before the update's answer is answered at once."""
    peer = await _connected(plugin, runtime)
    update = asyncio.create_task(plugin.update("c1", CPUS))
    stream, *_ = await peer.update()
    for kind in (EventKind.CREATE_CONTAINER, EventKind.STOP_CONTAINER):
        assert (await peer.event(kind, pod(), container())).code == Code.OK
    peer.reply(stream)
    await update


async def test_a_runtime_that_does_not_answer(
    plugin: NriPlugin, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deadline ends the call; the late answer is dropped, and the next call is its own."""
    for module in (source, nrisession):
        monkeypatch.setattr(module, "DEADLINE_S", 0.2)
    peer = await _connected(plugin, runtime)
    with pytest.raises(UpdateRefused, match=r"no answer from the runtime within 0\.2 s"):
        await plugin.update("c1", CPUS)
    late, *_ = await peer.update()
    peer.reply(late, code=2, why="late")
    await _updated(plugin, peer)


async def test_a_connection_that_ends(plugin: NriPlugin, runtime: Runtime) -> None:
    """A lost connection fails waiting and new calls at once."""
    peer = await _connected(plugin, runtime)
    update = asyncio.create_task(plugin.update("c1", CPUS))
    await peer.update()
    peer.writer.close()
    with pytest.raises(RuntimeUnavailable, match="closed the connection"):
        await update
    with pytest.raises(RuntimeUnavailable, match="not connected"):
        await plugin.update("c1", CPUS)
    again = await _connected(plugin, runtime)
    assert await _updated(plugin, again) == 3


async def test_an_answer_that_is_none(plugin: NriPlugin, runtime: Runtime) -> None:
    """Bytes that are no answer end the call, not the daemon."""
    peer = await _connected(plugin, runtime)
    with pytest.raises(RuntimeUnavailable, match="UpdateContainersResponse"):
        await _updated(plugin, peer, b"\xff\xff\xff")
    await _updated(plugin, peer)
