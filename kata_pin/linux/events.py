"""Events of the kernel: threads that start and exit, CPUs that go on- or offline."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import struct
from collections.abc import AsyncGenerator, Callable
from collections.abc import Set as AbstractSet
from contextlib import suppress
from errno import ECONNREFUSED, ENOBUFS, ETIMEDOUT
from typing import Final, Protocol

from msgspec import Struct

from kata_pin.base.errors import HostError
from kata_pin.rights.broker.libc import EXEC, EXIT, FORK, IGNORE, process_events, request

# New and exited threads, from the kernel's process connector (cn_proc), filtered.
#
# A ProcEvents lives from open() to close() and belongs to one event loop. An event is a hint that
# starts a pass sooner; lost events cost only time and are reported as an Overrun.
#
# A plain socket, not pyroute2's (ADR 4). Measured on 6.18, 2 CPUs: a storm of 20,000 threads
# elsewhere costs 54 us per event through pyroute2 0.9.7 and 2 to 5 us here, and its socket is
# unusable after its first ENOBUFS (every call raises, close too) while a plain one goes on.
#
# The kernel acknowledges a plain subscription (4 bytes), but never one with a filter (8 bytes,
# Linux 6.6 and later): the acknowledgement has no event type and does not pass the filter it
# confirms. Older kernels silently ignore 8 bytes. Events alone prove nothing: they arrive whenever
# another process listens. So open() subscribes plainly, waits for the acknowledgement, and then
# narrows; a kernel without filters goes on sending all events, and the rest is skipped here.
#
# Facts are in drivers/connector/cn_proc.c, include/uapi/linux/{netlink,connector,cn_proc}.h.

KTHREADD: Final = 2  # the pid of the parent of all kernel threads
MAX_PENDING: Final = 4096  # most events kept for a busy consumer; more become one Overrun
BURST: Final = 256  # most events read before the event loop gets a turn
HOT_WAKES: Final = 16
HOT_GAP_S: Final = 0.002
PAUSE_S: Final = 0.001
"""After 16 wakes less than 2 ms apart, events gather for 1 ms before each read: in a fork storm
most of the cost is waking up for a single event."""

_EVENT: Final = struct.Struct("=16xII12xI12xIIII")  # idx, val; what; four words of event data
_ACK: Final = struct.Struct("=28xI4xI12xI")  # cn_msg.ack; what; error
_CN_IDX_PROC: Final = 1
_CN_VAL_PROC: Final = 1
_NONE: Final = 0x0  # enum proc_cn_event


class NewThread(Struct, frozen=True):
    """A tracked process has a new thread."""

    tgid: int
    tid: int


class NewProcess(Struct, frozen=True):
    """A tracked process forked, or the kernel started a kernel thread (ppid 2)."""

    pid: int
    ppid: int


class TaskExit(Struct, frozen=True):
    """A thread of a tracked process exited; the process itself if both ids are equal."""

    tgid: int
    tid: int


class NewProgram(Struct, frozen=True):
    """A process that `wanted` chose now runs another program (execve(2))."""

    pid: int


class Overrun(Struct, frozen=True):
    """Events were lost: read everything again."""


Event = NewThread | NewProcess | NewProgram | TaskExit | Overrun


class Connect(Protocol):
    """Returns a socket that listens, as `process_events` does."""

    def __call__(self, token: int, *, execs: bool) -> socket.socket:
        """Return it; `token` is acknowledged."""


class ProcEvents:
    """Process events, in batches: `async for batch in events`.

    `tracked` holds the tgids that matter; it is shared, and a change takes effect at once. Reported
    too are the children of those, new kernel threads (vhost workers before Linux 6.4), and of the
    processes that run another program now those that `wanted` chooses by their pid: it is called
    for each of the node's, so it must be cheap. One consumer at a time. `connect` returns a socket
    that listens.
    """

    def __init__(
        self,
        tracked: AbstractSet[int],
        *,
        wanted: Callable[[int], bool] | None = None,
        connect: Connect = process_events,
    ) -> None:
        self._tracked = tracked
        self._wanted = wanted
        self._connect = connect
        self._sock: socket.socket | None = None
        self._buffer = bytearray(4096)
        self._pending: list[Event] = []
        self._waiter: asyncio.Future[None] | None = None
        self._error: OSError | None = None
        self._last_wake = 0.0
        self._hot = 0
        self._pause: asyncio.TimerHandle | None = None

    async def open(self, timeout_s: float = 0.5) -> None:
        """Subscribe within `timeout_s`; raises HostError where there are no process events.

        Events that come before the acknowledgement count.
        """
        token = int.from_bytes(os.urandom(4), "little") >> 1
        try:
            sock = self._connect(token, execs=self._wanted is not None)
        except OSError as error:
            raise _unavailable(error) from error
        try:
            await self._subscribe(sock, token, timeout_s)
        except OSError as error:
            sock.close()
            raise _unavailable(error) from error
        except BaseException:
            sock.close()
            raise
        self._sock = sock
        asyncio.get_running_loop().add_reader(sock.fileno(), self._wake)

    def close(self) -> None:
        """Unsubscribe and end the iteration; safe to repeat."""
        sock, self._sock = self._sock, None
        if sock is None:
            return
        asyncio.get_running_loop().remove_reader(sock.fileno())
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
        with suppress(OSError):
            sock.send(request(0, IGNORE))
        sock.close()
        self._notify()

    def __aiter__(self) -> ProcEvents:
        return self

    async def __anext__(self) -> tuple[Event, ...]:
        """Return the next events, at least one; raises HostError when the socket broke."""
        while not self._pending:
            if self._error is not None:
                raise _unavailable(self._error)
            if self._sock is None:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        batch, self._pending = tuple(self._pending), []
        return batch

    async def _subscribe(self, sock: socket.socket, token: int, timeout_s: float) -> None:
        """Wait for the acknowledgement of the first request; that of the second is passed over."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        async with asyncio.timeout_at(deadline):
            # Where events are always ready, nothing here yields and the timeout never fires.
            while loop.time() < deadline:
                size = await loop.sock_recv_into(sock, self._buffer)
                error = _acknowledged(self._buffer, size, token)
                if error is None:
                    self._take(size)
                elif error:
                    raise OSError(error, "refused")
                else:
                    return
        raise TimeoutError

    def _wake(self) -> None:
        """Read the waiting events; called by the event loop."""
        assert self._sock is not None
        try:
            self._drain(self._sock)
        except OSError as error:
            self._error = error
            asyncio.get_running_loop().remove_reader(self._sock.fileno())
        else:
            self._slow_down(self._sock)
        if self._pending or self._error:
            self._notify()

    def _drain(self, sock: socket.socket) -> None:
        receive, buffer = sock.recv_into, self._buffer
        for _ in range(BURST):
            try:
                size = receive(buffer)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno != ENOBUFS:
                    raise
                self._pending = [Overrun()]
            else:
                self._take(size)

    def _take(self, size: int) -> None:
        """Keep the event in the buffer if it is wanted; cheap, for fork storms."""
        if size < _EVENT.size:
            return
        idx, val, what, first, second, child, tgid = _EVENT.unpack_from(self._buffer)
        if idx != _CN_IDX_PROC or val != _CN_VAL_PROC:
            return
        if what == FORK:
            # Threads and processes have the same parent fields: only the child differs.
            if child != tgid:
                if tgid in self._tracked:
                    self._keep(NewThread(tgid, child))
            elif second in self._tracked or second == KTHREADD:
                self._keep(NewProcess(child, second))
        elif what == EXIT:
            if second in self._tracked:
                self._keep(TaskExit(second, first))
        elif what == EXEC and self._wanted is not None and self._wanted(second):
            self._keep(NewProgram(second))

    def _keep(self, event: Event) -> None:
        """Append an event, unless an Overrun is pending, which covers it."""
        if len(self._pending) >= MAX_PENDING:
            self._pending = [Overrun()]
        elif not (self._pending and isinstance(self._pending[0], Overrun)):
            self._pending.append(event)

    def _slow_down(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._hot = self._hot + 1 if now - self._last_wake < HOT_GAP_S else 0
        self._last_wake = now
        if self._hot >= HOT_WAKES:
            loop.remove_reader(sock.fileno())
            self._pause = loop.call_later(PAUSE_S, self._resume)

    def _resume(self) -> None:
        self._pause = None
        if self._sock is not None:
            asyncio.get_running_loop().add_reader(self._sock.fileno(), self._wake)
            self._wake()

    def _notify(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _acknowledged(buffer: bytearray, size: int, token: int) -> int | None:
    """Return the errno of our acknowledgement (0: granted), None if this is another message.

    Every listener gets every acknowledgement; the token identifies ours.
    """
    if size < _ACK.size:
        return None
    ack, what, error = _ACK.unpack_from(buffer)
    return abs(error) if what == _NONE and ack == token + 1 else None


def _unavailable(error: OSError) -> HostError:
    errno = error.errno or ETIMEDOUT
    hints = {
        ECONNREFUSED: "needs the host's network namespace",
        ETIMEDOUT: "no acknowledgement: needs the host's pid and user namespaces, "
        "and CAP_NET_ADMIN before Linux 6.6",
    }
    return HostError("subscribe to", "process events", errno, hint=hints.get(errno, ""))


# CPUs that go on- or offline, from the kernel's uevents over netlink.
#
# An event only says when to look (D1). Taking a CPU offline through sysfs sends one after it is
# done (drivers/base/core.c, device_offline); the cpusets change a moment later, without an event.
# Needs no capability, but the network namespace of the first user namespace.
#
# The socket lives as long as the iteration. Which CPUs are online: linux/topology.py.

NETLINK_KOBJECT_UEVENT: Final = 15  # linux/netlink.h
KERNEL_GROUP: Final = 1
"""The kernel's own messages; group 2 has udev's, which other privileged processes can send."""

RECEIVE_BYTES: Final = 1024 * 1024
MESSAGE_BYTES: Final = 8192  # UEVENT_BUFFER_SIZE is 2048 bytes of variables, the path before them

_ACTIONS: Final = frozenset({b"online", b"offline", b"add", b"remove"})
_CPUS: Final = b"/devices/system/cpu/cpu"


def kernel_events() -> socket.socket:
    """Return a socket that receives the kernel's uevents; raises OSError."""
    sock = socket.socket(
        socket.AF_NETLINK, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK, NETLINK_KOBJECT_UEVENT
    )
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
        sock.bind((0, KERNEL_GROUP))
    except OSError:
        sock.close()
        raise
    return sock


async def cpu_changes(
    connect: Callable[[], socket.socket] = kernel_events,
) -> AsyncGenerator[None, None]:
    """Yield once listening, then whenever a CPU went on- or offline, or events were lost.

    Raises HostError where the kernel sends no uevents.
    """
    loop = asyncio.get_running_loop()
    try:
        with connect() as sock:
            yield None
            while True:
                if await _next_is_about_cpu(loop, sock):
                    yield None
                await asyncio.sleep(0)  # a node that starts pods has thousands of other uevents
    except OSError as error:
        raise HostError("receive", "the kernel's uevents", error.errno or errno.EIO) from error


async def _next_is_about_cpu(loop: asyncio.AbstractEventLoop, sock: socket.socket) -> bool:
    """Wait for a message; return whether it is about a CPU, or messages were lost."""
    try:
        message, sender = await loop.sock_recvfrom(sock, MESSAGE_BYTES)
    except OSError as error:
        if error.errno != errno.ENOBUFS:
            raise
        return True
    return sender[0] == 0 and is_about_cpu(message)


def is_about_cpu(message: bytes) -> bool:
    """Return whether a uevent is about a CPU, such as `online@/devices/system/cpu/cpu3`."""
    action, _, path = message.partition(b"\0")[0].partition(b"@")
    return action in _ACTIONS and path.startswith(_CPUS) and path[len(_CPUS) :].isdigit()
