"""The kata-agent's client: what a guest says about itself, and containers' cpusets in it.

    async with AgentClient(address, connect_s=2.0, call_s=2.0) as agent:
        await agent.set_cpus(container_id, CpuSet.parse("1"))

A second client beside Kata's own: the agent serves many, one request at a time. A client is made
for a few calls and closed; an agent that restarted is a new connection. Every call raises a
GuestError (errors.py) within its deadline, whatever the guest does; after one that was not the
agent's own refusal the connection is closed, and only `connect` makes a new one.

A success of `set_cpus` proves nothing: the agent only warns in its own log when the kernel refuses
the cpuset. What can tell (docs/adr/0008-what-a-guest-reports.md):

    read_cpus        exact; runs `cat` in the container, so it needs leave, a policy that allows
                     it and a container that has one
    usage            where the guest has cgroup v1, the CPUs that the container has run on;
                     otherwise its CPU time, to be compared with its vCPU threads' run time
    metrics          busy time by rank among the guest's online CPUs (wire.guestmetrics)

Out of scope: which CPUs a container should have, and whether to believe an answer (policy).
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self, TypeVar

from kata_pin.errors import (
    AgentDenied,
    AgentFailed,
    AgentUnavailable,
    AgentUnsupported,
    GuestError,
    ParseError,
)
from kata_pin.guest.address import AgentAddress
from kata_pin.guest.connection import Connection
from kata_pin.model.cpuset import CpuSet
from kata_pin.wire.guest import agent
from kata_pin.wire.guest import cpus as guest_cpus
from kata_pin.wire.guest.agent import AGENT, HEALTH, CpuUsage

SMALL: Final = 64 * 1024
"""Longest answer of an ordinary call."""

MAX_METRICS: Final = 1 << 20
"""Longest metrics: 1,024 CPUs make 0.6 MiB."""

READ: Final = 32 * 1024
"""What one ReadStdout asks for."""

MAX_READS: Final = 4096
"""ReadStdout calls for one program: a guest could answer each with a byte."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class AgentVersion:
    """What an agent says of itself; empty where it does not say.

    `features` are those of its build: `agent-policy` says that its policy may deny requests.
    """

    grpc_version: str = ""
    agent_version: str = ""
    features: tuple[str, ...] = ()


