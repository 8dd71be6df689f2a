"""Calls made by the broker: the daemon's side of its socket (D23; docs/broker.md).

Calls are short and made one at a time; the event loop waits for the answer, as it would for the
system call itself. Slow reads and moves of pages are different: a child of the broker makes them,
which is killed when it does not answer, and the event loop goes on meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from errno import ECONNRESET, ETIMEDOUT
from typing import Final

from kata_pin.broker import tunables
from kata_pin.broker.pages import PagesMoved, PageWindow, parse_moved, render_window
from kata_pin.broker.policy import MAX_JAILS
from kata_pin.broker.protocol import NUMBER, REQUEST, STATUS, FileStatus
from kata_pin.broker.tunables import TunableWrite, TunableWritten
from kata_pin.calls import DIRECT
from kata_pin.host.broker_children import (
    Child,
    SlowFile,
    ask,
    content_of,
    read_all,
    receive,
    receive_from,
    slow_request,
)
from kata_pin.host.thread_calls import ThreadCalls

log = logging.getLogger(__name__)

ANSWER_S: Final = 10.0
"""Longest wait for an answer: the broker hangs, and systemd's watchdog ends the daemon next."""

SYSCALL_S: Final = 0.1
"""Longest wait for a thread's system call, which a pass needs at once."""

HUNG_S: Final = 60.0
"""How long a process is not asked again for its threads' system calls after that took too long."""

MAX_READERS: Final = 8
"""Most children that read at once."""

_SYSCALL: Final = re.compile(r"/proc/([0-9]+)/(task/[0-9]+/syscall)\Z")


class BrokerGone(OSError):  # noqa: N818 - what happened, as ConnectionError's own names
    """The broker ended, or does not answer; the daemon ends too."""


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
        self._idle: list[Child] = []
        self._slots = asyncio.Semaphore(MAX_READERS)
        self._for_syscalls: Child | None = None
        self._mover: Child | None = None
        self._hung: dict[int, float] = {}
        self._jails: dict[int, str] = {}
        """The verified jails by pid, as the broker remembers them."""

    def close(self) -> None:
        """Close the sockets: the broker and its children end."""
        self._end_children()
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
        self._jails.pop(pid, None)
        self._ask(b"j", NUMBER.pack(pid) + os.fsencode(jail))
        if len(self._jails) >= MAX_JAILS:
            del self._jails[next(iter(self._jails))]
        self._jails[pid] = jail
        if not all(map(self._is_informed, self._waiting())):
            self._end_children()

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
        child, self._mover = self._mover or self._new_child(b"m"), None
        sound = False
        try:
            data = await ask(child, b"m", render_window(window), deadline_s)
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

    # ---- the socket ----------------------------------------------------------------------

    def _ask(self, letter: bytes, data: bytes = b"", descriptors: Sequence[int] = ()) -> bytes:
        """Return the answer's bytes; raises OSError, also the operation's own."""
        answer, handed = self._exchange(letter, data, descriptors)
        return content_of(answer, handed)

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
                answered, errno, answer, handed = receive(self._channel)
        except TimeoutError as error:
            raise BrokerGone(ETIMEDOUT, "the broker does not answer") from error
        except (OSError, EOFError) as error:
            raise BrokerGone(ECONNRESET, "the broker has ended") from error
        if answered != number:
            raise BrokerGone(ECONNRESET, "the broker answered another request")
        if errno:
            raise OSError(errno, os.strerror(errno))
        return answer, handed

    # ---- children -----------------------------------------------------------------------

    def _new_child(self, kind: bytes = b"") -> Child:
        answer, (fd,) = self._exchange(b"n", kind, ())
        channel = socket.socket(fileno=fd)
        channel.settimeout(0)
        return Child(NUMBER.unpack(answer)[0], channel, dict(self._jails))

    def _end_children(self) -> None:
        """End the children that wait for requests."""
        for child in self._waiting():
            child.channel.close()
        self._idle, self._for_syscalls, self._mover = [], None, None

    def _waiting(self) -> list[Child]:
        found = (*self._idle, self._for_syscalls, self._mover)
        return [one for one in found if one is not None]

    def _is_informed(self, child: Child) -> bool:
        """Whether a child knows every jail: to one that does not, its VMM is a stranger."""
        return self._jails.items() <= child.jails.items()

    def _kill(self, reader: Child) -> None:
        reader.channel.close()
        self._ask(b"k", NUMBER.pack(reader.pid))

    def _read_syscall(self, pid: int, file: str, limit: int) -> bytes:
        """Return what a thread waits in; TimeoutError for a process that did not show it lately."""
        now = time.monotonic()
        if self._hung.get(pid, now) > now:
            raise TimeoutError(ETIMEDOUT, "it did not answer lately")
        reader, self._for_syscalls = self._for_syscalls or self._new_child(), None
        reader.channel.settimeout(SYSCALL_S)
        try:
            reader.channel.send(slow_request(0, pid, file, limit))
            _, errno, answer, handed = receive_from(reader)
        except (OSError, EOFError) as error:
            self._kill(reader)
            self._hung = {one: until for one, until in self._hung.items() if until > now}
            self._hung[pid] = now + HUNG_S
            log.warning("process %d hangs: /proc/%d/%s cannot be read in time", pid, pid, file)
            raise TimeoutError(ETIMEDOUT, "it does not answer") from error
        self._for_syscalls = reader
        if errno:
            raise OSError(errno, os.strerror(errno))
        return content_of(answer, handed)
