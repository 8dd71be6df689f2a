"""The daemon's side of the broker's socket: calls that the broker makes (D23; docs/broker.md)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import select
import socket
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from errno import EACCES, ECONNRESET, ETIMEDOUT
from typing import Final, NamedTuple, NoReturn

from kata_pin.base.errors import DaemonError
from kata_pin.rights.broker import threads, tunables
from kata_pin.rights.broker.pages import PagesMoved, PageWindow, parse_moved, render_window
from kata_pin.rights.broker.policy import MAX_JAILS
from kata_pin.rights.broker.protocol import (
    ANSWER,
    MAX_MESSAGE,
    NUMBER,
    REQUEST,
    STATUS,
    FileStatus,
    Settings,
)
from kata_pin.rights.broker.rows import BY_NAME, MONITOR_ROW, NUMBERS, Value
from kata_pin.rights.broker.threads import KvmVcpu, ThreadCall
from kata_pin.rights.broker.tunables import TunableWrite, TunableWritten
from kata_pin.rights.client_calls import FileCalls, ThreadCalls

log = logging.getLogger(__name__)


# Children of the broker that make calls which may never end: asking them, and their answers.

STARVED_S: Final = 2.0
"""Longest wait for an answer of a child that could run: it only gets no CPU."""

WINDOW: Final = 32
"""Most requests that a child has before it answered them."""

SlowFile = tuple[int, str]
"""A pid, and a file below /proc/<pid>."""


class Child(NamedTuple):
    """A child of the broker: its pid and our end of its socket.

    `jails` are those that the broker had verified when it began, by pid: it knows no others.
    """

    pid: int
    channel: socket.socket
    jails: Mapping[int, str]


async def read_all(
    child: Child,
    left: deque[tuple[int, str, int]],
    found: dict[SlowFile, bytes | OSError],
    deadline_s: float,
) -> bool:
    """Have a child read what is left until nothing is; return False when it did not answer."""
    sent: deque[tuple[int, str, int]] = deque()
    try:
        while left or sent:
            while left and len(sent) < WINDOW:
                child.channel.send(slow_request(*left[0]))
                sent.append(left.popleft())
            try:
                _, errno, answer, handed = receive(child.channel)
            except BlockingIOError:
                await readable(child, deadline_s)
                continue
            pid, file, _ = sent.popleft()
            content = content_of(answer, handed)
            found[pid, file] = OSError(errno, os.strerror(errno)) if errno else content
    except (OSError, EOFError) as error:  # TimeoutError is an OSError
        if sent:
            pid, file, _ = sent.popleft()
            late = isinstance(error, TimeoutError)
            found[pid, file] = TimeoutError(ETIMEDOUT, "it hangs") if late else OSError(*error.args)
        left.extendleft(reversed(sent))
        return False
    return True


async def ask(child: Child, name: str, values: Mapping[str, Value], deadline_s: float) -> bytes:
    """Return a child's answer to one request.

    Raises OSError for the operation's own, TimeoutError or EOFError where none comes.
    """
    try:
        child.channel.send(request_of(name, values))
        await readable(child, deadline_s)
        _, errno, answer, handed = receive(child.channel)
    except (BrokenPipeError, ConnectionResetError) as error:
        raise EOFError("closed") from error
    content = content_of(answer, handed)
    if errno:
        raise OSError(errno, os.strerror(errno))
    return content


async def readable(child: Child, deadline_s: float) -> None:
    """Return when a child has answered; TimeoutError if it sleeps after the deadline, or long."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    until = time.monotonic() + deadline_s + STARVED_S
    loop.add_reader(child.channel.fileno(), ready.set)
    try:
        while not ready.is_set():
            try:
                async with asyncio.timeout(deadline_s):
                    await ready.wait()
            except TimeoutError:
                if _sleeps(child) or time.monotonic() > until:
                    raise
    finally:
        loop.remove_reader(child.channel.fileno())


def receive(channel: socket.socket) -> tuple[int, int, bytes, list[int]]:
    """Return an answer: the request's number, its errno, its bytes and descriptors.

    Raises EOFError when the other end closed.
    """
    message, descriptors, _, _ = socket.recv_fds(
        channel, MAX_MESSAGE, 4, flags=socket.MSG_CMSG_CLOEXEC
    )
    if len(message) < ANSWER.size:
        raise EOFError("closed")
    number, errno = ANSWER.unpack_from(message)
    return number, errno, message[ANSWER.size :], descriptors


