"""What OCI hooks hand over: their messages, on a socket, and in the spool (D3)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import socket
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from msgspec import Struct

from kata_pin.base.errors import RemoteProtocolError, reason_of
from kata_pin.linux import sockets
from kata_pin.linux.owned_files import FileRefused, clear, read_owned
from kata_pin.peers.oci import MAX_PID, Phase

log = logging.getLogger(__name__)


# The hook's messages: one request with the bytes of stdin, one to two reply lines.
#
# > request   KP1 <phase> <boottime_ns> <pid> <length>\n<length bytes>
# > replies   recorded\n  then, for prestart and createRuntime, pinned\n or unpinned <reason>\n
# > refused <reason>\n  for an invalid message
#
# A spool file holds exactly the bytes of a request and is named after its stamp and pid, which
# identify the message: one that was answered late and also spooled counts once. The hook program
# imports nothing of the package and builds the same bytes on its own.

MAX_HEADER: Final = 128  # longest header line in bytes, newline included
UNINSTALLED: Final = "uninstalled"
"""A file in the spool that tells hooks which were left behind not to use it (kata_pin/hook.py)."""

MAX_SPOOLED: Final = 10_000
"""Messages in the spool from which on hooks leave no more (kata_pin/hook.py)."""

MAX_BODY: Final = 4 * 1024 * 1024  # longest state accepted from a hook
MAX_STAMP: Final = (1 << 63) - 1
MAX_REASON: Final = 200

RECORDED: Final = b"recorded\n"
PINNED: Final = b"pinned\n"

_HEADER: Final = re.compile(
    rb"KP1 ([A-Za-z]{1,32}) (0|[1-9][0-9]{0,18}) ([1-9][0-9]{0,6}) (0|[1-9][0-9]{0,6})\n\Z"
)
_SPOOL_NAME: Final = re.compile(r"(0|[1-9][0-9]{0,18})-([1-9][0-9]{0,6})\.msg\Z", re.ASCII)


class HookMessage(Struct, frozen=True):
    """One request. `stamp_ns` is CLOCK_BOOTTIME when the hook started, `pid` the hook's own."""

    phase: Phase
    stamp_ns: int
    pid: int
    body: bytes

    @property
    def spool_name(self) -> str:
        """The name of its spool file."""
        return f"{self.stamp_ns}-{self.pid}.msg"


class HookDecoder:
    """Takes the bytes of one connection in any pieces; holds at most one message.

    After a RemoteProtocolError the connection must be closed.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._header: tuple[Phase, int, int, int] | None = None

    def feed(self, data: bytes) -> HookMessage | None:
        """Take more bytes; return the message once it is complete, None until then."""
        self._buffer += data
        if self._header is None:
            end = self._buffer.find(b"\n", 0, MAX_HEADER) + 1
            if not end and len(self._buffer) >= MAX_HEADER:
                raise RemoteProtocolError(f"no hook header in the first {MAX_HEADER} bytes")
            if not end:
                return None
            self._header = _parse_header(bytes(self._buffer[:end]))
            del self._buffer[:end]
        phase, stamp_ns, pid, length = self._header
        surplus = len(self._buffer) - length
        if surplus > 0:
            raise RemoteProtocolError(f"{surplus} bytes after the hook message")
        return None if surplus else HookMessage(phase, stamp_ns, pid, bytes(self._buffer))


def _parse_header(line: bytes) -> tuple[Phase, int, int, int]:
    """Return phase, stamp, pid and the length of the state."""
    match = _HEADER.match(line)
    if match is None:
        raise RemoteProtocolError(f"invalid hook header: {line!r}")
    try:
        phase = Phase(match[1].decode("ascii"))
    except ValueError:
        raise RemoteProtocolError(f"unknown hook phase: {match[1]!r}") from None
    stamp_ns, pid, length = int(match[2]), int(match[3]), int(match[4])
    if stamp_ns > MAX_STAMP or pid > MAX_PID or length > MAX_BODY:
        raise RemoteProtocolError(f"hook header out of bounds: {line!r}")
    return phase, stamp_ns, pid, length


def decode(data: bytes) -> HookMessage:
    """Read a complete request (a spool file); RemoteProtocolError if it is cut short or invalid."""
    message = HookDecoder().feed(data)
    if message is None:
        raise RemoteProtocolError(f"hook message cut short after {len(data)} bytes")
    return message


def parse_spool_name(name: str) -> tuple[int, int] | None:
    """Return (stamp_ns, pid) of a spool file's name; None for any other file."""
    match = _SPOOL_NAME.match(name)
    return None if match is None else (int(match[1]), int(match[2]))


def unpinned(reason: str) -> bytes:
    """Return the reply line for pins that are not applied."""
    return b"unpinned " + _one_line(reason)


