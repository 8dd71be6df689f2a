"""The socket on which OCI hooks hand over their messages (D3).

Each hook is one connection: one request, one or two answer lines (wire/hook_message.py). The
handler gets a HookConnection once the whole request has arrived. A connection that sends garbage,
half a request or nothing is closed after its deadline and disturbs no other; those beyond the bound
wait in the socket's backlog, where the hook's own budget ends the wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from kata_pin.errors import RemoteProtocolError, reason_of
from kata_pin.sources import unix_socket
from kata_pin.wire import hook_message
from kata_pin.wire.hook_message import HookDecoder, HookMessage

log = logging.getLogger(__name__)

BACKLOG = 512  # hooks at once before connect(2) fails with EAGAIN; the kernel clips to somaxconn
MAX_CONNECTIONS = 256
REQUEST_S = 1.0  # from accept to the last byte of the request
ACCEPT_RETRY_S = 0.1
HANDLER_S = 10.0  # far beyond every budget of a hook


@dataclass
class HookConnection:
    """A hook that has handed over `message` and waits for the answer.

    `gone` is set once the hook has disconnected: answered, out of budget or killed. Later answers
    are dropped; the hook has spooled the message, or soon will.
    """

    message: HookMessage
    transport: asyncio.WriteTransport
    gone: asyncio.Event

    async def recorded(self) -> None:
        """Answer that the registry has committed the message."""
        self._send(hook_message.RECORDED, last=not self.message.phase.waits_for_pins)

    async def pinned(self) -> None:
        """Answer, after `recorded`, that the pins are applied, or that the container needs none.

        Dropped where the hook does not wait for it: `recorded` was the last line then.
        """
        self._send(hook_message.PINNED, last=True)

    async def unpinned(self, reason: str) -> None:
        """Answer that the pins are not applied; in strict mode the hook fails the container."""
        self._send(hook_message.unpinned(reason), last=True)

    async def refused(self, reason: str) -> None:
        """Answer, instead of `recorded`, that the message is invalid and must not be spooled."""
        self._send(hook_message.refused(reason), last=True)

    def _send(self, line: bytes, *, last: bool) -> None:
        if not self.transport.is_closing():
            self.transport.write(line)
            if last:
                self.transport.close()


Handler = Callable[[HookConnection], Awaitable[None]]


class HookServer:
    """Takes the hooks' connections and gives each message to `handler`.

    From `bind` on hooks can connect, if only into the backlog; `serve` answers them.

    `path` is the socket's. At most `connections` are served at once. Each has `request_s` to send
    its request; then `handler` has `handler_s` before it is cancelled.
    """

    def __init__(
        self,
        path: str,
        handler: Handler,
        *,
        connections: int = MAX_CONNECTIONS,
        request_s: float = REQUEST_S,
        handler_s: float = HANDLER_S,
    ) -> None:
        self._path = path
        self._handler = handler
        self._slots = asyncio.Semaphore(connections)
        self._request_s = request_s
        self._handler_s = handler_s
        self._listener: socket.socket | None = None
        self._inode = 0

    def bind(self) -> None:
        """Listen on the path, replacing a socket that a dead daemon left there. Raises OSError.

        The caller makes sure that no other daemon runs.
        """
        self._listener = unix_socket.listen(self._path, backlog=BACKLOG)
        self._inode = os.stat(self._path).st_ino

    async def serve(self) -> None:
        """Serve hooks until cancelled; needs `bind` before."""
        if self._listener is None:
            raise RuntimeError("serve() needs bind() first")
        try:
            async with asyncio.TaskGroup() as connections:
                while True:
                    await self._slots.acquire()
                    peer = await _accept(self._listener)
                    connections.create_task(self._serve_one(peer))
        finally:
            self.close()

    def close(self) -> None:
        """Stop listening and remove the socket, unless another daemon has replaced it."""
        if self._listener is None:
            return
        self._listener.close()
        self._listener = None
        with contextlib.suppress(FileNotFoundError):
            if os.stat(self._path).st_ino == self._inode:
                os.unlink(self._path)

    async def _serve_one(self, peer: socket.socket) -> None:
        """Serve one connection; the fault barrier between it and all others."""
        receiver = _Receiver()
        try:
            unix_socket.require_trusted(peer)
            await asyncio.get_running_loop().connect_accepted_socket(lambda: receiver, peer)
            async with asyncio.timeout(self._request_s):
                message = await receiver.message
            async with asyncio.timeout(self._handler_s):
                await self._handler(receiver.connection(message))
        except TimeoutError:
            log.warning("hook connection dropped: deadline passed")
        except (RemoteProtocolError, ConnectionError, PermissionError) as error:
            log.warning("hook connection dropped: %s", reason_of(error))
        except Exception as error:  # the fault barrier of one hook: it spools
            log.error("hook not answered, its message is spooled: %s", reason_of(error))
            log.debug("hook not answered", exc_info=True)
        finally:
            receiver.close(peer)
            self._slots.release()


class _Receiver(asyncio.Protocol):
    """Collects one request; `message` is its future, `gone` set when the connection ends."""

    def __init__(self) -> None:
        self.message: asyncio.Future[HookMessage] = asyncio.get_running_loop().create_future()
        self.gone = asyncio.Event()
        self._decoder = HookDecoder()
        self._transport: asyncio.Transport | None = None

    def connection(self, message: HookMessage) -> HookConnection:
        assert self._transport is not None, "a message came over a transport"
        return HookConnection(message, self._transport, self.gone)

    def close(self, peer: socket.socket) -> None:
        """Close the connection; `peer` is the transport's own once there is one."""
        (self._transport or peer).close()
        self.message.cancel()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport), "a stream socket has a Transport"
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            message = self._decoder.feed(data)
        except RemoteProtocolError as error:
            self._fail(error)
            return
        if message is not None and not self.message.done():
            self.message.set_result(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self.gone.set()
        self._fail(ConnectionResetError("the hook disconnected before its request was complete"))

    def _fail(self, error: Exception) -> None:
        if not self.message.done():
            self.message.set_exception(error)


async def _accept(listener: socket.socket) -> socket.socket:
    """Return the next connection; unlike loop.sock_accept, a cancellation loses none."""
    loop, level = asyncio.get_running_loop(), logging.WARNING
    while True:
        try:
            return listener.accept()[0]
        except BlockingIOError:
            ready = asyncio.Event()
            loop.add_reader(listener, ready.set)
            try:
                await ready.wait()
            finally:
                loop.remove_reader(listener)
        except OSError as error:  # out of descriptors or memory: hooks wait in the backlog
            log.log(level, "cannot accept a hook connection: %s; retrying", error.strerror)
            level = logging.DEBUG
            await asyncio.sleep(ACCEPT_RETRY_S)
