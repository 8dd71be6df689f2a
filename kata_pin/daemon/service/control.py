"""The control socket: what the command line asks of the daemon.

control.sock (0600) takes every verb, status.sock (0660 and a group) only those that read. The
kernel identifies the client (SO_PEERCRED); group members are limited (readers.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from kata_pin.daemon.service.readers import MOST_CONNECTIONS, Readers
from kata_pin.errors import KataPinError
from kata_pin.sources import unix_socket
from kata_pin.sources.stream_clients import BACKLOG, Clients, send
from kata_pin.sources.unix_socket import Peer
from kata_pin.wire.control import MAX_REQUEST, LineDecoder, encode_error, encode_reply
from kata_pin.wire.request import Request, parse_request

log = logging.getLogger(__name__)

MAX_CLIENTS: Final = 32
REQUEST_S: Final = 5.0
"""Longest a client may take to send a request, and to take the reply."""
VERB_S: Final = 30.0

Verb = Callable[[Request], Awaitable[bytes]]
"""Takes a request, returns the encoded document; raises KataPinError to refuse."""


@dataclass(frozen=True)
class ControlServer:
    """Serves one socket; `gid` owns it, and its members may connect where `mode` lets them."""

    path: str
    verbs: Mapping[str, Verb]
    mode: int = 0o600
    gid: int | None = None
    _readers: Readers = field(default_factory=Readers)

    def serving(self) -> AbstractAsyncContextManager[None]:
        """Serve within the block, in place of what a dead daemon left; raises OSError."""
        full = encode_error("too many clients", "try again in a moment")
        clients = Clients("control client", MAX_CLIENTS, self._talk, limit=MAX_REQUEST, full=full)
        listener = unix_socket.listen(self.path, backlog=BACKLOG, mode=self.mode, gid=self.gid)
        return clients.served(listener, self.path)

    def _admitted(self, peer: Peer) -> bool:
        """Whether the peer may talk: root, the person who started us, or the socket's group.

        The file's mode keeps others out already; this also refuses a descriptor that was handed
        on, except for group members: the kernel does not report their groups.
        """
        if peer.trusted or self.mode & 0o060:
            return True
        log.warning("control client refused: pid %d, uid %d", peer.pid, peer.uid)
        return False

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = unix_socket.peer(writer.get_extra_info("socket"))
        if not self._admitted(peer):
            return
        if peer.trusted:
            await _converse(reader, writer, self._answer)
            return
        with self._readers.connected(peer.uid) as may_ask:
            if may_ask:
                await _converse(reader, writer, partial(self._answer_reader, peer.uid))
            else:
                full = f"user {peer.uid} has {MOST_CONNECTIONS} connections already"
                await send(writer, encode_error(full, "close one of them"), REQUEST_S)

    async def _answer_reader(self, uid: int, line: bytes) -> bytes:
        return await self._readers.answer(uid, line, partial(self._answer, line))

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


async def _converse(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    answer: Callable[[bytes], Awaitable[bytes]],
) -> None:
    """Answer one request line after the other until the client hangs up."""
    decoder = LineDecoder()
    while True:
        async with asyncio.timeout(REQUEST_S):
            data = await reader.read(MAX_REQUEST)
        if not data:
            return
        for line in decoder.feed(data):
            await send(writer, await answer(line), REQUEST_S)
