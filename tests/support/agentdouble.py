"""An agent played by a test: the service behind a VMM's unix socket (hybrid vsock).

    async with AgentDouble(path) as agent:
        agent.answer("GetMetrics", pb.Metrics(metrics="..."))
        ...
        assert agent.asked["UpdateContainer"] == [...]

What it answers is set by method: a message, a Response, or a function of the request's payload.
Hostile behaviour is a `twist`: a coroutine that gets the writer, the stream and the frame that an
honest agent would send. It uses kata-pin's own codecs, which are held to recorded bytes elsewhere.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias

from google.protobuf.message import Message

from kata_pin.peers import ttrpc
from kata_pin.peers.agent.client import HybridVsockAddress
from kata_pin.peers.proto import agent_pb2 as pb
from kata_pin.peers.ttrpc import Code, FrameDecoder, Response

Reply: TypeAlias = Message | Response | Callable[[bytes], Message | Response]
Twist: TypeAlias = Callable[[asyncio.StreamWriter, int, bytes], Awaitable[None]]


class AgentDouble:
    """Serves until the context ends; `asked` are the payloads received, by method."""

    def __init__(self, path: Path, *, greeting: bytes = b"OK 1073741824\n") -> None:
        self.address = HybridVsockAddress(str(path))
        self.asked: dict[str, list[bytes]] = defaultdict(list)
        self.deadlines_ns: list[int] = []
        self.connects: list[bytes] = []
        self.twist: Twist | None = None
        self._greeting = greeting
        self._replies: dict[str, Reply] = {}
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    def answer(self, method: str, reply: Reply) -> None:
        """Answer a method so from now on; methods that are not set are not implemented."""
        self._replies[method] = reply

    def drop(self) -> None:
        """Close every connection."""
        for writer in self._writers:
            writer.transport.abort()

    @property
    def connected(self) -> int:
        """How many connections are open."""
        return len(self._writers)

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_unix_server(self._serve, self.address.path)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._server is not None
        self._server.close()
        for _ in range(10):  # a connection that was accepted a moment ago gets its task by then
            await asyncio.sleep(0)
        self.drop()
        await self._server.wait_closed()
        while self._writers:
            await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            self.connects.append(await reader.readline())
            writer.write(self._greeting)
            decoder = FrameDecoder()
            while data := await reader.read(65536):
                for frame in decoder.feed(data):
                    await self._answer(writer, frame.stream, frame.data or b"")
        except OSError:
            pass
        finally:
            self._writers.discard(writer)
            writer.transport.abort()

    async def _answer(self, writer: asyncio.StreamWriter, stream: int, data: bytes) -> None:
        request = ttrpc.parse_request(data)
        self.asked[request.method].append(request.payload)
        self.deadlines_ns.append(request.timeout_ns)
        frame = ttrpc.encode_response(stream, self._response(request.method, request.payload))
        if self.twist is not None:
            await self.twist(writer, stream, frame)
        else:
            writer.write(frame)

    def _response(self, method: str, payload: bytes) -> Response:
        reply: Any = self._replies.get(method)
        if reply is None:
            return Response(b"", Code.UNIMPLEMENTED, f"method {method}")
        if callable(reply):
            reply = reply(payload)
        return reply if isinstance(reply, Response) else Response(reply.SerializeToString())


class HonestAgent(AgentDouble):
    """A double that does what an agent does: keeps cpusets, runs `cat`, refuses by policy.

    Containers: `app`; `sealed`, whose requests the policy denies; `mute`, whose output it hides.
    Its guest has CPU 0 with APIC id 0 and CPU 3 with APIC id 15.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.cpus = {"app": "0,3", "sealed": "0,3", "mute": "0,3"}
        self._output: dict[str, list[bytes]] = {}
        usage = pb.CpuUsage(total_usage=7_000_000, percpu_usage=[5_000_000, 0, 0, 2_000_000])
        stats = pb.CgroupStats(cpu_stats=pb.CpuStats(cpu_usage=usage))
        self.answer("GetMetrics", pb.Metrics(metrics=METRICS))
        self.answer("StatsContainer", pb.StatsContainerResponse(cgroup_stats=stats))
        self.answer("UpdateContainer", self._update)
        self.answer("ExecProcess", self._exec)
        self.answer("ReadStdout", self._read)
        self.answer("WaitProcess", pb.WaitProcessResponse())
        self.answer("SignalProcess", pb.GetMetricsRequest())

    def _update(self, payload: bytes) -> Message | Response:
        asked = pb.UpdateContainerRequest.FromString(payload)
        if refusal := self._refusal("UpdateContainerRequest", asked.container_id):
            return refusal
        self.cpus[asked.container_id] = asked.resources.cpu.cpus or self.cpus[asked.container_id]
        return pb.GetMetricsRequest()  # Empty

    def _exec(self, payload: bytes) -> Message | Response:
        asked = pb.ExecProcessRequest.FromString(payload)
        if refusal := self._refusal("ExecProcessRequest", asked.container_id):
            return refusal
        program, path = asked.process.args
        if program != "cat":
            return Response(b"", Code.INTERNAL, f'"failed to exec {program}: ENOENT"')
        allowed = f"Name:\tcat\nCpus_allowed_list:\t{self.cpus[asked.container_id]}\n".encode()
        text = {"/proc/self/status": allowed, "/proc/cpuinfo": CPUINFO}[path]
        self._output[asked.exec_id] = [] if asked.container_id == "mute" else [text[:10], text[10:]]
        return pb.GetMetricsRequest()

    def _read(self, payload: bytes) -> Message:
        pieces = self._output[pb.ReadStreamRequest.FromString(payload).exec_id]
        return pb.ReadStreamResponse(data=pieces.pop(0) if pieces else b"")

    def _refusal(self, request: str, container: str) -> Response | None:
        if container not in self.cpus:
            return Response(b"", Code.INVALID_ARGUMENT, '"invalid container id"')
        if container == "sealed":
            return Response(b"", Code.PERMISSION_DENIED, f'"{request} is blocked by policy: "')
        return None


METRICS = """\
# HELP kata_guest_cpu_time Guest CPU statistics.
# TYPE kata_guest_cpu_time gauge
kata_guest_cpu_time{cpu="0",item="idle"} 9000
kata_guest_cpu_time{cpu="0",item="user"} 1200
kata_guest_cpu_time{cpu="1",item="idle"} 100
kata_guest_cpu_time{cpu="1",item="user"} 10100
kata_guest_cpu_time{cpu="total",item="user"} 11300
"""
CPUINFO = b"processor\t: 0\napicid\t\t: 0\n\nprocessor\t: 3\napicid\t\t: 15\n"