class AgentClient:
    """One agent. `connect_s` bounds connecting, `call_s` each request; `exec` takes several."""

    def __init__(self, address: AgentAddress, *, connect_s: float, call_s: float) -> None:
        self.address = address
        self._connect_s = connect_s
        self._call_s = call_s
        self._connection: Connection | None = None

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def connect(self) -> None:
        """Connect, anew if need be; AgentUnavailable when there is nobody."""
        await self.close()
        self._connection = await Connection.open(self.address, connect_s=self._connect_s)

    async def close(self) -> None:
        """Close the connection at once. May be called again."""
        if self._connection is not None:
            connection, self._connection = self._connection, None
            await connection.close()

    # ---- what the agent is ---------------------------------------------------------------

    async def check(self) -> AgentVersion:
        """Ask whether it serves, and what it is; AgentUnavailable when it does not serve.

        Health is open to everybody; the features are not, and stay empty where they are refused.
        """
        request = agent.check_request()
        data = await self._call("Check", request, service=HEALTH)
        if not self._understood(agent.parse_serving, data):
            raise AgentUnavailable(f"agent {self.address}: it does not serve")
        versions = ("", "")
        features: tuple[str, ...] = ()
        with contextlib.suppress(AgentUnsupported):
            data = await self._call("Version", request, service=HEALTH)
            versions = self._understood(agent.parse_version, data)
        with contextlib.suppress(AgentDenied, AgentUnsupported):
            data = await self._call("GetGuestDetails", agent.details_request())
            features = self._understood(agent.parse_features, data)
        return AgentVersion(*versions, features)

    # ---- cpusets -------------------------------------------------------------------------

    async def set_cpus(self, container_id: str, cpus: CpuSet) -> None:
        """Ask for a container's cpuset, in guest CPU numbers; ValueError for an empty one.

        No other limit of the container is touched. The answer is no proof.
        """
        await self._call("UpdateContainer", agent.update_request(container_id, cpus))

    async def read_cpus(self, container_id: str) -> CpuSet:
        """Return the CPUs that a container's processes may run on, from one that is run there.

        Read in its own /proc/self/status: a program of the container starts in its cgroup. Only
        where the administrator allows programs to be started in containers.
        """
        text = await self._cat(container_id, "/proc/self/status", guest_cpus.MAX_STATUS)
        return self._understood(guest_cpus.parse_allowed, text)

    async def usage(self, container_id: str) -> CpuUsage:
        """Return the CPU time that a container has used."""
        data = await self._call("StatsContainer", agent.stats_request(container_id))
        return self._understood(agent.parse_usage, data)

    # ---- the guest's CPUs ----------------------------------------------------------------

    async def metrics(self) -> str:
        """Return the agent's metrics, in the text format of Prometheus."""
        data = await self._call("GetMetrics", agent.metrics_request(), limit=MAX_METRICS)
        return self._understood(agent.parse_metrics, data)

    async def read_apic_ids(self, container_id: str) -> Mapping[int, int]:
        """Return each online guest CPU's APIC id, from /proc/cpuinfo as a container sees it.

        A cpuset hides nothing there. Only where programs may be started in containers.
        """
        text = await self._cat(container_id, "/proc/cpuinfo", guest_cpus.MAX_CPUINFO)
        return self._understood(guest_cpus.parse_cpuinfo, text)

    # ---- programs ------------------------------------------------------------------------

    async def exec(self, container_id: str, args: tuple[str, ...], *, limit: int) -> bytes:
        """Run a program in a container, as nobody, and return what it prints.

        At most `limit` bytes; AgentFailed for more, or when its status is not 0. All of it within
        the deadline of one call; a program that is given up is killed, which may take two more.
        """
        exec_id = f"kata-pin-{secrets.token_hex(8)}"
        started = False
        try:
            async with asyncio.timeout(self._call_s):
                request = agent.exec_request(container_id, exec_id, args)
                await self._call("ExecProcess", request)
                started = True
                output = await self._output(container_id, exec_id, limit)
                status = await self._wait(container_id, exec_id)
        except TimeoutError as error:
            await self._kill(container_id, exec_id)
            late = f"{args[0]} not done within {self._call_s:g} s"
            raise AgentUnavailable(f"agent {self.address}: {late}") from error
        except GuestError as error:
            if started or isinstance(error, AgentUnavailable):  # it may have been started
                await self._kill(container_id, exec_id)
            raise
        if status != 0:
            raise AgentFailed(f"agent {self.address}: {args[0]} ended with status {status}")
        return output

    async def _output(self, container_id: str, exec_id: str, limit: int) -> bytes:
        """Return what a program prints until it closes its stdout."""
        request = agent.read_request(container_id, exec_id, READ)
        output = bytearray()
        for _ in range(MAX_READS):
            try:
                data = await self._call("ReadStdout", request)
            except AgentFailed as error:  # the end, as agents before 3.30 say it
                if "meet eof" in error.message:
                    return bytes(output)
                raise
            piece = self._understood(agent.parse_read, data)
            if not piece:
                return bytes(output)
            output += piece
            if len(output) > limit:
                raise AgentFailed(f"agent {self.address}: a program printed over {limit} bytes")
        raise AgentFailed(f"agent {self.address}: output in over {MAX_READS} pieces")

    async def _wait(self, container_id: str, exec_id: str) -> int:
        data = await self._call("WaitProcess", agent.wait_request(container_id, exec_id))
        return self._understood(agent.parse_wait, data)

    async def _kill(self, container_id: str, exec_id: str) -> None:
        """Leave no program behind, if the agent lets us; by a new connection."""
        with contextlib.suppress(GuestError):
            await self.connect()
            await self._call("SignalProcess", agent.kill_request(container_id, exec_id))
            await self._wait(container_id, exec_id)

    async def _cat(self, container_id: str, path: str, limit: int) -> bytes:
        """Return a file as a container sees it; AgentDenied where the policy hides output."""
        output = await self.exec(container_id, ("cat", path), limit=limit)
        if not output:  # a policy without ReadStreamRequest: all output reads as nothing
            raise AgentDenied(f"agent {self.address}: it shows nothing of {path}")
        return output

    # ---- calls ---------------------------------------------------------------------------

    async def _call(
        self, method: str, payload: bytes, *, service: str = AGENT, limit: int = SMALL
    ) -> bytes:
        if self._connection is None:
            raise AgentUnavailable(f"agent {self.address}: not connected")
        return await self._connection.call(
            service, method, payload, call_s=self._call_s, limit=limit
        )

    def _understood(self, parse: Callable[[bytes], T], data: bytes) -> T:
        """Return what an answer says; AgentFailed when it makes no sense."""
        try:
            return parse(data)
        except ParseError as error:
            raise AgentFailed(f"agent {self.address}: {error}") from error