def refused(reason: str) -> bytes:
    """Return the reply line for an invalid message; nothing follows it."""
    return b"refused " + _one_line(reason)


def _one_line(reason: str) -> bytes:
    """Return `reason` as printable ASCII on one line, never empty."""
    printable = "".join(char if " " <= char <= "~" else "?" for char in reason)
    return (printable.strip()[:MAX_REASON] or "no reason given").encode("ascii") + b"\n"


# The socket on which OCI hooks hand over their messages (D3).
#
# Each hook is one connection: one request, one or two answer lines. The
# handler gets a HookConnection once the whole request has arrived. A connection that sends garbage,
# half a request or nothing is closed after its deadline and disturbs no other; those beyond the
# bound wait in the socket's backlog, where the hook's own budget ends the wait.

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
        self._send(RECORDED, last=not self.message.phase.waits_for_pins)

    async def pinned(self) -> None:
        """Answer, after `recorded`, that the pins are applied, or that the container needs none.

        Dropped where the hook does not wait for it: `recorded` was the last line then.
        """
        self._send(PINNED, last=True)

    async def unpinned(self, reason: str) -> None:
        """Answer that the pins are not applied; in strict mode the hook fails the container."""
        self._send(unpinned(reason), last=True)

    async def refused(self, reason: str) -> None:
        """Answer, instead of `recorded`, that the message is invalid and must not be spooled."""
        self._send(refused(reason), last=True)

    def _send(self, line: bytes, *, last: bool) -> None:
        if not self.transport.is_closing():
            self.transport.write(line)
            if last:
                self.transport.close()


Handler = Callable[[HookConnection], Awaitable[None]]


@dataclass
class HookServer:
    """Takes the hooks' connections and gives each message to `handler`.

    From `bind` on hooks can connect, if only into the backlog; `serve` answers them.

    `path` is the socket's. At most `connections` are served at once. Each has `request_s` to send
    its request; then `handler` has `handler_s` before it is cancelled.
    """

    path: str
    handler: Handler
    connections: int = field(default=MAX_CONNECTIONS, kw_only=True)
    request_s: float = field(default=REQUEST_S, kw_only=True)
    handler_s: float = field(default=HANDLER_S, kw_only=True)
    _listener: socket.socket | None = None
    _inode: int = 0

    def __post_init__(self) -> None:
        self._slots = asyncio.Semaphore(self.connections)

    def bind(self) -> None:
        """Listen on the path, replacing a socket that a dead daemon left there. Raises OSError.

        The caller makes sure that no other daemon runs.
        """
        self._listener = sockets.listen(self.path, backlog=BACKLOG)
        self._inode = os.stat(self.path).st_ino

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
            if os.stat(self.path).st_ino == self._inode:
                os.unlink(self.path)

    async def _serve_one(self, peer: socket.socket) -> None:
        """Serve one connection; the fault barrier between it and all others."""
        receiver = _Receiver()
        try:
            sockets.require_trusted(peer)
            await asyncio.get_running_loop().connect_accepted_socket(lambda: receiver, peer)
            async with asyncio.timeout(self.request_s):
                message = await receiver.message
            async with asyncio.timeout(self.handler_s):
                await self.handler(receiver.connection(message))
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


# The spool: messages that hooks left as files because the daemon did not record them in time.
#
# A file holds exactly the bytes of a request and appears by rename, so it is
# complete or absent. The daemon reads the spool at start, whenever `watch` yields, and in each
# audit; `done` removes a message after its commit, so a crash in between only repeats it.
# Unreadable files are moved to `bad`, where the newest are kept for an administrator.

MAX_FILE_BYTES = MAX_HEADER + MAX_BODY
MAX_BAD = 16
MAX_NAMES = 16_384  # that one look reads; hooks leave 10,000 at most
MAX_OTHERS = 64  # that one look sets aside
STALE_S = 60.0  # a hook writes its file in milliseconds; if older, the hook was killed meanwhile
RETRY_S = 1.0  # between tries to watch a folder that cannot be watched


