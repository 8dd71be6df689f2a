"""The kata-agent's client, over vsock or hybrid vsock."""

from __future__ import annotations

import asyncio
import contextlib
import os
import os.path
import re
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Self, TypeVar

from msgspec import Struct

from kata_pin.base.cpuset import CpuSet
from kata_pin.base.errors import (
    AgentDenied,
    AgentFailed,
    AgentUnavailable,
    AgentUnsupported,
    GuestError,
    ParseError,
    reason_of,
)
from kata_pin.base.json_text import printable
from kata_pin.peers import ttrpc
from kata_pin.peers.agent import messages
from kata_pin.peers.agent.messages import SERVICE, CpuUsage
from kata_pin.peers.ttrpc import Code, FrameDecoder, Response, TtrpcRequest
from kata_pin.rights.calls import DIRECT, Calls

# The address of a guest's agent: vsock, or a VMM's unix socket that leads to vsock.
#
# > vsock://<cid>:1024      QEMU; cid is the guest-cid of its vhost-vsock device
# > hvsock://<path>:1024    Cloud Hypervisor, Firecracker, Dragonball: connect, send CONNECT 1024
#
# These are the forms of Kata's agent URL (persist.json AgentState.URL, the shim's /agent-url);
# runtime-rs omits the port. The daemon finds the address: the cid on QEMU's command line, else
# Kata's state.

AGENT_PORT: Final = 1024  # the port of Kata's agent (DEFAULT_AGENT_VSOCK_PORT)
FIRST_GUEST_CID: Final = 3  # 0 is the hypervisor, 1 the local machine, 2 the host (vsock(7))
LAST_GUEST_CID: Final = 0xFFFFFFFE
MAX_PATH: Final = 107  # longest path of a unix socket (unix(7)), without the final zero

_URL: Final = re.compile(r"(h?vsock)://(.+?)(?::([0-9]{1,10}))?\Z")
_NUMBER: Final = re.compile(r"[0-9]{1,10}\Z")


class VsockAddress(Struct, frozen=True):
    """A guest's cid and port; ValueError for a cid that no guest can have."""

    cid: int
    port: int = AGENT_PORT

    def __post_init__(self) -> None:
        if not FIRST_GUEST_CID <= self.cid <= LAST_GUEST_CID:
            raise ValueError(f"no guest has cid {self.cid}")

    def __str__(self) -> str:
        return f"vsock://{self.cid}:{self.port}"


class HybridVsockAddress(Struct, frozen=True):
    """A VMM's unix socket, and the guest's port behind it; ValueError for an invalid path."""

    path: str
    port: int = AGENT_PORT

    def __post_init__(self) -> None:
        if not self.path.startswith("/") or os.path.normpath(self.path) != self.path:
            raise ValueError(f"not an absolute, normalized path: {self.path!r}")
        if len(os.fsencode(self.path)) > MAX_PATH or "\0" in self.path:
            raise ValueError("too long or invalid for the path of a unix socket")

    def __str__(self) -> str:
        return f"hvsock://{self.path}:{self.port}"


AgentAddress = VsockAddress | HybridVsockAddress


def parse_address(url: str) -> AgentAddress:
    """Read an agent URL; ParseError if it is invalid, or names the host instead of a guest."""
    match = _URL.match(url[:4096])
    if match is None:
        raise ParseError("not vsock:// or hvsock://", source="agent URL", text=url)
    scheme, where, port_text = match.groups()
    port = int(port_text) if port_text else AGENT_PORT
    if not 0 < port < 0xFFFFFFFF:
        raise ParseError("invalid port", source="agent URL", text=url)
    try:
        if scheme == "hvsock":
            return HybridVsockAddress(where, port)
        if _NUMBER.match(where):
            return VsockAddress(int(where), port)
    except ValueError as error:
        raise ParseError(str(error), source="agent URL", text=url) from error
    raise ParseError("invalid cid", source="agent URL", text=url)


# One ttrpc connection to a guest's agent: connect, call, close.
#
# Every received byte is hostile. There is one call at a time, and the only frame that may arrive is
# its answer, no longer than `limit`. Anything else (another stream's frame, a longer one, garbage,
# the end) and a passed deadline end the connection, so a late answer cannot be taken for the next
# one. A guest can make this allocate `limit` and one read, and wait until the deadline.
#
# Facts are in vsock(7); hybrid vsock, "Using the Firecracker Virtio-vsock Device" of its
# repository.

READ: Final = 64 * 1024
MAX_GREETING: Final = 32  # longest answer to CONNECT: `OK <port>` and a newline
ENVELOPE: Final = 64  # more bytes than the ttrpc answer adds to its payload

_LAST_STREAM: Final = 0x7FFFFFFF


