"""Calls made by the broker: the daemon's side of its socket (D23; docs/broker.md).

Calls are short and made one at a time; the event loop waits for the answer, as it would for the
system call itself. Slow reads are different: each batch has a child of the broker of its own,
which is killed when it does not answer, and the event loop goes on meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from errno import ECONNRESET, ETIMEDOUT
from typing import Final, NamedTuple

from kata_pin.broker import tunables
from kata_pin.broker.protocol import (
    ANSWER,
    MAX_MESSAGE,
    NUMBER,
    REQUEST,
    STATUS,
    FileStatus,
)
from kata_pin.broker.tunables import TunableWrite, TunableWritten
from kata_pin.calls import DIRECT
from kata_pin.host.thread_calls import ThreadCalls

log = logging.getLogger(__name__)

ANSWER_S: Final = 10.0
"""Longest wait for an answer: the broker hangs, and systemd's watchdog ends the daemon next."""

SYSCALL_S: Final = 0.1
"""Longest wait for a thread's system call, which a pass needs at once."""

STARVED_S: Final = 2.0
"""Longest wait for an answer of a child that could run: it only gets no CPU."""

HUNG_S: Final = 60.0
"""How long a process is not asked again for its threads' system calls after that took too long."""

MAX_READERS: Final = 8
"""Most children that read at once."""

WINDOW: Final = 32
"""Most requests that a child has before it answered them."""

_SYSCALL: Final = re.compile(r"/proc/([0-9]+)/(task/[0-9]+/syscall)\Z")

SlowFile = tuple[int, str]
"""A pid, and a file below /proc/<pid>."""


class BrokerGone(OSError):  # noqa: N818 - what happened, as ConnectionError's own names
    """The broker ended, or does not answer; the daemon ends too."""


class Reader(NamedTuple):
    """A child of the broker that reads: its pid and our end of its socket."""

    pid: int
    channel: socket.socket