def receive_from(child: Child) -> tuple[int, int, bytes, list[int]]:
    """Return a child's answer, as `receive`; TimeoutError if it sleeps, or after a long time."""
    until = time.monotonic() + STARVED_S
    while True:
        try:
            return receive(child.channel)
        except TimeoutError:
            if _sleeps(child) or time.monotonic() > until:
                raise


def _sleeps(child: Child) -> bool:
    """Return whether a child waits in a read: it does not if it could run, or was stopped.

    Nor does one that has answered by now: it sleeps until the next request.
    """
    try:
        with open(f"/proc/{child.pid}/stat", "rb", buffering=0) as file:
            if file.read(1024).rpartition(b") ")[2].startswith((b"R", b"T")):
                return False
    except OSError:
        return True
    answered = select.poll()
    answered.register(child.channel, select.POLLIN)
    return not answered.poll(0)


def content_of(answer: bytes, descriptors: Iterable[int]) -> bytes:
    """Return an answer's bytes, which may have come as a file in memory."""
    for fd in descriptors:
        with open(fd, "rb") as file:
            file.seek(0)
            answer += file.read()
    return answer


def slow_request(pid: int, file: str, limit: int) -> bytes:
    """Return the request to read a file below /proc/<pid>."""
    return request_of("slow-file", {"limit": limit, "pid": pid, "file": file})


def request_of(name: str, values: Mapping[str, Value]) -> bytes:
    """Return a request to a child, whose answers come in the order of its requests."""
    return REQUEST.pack(NUMBERS[name], 0) + BY_NAME[name].pack(values)


# Calls made by the broker: the daemon's side of its socket (D23; docs/broker.md).
#
# Calls are short and made one at a time; the event loop waits for the answer, as it would for the
# system call itself. Slow reads and moves of pages are different: a child of the broker makes them,
# which is killed when it does not answer, and the event loop goes on meanwhile.

ANSWER_S: Final = 10.0
"""Longest wait for an answer: the broker hangs, and systemd's watchdog ends the daemon next."""

SYSCALL_S: Final = 0.1
"""Longest wait for a thread's system call, which a pass needs at once."""

HUNG_S: Final = 60.0
"""How long a process is not asked again for its threads' system calls after that took too long."""

LATE_S: Final = 0.5
"""How much longer than QEMU has time the broker's child has."""

MAX_READERS: Final = 8
"""Most children that read at once."""

_PROCESS: Final = re.compile(r"/proc/([1-9][0-9]{0,8})\Z")


class BrokerGone(DaemonError):  # noqa: N818 - what happened, as ConnectionError's own names
    """The broker ended, or its answers can no longer be trusted; the daemon ends too.

    It is no OSError: nothing follows from it about what was asked for.
    """


