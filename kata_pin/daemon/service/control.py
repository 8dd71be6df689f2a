"""The control socket: what the command line asks of the daemon.

Two sockets with one server each: control.sock (0600) takes every verb, status.sock (0660 and a
group) only those that read. The kernel identifies the client (SO_PEERCRED). Requests are bounded
lines; a client that stalls, floods or sends garbage is dropped and disturbs no other.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from kata_pin.errors import KataPinError, RemoteProtocolError
from kata_pin.sources import unix_socket
from kata_pin.wire.control import (
    MAX_REQUEST,
    LineDecoder,
    encode_error,
    encode_reply,
)
from kata_pin.wire.request import Request, parse_request

log = logging.getLogger(__name__)

BACKLOG: Final = 64
MAX_CLIENTS: Final = 32
REQUEST_S: Final = 5.0
"""Longest a client may take to send a request, and to take the reply."""
VERB_S: Final = 30.0

Verb = Callable[[Request], Awaitable[bytes]]
"""Takes a request, returns the encoded document; raises KataPinError to refuse."""


class ControlServer:
    """Serves one socket until closed."""

    def __init__(
        self, path: str, verbs: Mapping[str, Verb], *, mode: int = 0o600, gid: int | None = None
    ) -> None:
        """`gid` owns the socket; its members may connect where `mode` lets them."""
        self._path = path
        self.verbs = verbs
        self._mode = mode
        self._gid = gid
        self._clients = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen on the path, in place of what a dead daemon left; raises OSError."""
        listener = unix_socket.listen(self._path, backlog=BACKLOG, mode=self._mode, gid=self._gid)
        try:
            self._server = await asyncio.start_unix_server(
                self._client, sock=listener, backlog=BACKLOG, limit=MAX_REQUEST
            )
        except OSError:
            listener.close()
            raise

    async def close(self) -> None:
        """Stop listening, drop the clients, remove the socket."""
        if self._server is None:
            return
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._server = None
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._clients += 1
        try:
            if self._clients > MAX_CLIENTS:
                await _send(writer, encode_error("too many clients", "try again in a moment"))
            elif self._admitted(writer):
                await self._talk(reader, writer)
        except (RemoteProtocolError, ConnectionError, TimeoutError) as error:
            log.debug("control client dropped: %s", str(error) or "too slow")
            writer.transport.abort()  # unsent bytes are dropped
        except Exception as error:  # the fault barrier of one client
            log.error("control client failed: %s", error)
            log.debug("control client failed", exc_info=True)
        finally:
            self._clients -= 1
            self._tasks.discard(task)
            writer.close()

    def _admitted(self, writer: asyncio.StreamWriter) -> bool:
        """Whether the peer may talk: root and the daemon's own user, or the socket's group.

        The file's mode keeps others out already; this also refuses a descriptor that was handed
        on, except for group members: the kernel does not report their groups.
        """
        peer = unix_socket.peer(writer.get_extra_info("socket"))
        if peer.trusted or self._mode & 0o060:
            return True
        log.warning("control client refused: pid %d, uid %d", peer.pid, peer.uid)
        return False

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        decoder = LineDecoder()
        while True:
            async with asyncio.timeout(REQUEST_S):
                data = await reader.read(MAX_REQUEST)
            if not data:
                return
            for line in decoder.feed(data):
                await _send(writer, await self._answer(line))

    async def _answer(self, line: bytes) -> bytes:
        request = parse_request(line)
        verb = self.verbs.get(request.verb)
        if verb is None:
            known = ", ".join(sorted(self.verbs))
            return encode_error(f"unknown verb {request.verb!r}", f"this socket knows {known}")
        try:
            async with asyncio.timeout(VERB_S):
                return encode_reply(await verb(request))
        except KataPinError as error:
            return encode_error(error.message, error.hint)
        except TimeoutError:
            return encode_error(f"{request.verb} took longer than {VERB_S:.0f} s")


async def _send(writer: asyncio.StreamWriter, line: bytes) -> None:
    writer.write(line)
    async with asyncio.timeout(REQUEST_S):
        await writer.drain()