_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Spool:
    """The folder of spooled messages; `max_bad` bounds how many unreadable ones are kept."""

    def __init__(self, directory: str, *, max_bad: int = MAX_BAD) -> None:
        self._directory = directory
        self._bad = os.path.join(directory, "bad")
        self._max_bad = max_bad

    def prepare(self) -> None:
        """Create the folder, for its owner alone, where tmpfiles.d has not. Raises OSError.

        Its messages, which root's hooks write, get its group, so that the daemon can read them.
        """
        clear(self._directory, folder=True)
        os.makedirs(self._directory, mode=0o700, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path(UNINSTALLED))

    def retire(self) -> None:
        """Tell hooks that are still configured not to spool, until a daemon runs again."""
        with contextlib.suppress(OSError):  # without the folder they cannot
            folder = os.open(self._directory, _FOLDER)
            try:
                os.close(os.open(UNINSTALLED, _NEW, 0o600, dir_fd=folder))
            finally:
                os.close(folder)

    def pending(self) -> Iterator[HookMessage]:
        """Yield the messages in the order of their stamps, reading each when its turn comes.

        Messages that appear meanwhile are left for the next call. Anything else is set aside.
        """
        names, others = self._list()
        for name in others:
            self._sweep(name)
        for name in names:
            try:
                message = self._message(name)
            except (FileRefused, RemoteProtocolError) as error:
                self._put_aside(name, error)
            else:
                if message is not None:
                    yield message

    def peek(self) -> Iterator[HookMessage]:
        """Yield the same messages without changing any file, for `show` and `check`."""
        for name in self._list()[0]:
            with contextlib.suppress(FileRefused, RemoteProtocolError):
                message = self._message(name)
                if message is not None:
                    yield message

    def done(self, message: HookMessage) -> None:
        """Remove a message that is recorded."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path(message.spool_name))

    def reject(self, message: HookMessage, reason: object) -> None:
        """Set aside a message whose content is invalid."""
        self._put_aside(message.spool_name, reason)

    async def watch(self) -> AsyncGenerator[None, None]:
        """Yield whenever `pending` may have messages: once watching, then after each arrival."""
        from asyncinotify import Mask  # noqa: PLC0415 - only a daemon watches

        from kata_pin.linux.inotify import folder_events  # noqa: PLC0415

        events = folder_events(
            self._directory,
            Mask.MOVED_TO,
            retry_s=RETRY_S,
            level=logging.WARNING,
            prepare=self.prepare,
        )
        async with contextlib.aclosing(events):
            async for _ in events:
                yield None

    def _list(self) -> tuple[list[str], list[str]]:
        """Return the names of messages by stamp, and those of everything else.

        Those beyond the bounds have their turn when these are gone.
        """
        messages: list[tuple[tuple[int, int], str]] = []
        others: list[str] = []
        with contextlib.suppress(FileNotFoundError), os.scandir(self._directory) as entries:
            for entry in islice(entries, MAX_NAMES):
                key = parse_spool_name(entry.name)
                if key is not None:
                    messages.append((key, entry.name))
                elif entry.name not in {"bad", UNINSTALLED} and len(others) < MAX_OTHERS:
                    others.append(entry.name)
        return [name for _, name in sorted(messages)], others

    def _sweep(self, name: str) -> None:
        """Handle a file that is not a message: unfinished, abandoned or foreign."""
        try:
            age_s = time.time() - os.lstat(self._path(name)).st_mtime
            if not name.endswith(".tmp"):
                self._put_aside(name, "not the name of a message")
            elif age_s > STALE_S:
                os.unlink(self._path(name))
        except OSError as error:
            log.debug("spool: cannot clean up %s: %s", name, error.strerror)

    def _message(self, name: str) -> HookMessage | None:
        """Return the message of a file; None if it is gone, or cannot be read for now.

        Raises FileRefused or RemoteProtocolError for a file that is not a message of ours.
        """
        try:
            return _decode(name, read_owned(self._path(name), MAX_FILE_BYTES))
        except FileNotFoundError:
            return None
        except OSError as error:  # such as EMFILE: it stays for the next time
            log.warning("cannot read spooled message %s: %s; retrying", name, error.strerror)
        return None

    def _put_aside(self, name: str, reason: object) -> None:
        log.warning("spooled message %s is invalid, moved to %s: %s", name, self._bad, reason)
        try:
            os.makedirs(self._bad, mode=0o700, exist_ok=True)
            self._move(name)
            self._prune()
        except OSError as error:
            log.warning("cannot move spooled message %s: %s", name, error.strerror)

    def _move(self, name: str) -> None:
        """Move a file to `bad`; a folder that only its owner can move is removed, if empty."""
        try:
            os.rename(self._path(name), os.path.join(self._bad, name))
        except PermissionError as refused:
            try:
                os.rmdir(self._path(name))
            except OSError:
                raise refused from None
            log.warning("%s is an empty folder of another user: removed instead", name)

    def _prune(self) -> None:
        """Keep the newest of what was set aside."""
        with os.scandir(self._bad) as entries:
            aged = sorted((e.stat(follow_symlinks=False).st_ctime_ns, e.path) for e in entries)
        for _, path in aged[: -self._max_bad]:
            os.unlink(path)

    def _path(self, name: str) -> str:
        return os.path.join(self._directory, name)


def _decode(name: str, content: bytes) -> HookMessage:
    message = decode(content)
    if message.spool_name != name:
        raise RemoteProtocolError(f"holds the message of {message.spool_name}")
    if message.stamp_ns > time.clock_gettime_ns(time.CLOCK_BOOTTIME):
        raise RemoteProtocolError("its stamp is in the future: it is from before a reboot")
    return message
