"""A bounded number of clients of a listening socket, none of which can harm another.

clients = Clients("control client", 32, talk, limit=4096)
async with clients.served(unix_socket.listen(path, backlog=64), path):
    ...
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

from kata_pin.errors import RemoteProtocolError, reason_of

log = logging.getLogger(__name__)

BACKLOG: Final = 64
PIECE: Final = 64 * 1024
"""Bytes that are sent at once."""

TAKE_S: Final = 10.0
"""Longest that a client may take to receive what was sent."""

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Clients:
    """Serves with `talk`; a client that stalls, floods or sends garbage is dropped.

    `name` is what log lines call one. Beyond `most` at once a client gets `full` and is hung up on.
    `limit` bounds what is read ahead, in bytes.
    """

    name: str
    most: int
    talk: Talk
    limit: int
    full: bytes = b""
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @contextlib.asynccontextmanager
    async def served(self, listener: socket.socket, path: str = "") -> AsyncIterator[None]:
        """Serve within the block; at its end drop the clients, close the socket, remove `path`."""
        try:
            server = await asyncio.start_server(
                self._client, sock=listener, backlog=BACKLOG, limit=self.limit, start_serving=False
            )
            try:
                await server.start_serving()
                yield
            finally:
                server.close()
                for task in self._tasks:
                    task.cancel()
                await asyncio.gather(*self._tasks, return_exceptions=True)
        finally:
            listener.close()
            if path:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            if len(self._tasks) > self.most:
                writer.write(self.full)
            else:
                await self.talk(reader, writer)
            writer.close()
            async with asyncio.timeout(TAKE_S):
                await writer.wait_closed()
        except (RemoteProtocolError, ConnectionError, TimeoutError, EOFError) as error:
            log.debug(
                "%s dropped: %s",
                self.name,
                "too slow" if isinstance(error, TimeoutError) else reason_of(error),
            )
        except Exception as error:  # the fault barrier of one client
            log.error("%s failed: %s", self.name, reason_of(error))
            log.debug("%s failed", self.name, exc_info=True)
        finally:
            writer.transport.abort()  # unsent bytes are dropped
            self._tasks.discard(task)


async def send(writer: asyncio.StreamWriter, data: bytes, within_s: float) -> None:
    """Send bytes; raises TimeoutError if the client does not take them in time, ConnectionError.

    Piece by piece: for a long text the transport would make a copy per client, and hold up the loop
    while the kernel takes it.
    """
    whole = memoryview(data)
    async with asyncio.timeout(within_s):
        for start in range(0, len(whole), PIECE):
            writer.write(whole[start : start + PIECE])
            await writer.drain()
            await asyncio.sleep(0)
