"""One ttrpc connection to a guest's agent: connect, call, close.

Every received byte is hostile. There is one call at a time, and the only frame that may arrive is
its answer, no longer than `limit`. Anything else (another stream's frame, a longer one, garbage,
the end) and a passed deadline end the connection, so a late answer cannot be taken for the next
one. A guest can make this allocate `limit` and one read, and wait until the deadline.

Facts: vsock(7); hybrid vsock, "Using the Firecracker Virtio-vsock Device" of its repository.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from dataclasses import dataclass, field
from typing import Final

from kata_pin.calls import DIRECT, Calls
from kata_pin.errors import (
    AgentDenied,
    AgentFailed,
    AgentUnavailable,
    AgentUnsupported,
    GuestError,
    ParseError,
    reason_of,
)
from kata_pin.guest.address import AgentAddress, VsockAddress
from kata_pin.wire import ttrpc
from kata_pin.wire.ids import printable
from kata_pin.wire.ttrpc import Code, FrameDecoder, Request, Response

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

    async def call(
        self, service: str, method: str, payload: bytes, *, call_s: float, limit: int
    ) -> bytes:
        """Make one call and return the payload of its answer, at most `limit` bytes.

        Raises a GuestError, which closes the connection unless the agent itself refused.
        """
        async with self._turn:
            if self.closed:
                raise AgentUnavailable(f"agent {self.address}: the connection is closed")
            try:
                async with asyncio.timeout(call_s):
                    response = await self._exchange(service, method, payload, call_s, limit)
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

    async def _exchange(
        self, service: str, method: str, payload: bytes, call_s: float, limit: int
    ) -> Response:
        self._stream += 2  # a client's are odd: 1, 3, 5...
        if self._stream > _LAST_STREAM:
            raise EOFError("out of streams")
        request = Request(service, method, payload, timeout_ns=int(call_s * 1e9))
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
