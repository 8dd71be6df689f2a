"""System calls that may need rights which the deciding process does not have (D23).

`Calls` is the one way to them. DIRECT makes them in this process: for commands that root runs, and
on captured trees. The daemon's are made by a small helper process with the rights. What needs no
rights (stat files of processes and threads, cgroups, sysfs) is read without it.

Every method raises OSError as the function of `os` that it is named after.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from errno import ETIMEDOUT
from typing import TYPE_CHECKING, Final, Protocol

from kata_pin.rights.broker import children, pages, threads
from kata_pin.rights.broker import libc as broker_libc
from kata_pin.rights.broker.files import (
    File,
    as_status,
    connected,
    names_in,
    open_path,
    read_file,
    trusted_uid,
)
from kata_pin.rights.broker.libc import libc, open_switches
from kata_pin.rights.broker.pages import PagesMoved, PageWindow
from kata_pin.rights.broker.protocol import MAX_NAMES, AffinityChange, Changed, FileStatus
from kata_pin.rights.broker.threads import MAX_REPLY, KvmVcpu, ThreadCall, executable_of
from kata_pin.rights.broker.tunables import (
    ResctrlGroups,
    TunableWrite,
    TunableWritten,
    ask_irqbalance,
    write_tunables,
)

if TYPE_CHECKING:
    import asyncio

__all__ = [
    "DIRECT",
    "MAX_REPLY",
    "AffinityChange",
    "Calls",
    "Changed",
    "DirectCalls",
    "File",
    "FileStatus",
    "KvmVcpu",
    "PageWindow",
    "PagesMoved",
    "ThreadCall",
    "TunableWrite",
    "TunableWritten",
]

_OWNERS: Final = frozenset({0, trusted_uid()})


class Calls(Protocol):
    """The calls. Sets of CPUs are numbers, paths absolute."""

    def get_affinity(self, tid: int) -> set[int]:
        """Return the CPUs that a thread may use, offline ones left out by the kernel."""

    def set_affinities(self, changes: Sequence[AffinityChange], proc: str) -> list[Changed]:
        """Set the affinities of threads in this order; one that fails does not stop the rest.

        `proc` is where the threads are found: /proc, or a captured tree's.
        """

    def executable(self, pid: int) -> tuple[FileStatus, str]:
        """Return the status and the name of the file that a process executes."""

    def executables(self, pids: Sequence[int]) -> list[str]:
        """Return the names of what processes execute, empty where that cannot be seen."""

    def system_calls(self, process: str, tids: Sequence[int]) -> list[ThreadCall]:
        """Return what threads of a process wait in; `process` is its folder in /proc.

        TimeoutError where that hangs.
        """

    def descriptors(self, process: str) -> list[str]:
        """Return where descriptors of vCPUs and of VFIO lead, among a process's first 2,048."""

    def kvm_vcpus(self, folder: str, pid: int, tids: Collection[int]) -> list[KvmVcpu]:
        """Return the vCPUs of the VMs that a process made, whose threads are `tids`.

        `folder` is debugfs's `kvm`.
        """

    async def vcpu_list(self, path: str, greeting_s: float, session_s: float) -> bytes:
        """Return what the QEMU at a monitor's socket answers; see broker.threads.converse.

        Cancelled, it is off the socket before the cancellation goes on.
        """

    def listdir(self, path: str) -> list[str]:
        """Return the names in a folder."""

    def folders(self, path: str) -> list[str]:
        """Return the names of the folders in a folder, links to some not among them."""

    def stat(self, path: str) -> FileStatus:
        """Return the status of what a path leads to."""

    def file(self, base: str, parts: Sequence[str], limit: int) -> File:
        """Return the status of a file below the folder `base`, and at most `limit` bytes of it.

        `base` may be a link; none of the parts may be one, or be `..`. Without a limit, and of what
        broker.files.refusal objects to, only the status.
        """

    def add_watch(self, inotify: int, path: str, mask: int) -> int:
        """Have a descriptor of inotify watch a path; return the number of the watch."""

    def connect(self, path: str) -> socket.socket:
        """Return a non-blocking stream socket connected to a unix socket.

        BlockingIOError where its backlog is full.
        """

    def verify_jail(self, pid: int, jail: str) -> None:
        """Return if a process runs the program of a jail in it, and only root may write there.

        Otherwise OSError, see broker.threads.check_jailed.
        """

    def process_events(self, token: int, *, execs: bool) -> socket.socket:
        """Return a socket of the process connector; see broker.libc.process_events."""

    def switches(self, cpu: int) -> int:
        """Return a descriptor of a perf event that records the task switches of a CPU."""

    def set_classes(
        self, changes: Sequence[AffinityChange], policy: int, priority: int, proc: str
    ) -> list[Changed]:
        """Give vCPU threads a scheduling class; the CPUs of each are ignored.

        See broker.threads.set_classes.
        """

    def make_group(self, class_name: str, name: str) -> None:
        """Make a sandbox's group of resctrl; see broker.tunables.ResctrlGroups for these three."""

    def join_group(
        self, class_name: str, name: str, threads: Sequence[AffinityChange]
    ) -> list[Changed]:
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
        mode (octal), a newline, and where the link leads (linux.proc.parse_exe).
        """


class DirectCalls:
    """Makes the calls in this process; tests replace the two of the scheduler."""

    def get_affinity(self, tid: int) -> set[int]:
        """See Calls."""
        return os.sched_getaffinity(tid)

    def set_affinity(self, tid: int, cpus: Iterable[int]) -> None:
        """Set a thread's affinity, whoever has its number."""
        os.sched_setaffinity(tid, cpus)

    def set_affinities(self, changes: Sequence[AffinityChange], proc: str) -> list[Changed]:
        """See Calls."""
        return threads.set_affinities(changes, proc, self.set_affinity, self.get_affinity)

    def executable(self, pid: int) -> tuple[FileStatus, str]:
        """See Calls."""
        link, target = executable_of(pid)
        return as_status(os.stat(link)), target

    def executables(self, pids: Sequence[int]) -> list[str]:
        """See Calls."""
        return threads.executables(pids)

    def system_calls(self, process: str, tids: Sequence[int]) -> list[ThreadCall]:
        """See Calls."""
        return threads.system_calls(process, tids)

    def descriptors(self, process: str) -> list[str]:
        """See Calls."""
        return threads.descriptors(process)

    def kvm_vcpus(self, folder: str, pid: int, tids: Collection[int]) -> list[KvmVcpu]:
        """See Calls."""
        return list(threads.kvm_vcpus(folder, tids))

    async def vcpu_list(self, path: str, greeting_s: float, session_s: float) -> bytes:
        """See Calls."""
        from kata_pin.rights.monitor import converse  # noqa: PLC0415 - rarely needed

        folder, name = os.path.split(path)
        return await converse(connected(open_path(folder, [name])), greeting_s, session_s)

    def listdir(self, path: str) -> list[str]:
        """See Calls."""
        return os.listdir(path)

    def folders(self, path: str) -> list[str]:
        """See Calls."""
        return names_in(path, MAX_NAMES, folders=True)

    def stat(self, path: str) -> FileStatus:
        """See Calls."""
        return as_status(os.stat(path))

    def file(self, base: str, parts: Sequence[str], limit: int) -> File:
        """See Calls; the status alone takes no descriptor."""
        if not limit:
            return File(as_status(os.lstat("/".join((base, *parts)))), b"")
        return read_file(base, parts, limit, _OWNERS)

    def add_watch(self, inotify: int, path: str, mask: int) -> int:
        """See Calls."""
        return libc().add_watch(inotify, path, mask)

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
        threads.check_jailed(pid, jail, _OWNERS)

    def process_events(self, token: int, *, execs: bool) -> socket.socket:
        """See Calls."""
        return broker_libc.process_events(token, execs=execs)

    def switches(self, cpu: int) -> int:
        """See Calls."""
        return open_switches(cpu)

    def set_classes(
        self, changes: Sequence[AffinityChange], policy: int, priority: int, proc: str
    ) -> list[Changed]:
        """See Calls."""
        return threads.set_classes(changes, policy, priority, proc)

    def make_group(self, class_name: str, name: str) -> None:
        """See Calls; it knows no classes."""
        ResctrlGroups({}).make(class_name, name)

    def join_group(
        self, class_name: str, name: str, threads: Sequence[AffinityChange]
    ) -> list[Changed]:
        """See Calls."""
        return ResctrlGroups({}).join(class_name, name, threads)

    def remove_group(self, class_name: str, name: str) -> None:
        """See Calls."""
        ResctrlGroups({}).remove(class_name, name)

    def write_tunables(self, writes: Sequence[TunableWrite], root: str) -> list[TunableWritten]:
        """See Calls."""
        return write_tunables(writes, root)

    def ask_irqbalance(self, pid: int, banned: str | None) -> socket.socket:
        """See Calls."""
        return ask_irqbalance(pid, banned)

    async def move_pages(self, window: PageWindow, deadline_s: float) -> PagesMoved:
        """See Calls; a thread makes the call, and is left behind where it hangs."""
        import asyncio  # noqa: PLC0415 - 25 ms that commands without an event loop do not need

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
        import asyncio  # noqa: PLC0415 - see move_pages

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
        import asyncio  # noqa: PLC0415 - see move_pages

        self._requests = requests
        self._answers = answers
        self._loop = loop
        self._moved = asyncio.Event()
        self._abandoned = False
        self.position = 0
        threading.Thread(target=self._run, daemon=True).start()

    async def done(self, deadline_s: float) -> bool:
        """Wait until it has read everything; False once a single read takes too long."""
        import asyncio  # noqa: PLC0415 - see move_pages

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


def _content(pid: int, file: str, limit: int) -> bytes | OSError:
    try:
        return children.read(pid, file, limit)
    except OSError as error:
        return error