class BrokerCalls(ThreadCalls):
    """The calls over one socket; see Calls for what the methods do.

    `close` ends the broker.
    """

    def __init__(self, channel: socket.socket) -> None:
        """`channel` is connected to a broker that has taken its first message."""
        channel.settimeout(ANSWER_S)
        self._channel = channel
        self._number = 0
        self._turn = threading.Lock()  # the list of pods is asked for in a thread
        self._idle: list[Reader] = []
        self._slots = asyncio.Semaphore(MAX_READERS)
        self._for_syscalls: Reader | None = None
        self._hung: dict[int, float] = {}

    def close(self) -> None:
        """Close the sockets: the broker and its children end."""
        for reader in (*self._idle, *([self._for_syscalls] if self._for_syscalls else ())):
            reader.channel.close()
        self._idle, self._for_syscalls = [], None
        self._channel.close()

    def get_affinity(self, tid: int) -> set[int]:
        """See Calls; the kernel lets everybody ask."""
        return os.sched_getaffinity(tid)

    def readlink(self, path: str) -> str:
        """See Calls."""
        return os.fsdecode(self._ask(b"l", os.fsencode(path)))

    def listdir(self, path: str) -> list[str]:
        """See Calls."""
        try:
            return os.listdir(path)
        except PermissionError:
            names = os.fsdecode(self._ask(b"d", os.fsencode(path)))
            return names.split("/") if names else []

    def stat(self, path: str) -> FileStatus:
        """See Calls; what needs no rights is not asked of the broker."""
        return (
            self._own_or(DIRECT.stat, path) if not path.startswith("/proc/") else self._stat(path)
        )

    def lstat(self, path: str) -> FileStatus:
        """See Calls."""
        return self._own_or(DIRECT.lstat, path)

    def _own_or(self, own: Callable[[str], FileStatus], path: str) -> FileStatus:
        try:
            return own(path)
        except PermissionError:
            return self._stat(path)

    def _stat(self, path: str) -> FileStatus:
        return FileStatus(*STATUS.unpack(self._ask(b"s", os.fsencode(path))))

    def open_below(self, base: str, parts: Sequence[str]) -> int:
        """See Calls."""
        try:
            return DIRECT.open_below(base, parts)
        except PermissionError:
            return self._handed(b"o", os.fsencode("/".join((base.rstrip("/"), *parts))))

    def add_watch(self, inotify: int, path: str, mask: int) -> int:
        """See Calls."""
        try:
            return DIRECT.add_watch(inotify, path, mask)
        except PermissionError:
            request = NUMBER.pack(mask & 0xFFFFFFFF) + os.fsencode(path)
            number: int = NUMBER.unpack(self._ask(b"w", request, [inotify]))[0]
            return number

    def read(self, path: str, limit: int) -> bytes:
        """See Calls."""
        syscall = _SYSCALL.match(path)
        if syscall is not None:
            return self._read_syscall(int(syscall[1]), syscall[2], limit)
        return self._ask(b"r", NUMBER.pack(limit) + os.fsencode(path))

    def connect(self, path: str) -> socket.socket:
        """See Calls."""
        return socket.socket(fileno=self._handed(b"c", os.fsencode(path)))

    def verify_jail(self, pid: int, jail: str) -> None:
        """See Calls."""
        self._ask(b"j", NUMBER.pack(pid) + os.fsencode(jail))

    def process_events(self, first: bytes) -> socket.socket:
        """See Calls."""
        return socket.socket(fileno=self._handed(b"p", first))

    def switches(self, cpu: int) -> int:
        """See Calls."""
        return self._handed(b"e", NUMBER.pack(cpu))

    def write_tunables(self, writes: Sequence[TunableWrite], root: str) -> list[TunableWritten]:
        """See Calls."""
        assert not root, "the broker knows the running system only"
        written: list[TunableWritten] = []
        for part in tunables.batched_writes(writes):
            written += tunables.parse_written(self._ask(b"t", tunables.render_writes(part)))
        return written

    def ask_irqbalance(self, pid: int, banned: str | None) -> socket.socket:
        """See Calls."""
        what = b"?" if banned is None else b"=" + banned.encode("ascii")
        return socket.socket(fileno=self._handed(b"b", NUMBER.pack(pid) + what))

    async def read_slow(
        self, requests: Sequence[tuple[int, str, int]], deadline_s: float
    ) -> Mapping[SlowFile, bytes | OSError]:
        """See Calls."""
        left = deque(requests)
        found: dict[SlowFile, bytes | OSError] = {}
        async with self._slots:
            while left:
                try:
                    reader = self._idle.pop() if self._idle else self._new_reader()
                except OSError as error:  # so many are stuck that there can be no more
                    found |= {(pid, file): error for pid, file, _ in left}
                    break
                sound = False
                try:
                    sound = await _read_all(reader, left, found, deadline_s)
                finally:
                    if sound:
                        self._idle.append(reader)
                    else:
                        self._kill(reader)
        return found

    # ---- the socket ----------------------------------------------------------------------

    def _ask(self, letter: bytes, data: bytes = b"", descriptors: Sequence[int] = ()) -> bytes:
        """Return the answer's bytes; raises OSError, also the operation's own."""
        answer, handed = self._exchange(letter, data, descriptors)
        return _content(answer, handed)

    def _handed(self, letter: bytes, data: bytes) -> int:
        """Return the descriptor that an operation hands over."""
        _, (fd, *_more) = self._exchange(letter, data, ())
        return fd

    def _exchange(
        self, letter: bytes, data: bytes, descriptors: Sequence[int]
    ) -> tuple[bytes, list[int]]:
        try:
            with self._turn:
                self._number = number = (self._number + 1) & 0xFFFFFFFF
                socket.send_fds(self._channel, [REQUEST.pack(letter, number) + data], descriptors)
                answered, errno, answer, handed = _receive(self._channel)
        except TimeoutError as error:
            raise BrokerGone(ETIMEDOUT, "the broker does not answer") from error
        except (OSError, EOFError) as error:
            raise BrokerGone(ECONNRESET, "the broker has ended") from error
        if answered != number:
            raise BrokerGone(ECONNRESET, "the broker answered another request")
        if errno:
            raise OSError(errno, os.strerror(errno))
        return answer, handed

    # ---- children that read --------------------------------------------------------------

    def _new_reader(self) -> Reader:
        answer, (fd,) = self._exchange(b"n", b"", ())
        channel = socket.socket(fileno=fd)
        channel.settimeout(0)
        return Reader(NUMBER.unpack(answer)[0], channel)

    def _kill(self, reader: Reader) -> None:
        reader.channel.close()
        self._ask(b"k", NUMBER.pack(reader.pid))

    def _read_syscall(self, pid: int, file: str, limit: int) -> bytes:
        """Return what a thread waits in; TimeoutError for a process that did not show it lately."""
        now = time.monotonic()
        if self._hung.get(pid, now) > now:
            raise TimeoutError(ETIMEDOUT, "it did not answer lately")
        reader, self._for_syscalls = self._for_syscalls or self._new_reader(), None
        reader.channel.settimeout(SYSCALL_S)
        try:
            reader.channel.send(_slow_request(0, pid, file, limit))
            _, errno, answer, handed = _receive_from(reader)
        except (OSError, EOFError) as error:
            self._kill(reader)
            self._hung = {one: until for one, until in self._hung.items() if until > now}
            self._hung[pid] = now + HUNG_S
            log.warning("process %d hangs: /proc/%d/%s cannot be read in time", pid, pid, file)
            raise TimeoutError(ETIMEDOUT, "it does not answer") from error
        self._for_syscalls = reader
        if errno:
            raise OSError(errno, os.strerror(errno))
        return _content(answer, handed)


