"""The kata-agent's client: containers' cpusets in the guest, and what the agent reports.

This is a second client beside Kata's own; the agent serves many, one request at a time. Every call
ends within its deadline, whatever the guest does. It raises a GuestError (errors.py), which also
closes the connection unless the agent itself refused the call; only `connect` makes a new one.

A success of `set_cpus` proves nothing: if the kernel refuses the cpuset, the agent only logs that.
The evidence there is (ADR 8):

    read_cpus        exact; runs `cat` in the container, so the settings and the agent's policy
                     must allow it, and the container must have the program
    usage            with cgroup v1 in the guest, the CPUs that the container has run on; else its
                     CPU time, to be compared with the run time of its vCPU threads
    metrics          busy time by rank among the guest's online CPUs (wire/guest/metrics.py)
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Self, TypeVar

from kata_pin.calls import DIRECT, Calls
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

SMALL: Final = 64 * 1024  # longest answer of an ordinary call
MAX_METRICS: Final = 1 << 20  # longest metrics: 1,024 CPUs have 0.6 MiB
READ: Final = 32 * 1024  # bytes that one ReadStdout asks for

MAX_READS: Final = 4096
"""Most ReadStdout calls per program: a guest could answer each with one byte."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class AgentVersion:
    """An agent's versions and build features, empty where it does not report them.

    With the feature `agent-policy`, a policy in the guest may deny requests.
    """

    grpc_version: str = ""
    agent_version: str = ""
    features: tuple[str, ...] = ()


