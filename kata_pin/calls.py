"""System calls that may need rights which the deciding process does not have (D23).

`Calls` is the one way to them. DIRECT makes them in this process: for commands that root runs, and
on captured trees. The daemon's are made by a small helper process with the rights. What needs no
rights (stat files of processes and threads, cgroups, sysfs) is read without it.

Every method raises OSError as the function of `os` that it is named after.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import Iterable, Mapping, Sequence
from errno import ETIMEDOUT
from typing import Final, Protocol

from kata_pin.broker import affinity, connector, jails, pages, scheduling, slow_reads
from kata_pin.broker.libc import libc
from kata_pin.broker.pages import PagesMoved, PageWindow
from kata_pin.broker.perf import open_switches
from kata_pin.broker.policy import walk
from kata_pin.broker.protocol import Change, Changed, FileStatus
from kata_pin.broker.resctrl import Resctrl
from kata_pin.broker.trust import trusted_uid
from kata_pin.broker.tunables import (
    TunableWrite,
    TunableWritten,
    ask_irqbalance,
    write_tunables,
)

__all__ = [
    "DIRECT",
    "Calls",
    "Change",
    "Changed",
    "DirectCalls",
    "FileStatus",
    "PageWindow",
    "PagesMoved",
    "TunableWrite",
    "TunableWritten",
]


class Calls(Protocol):
    """The calls. Sets of CPUs are numbers, paths absolute."""

    def get_affinity(self, tid: int) -> set[int]:
        """Return the CPUs that a thread may use, offline ones left out by the kernel."""

    def set_affinities(self, changes: Sequence[Change], proc: str) -> list[Changed]:
        """Set the affinities of threads in this order; one that fails does not stop the rest.

        `proc` is where the threads are found: /proc, or a captured tree's.
        """

    def readlink(self, path: str) -> str:
        """Return where a link leads."""

    def listdir(self, path: str) -> list[str]:
        """Return the names in a folder."""

    def stat(self, path: str) -> FileStatus:
        """Return the status of what a path leads to."""

    def lstat(self, path: str) -> FileStatus:
        """Return the status of a path itself, also where it is a link."""

    def read(self, path: str, limit: int) -> bytes:
        """Return what one read of at most `limit` bytes gives."""

    def open_below(self, base: str, parts: Sequence[str]) -> int:
        """Return a descriptor of a file below the folder `base`, to be read.

        `base` may be a link; none of the parts may be one, or be `..`.
        """

    def add_watch(self, inotify: int, path: str, mask: int) -> int:
        """Have a descriptor of inotify watch a path; return the number of the watch."""

    def connect(self, path: str) -> socket.socket:
        """Return a non-blocking stream socket connected to a unix socket.

        BlockingIOError where its backlog is full.
        """

    def verify_jail(self, pid: int, jail: str) -> None:
        """Return if a process runs the program of a jail in it, and only root may write there.

        Otherwise OSError, see broker.jails.check_jailed.
        """

    def process_events(self, first: bytes) -> socket.socket:
        """Return a socket of the process connector on which the request `first` was sent."""

    def switches(self, cpu: int) -> int:
        """Return a descriptor of a perf event that records the task switches of a CPU."""

    def set_classes(
        self, changes: Sequence[Change], policy: int, priority: int, proc: str
    ) -> list[Changed]:
        """Give vCPU threads a scheduling class; the CPUs of each are ignored.

        See broker.scheduling.set_classes.
        """

    def make_group(self, class_name: str, name: str) -> None:
        """Make a sandbox's group of resctrl; see broker.resctrl.Resctrl for these three."""

    def join_group(self, class_name: str, name: str, threads: Sequence[Change]) -> list[Changed]:
        """Have threads join a group; the CPUs of each are ignored."""

    def remove_group(self, class_name: str, name: str) -> None:
        """Remove a sandbox's group, or without `name` that of a class."""

    def write_tunables(self, writes: Sequence[TunableWrite], root: str) -> list[TunableWritten]:
        """Write values of the kernel and read them back; one that fails does not stop the rest.

        `root` is the prefix of the files' tree, empty for the running system.
        """

    def ask_irqbalance(self, pid: int, banned: str | None) -> socket.socket:
        """Return a connection over which irqbalance was asked for its setup, or told its bans.

        See broker.tunables.ask_irqbalance.
        """

    async def move_pages(self, window: PageWindow, deadline_s: float) -> PagesMoved:
        """Move pages of a VMM to another NUMA node; see broker.pages.

        TimeoutError if that does not end within `deadline_s` seconds.
        """

    async def read_slow(
        self, requests: Sequence[tuple[int, str, int]], deadline_s: float
    ) -> Mapping[tuple[int, str], bytes | OSError]:
        """Read files of /proc whose reading may never end: those that take the mmap lock.

        A request is a pid, `cmdline` or `exe` (of a VMM also `maps` or `numa_maps`; without a
        broker any other file too), and the most bytes to return. The answer has the
        content or the error under pid and file, TimeoutError for each one that did not answer
        within `deadline_s` seconds. Of `exe` it is device, inode, uid and
        mode (octal), a newline, and where the link leads (wire.proc.parse_exe).
        """