async def _read_all(
    reader: Reader,
    left: deque[tuple[int, str, int]],
    found: dict[SlowFile, bytes | OSError],
    deadline_s: float,
) -> bool:
    """Have a child read what is left until nothing is; return False when it did not answer."""
    sent: deque[tuple[int, str, int]] = deque()
    try:
        while left or sent:
            while left and len(sent) < WINDOW:
                reader.channel.send(_slow_request(0, *left[0]))
                sent.append(left.popleft())
            try:
                _, errno, answer, handed = _receive(reader.channel)
            except BlockingIOError:
                await _readable(reader, deadline_s)
                continue
            pid, file, _ = sent.popleft()
            content = _content(answer, handed)
            found[pid, file] = OSError(errno, os.strerror(errno)) if errno else content
    except (OSError, EOFError) as error:  # TimeoutError is an OSError
        if sent:
            pid, file, _ = sent.popleft()
            late = isinstance(error, TimeoutError)
            found[pid, file] = TimeoutError(ETIMEDOUT, "it hangs") if late else OSError(*error.args)
        left.extendleft(reversed(sent))
        return False
    return True


async def _readable(reader: Reader, deadline_s: float) -> None:
    """Return when a child has answered; TimeoutError if it sleeps after the deadline, or long."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    until = time.monotonic() + deadline_s + STARVED_S
    loop.add_reader(reader.channel.fileno(), ready.set)
    try:
        while not ready.is_set():
            try:
                async with asyncio.timeout(deadline_s):
                    await ready.wait()
            except TimeoutError:
                if _sleeps(reader) or time.monotonic() > until:
                    raise
    finally:
        loop.remove_reader(reader.channel.fileno())


def _receive(channel: socket.socket) -> tuple[int, int, bytes, list[int]]:
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


def _receive_from(reader: Reader) -> tuple[int, int, bytes, list[int]]:
    """Return a child's answer, as _receive; TimeoutError if it sleeps, or after a long time."""
    until = time.monotonic() + STARVED_S
    while True:
        try:
            return _receive(reader.channel)
        except TimeoutError:
            if _sleeps(reader) or time.monotonic() > until:
                raise


def _sleeps(reader: Reader) -> bool:
    """Return whether a child waits in a read: it does not if it could run, or was stopped.

    Nor does one that has answered by now: it sleeps until the next request.
    """
    try:
        with open(f"/proc/{reader.pid}/stat", "rb", buffering=0) as file:
            if file.read(1024).rpartition(b") ")[2].startswith((b"R", b"T")):
                return False
    except OSError:
        return True
    answered = select.poll()
    answered.register(reader.channel, select.POLLIN)
    return not answered.poll(0)


def _content(answer: bytes, descriptors: Iterable[int]) -> bytes:
    """Return an answer's bytes, which may have come as a file in memory."""
    for fd in descriptors:
        with open(fd, "rb") as file:
            file.seek(0)
            answer += file.read()
    return answer


def _slow_request(number: int, pid: int, file: str, limit: int) -> bytes:
    return REQUEST.pack(b"x", number) + NUMBER.pack(limit) + f"{pid}/{file}".encode()