@dataclass
class Connection:
    """A connection that is open until a call fails or `close` is called."""

    address: AgentAddress
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    _stream: int = field(default=-1, init=False)
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    @classmethod
    async def open(
        cls, address: AgentAddress, *, connect_s: float, calls: Calls = DIRECT
    ) -> Connection:
        """Connect within `connect_s` seconds; raises AgentUnavailable."""
        sock = _socket(address, calls)
        try:
            async with asyncio.timeout(connect_s):
                await _connect(sock, address)
            # Not under the deadline: from here on the transport owns the socket.
            reader, writer = await asyncio.open_connection(sock=sock, limit=READ)
        except (OSError, EOFError, ParseError) as error:  # TimeoutError is an OSError
            sock.close()
            reason = _reason(error, f"no connection within {connect_s:g} s")
            raise AgentUnavailable(f"agent {address}: {reason}") from error
        except BaseException:
            sock.close()
            raise
        return cls(address, reader, writer)

    @property
    def closed(self) -> bool:
        """Whether no more calls can be made."""
        return self.writer.is_closing()

    async def close(self) -> None:
        """Close at once, without sending what is queued; may be called again."""
        self._abort()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()

    async def call(self, method: str, payload: bytes, *, call_s: float, limit: int) -> bytes:
        """Make one call and return the payload of its answer, at most `limit` bytes.

        Raises a GuestError, which closes the connection unless the agent itself refused.
        """
        async with self._turn:
            if self.closed:
                raise AgentUnavailable(f"agent {self.address}: the connection is closed")
            try:
                async with asyncio.timeout(call_s):
                    response = await self._exchange(method, payload, call_s, limit)
            except (OSError, EOFError) as error:
                self._abort()
                reason = _reason(error, f"no answer within {call_s:g} s")
                raise AgentUnavailable(f"agent {self.address}: {method}: {reason}") from error
            except ParseError as error:
                self._abort()
                raise AgentFailed(f"agent {self.address}: {method}: {error}") from error
            except BaseException:
                self._abort()
                raise
        if response.code != Code.OK:
            raise _refusal(self.address, method, response)
        return response.payload

    def _abort(self) -> None:
        self.writer.transport.abort()

    async def _exchange(self, method: str, payload: bytes, call_s: float, limit: int) -> Response:
        self._stream += 2  # a client's are odd: 1, 3, 5...
        if self._stream > _LAST_STREAM:
            raise EOFError("out of streams")
        request = TtrpcRequest(SERVICE, method, payload, timeout_ns=int(call_s * 1e9))
        self.writer.write(ttrpc.encode_request(self._stream, request))
        await self.writer.drain()
        decoder = FrameDecoder(limit + ENVELOPE)
        while True:
            data = await self.reader.read(READ)
            if not data:
                raise EOFError("the agent closed the connection")
            for frame in decoder.feed(data):
                if frame.kind != ttrpc.RESPONSE or frame.stream != self._stream:
                    raise ParseError("an answer to no call of ours", source="ttrpc")
                if frame.data is None:
                    raise ParseError(f"answer longer than {limit} bytes", source="ttrpc")
                return ttrpc.parse_response(frame.data)


def _socket(address: AgentAddress, calls: Calls) -> socket.socket:
    """Return a socket, connected already to a path: that may need rights."""
    try:
        if isinstance(address, VsockAddress):
            kind = socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
            return socket.socket(socket.AF_VSOCK, kind)
        return calls.connect(address.path)
    except OSError as error:  # also: the host has no vsock
        raise AgentUnavailable(f"agent {address}: {_reason(error, '')}") from error


async def _connect(sock: socket.socket, address: AgentAddress) -> None:
    loop = asyncio.get_running_loop()
    if isinstance(address, VsockAddress):
        await loop.sock_connect(sock, (address.cid, address.port))
    else:
        await _pass_through(sock, address.port)


async def _pass_through(sock: socket.socket, port: int) -> None:
    """Have the VMM connect its unix socket to a port of the guest.

    Its answer is read byte by byte, because the agent's bytes follow it.
    """
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(sock, f"CONNECT {port}\n".encode())
    answer = b""
    while not answer.endswith(b"\n"):
        byte = await loop.sock_recv(sock, 1)
        if not byte:
            raise EOFError("the VMM closed the connection: no agent listens in the guest")
        answer += byte
        if len(answer) > MAX_GREETING:
            break
    if not answer.startswith(b"OK ") or len(answer) > MAX_GREETING:
        raise ParseError("not OK", source="CONNECT", text=printable(answer.decode("latin-1")))


def _refusal(address: AgentAddress, method: str, response: Response) -> GuestError:
    """Return the error for an answer that is not OK, by its code, or by its text for old agents.

    Rust's ttrpc reports a missing method or service under various codes.
    """
    text = response.message
    shown = f"agent {address}: {method}: {printable(text) or f'code {response.code}'}"
    unknown = ("is not supported", "service does not exist", f"{method} does not exist")
    if response.code == Code.PERMISSION_DENIED or "is blocked by policy" in text:
        return AgentDenied(shown)
    if response.code == Code.UNIMPLEMENTED or text.endswith(unknown):
        return AgentUnsupported(shown)
    if response.code == Code.DEADLINE_EXCEEDED:
        return AgentUnavailable(shown)
    return AgentFailed(shown)