class BrokerCalls(ThreadCalls, FileCalls):
    """The calls over one socket; see Calls for what the methods do.

    `close` ends the broker.
    """

    def __init__(self, channel: socket.socket, settings: Settings) -> None:
        """`channel` is connected to a broker that has taken these settings."""
        super().__init__(settings)
        channel.settimeout(ANSWER_S)
        self.ended = threading.Event()
        """Set once the channel has ended, for whichever reason; then no call succeeds."""
        self.on_end: Callable[[], None] = lambda: None
        self._channel = channel
        self._settings = settings
        self._number = 0
        self._turn = threading.Lock()  # the list of pods is asked for in a thread
        self._idle: list[Child] = []
        self._slots = asyncio.Semaphore(MAX_READERS)
        self._for_syscalls: Child | None = None
        self._mover: Child | None = None
        self._monitor: Child | None = None
        self._hung: dict[int, float] = {}
        self._jails: dict[int, str] = {}
        """The verified jails by pid, as the broker remembers them."""

    def close(self) -> None:
        """Close the sockets: the broker and its children end."""
        self._end_children()
        self._channel.close()

    get_affinity = staticmethod(os.sched_getaffinity)  # the kernel lets everybody ask

    def executable(self, pid: int) -> tuple[FileStatus, str]:
        """See Calls."""
        answer = self._ask("executable", {"pid": pid})
        status = FileStatus(*STATUS.unpack_from(answer))
        return status, os.fsdecode(answer[STATUS.size :])

    def executables(self, pids: Sequence[int]) -> list[str]:
        """See Calls."""
        found: list[str] = []
        for at in range(0, len(pids), threads.MAX_PIDS):
            asked = array("I", pids[at : at + threads.MAX_PIDS]).tobytes()
            found += os.fsdecode(self._ask("executables", {"pids": asked})).split("\0")
        return found

    def descriptors(self, process: str) -> list[str]:
        """See Calls."""
        answer = self._ask("descriptors", {"pid": _number_in(_PROCESS, process)})
        return os.fsdecode(answer).split("\n") if answer else []

    def kvm_vcpus(self, folder: str, pid: int, tids: Collection[int]) -> list[KvmVcpu]:
        """See Calls; the broker knows the folder and the threads itself."""
        return threads.parse_vcpus(self._ask("kvm-vcpus", {"pid": pid}))

    def verify_jail(self, pid: int, jail: str) -> None:
        """See Calls."""
        base, program, sandbox = threads.parts_of(jail)
        bases = (self._settings.vc, self._settings.kata)
        if base not in bases:
            raise PermissionError(EACCES, "not below Kata's folders", jail)
        self._jails.pop(pid, None)
        self._ask(
            "verify-jail",
            {"pid": pid, "base": bases.index(base), "program": program, "sandbox": sandbox},
        )
        if len(self._jails) >= MAX_JAILS:
            del self._jails[next(iter(self._jails))]
        self._jails[pid] = jail
        if not all(map(self._is_informed, self._waiting())):
            self._end_children()

    def process_events(self, token: int, *, execs: bool) -> socket.socket:
        """See Calls."""
        found = self._handed("process-events", {"token": token, "execs": int(execs)})
        return socket.socket(fileno=found)

    def switches(self, cpu: int) -> int:
        """See Calls."""
        return self._handed("switches", {"cpu": cpu})

    def write_tunables(self, writes: Sequence[TunableWrite], root: str) -> list[TunableWritten]:
        """See Calls."""
        assert not root, "the broker knows the running system only"
        written: list[TunableWritten] = []
        for part in tunables.batched_writes(writes):
            answer = self._ask("tunables", {"writes": tunables.render_writes(part)})
            written += tunables.parse_written(answer)
        return written

    def ask_irqbalance(self, pid: int, banned: str | None) -> socket.socket:
        """See Calls."""
        asked = "?" if banned is None else f"={banned}"
        return socket.socket(fileno=self._handed("irqbalance", {"pid": pid, "banned": asked}))

    async def read_slow(
        self, requests: Sequence[tuple[int, str, int]], deadline_s: float
    ) -> Mapping[SlowFile, bytes | OSError]:
        """See Calls."""
        left = deque(requests)
        found: dict[SlowFile, bytes | OSError] = {}
        async with self._slots:
            while left:
                try:
                    reader = self._idle.pop() if self._idle else self._new_child()
                except OSError as error:  # so many are stuck that there can be no more
                    found |= {(pid, file): error for pid, file, _ in left}
                    break
                sound = False
                try:
                    sound = await read_all(reader, left, found, deadline_s)
                finally:
                    if sound and self._is_informed(reader):
                        self._idle.append(reader)
                    else:
                        self._kill(reader)
        return found

    async def move_pages(self, window: PageWindow, deadline_s: float) -> PagesMoved:
        """See Calls."""
        child, self._mover = self._mover or self._new_child("mover"), None
        sound = False
        try:
            data = await ask(child, "move-pages", {"window": render_window(window)}, deadline_s)
            sound = True
        except (EOFError, TimeoutError) as error:
            raise TimeoutError(ETIMEDOUT, "the move does not end") from error
        except OSError:
            sound = True  # the answer to this window
            raise
        finally:
            if sound and self._is_informed(child):
                self._mover = child
            else:
                self._kill(child)
        return parse_moved(data)

    async def vcpu_list(self, path: str, greeting_s: float, session_s: float) -> bytes:
        """See Calls; a child of the broker talks to QEMU, and is killed when nobody waits."""
        found = self._finder.find(MONITOR_ROW, path)
        if found is None:
            raise PermissionError(EACCES, "not a monitor of Kata's", path)
        child, self._monitor = self._monitor or self._new_child("monitor"), None
        times = {"greeting_ms": int(greeting_s * 1000), "session_ms": int(session_s * 1000)}
        answered = False
        try:
            data = await ask(child, "vcpu-list", found.values | times, session_s + LATE_S)
            answered = True
        except EOFError as error:
            raise OSError(ECONNRESET, "the broker's child has ended") from error
        except TimeoutError:
            raise
        except OSError:
            answered = True  # its own answer
            raise
        finally:
            if answered and self._monitor is None:
                self._monitor = child
            else:
                self._kill(child)
        return data

    # ---- the socket ----------------------------------------------------------------------

    def _ask(
        self, name: str, values: Mapping[str, Value], descriptors: Sequence[int] = ()
    ) -> bytes:
        """Return the answer's bytes; raises OSError, the operation's own, and BrokerGone."""
        answer, handed = self._exchange(name, values, descriptors)
        return content_of(answer, handed)

    def _handed(self, name: str, values: Mapping[str, Value]) -> int:
        """Return the descriptor that an operation hands over."""
        _, handed = self._exchange(name, values, ())
        if len(handed) != 1:
            self._end("the broker handed over no descriptor")
        return handed[0]

    def _exchange(
        self, name: str, values: Mapping[str, Value], descriptors: Sequence[int]
    ) -> tuple[bytes, list[int]]:
        data = BY_NAME[name].pack(values)
        with self._turn:
            if self.ended.is_set():
                self._end("the broker has ended")
            self._number = number = (self._number + 1) & 0xFFFFFFFF
            request = REQUEST.pack(NUMBERS[name], number) + data
            try:
                if descriptors:
                    socket.send_fds(self._channel, [request], descriptors)
                else:
                    self._channel.send(request)
                answered, errno, answer, handed = receive(self._channel)
            except TimeoutError:
                self._end(f"the broker did not answer within {ANSWER_S:g} s")
            except (OSError, EOFError):
                self._end("the broker has ended")
            if answered != number:
                self._end("the broker answered another request")
        if errno:
            raise OSError(errno, os.strerror(errno))
        return answer, handed

    def _end(self, reason: str) -> NoReturn:
        """End the channel for good: a later answer would be taken for another request's."""
        if not self.ended.is_set():
            self.ended.set()
            with contextlib.suppress(OSError):
                self._channel.shutdown(socket.SHUT_RDWR)
            self.on_end()
        raise BrokerGone(reason, hint="the daemon ends; systemd starts both again")

    # ---- children -----------------------------------------------------------------------

    def _new_child(self, kind: str = "reader") -> Child:
        answer, (fd,) = self._exchange("child", {"kind": kind}, ())
        channel = socket.socket(fileno=fd)
        channel.settimeout(0)
        return Child(NUMBER.unpack(answer)[0], channel, dict(self._jails))

    def _end_children(self) -> None:
        """End the children that wait for requests."""
        for child in self._waiting():
            child.channel.close()
        self._idle, self._for_syscalls, self._mover, self._monitor = [], None, None, None

    def _waiting(self) -> list[Child]:
        found = (*self._idle, self._for_syscalls, self._mover, self._monitor)
        return [one for one in found if one is not None]

    def _is_informed(self, child: Child) -> bool:
        """Whether a child knows every jail: to one that does not, its VMM is a stranger."""
        return self._jails.items() <= child.jails.items()

    def _kill(self, reader: Child) -> None:
        reader.channel.close()
        self._ask("end-child", {"pid": reader.pid})

    def system_calls(self, process: str, tids: Sequence[int]) -> list[ThreadCall]:
        """See Calls; a process that did not show it lately is not asked again for a while."""
        pid, now = _number_in(_PROCESS, process), time.monotonic()
        if self._hung.get(pid, now) > now:
            raise TimeoutError(ETIMEDOUT, "it did not answer lately")
        found: list[ThreadCall] = []
        for at in range(0, len(tids), threads.MAX_TIDS):
            found += self._system_calls(pid, tids[at : at + threads.MAX_TIDS], now)
        return found

    def _system_calls(self, pid: int, tids: Sequence[int], now: float) -> list[ThreadCall]:
        reader, self._for_syscalls = self._for_syscalls or self._new_child(), None
        reader.channel.settimeout(SYSCALL_S)
        request: dict[str, Value] = {"pid": pid, "tids": array("I", tids).tobytes()}
        try:
            reader.channel.send(request_of("system-calls", request))
            _, errno, answer, handed = receive_from(reader)
        except (OSError, EOFError) as error:
            self._kill(reader)
            self._hung = {one: until for one, until in self._hung.items() if until > now}
            self._hung[pid] = now + HUNG_S
            log.warning("process %d hangs: its threads' system calls cannot be read in time", pid)
            raise TimeoutError(ETIMEDOUT, "it does not answer") from error
        self._for_syscalls = reader
        if errno:
            raise OSError(errno, os.strerror(errno))
        return threads.parse_calls(content_of(answer, handed))


def _number_in(pattern: re.Pattern[str], path: str) -> int:
    """Return the pid in a path below /proc; PermissionError for another path."""
    match = pattern.match(path)
    if match is None:
        raise PermissionError(EACCES, "not a process of this system", path)
    return int(match[1])
