"""A guest played by a thread: its agent serves a unix socket beside whatever the test does.

    with PlayedGuest(folder / "agent", online="0-1") as guest:
        pod = node.pod("p1", agent_url=guest.url)
        ...
        assert guest.cpus["c1"] == "1"

It keeps a cpuset for each container it is asked about, as the kernel in a guest would. What kind of
guest it is can be changed at any time: `mood`. `used_ns` and `per_cpu_ns` are
what containers have used, `times_ms` how long the online CPUs were busy and idle, by rank.
"""

from __future__ import annotations

import asyncio
import threading
from enum import Enum, auto
from pathlib import Path
from types import TracebackType
from typing import Self

from google.protobuf.message import Message

from kata_pin.base.cpuset import CpuSet
from kata_pin.peers.proto import agent_pb2 as pb
from kata_pin.peers.ttrpc import Code, Response
from tests.support.agentdouble import AgentDouble
from tests.support.waiting import wait_for

SLOW_S = 0.3


class Mood(Enum):
    """What kind of guest it is."""

    HONEST = auto()
    LIES = auto()  # says yes, and the kernel has refused
    DENIES = auto()  # its policy refuses every request that changes or runs something
    HANGS = auto()  # takes requests and never answers
    FLOODS = auto()  # answers with more than anybody asked for
    UNKNOWING = auto()  # knows no container
    FROZEN = auto()  # its containers run no program to its end
    SLOW = auto()  # answers after SLOW_S
    WAITS = auto()  # answers when it is in another mood


class PlayedGuest:
    """See the module. `said` are (container, cpu list) in the order they were asked for."""

    def __init__(
        self, path: Path, *, online: str = "0-1", apic: dict[int, int] | None = None
    ) -> None:
        self.path = path
        self.url = f"hvsock://{path}:1024"
        self.online = online
        self.apic = apic or {cpu: cpu for cpu in CpuSet.parse(online)}
        self.cpus: dict[str, str] = {}
        self.said: list[tuple[str, str]] = []
        self.used_ns: dict[str, int] = {}
        self.per_cpu_ns: dict[str, list[int]] = {}
        self.times_ms: list[tuple[float, float]] = []
        self.mood = Mood.HONEST
        self.unknown: set[str] = set()
        self.requests: list[str] = []
        self._output: dict[str, list[bytes]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end: asyncio.Event | None = None
        self._double: AgentDouble | None = None
        self._thread: threading.Thread | None = None
        self._ready = threading.Event()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Serve, from here on."""
        self._ready.clear()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()
        assert self._ready.wait(10)

    def stop(self) -> None:
        """Serve no longer: the agent is gone, and every connection broken."""
        if self._thread is None or self._loop is None or self._end is None:
            return
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(10)
        self._thread = None
        self.path.unlink(missing_ok=True)

    @property
    def connected(self) -> int:
        """How many connections are open."""
        return self._double.connected if self._double else 0

    def wait_cpus(self, **cpus: str) -> None:
        """Wait until containers have these cpusets in the guest."""
        try:
            wait_for(lambda: all(self.cpus.get(n) == c for n, c in cpus.items()), f"guest {cpus}")
        except TimeoutError as error:
            error.add_note(f"the guest has {self.cpus}, was asked {self.said[-10:]}")
            raise

    async def _serve(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        async with AgentDouble(self.path) as double:
            self._double = double
            for method in ("UpdateContainer", "StatsContainer", "GetMetrics", "ExecProcess",
                           "ReadStdout", "WaitProcess", "SignalProcess"):  # fmt: skip
                double.answer(method, self._named(method))
            double.twist = self._twist
            self._ready.set()
            await self._end.wait()
        self._double = None

    async def _twist(self, writer: asyncio.StreamWriter, stream: int, frame: bytes) -> None:
        if self.mood is Mood.HANGS:
            return
        if self.mood is Mood.SLOW:
            await asyncio.sleep(SLOW_S)
        while self.mood is Mood.WAITS:
            await asyncio.sleep(0.002)
        if self.mood is Mood.FLOODS:
            head = (1 << 22).to_bytes(4, "big") + stream.to_bytes(4, "big") + b"\x02\x00"
            writer.write(head + bytes(1 << 20))
            return
        if self.mood is not Mood.FROZEN or self.requests[-1] != "ReadStdout":
            writer.write(frame)

    def _named(self, method: str) -> object:
        def answer(payload: bytes) -> Message | Response:
            self.requests.append(method)
            if self.mood is Mood.DENIES:
                return Response(
                    b"", Code.PERMISSION_DENIED, f'"{method}Request is blocked by policy"'
                )
            return getattr(self, f"_{method}")(payload)

        return answer

    def _of(self, container: str) -> str:
        return self.cpus.setdefault(container, self.online)

    def _unknown(self, container: str) -> Response | None:
        if self.mood is Mood.UNKNOWING or container in self.unknown:
            return Response(b"", Code.INVALID_ARGUMENT, f'"invalid container id {container}"')
        return None

    def _UpdateContainer(self, payload: bytes) -> Message | Response:
        asked = pb.UpdateContainerRequest.FromString(payload)
        if refusal := self._unknown(asked.container_id):
            return refusal
        cpus = asked.resources.cpu.cpus
        self.said.append((asked.container_id, cpus))
        assert asked == pb.UpdateContainerRequest(
            container_id=asked.container_id,
            resources=pb.LinuxResources(cpu=pb.LinuxCPU(cpus=cpus)),
        ), "only CPU.Cpus is sent"
        self._of(asked.container_id)
        if self.mood is not Mood.LIES:
            self.cpus[asked.container_id] = cpus
        return pb.GetMetricsRequest()  # Empty

    def _StatsContainer(self, payload: bytes) -> Message:
        name = pb.StatsContainerRequest.FromString(payload).container_id
        usage = pb.CpuUsage(
            total_usage=self.used_ns.get(name, 0), percpu_usage=self.per_cpu_ns.get(name, [])
        )
        stats = pb.CgroupStats(cpu_stats=pb.CpuStats(cpu_usage=usage))
        return pb.StatsContainerResponse(cgroup_stats=stats)

    def _GetMetrics(self, _payload: bytes) -> Message:
        times = self.times_ms or [(0.0, 0.0)] * len(CpuSet.parse(self.online))
        lines = [
            f'kata_guest_cpu_time{{cpu="{rank}",item="{item}"}} {value}'
            for rank, both in enumerate(times)
            for item, value in zip(("user", "idle"), both, strict=True)
        ]
        return pb.Metrics(metrics="\n".join(lines) + "\n")

    def _ExecProcess(self, payload: bytes) -> Message | Response:
        asked = pb.ExecProcessRequest.FromString(payload)
        if refusal := self._unknown(asked.container_id):
            return refusal
        allowed = f"Cpus_allowed_list:\t{self._of(asked.container_id)}\n"
        cpuinfo = "".join(f"processor\t: {n}\napicid\t: {a}\n\n" for n, a in self.apic.items())
        text = {"/proc/self/status": allowed, "/proc/cpuinfo": cpuinfo}[asked.process.args[1]]
        self._output[asked.exec_id] = [text.encode()]
        return pb.GetMetricsRequest()

    def _ReadStdout(self, payload: bytes) -> Message:
        pieces = self._output[pb.ReadStreamRequest.FromString(payload).exec_id]
        return pb.ReadStreamResponse(data=pieces.pop() if pieces else b"")

    def _WaitProcess(self, _payload: bytes) -> Message:
        return pb.WaitProcessResponse()

    def _SignalProcess(self, _payload: bytes) -> Message:
        return pb.GetMetricsRequest()