class DirectCalls:
    """Makes the calls in this process; tests replace the two of the scheduler."""

    def get_affinity(self, tid: int) -> set[int]:
        """See Calls."""
        return os.sched_getaffinity(tid)

    def set_affinity(self, tid: int, cpus: Iterable[int]) -> None:
        """Set a thread's affinity, whoever has its number."""
        os.sched_setaffinity(tid, cpus)

    def set_affinities(self, changes: Sequence[Change], proc: str) -> list[Changed]:
        """See Calls."""
        return affinity.set_affinities(changes, proc, self.set_affinity, self.get_affinity)

    def readlink(self, path: str) -> str:
        """See Calls."""
        return os.readlink(path)

    def listdir(self, path: str) -> list[str]:
        """See Calls."""
        return os.listdir(path)

    def stat(self, path: str) -> FileStatus:
        """See Calls."""
        return _status(os.stat(path))

    def lstat(self, path: str) -> FileStatus:
        """See Calls."""
        return _status(os.lstat(path))

    def open_below(self, base: str, parts: Sequence[str]) -> int:
        """See Calls."""
        return walk(base, parts, os.O_RDONLY)

    def add_watch(self, inotify: int, path: str, mask: int) -> int:
        """See Calls."""
        return libc().add_watch(inotify, path, mask)

    def read(self, path: str, limit: int) -> bytes:
        """See Calls."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(fd, limit)
        finally:
            os.close(fd)

    def connect(self, path: str) -> socket.socket:
        """See Calls."""
        kind = socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
        end = socket.socket(socket.AF_UNIX, kind)
        try:
            end.connect(path)
        except BaseException:
            end.close()
            raise
        return end

    def verify_jail(self, pid: int, jail: str) -> None:
        """See Calls."""
        jails.check_jailed(pid, jail, {0, trusted_uid()})

    def process_events(self, first: bytes) -> socket.socket:
        """See Calls."""
        return connector.process_events(first)

    def switches(self, cpu: int) -> int:
        """See Calls."""
        return open_switches(cpu)

    def set_classes(
        self, changes: Sequence[Change], policy: int, priority: int, proc: str
    ) -> list[Changed]:
        """See Calls."""
        return scheduling.set_classes(changes, policy, priority, proc)

    def make_group(self, class_name: str, name: str) -> None:
        """See Calls; it knows no classes."""
        Resctrl({}).make(class_name, name)

    def join_group(self, class_name: str, name: str, threads: Sequence[Change]) -> list[Changed]:
        """See Calls."""
        return Resctrl({}).join(class_name, name, threads)

    def remove_group(self, class_name: str, name: str) -> None:
        """See Calls."""
        Resctrl({}).remove(class_name, name)

    def write_tunables(self, writes: Sequence[TunableWrite], root: str) -> list[TunableWritten]:
        """See Calls."""
        return write_tunables(writes, root)

    def ask_irqbalance(self, pid: int, banned: str | None) -> socket.socket:
        """See Calls."""
        return ask_irqbalance(pid, banned)

    async def move_pages(self, window: PageWindow, deadline_s: float) -> PagesMoved:
        """See Calls; a thread makes the call, and is left behind where it hangs."""
        loop = asyncio.get_running_loop()
        moved: asyncio.Future[PagesMoved] = loop.create_future()

        def settle(found: PagesMoved | Exception) -> None:
            if moved.done():
                return
            if isinstance(found, Exception):
                moved.set_exception(found)
            else:
                moved.set_result(found)

        def run() -> None:
            found: PagesMoved | Exception
            try:
                found = pages.move_checked(window)
            except (OSError, ValueError) as error:
                found = error
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(settle, found)

        threading.Thread(target=run, daemon=True).start()
        async with asyncio.timeout(deadline_s):
            return await moved

    async def read_slow(
        self, requests: Sequence[tuple[int, str, int]], deadline_s: float
    ) -> Mapping[tuple[int, str], bytes | OSError]:
        """See Calls; one thread reads them in turn, and is left behind where it hangs."""
        answers: dict[tuple[int, str], bytes | OSError] = {}
        left = list(requests)
        while left:
            reader = _Reader(left, answers, asyncio.get_running_loop())
            if await reader.done(deadline_s):
                break
            pid, file, _ = left[reader.position]
            answers[pid, file] = TimeoutError(ETIMEDOUT, os.strerror(ETIMEDOUT))
            left = left[reader.position + 1 :]
        return answers


DIRECT: Final = DirectCalls()
"""The calls of this process."""


class _Reader:
    """A thread that reads files of /proc one after the other; it cannot be ended while it hangs.

    `position` is the request that it is at.
    """

    def __init__(
        self,
        requests: Sequence[tuple[int, str, int]],
        answers: dict[tuple[int, str], bytes | OSError],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._requests = requests
        self._answers = answers
        self._loop = loop
        self._moved = asyncio.Event()
        self._abandoned = False
        self.position = 0
        threading.Thread(target=self._run, daemon=True).start()

    async def done(self, deadline_s: float) -> bool:
        """Wait until it has read everything; False once a single read takes too long."""
        while self.position < len(self._requests):
            try:
                async with asyncio.timeout(deadline_s):
                    await self._moved.wait()
            except TimeoutError:
                self._abandoned = True
                return False
            self._moved.clear()
        return True

    def _run(self) -> None:
        for pid, file, limit in self._requests:
            found = _content(pid, file, limit)
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._take, (pid, file), found)

    def _take(self, key: tuple[int, str], found: bytes | OSError) -> None:
        if not self._abandoned:
            self._answers[key] = found
            self.position += 1
            self._moved.set()


def _status(found: os.stat_result) -> FileStatus:
    return FileStatus(
        found.st_dev,
        found.st_ino,
        found.st_mode,
        found.st_uid,
        found.st_nlink,
        found.st_size,
        found.st_mtime_ns,
    )


def _content(pid: int, file: str, limit: int) -> bytes | OSError:
    try:
        return slow_reads.read(pid, file, limit)
    except OSError as error:
        return error
