"""A runtime's side of NRI, played by a test: it listens, is registered at, and calls the plugin.

    async with Runtime(path) as runtime:
        peer = await runtime.plugin()          # the next plugin that connects
        await peer.registered()
        await peer.configure(); await peer.synchronize(pods, containers)
        await peer.event(EventKind.STOP_CONTAINER, pod, container)

It uses kata-pin's own codecs, which are held to recorded bytes elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kata_pin.peers import ttrpc
from kata_pin.peers.nri import messages as nri
from kata_pin.peers.nri.messages import EventKind
from kata_pin.peers.proto import nri_pb2 as pb
from kata_pin.peers.ttrpc import Code, FrameDecoder, MuxDecoder, Response, TtrpcRequest

__all__ = ["Peer", "Runtime", "container", "pb", "pod"]

WAIT_S = 10.0


class Peer:
    """One connected plugin."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer
        self._trunk = MuxDecoder()
        self._frames = {ttrpc.PLUGIN: FrameDecoder(), ttrpc.RUNTIME: FrameDecoder()}
        self._stream = 1
        self._answers: dict[int, Response] = {}
        self._requests: list[tuple[int, TtrpcRequest]] = []

    async def registered(self, code: int = Code.OK, message: str = "") -> pb.RegisterPluginRequest:
        """Wait for the registration and answer it."""
        stream, request = await self.request()
        self.send(ttrpc.RUNTIME, ttrpc.encode_response(stream, Response(b"", code, message)))
        told = pb.RegisterPluginRequest()
        told.ParseFromString(request.payload)
        return told

    async def request(self) -> tuple[int, TtrpcRequest]:
        """Wait for the plugin's next call; return it with its stream."""
        while not self._requests:
            await self._read()
        return self._requests.pop(0)

    async def update(self) -> tuple[int, str, str]:
        """Wait for an update unasked of one container; return stream, container and CPUs."""
        stream, request = await self.request()
        assert (request.service, request.method) == (nri.RUNTIME_SERVICE, "UpdateContainers")
        told = pb.UpdateContainersRequest()
        told.ParseFromString(request.payload)
        (one,) = told.update
        assert not one.ignore_failure
        return stream, one.container_id, one.linux.resources.cpu.cpus

    def reply(self, stream: int, payload: bytes = b"", code: int = Code.OK, why: str = "") -> None:
        """Answer a call of the plugin's."""
        self.send(ttrpc.RUNTIME, ttrpc.encode_response(stream, Response(payload, code, why)))

    async def quiet(self, seconds: float = 0.2) -> bool:
        """Whether the plugin calls nothing for so long."""
        try:
            async with asyncio.timeout(seconds):
                while not self._requests:
                    await self._read()
        except TimeoutError:
            return True
        return False

    async def configure(self, version: str = "v2.3.0", timeout_ms: int = 2000) -> int:
        """Configure the plugin; return the events it wants."""
        message = pb.ConfigureRequest(
            runtime_name="containerd", runtime_version=version, request_timeout=timeout_ms
        )
        reply = pb.ConfigureResponse()
        reply.ParseFromString((await self.call("Configure", message)).payload)
        return int(reply.events)

    async def synchronize(
        self, pods: Sequence[Any] = (), containers: Sequence[Any] = (), *, more: bool = False
    ) -> bool:
        """Tell what there is, or a part of it; return the answer's `more`."""
        message = pb.SynchronizeRequest(pods=pods, containers=containers, more=more)
        reply = pb.SynchronizeResponse()
        reply.ParseFromString((await self.call("Synchronize", message)).payload)
        return bool(reply.more)

    async def ready(self, **options: Any) -> None:
        """Do all that comes before events."""
        await self.registered()
        await self.configure(**options)
        await self.synchronize()

    async def event(
        self, kind: EventKind, pod: Any, container: Any = None, *, change: bool = False
    ) -> Response:
        """Tell of an event, by a method of its own or by StateChange; return the answer."""
        if change:
            message = pb.StateChangeEvent(event=int(kind), pod=pod, container=container)
            return await self.call("StateChange", message)
        return await self.call(kind.method, pb.EventRequest(pod=pod, container=container))

    async def call(self, method: str, message: Any, service: str = nri.PLUGIN_SERVICE) -> Response:
        """Call the plugin and return its answer."""
        return await self.answer(self.begin(method, message.SerializeToString(), service))

    def begin(self, method: str, payload: bytes, service: str = nri.PLUGIN_SERVICE) -> int:
        """Call the plugin; return the stream that its answer will have."""
        stream, self._stream = self._stream, self._stream + 2
        self.send(
            ttrpc.PLUGIN, ttrpc.encode_request(stream, TtrpcRequest(service, method, payload))
        )
        return stream

    async def answer(self, stream: int) -> Response:
        """Wait for the answer of a stream."""
        while stream not in self._answers:
            await self._read()
        return self._answers.pop(stream)

    def send(self, connection: int, data: bytes) -> None:
        """Send a frame, whole: the runtime's frames may be longer than ours."""
        self.writer.write(ttrpc.MUX_HEADER.pack(connection, len(data)) + data)

    async def gone(self) -> bool:
        """Wait until the plugin has hung up."""
        async with asyncio.timeout(WAIT_S):
            while await self._reader.read(65536):
                pass
        return True

    async def _read(self) -> None:
        async with asyncio.timeout(WAIT_S):
            data = await self._reader.read(65536)
        assert data, "the plugin has hung up"
        for connection, piece in self._trunk.feed(data):
            assert len(piece) <= ttrpc.MAX_SENT
            for frame in self._frames[connection].feed(piece):
                assert frame.data is not None
                if connection == ttrpc.PLUGIN:
                    self._answers[frame.stream] = ttrpc.parse_response(frame.data)
                else:
                    self._requests.append((frame.stream, ttrpc.parse_request(frame.data)))


class Runtime:
    """The listening socket."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._plugins: asyncio.Queue[Peer] = asyncio.Queue()
        self._peers: list[Peer] = []

    async def plugin(self) -> Peer:
        """Return the next plugin that connects."""
        async with asyncio.timeout(WAIT_S):
            return await self._plugins.get()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_unix_server(self._take, self.path)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.close()
        for peer in self._peers:
            peer.writer.close()

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = Peer(reader, writer)
        self._peers.append(peer)
        self._plugins.put_nowait(peer)


def pod(name: str = "p1", **fields: Any) -> pb.PodSandbox:
    """Return a pod's message."""
    return pb.PodSandbox(
        **{"id": name, "name": name, "namespace": "shop", "runtime_handler": "kata", **fields}
    )


def container(name: str = "c1", of: str = "p1", cpus: str = "", **fields: Any) -> pb.Container:
    """Return a container's message."""
    cpu = pb.LinuxCPU(cpus=cpus)
    linux = pb.LinuxContainer(resources=pb.LinuxResources(cpu=cpu), cgroups_path=f"/pods/{name}")
    return pb.Container(
        **{"id": name, "pod_sandbox_id": of, "name": name, "linux": linux, **fields}
    )
