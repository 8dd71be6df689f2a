"""The daemon's side of the broker's socket: calls that the broker makes (D23; docs/broker.md)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import socket
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from errno import EACCES, ECONNRESET, ETIMEDOUT
from functools import partial
from itertools import chain
from typing import Final, NoReturn, TypeVar

from kata_pin.base.errors import DaemonError
from kata_pin.rights.broker import threads, tunables
from kata_pin.rights.broker.files import File
from kata_pin.rights.broker.pages import PagesMoved, PageWindow, render_window
from kata_pin.rights.broker.policy import MAX_JAILS
from kata_pin.rights.broker.protocol import (
    MAX_CHANGES,
    MAX_MESSAGE,
    NUMBER,
    REQUEST,
    STATUS,
    AffinityChange,
    Changed,
    FileStatus,
    Settings,
    parse_changed,
    render_changes,
)
from kata_pin.rights.broker.rows import (
    AGENT_ROW,
    BY_NAME,
    FILE_ROW,
    FOLDERS_ROW,
    MONITOR_ROW,
    NAMES_ROW,
    NUMBERS,
    SERVER_ROW,
    WATCH_ROW,
    Finder,
    Found,
    Value,
)
from kata_pin.rights.broker.threads import KvmVcpu, ThreadCall
from kata_pin.rights.broker.tunables import TunableWrite, TunableWritten
from kata_pin.rights.calls import Calls
from kata_pin.rights.client_children import (
    Child,
    SlowFile,
    ask,
    ask_now,
    content_of,
    read_all,
    receive,
)

log = logging.getLogger(__name__)

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

MOST_WAITING: Final = {"reader": MAX_READERS, "mover": 1, "monitor": 1}
"""Most children of each kind that wait for the next request."""

MAX_HEAD: Final = 512  # bytes that a request has before its changes

NO_CPUS: frozenset[int] = frozenset()

T = TypeVar("T")

_PROCESS: Final = re.compile(r"/proc/([1-9][0-9]{0,8})\Z")


class BrokerGone(DaemonError):  # noqa: N818 - what happened, as ConnectionError's own names
    """The broker ended, or its answers can no longer be trusted; the daemon ends too.

    It is no OSError: nothing follows from it about what was asked for.
    """


class BrokerCalls(Calls):
    """The calls over one socket; `close` ends the broker."""

    def __init__(self, channel: socket.socket, settings: Settings) -> None:
        """`channel` is connected to a broker that has taken these settings."""
        channel.settimeout(ANSWER_S)
        self.ended = threading.Event()
        """Set once the channel has ended, for whichever reason; then no call succeeds."""
        self.on_end: Callable[[], None] = lambda: None
        self._channel = channel
        self._settings = settings
        self._number = 0
        self._turn = threading.Lock()  # the list of pods is asked for in a thread
        self._finder = Finder(settings)
        self._waiting: dict[str, list[Child]] = {kind: [] for kind in MOST_WAITING}
        """The children of each kind that wait for requests."""
        self._slots = asyncio.Semaphore(MAX_READERS)
        self._hung: dict[int, float] = {}
        self._jails: dict[int, str] = {}
        """The verified jails by pid, as the broker remembers them."""

    def close(self) -> None:
        """Close the sockets: the broker and its children end."""
        self._end_children()
        self._channel.close()

    # the kernel lets everybody ask
    get_affinity = staticmethod(os.sched_getaffinity)  # type: ignore[assignment]

    def executable(self, pid: int) -> tuple[FileStatus, str]:
        answer = self._ask("executable", {"pid": pid})
        status = FileStatus(*STATUS.unpack_from(answer))
        return status, os.fsdecode(answer[STATUS.size :])

    def executables(self, pids: Sequence[int]) -> list[str]:
        found: list[str] = []
        for at in range(0, len(pids), threads.MAX_PIDS):
            asked = array("I", pids[at : at + threads.MAX_PIDS]).tobytes()
            found += json.loads(self._ask("executables", {"pids": asked}))
        return found

    def descriptors(self, process: str) -> list[str]:
        asked = {"pid": _number_in(_PROCESS, process)}
        links: list[str] = json.loads(self._ask("descriptors", asked))
        return links

    def kvm_vcpus(self, folder: str, pid: int, tids: Collection[int]) -> list[KvmVcpu]:
        return [KvmVcpu(*vcpu) for vcpu in json.loads(self._ask("kvm-vcpus", {"pid": pid}))]

    def verify_jail(self, pid: int, jail: str) -> None:
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
        if not all(map(self._is_informed, chain(*self._waiting.values()))):
            self._end_children()

    def process_events(self, token: int, *, execs: bool) -> socket.socket:
        found = self._handed("process-events", {"token": token, "execs": int(execs)})
        return socket.socket(fileno=found)

    def switches(self, cpu: int) -> int:
        return self._handed("switches", {"cpu": cpu})

    def write_tunables(self, writes: Sequence[TunableWrite], root: str) -> list[TunableWritten]:
        assert not root, "the broker knows the running system only"
        written: list[TunableWritten] = []
        for part in tunables.batched_writes(writes):
            answer = self._ask("tunables", {"writes": tunables.render_writes(part)})
            written += [TunableWritten(*one) for one in json.loads(answer)]
        return written

    def ask_irqbalance(self, pid: int, banned: str | None) -> socket.socket:
        asked = "?" if banned is None else f"={banned}"
        return socket.socket(fileno=self._handed("irqbalance", {"pid": pid, "banned": asked}))

    async def read_slow(
        self, requests: Sequence[tuple[int, str, int]], deadline_s: float
    ) -> Mapping[SlowFile, bytes | OSError]:
        left = deque(requests)
        found: dict[SlowFile, bytes | OSError] = {}
        async with self._slots:
            while left:
                try:
                    with self._child("reader") as reader:
                        if not await read_all(reader, left, found, deadline_s):
                            raise EOFError("it did not answer")
                except EOFError:
                    continue
                except OSError as error:  # so many are stuck that there can be no more
                    found |= {(pid, file): error for pid, file, _ in left}
                    break
        return found

    async def move_pages(self, window: PageWindow, deadline_s: float) -> PagesMoved:
        request = {"window": render_window(window)}
        try:
            with self._child("mover") as child:
                return PagesMoved(*json.loads(await ask(child, "move-pages", request, deadline_s)))
        except (EOFError, TimeoutError) as error:
            raise TimeoutError(ETIMEDOUT, "the move does not end") from error

    async def vcpu_list(self, path: str, greeting_s: float, session_s: float) -> bytes:
        # a child of the broker talks to QEMU, and is killed when nobody waits
        found = self._finder.find(MONITOR_ROW, path)
        if found is None:
            raise PermissionError(EACCES, "not a monitor of Kata's", path)
        times = {"greeting_ms": int(greeting_s * 1000), "session_ms": int(session_s * 1000)}
        try:
            with self._child("monitor") as child:
                return await ask(child, "vcpu-list", found.values | times, session_s + LATE_S)
        except EOFError as error:
            raise OSError(ECONNRESET, "the broker's child has ended") from error

    def system_calls(self, process: str, tids: Sequence[int]) -> list[ThreadCall]:
        # a process that did not show it lately is not asked again for a while
        pid, now = _number_in(_PROCESS, process), time.monotonic()
        if self._hung.get(pid, now) > now:
            raise TimeoutError(ETIMEDOUT, "it did not answer lately")
        found: list[ThreadCall] = []
        try:
            for at in range(0, len(tids), threads.MAX_TIDS):
                part = array("I", tids[at : at + threads.MAX_TIDS]).tobytes()
                request: dict[str, Value] = {"pid": pid, "tids": part}
                with self._child("reader") as reader:
                    answer = ask_now(reader, "system-calls", request, SYSCALL_S)
                found += [ThreadCall(*one) for one in json.loads(answer)]
        except (EOFError, TimeoutError) as error:
            self._hung = {one: until for one, until in self._hung.items() if until > now}
            self._hung[pid] = now + HUNG_S
            log.warning("process %d hangs: its threads' system calls cannot be read in time", pid)
            raise TimeoutError(ETIMEDOUT, "it does not answer") from error
        return found

    # ---- threads, at most so many in a request ------------------------------------------

    def set_affinities(self, changes: Sequence[AffinityChange], proc: str) -> list[Changed]:
        assert proc == "/proc", "the broker knows the running system only"
        done: list[Changed] = []
        for request in _requests(changes):
            done += parse_changed(self._ask("affinities", {"changes": request}))
        return done

    def set_classes(
        self, changes: Sequence[AffinityChange], policy: int, priority: int, proc: str
    ) -> list[Changed]:
        assert proc == "/proc", "the broker knows the running system only"
        head = {"policy": policy, "priority": priority}
        done: list[Changed] = []
        for request in _requests([one._replace(cpus=NO_CPUS) for one in changes]):
            done += parse_changed(self._ask("classes", {**head, "changes": request}))
        return done

    def make_group(self, class_name: str, name: str) -> None:
        self._ask("make-group", {"class": class_name, "group": name})

    def join_group(
        self, class_name: str, name: str, threads: Sequence[AffinityChange]
    ) -> list[Changed]:
        done: list[Changed] = []
        for request in _requests([one._replace(cpus=NO_CPUS) for one in threads]):
            values: dict[str, Value] = {"class": class_name, "group": name, "changes": request}
            done += parse_changed(self._ask("join-group", values))
        return done

    def remove_group(self, class_name: str, name: str) -> None:
        self._ask("remove-group", {"class": class_name, "group": name})

    # ---- files, folders and sockets: what needs no rights is not asked of the broker -----

    def listdir(self, path: str) -> list[str]:
        return self._own_or(partial(os.listdir, path), partial(self._names, NAMES_ROW, path))

    def folders(self, path: str) -> list[str]:
        return self._own_or(partial(super().folders, path), partial(self._names, FOLDERS_ROW, path))

    def stat(self, path: str) -> FileStatus:
        return self._own_or(partial(super().stat, path), partial(self._stat, path))

    def file(self, base: str, parts: Sequence[str], limit: int) -> File:
        path = "/".join((base.rstrip("/"), *parts))
        return self._own_or(
            partial(super().file, base, parts, limit), lambda: self._file(path, limit)
        )

    def add_watch(self, inotify: int, path: str, mask: int) -> int:
        return self._own_or(
            partial(super().add_watch, inotify, path, mask),
            lambda: self._add_watch(inotify, path, mask & 0xFFFF_FFFF),
        )

    def connect(self, path: str) -> socket.socket:
        for kind in (AGENT_ROW, SERVER_ROW):
            found = self._finder.find(kind, path)
            if found is not None:
                return socket.socket(fileno=self._handed(found.row.name, found.values))
        raise PermissionError(EACCES, "not a socket that the broker connects to", path)

    def _own_or(self, own: Callable[[], T], brokered: Callable[[], T]) -> T:
        try:
            return own()
        except PermissionError:
            return brokered()

    def _found(self, kind: str, path: str) -> Found:
        found = self._finder.find(kind, path)
        if found is None:
            raise PermissionError(EACCES, os.strerror(EACCES), path)
        return found

    def _names(self, kind: str, path: str) -> list[str]:
        found = self._found(kind, path)
        names: list[str] = json.loads(self._ask(found.row.name, found.values))
        return names

    def _file(self, path: str, limit: int) -> File:
        found = self._found(FILE_ROW, path)
        answer = self._ask(found.row.name, {**found.values, "limit": limit})
        return File(FileStatus(*STATUS.unpack_from(answer)), answer[STATUS.size :])

    def _stat(self, path: str) -> FileStatus:
        place, program = self._finder.find_place(path), self._finder.find_program(path)
        if place is not None:
            answer = self._ask("folder-status", place)
        elif program is not None:
            answer = self._ask("program", program)
        else:
            return self._file(path, 0).status
        return FileStatus(*STATUS.unpack(answer))

    def _add_watch(self, inotify: int, path: str, mask: int) -> int:
        place = self._finder.find_place(path)
        if place is not None:
            answer = self._ask("watch-folder", {**place, "mask": mask}, [inotify])
        else:
            found = self._found(WATCH_ROW, path)
            answer = self._ask(found.row.name, {**found.values, "mask": mask}, [inotify])
        (number,) = NUMBER.unpack(answer)
        return int(number)

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

    @contextlib.contextmanager
    def _child(self, kind: str) -> Iterator[Child]:
        """Lend a child; one that does not answer within the block is killed."""
        waiting, answered = self._waiting[kind], False
        child = waiting.pop() if waiting else self._new_child(kind)
        try:
            yield child
            answered = True
        except TimeoutError:
            raise
        except OSError:
            answered = True  # the operation's own
            raise
        finally:
            if answered and self._is_informed(child) and len(waiting) < MOST_WAITING[kind]:
                waiting.append(child)
            else:
                child.channel.close()
                self._ask("end-child", {"pid": child.pid})

    def _new_child(self, kind: str) -> Child:
        answer, (fd,) = self._exchange("child", {"kind": kind}, ())
        channel = socket.socket(fileno=fd)
        channel.settimeout(0)
        return Child(NUMBER.unpack(answer)[0], channel, dict(self._jails))

    def _end_children(self) -> None:
        """End the children that wait for requests."""
        for children in self._waiting.values():
            while children:
                children.pop().channel.close()

    def _is_informed(self, child: Child) -> bool:
        """Whether a child knows every jail: to one that does not, its VMM is a stranger."""
        return self._jails.items() <= child.jails.items()


def _number_in(pattern: re.Pattern[str], path: str) -> int:
    """Return the pid in a path below /proc; PermissionError for another path."""
    match = pattern.match(path)
    if match is None:
        raise PermissionError(EACCES, "not a process of this system", path)
    return int(match[1])


def _requests(changes: Sequence[AffinityChange]) -> Iterator[bytes]:
    """Yield requests for changes that are short enough."""
    request = render_changes(changes) if len(changes) <= MAX_CHANGES else b""
    if changes and (not request or len(request) > MAX_MESSAGE - REQUEST.size - MAX_HEAD):
        half = (len(changes) + 1) // 2
        yield from _requests(changes[:half])
        yield from _requests(changes[half:])
    elif changes:
        yield request