def _reason(error: Exception, late: str) -> str:
    """Return what went wrong in a few words; `late` for our own deadline, which has no errno."""
    if isinstance(error, TimeoutError) and error.errno is None:
        return late
    return reason_of(error)


# This is a second client beside Kata's own; the agent serves many, one request at a time. Every
# call ends within its deadline, whatever the guest does. It raises a GuestError (base/errors.py),
# which also closes the connection unless the agent itself refused the call; only `connect` makes a
# new one.
#
# A success of `set_cpus` proves nothing: if the kernel refuses the cpuset, the agent only logs
# that. The evidence there is (ADR 8):
#
# > read_cpus        exact; runs `cat` in the container, so the settings and the agent's policy
# > must allow it, and the container must have the program
# > usage            with cgroup v1 in the guest, the CPUs that the container has run on; else its
# > CPU time, to be compared with the run time of its vCPU threads
# > metrics          busy time by rank among the guest's online CPUs (peers/agent/messages.py)

SMALL: Final = 64 * 1024  # longest answer of an ordinary call
MAX_METRICS: Final = 1 << 20  # longest metrics: 1,024 CPUs have 0.6 MiB
READ_STDOUT: Final = 32 * 1024  # bytes that one ReadStdout asks for

MAX_READS: Final = 4096
"""Most ReadStdout calls per program: a guest could answer each with one byte."""

T = TypeVar("T")


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

    async def set_cpus(self, container_id: str, cpus: CpuSet) -> None:
        """Set a container's cpuset, in guest CPU numbers; ValueError for an empty one.

        No other limit of the container changes. A success is no proof.
        """
        await self._ask("UpdateContainer", bytes, messages.update_request(container_id, cpus))

    async def read_cpus(self, container_id: str) -> CpuSet:
        """Return the CPUs that a container's processes may use, by running a program there.

        The program starts in the container's cgroup and prints /proc/self/status. Only where the
        administrator allows programs to be started in containers.
        """
        text = await self._cat(container_id, "/proc/self/status", messages.MAX_STATUS)
        return self._parsed(messages.parse_allowed, text)

    async def usage(self, container_id: str) -> CpuUsage:
        """Return the CPU time that a container has used."""
        request = messages.stats_request(container_id)
        return await self._ask("StatsContainer", messages.parse_usage, request)

    async def metrics(self) -> str:
        """Return the agent's metrics in Prometheus text format."""
        return await self._ask("GetMetrics", messages.parse_metrics, limit=MAX_METRICS)

    async def read_apic_ids(self, container_id: str) -> Mapping[int, int]:
        """Return each online guest CPU's APIC id, from /proc/cpuinfo in a container.

        A cpuset hides no CPU there. Only where programs may be started in containers.
        """
        text = await self._cat(container_id, "/proc/cpuinfo", messages.MAX_CPUINFO)
        return self._parsed(messages.parse_cpuinfo, text)

    async def exec(self, container_id: str, args: tuple[str, ...], *, limit: int) -> bytes:
        """Run a program in a container as user nobody, and return its output.

        AgentFailed for more than `limit` bytes, or a status other than 0. All of it has the
        deadline of one call; after that the program is killed, which may take two more.
        """
        exec_id = f"kata-pin-{os.urandom(8).hex()}"
        started = False
        try:
            async with asyncio.timeout(self.call_s):
                request = messages.exec_request(container_id, exec_id, args)
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
        request = messages.read_request(container_id, exec_id, READ_STDOUT)
        output = bytearray()
        for _ in range(MAX_READS):
            try:
                piece = await self._ask("ReadStdout", messages.parse_read, request)
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
        request = messages.wait_request(container_id, exec_id)
        return await self._ask("WaitProcess", messages.parse_wait, request)

    async def _kill(self, container_id: str, exec_id: str) -> None:
        """Kill a program through a new connection, if the agent allows it."""
        with contextlib.suppress(GuestError):
            await self.connect()
            await self._ask("SignalProcess", bytes, messages.kill_request(container_id, exec_id))
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
        payload: bytes = b"",
        *,
        limit: int = SMALL,
    ) -> T:
        if self._connection is None:
            raise AgentUnavailable(f"agent {self.address}: not connected")
        asked = time.monotonic()
        data = await self._connection.call(method, payload, call_s=self.call_s, limit=limit)
        self.slowest_s = max(self.slowest_s, time.monotonic() - asked)
        return self._parsed(parse, data)

    def _parsed(self, parse: Callable[[bytes], T], data: bytes) -> T:
        """Return an answer as `parse` reads it; AgentFailed if it cannot be read."""
        try:
            return parse(data)
        except ParseError as error:
            raise AgentFailed(f"agent {self.address}: {error}") from error
