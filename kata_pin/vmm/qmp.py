"""Asks QEMU over QMP which thread is which vCPU, without ever blocking Kata.

QEMU serves one client per socket: a second one connects, waits without a greeting, and takes the
slot when the first reconnects. So qmp.sock is asked only when the caller knows that it is free (D6:
in the window of the announcing hook, or when the shim is proven dead) and no client is connected;
the greeting must come within 50 ms, all answers within 120 ms, and the socket is closed in any
case. The extra monitor socket may be asked at any time. Two read-only queries, nothing else.

A session lives as long as one call. What QEMU answers is a hint: wire.qmp checks its shape, the
roles check that the threads are QEMU's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import socket
from typing import Final

from qemu.qmp import Message, QMPClient, QMPError
from qemu.qmp.protocol import Runstate

from kata_pin.calls import DIRECT, Calls
from kata_pin.errors import ParseError, QmpUnavailable, RemoteProtocolError, reason_of
from kata_pin.wire.json_text import check_bounds
from kata_pin.wire.qemu.qmp import QmpAnswers, check_answers

GREETING_S: Final = 0.05
SESSION_S: Final = 0.12
CLOSE_S: Final = 0.05
MAX_REPLY: Final = 2 * 1024 * 1024  # longest line that QEMU may send: 4,096 vCPUs take about 1.2 MB
MAX_GREETING: Final = 4096  # longest first line: QEMU 9 sends 150 bytes
MAX_VALUES: Final = 65_536  # most brackets and commas in one session: 4,096 vCPUs take about 53,000
MAX_SOCKETS: Final = 4 * 1024 * 1024  # longest /proc/net/unix that is read

_CONNECTED: Final = frozenset({"02", "03"})
"""Socket states CONNECTING and CONNECTED of /proc/net/unix (linux/net.h, socket_state)."""

_BROKEN: Final = (
    QMPError,
    ParseError,
    OSError,
    EOFError,
    ValueError,
    RecursionError,
    AssertionError,
)
"""What a session raises when the peer misbehaves, from disconnect too: ValueError for a line above
MAX_REPLY, RecursionError for JSON nested too deep, AssertionError by the client itself when it is
cancelled while it cleans up."""

# qemu.qmp logs every lost connection as an error, with a traceback; the caller reports it instead.
_quiet = logging.getLogger(f"{__name__}.client")
_quiet.disabled = True


class _Client(QMPClient):
    """The client with bounds on what it parses, and without its log of every message.

    The log takes a quarter of its time; `[],[],...` grows thirtyfold when parsed.
    """

    def __init__(self) -> None:
        super().__init__(readbuflen=MAX_REPLY)
        self.logger = _quiet
        self._values = MAX_VALUES

    async def _do_recv(self) -> Message:
        """Receive one message; raises ParseError for more than a QEMU would ever send."""
        line = await self._readline()
        limit = MAX_REPLY if self.greeting else MAX_GREETING
        self._values -= check_bounds(line, source="QMP", limit=limit, values=self._values)
        return Message(line, eager=True)

    def _cb_outbound(self, msg: Message) -> Message:
        return msg

    def _cb_inbound(self, msg: Message) -> Message:
        return msg


async def query(
    path: str,
    *,
    pid: int = 0,
    greeting_s: float = GREETING_S,
    session_s: float = SESSION_S,
    proc: str = "/proc",
    calls: Calls = DIRECT,
) -> QmpAnswers:
    """Return what QEMU reports of its vCPUs and iothreads.

    A socket that another client holds or waits for is not even connected (is_held; `pid` is the
    VMM's, if known). Raises QmpUnavailable when it is held, closed, too slow, or answers nonsense.
    Cancelled, it is off the socket before the cancellation goes on.
    """
    if is_held(path, pid=pid, proc=proc):
        raise QmpUnavailable(f"{path}: another client holds it")
    try:
        return await _session(_connected(path, calls), path, greeting_s, session_s)
    except QmpUnavailable as error:
        problem = error.message
    # What the client leaves of a failed session is in cycles, with all that QEMU sent; it is young.
    gc.collect(1)
    raise QmpUnavailable(problem)


def _connected(path: str, calls: Calls) -> socket.socket:
    """Return a connected socket. A unix socket connects at once or fails (EAGAIN: queue full)."""
    try:
        return calls.connect(path)
    except OSError as error:
        raise QmpUnavailable(f"{path}: {error.strerror or reason_of(error)}") from error


async def _session(
    end: socket.socket, path: str, greeting_s: float, session_s: float
) -> QmpAnswers:
    client = _Client()
    try:
        async with asyncio.timeout(session_s):
            await asyncio.wait_for(client.connect(end), greeting_s)
            return check_answers(
                await client.execute("query-cpus-fast"),
                await client.execute("query-iothreads"),
            )
    except TimeoutError as error:
        raise QmpUnavailable(f"{path}: no answer in time; another client may hold it") from error
    except (RemoteProtocolError, ParseError) as error:
        raise QmpUnavailable(f"{path}: {error}") from error
    except _BROKEN as error:
        _raise_if_cancelled()
        raise QmpUnavailable(f"{path}: {str(error) or type(error).__name__}") from error
    finally:
        await _close(client, end)


def is_held(path: str, *, pid: int = 0, proc: str = "/proc") -> bool:
    """Whether some client is connected to a unix socket, or waits for it.

    /proc/net/unix shows the server's end of each connection under the path that the listener is
    bound to, also while it waits in the backlog. It covers one network namespace: ours, and that of
    process `pid` (the VMM) where given. False also means unknown; the deadlines of `query` hold.
    """
    tables = [f"{proc}/net/unix"]
    if pid:
        tables.append(f"{proc}/{pid}/net/unix")
    return any(_holds(line, path) for table in tables for line in _lines(table))


def _lines(table: str) -> list[str]:
    try:
        with open(table, "rb") as file:
            return file.read(MAX_SOCKETS).decode("utf-8", "backslashreplace").splitlines()
    except OSError:
        return []


def _holds(line: str, path: str) -> bool:
    """Read `num: refcount protocol flags type state inode path`."""
    words = line.split(None, 7)
    return len(words) == 8 and words[7] == path and words[5] in _CONNECTED


def _raise_if_cancelled() -> None:
    """Raise a cancellation again that the client lost in one of its own errors."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


async def _close(client: QMPClient, end: socket.socket) -> None:
    """Free the slot, first on the wire: that holds even if this is cancelled again.

    The descriptor is closed only after the event loop has released it: its number is reused.
    """
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    with contextlib.suppress(*_BROKEN):
        if client.runstate is not Runstate.IDLE:
            async with asyncio.timeout(CLOSE_S):
                await client.disconnect()
    if client.runstate is Runstate.IDLE:
        end.close()
