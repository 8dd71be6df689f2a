"""Unix sockets: listening without a gap, and who is on the other end.

A listening socket serves a bounded number of clients, none of which can harm another.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from kata_pin.base.errors import RemoteProtocolError, reason_of
from kata_pin.linux.owned_files import OUR_UID, set_aside

log = logging.getLogger(__name__)

_UCRED: Final = struct.Struct("3i")  # struct ucred: pid, uid, gid


class Peer(NamedTuple):
    """The process on the other end, as it was when it connected."""

    pid: int
    uid: int

    @property
    def trusted(self) -> bool:
        """Whether it runs as root or as the person that started this program.

        rights/broker/files.py has it.
        """
        return self.uid in {0, OUR_UID}


def listen(path: str, *, backlog: int, mode: int = 0o600, gid: int | None = None) -> socket.socket:
    """Return a socket that listens on the path, replacing what a dead process left there.

    It appears under its path only once it has its mode and listens, so no client is turned away.
    The caller makes sure that no living process serves the path. Raises OSError.
    """
    fresh = f"{path}.new"
    for name in (fresh, path):
        if os.path.isdir(name) and not os.path.islink(name):
            set_aside(name, "a folder")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(fresh)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        listener.settimeout(0)
        listener.bind(fresh)
        os.chmod(fresh, mode)
        if gid is not None and os.stat(fresh).st_gid != gid:  # the unit's group is ours already
            os.chown(fresh, -1, gid)
        listener.listen(backlog)
        os.rename(fresh, path)
    except OSError:
        listener.close()
        raise
    return listener


def peer(connected: socket.socket) -> Peer:
    """Return the process on the other end (SO_PEERCRED)."""
    raw = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, _ = _UCRED.unpack(raw)
    return Peer(pid, uid)


def require_trusted(connected: socket.socket) -> None:
    """Raise PermissionError unless the other end runs as root or as our own user."""
    who = peer(connected)
    if not who.trusted:
        raise PermissionError(f"peer (pid {who.pid}) runs as uid {who.uid}, not as root")


@dataclass
class Credit:
    """How much a peer may take: a peer that floods delays only itself.

    It grows by `per_s` each second, up to `most`.
    """

    per_s: float
    most: float
    _left: float = field(init=False)
    _since: float = field(init=False, default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self._left = self.most

    @property
    def is_full(self) -> bool:
        """Whether nothing was taken that has not grown again."""
        return self._grown(time.monotonic()) == self.most

    def wait_after(self, taken: float) -> float:
        """Take so much; return how many seconds the peer should wait, 0 for none."""
        now = time.monotonic()
        self._left, self._since = self._grown(now) - taken, now
        return max(0.0, -self._left / self.per_s)

    def _grown(self, now: float) -> float:
        return min(self.most, self._left + (now - self._since) * self.per_s)


# > clients = Clients("control client", 32, talk, limit=4096)
# > async with clients.served(unix_socket.listen(path, backlog=64), path):
# >     ...

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
    try:
        async with asyncio.timeout(within_s):
            for start in range(0, len(data), PIECE):
                writer.write(data[start : start + PIECE])
                await writer.drain()
                await asyncio.sleep(0)
    finally:
        del data  # after a failed write asyncio keeps our frame, until cycles are collected