@dataclass
class AgentClient:
    """Calls one agent. `connect_s` bounds connecting, `call_s` each call.

    `slowest_s` is what the slowest answer so far took.
    """

    address: AgentAddress
    connect_s: float
    call_s: float
    calls: Calls = DIRECT
    slowest_s: float = field(default=0.0, init=False)
    _connection: Connection | None = field(default=None, init=False)

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def connect(self) -> None:
        """Connect, or connect again; raises AgentUnavailable."""
        await self.close()
        self._connection = await Connection.open(
            self.address, connect_s=self.connect_s, calls=self.calls
        )

    async def close(self) -> None:
        """Close the connection at once; may be called again."""
        if self._connection is not None:
            connection, self._connection = self._connection, None
            await connection.close()

    async def check(self) -> AgentVersion:
        """Return the agent's versions and features; AgentUnavailable if it does not serve.

        A policy may deny the features, which are empty then.
        """
        if not await self._ask("Check", agent.parse_serving, service=HEALTH):
            raise AgentUnavailable(f"agent {self.address}: reports that it does not serve")
        versions = ("", "")
        features: tuple[str, ...] = ()
        with contextlib.suppress(AgentUnsupported):
            versions = await self._ask("Version", agent.parse_version, service=HEALTH)
        with contextlib.suppress(AgentDenied, AgentUnsupported):
            features = await self._ask("GetGuestDetails", agent.parse_features)
        return AgentVersion(*versions, features)

    async def set_cpus(self, container_id: str, cpus: CpuSet) -> None:
        """Set a container's cpuset, in guest CPU numbers; ValueError for an empty one.

        No other limit of the container changes. A success is no proof.
        """
        await self._ask("UpdateContainer", bytes, agent.update_request(container_id, cpus))

    async def read_cpus(self, container_id: str) -> CpuSet:
        """Return the CPUs that a container's processes may use, by running a program there.

        The program starts in the container's cgroup and prints /proc/self/status. Only where the
        administrator allows programs to be started in containers.
        """
        text = await self._cat(container_id, "/proc/self/status", guest_cpus.MAX_STATUS)
        return self._parsed(guest_cpus.parse_allowed, text)

    async def usage(self, container_id: str) -> CpuUsage:
        """Return the CPU time that a container has used."""
        request = agent.stats_request(container_id)
        return await self._ask("StatsContainer", agent.parse_usage, request)

    async def metrics(self) -> str:
        """Return the agent's metrics in Prometheus text format."""
        return await self._ask("GetMetrics", agent.parse_metrics, limit=MAX_METRICS)

    async def read_apic_ids(self, container_id: str) -> Mapping[int, int]:
        """Return each online guest CPU's APIC id, from /proc/cpuinfo in a container.

        A cpuset hides no CPU there. Only where programs may be started in containers.
        """
        text = await self._cat(container_id, "/proc/cpuinfo", guest_cpus.MAX_CPUINFO)
        return self._parsed(guest_cpus.parse_cpuinfo, text)

    async def exec(self, container_id: str, args: tuple[str, ...], *, limit: int) -> bytes:
        """Run a program in a container as user nobody, and return its output.

        AgentFailed for more than `limit` bytes, or a status other than 0. All of it has the
        deadline of one call; after that the program is killed, which may take two more.
        """
        exec_id = f"kata-pin-{os.urandom(8).hex()}"
        started = False
        try:
            async with asyncio.timeout(self.call_s):
                request = agent.exec_request(container_id, exec_id, args)
                await self._ask("ExecProcess", bytes, request)
                started = True
                output = await self._output(container_id, exec_id, limit)
                status = await self._wait(container_id, exec_id)
        except TimeoutError as error:
            await self._kill(container_id, exec_id)
            late = f"{args[0]} did not end within {self.call_s:g} s"
            raise AgentUnavailable(f"agent {self.address}: {late}") from error
        except GuestError as error:
            if started or isinstance(error, AgentUnavailable):  # it may have been started
                await self._kill(container_id, exec_id)
            raise
        if status != 0:
            raise AgentFailed(f"agent {self.address}: {args[0]} ended with status {status}")
        return output

    async def _output(self, container_id: str, exec_id: str, limit: int) -> bytes:
        """Return a program's output until it closes its stdout."""
        request = agent.read_request(container_id, exec_id, READ)
        output = bytearray()
        for _ in range(MAX_READS):
            try:
                piece = await self._ask("ReadStdout", agent.parse_read, request)
            except AgentFailed as error:  # how agents before 3.30 report the end
                if "meet eof" in error.message:
                    return bytes(output)
                raise
            if not piece:
                return bytes(output)
            output += piece
            if len(output) > limit:
                raise AgentFailed(f"agent {self.address}: a program printed over {limit} bytes")
        raise AgentFailed(f"agent {self.address}: output in over {MAX_READS} pieces")

    async def _wait(self, container_id: str, exec_id: str) -> int:
        request = agent.wait_request(container_id, exec_id)
        return await self._ask("WaitProcess", agent.parse_wait, request)

    async def _kill(self, container_id: str, exec_id: str) -> None:
        """Kill a program through a new connection, if the agent allows it."""
        with contextlib.suppress(GuestError):
            await self.connect()
            await self._ask("SignalProcess", bytes, agent.kill_request(container_id, exec_id))
            await self._wait(container_id, exec_id)

    async def _cat(self, container_id: str, path: str, limit: int) -> bytes:
        """Return a file as a container sees it; AgentDenied where the policy hides output."""
        output = await self.exec(container_id, ("cat", path), limit=limit)
        if not output:  # a policy without ReadStreamRequest hides all output
            raise AgentDenied(f"agent {self.address}: no output of cat {path}")
        return output

    async def _ask(
        self,
        method: str,
        parse: Callable[[bytes], T],
        payload: bytes = agent.NO_ARGUMENTS,
        *,
        service: str = AGENT,
        limit: int = SMALL,
    ) -> T:
        if self._connection is None:
            raise AgentUnavailable(f"agent {self.address}: not connected")
        asked = time.monotonic()
        data = await self._connection.call(
            service, method, payload, call_s=self.call_s, limit=limit
        )
        self.slowest_s = max(self.slowest_s, time.monotonic() - asked)
        return self._parsed(parse, data)

    def _parsed(self, parse: Callable[[bytes], T], data: bytes) -> T:
        """Return an answer as `parse` reads it; AgentFailed if it cannot be read."""
        try:
            return parse(data)
        except ParseError as error:
            raise AgentFailed(f"agent {self.address}: {error}") from error
