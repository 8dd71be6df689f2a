"""System calls that may need rights which the deciding process does not have (D23).

`Calls` is the one way to them. DIRECT makes them in this process: for commands that root runs, and
on captured trees. The daemon's (client.py) are made by a small helper process with the rights. What
needs no rights (stat files of processes and threads, cgroups, sysfs) is read without it.

Every method raises OSError as the function of `os` that it is named after.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from errno import EINVAL, ETIMEDOUT
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

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
from kata_pin.rights.broker.living import executable_of, executables
from kata_pin.rights.broker.pages import PagesMoved, PageWindow
from kata_pin.rights.broker.protocol import MAX_NAMES, AffinityChange, Changed, FileStatus
from kata_pin.rights.broker.threads import MAX_REPLY, KvmVcpu, ThreadCall
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
    "File",
    "FileStatus",
    "KvmVcpu",
    "PageWindow",
    "PagesMoved",
    "ThreadCall",
    "TunableWrite",
    "TunableWritten",
]

T = TypeVar("T")

_OWNERS: Final = frozenset({0, trusted_uid()})


class Calls:
    """The calls, made in this process. Sets of CPUs are numbers, paths absolute."""

    def get_affinity(self, tid: int) -> set[int]:
        """Return the CPUs that a thread may use, offline ones left out by the kernel."""
        return os.sched_getaffinity(tid)

    def set_affinity(self, tid: int, cpus: Iterable[int]) -> None:
        """Set a thread's affinity, whoever has its number."""
        os.sched_setaffinity(tid, cpus)

    def set_affinities(self, changes: Sequence[AffinityChange], proc: str) -> list[Changed]:
        """Set the affinities of threads in this order; one that fails does not stop the rest.

        `proc` is where the threads are found: /proc, or a captured tree's.
        """
        return threads.change_threads(changes, proc, self.set_affinity, self.get_affinity)

    def executable(self, pid: int) -> tuple[FileStatus, str]:
        """Return the status and the name of the file that a process executes."""
        link, target = executable_of(pid)
        return as_status(os.stat(link)), target

    def executables(self, pids: Sequence[int]) -> list[str]:
        """Return the names of what processes execute, empty where that cannot be seen."""
        return executables(pids)

    def system_calls(self, process: str, tids: Sequence[int]) -> list[ThreadCall]:
        """Return what threads of a process wait in; `process` is its folder in /proc.

        TimeoutError where that hangs.
        """
        return threads.system_calls(process, tids)

    def descriptors(self, process: str) -> list[str]:
        """Return where descriptors of vCPUs and of VFIO lead, among a process's first 2,048."""
        return threads.descriptors(process)

    def kvm_vcpus(self, folder: str, pid: int, tids: Collection[int]) -> list[KvmVcpu]:
        """Return the vCPUs of the VMs that a process made, whose threads are `tids`.

        `folder` is debugfs's `kvm`.
        """
        return list(threads.kvm_vcpus(folder, tids))

    async def vcpu_list(self, path: str, greeting_s: float, session_s: float) -> bytes:
        """Return what the QEMU at a monitor's socket answers; see broker.threads.converse.

        Cancelled, it is off the socket before the cancellation goes on.
        """
        from kata_pin.rights.monitor import converse  # noqa: PLC0415 - rarely needed

        folder, name = os.path.split(path)
        return await converse(connected(open_path(folder, [name])), greeting_s, session_s)

    def listdir(self, path: str) -> list[str]:
        """Return the names in a folder."""
        return os.listdir(path)

    def folders(self, path: str) -> list[str]:
        """Return the names of the folders in a folder, links to some not among them."""
        return names_in(path, MAX_NAMES, folders=True)

    def stat(self, path: str) -> FileStatus:
        """Return the status of what a path leads to."""
        return as_status(os.stat(path))

    def file(self, base: str, parts: Sequence[str], limit: int) -> File:
        """Return the status of a file below the folder `base`, and at most `limit` bytes of it.

        `base` may be a link; none of the parts may be one, or be `..`. Without a limit, and of what
        broker.files.refusal objects to, only the status.
        """
        if not limit:
            return File(as_status(os.lstat("/".join((base, *parts)))), b"")
        return read_file(base, parts, limit, _OWNERS)

    def add_watch(self, inotify: int, path: str, mask: int) -> int:
        """Have a descriptor of inotify watch a path; return the number of the watch."""
        return libc().add_watch(inotify, path, mask)

    def connect(self, path: str) -> socket.socket:
        """Return a non-blocking stream socket connected to a unix socket.

        BlockingIOError where its backlog is full.
        """
        kind = socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
        end = socket.socket(socket.AF_UNIX, kind)
        try:
            end.connect(path)
        except BaseException:
            end.close()
            raise
        return end

    def verify_jail(self, pid: int, jail: str) -> None:
        """Return if a process runs the program of a jail in it, and only root may write there.

        Otherwise OSError, see broker.threads.check_jailed.
        """
        threads.check_jailed(pid, jail, _OWNERS)

    def process_events(self, token: int, *, execs: bool) -> socket.socket:
        """Return a socket of the process connector; see broker.libc.process_events."""
        return broker_libc.process_events(token, execs=execs)

    def switches(self, cpu: int) -> int:
        """Return a descriptor of a perf event that records the task switches of a CPU."""
        return open_switches(cpu)

    def set_classes(
        self, changes: Sequence[AffinityChange], policy: int, priority: int, proc: str
    ) -> list[Changed]:
        """Give vCPU threads a scheduling class; the CPUs of each are ignored.

        See broker.threads.set_classes.
        """
        return threads.set_classes(changes, policy, priority, proc)

    def make_group(self, class_name: str, name: str) -> None:
        """Make a sandbox's group of resctrl; see broker.tunables.ResctrlGroups for these three."""
        ResctrlGroups({}).make(class_name, name)

    def join_group(
        self, class_name: str, name: str, threads: Sequence[AffinityChange]
    ) -> list[Changed]:
        """Have threads join a group; the CPUs of each are ignored."""
        return ResctrlGroups({}).join(class_name, name, threads)

    def remove_group(self, class_name: str, name: str) -> None:
        """Remove a sandbox's group, or without `name` that of a class."""
        ResctrlGroups({}).remove(class_name, name)

    def write_tunables(self, writes: Sequence[TunableWrite], root: str) -> list[TunableWritten]:
        """Write values of the kernel and read them back; one that fails does not stop the rest.

        `root` is the prefix of the files' tree, empty for the running system.
        """
        return write_tunables(writes, root)

    def ask_irqbalance(self, pid: int, banned: str | None) -> socket.socket:
        """Return a connection over which irqbalance was asked for its setup, or told its bans.

        See broker.tunables.ask_irqbalance.
        """
        return ask_irqbalance(pid, banned)

    async def move_pages(self, window: PageWindow, deadline_s: float) -> PagesMoved:
        """Move pages of a VMM to another NUMA node; see broker.pages.

        TimeoutError if that does not end within `deadline_s` seconds.
        """
        import asyncio  # noqa: PLC0415 - 25 ms that commands without an event loop do not need

        answers = _answers([partial(pages.move_checked, window)])
        async with asyncio.timeout(deadline_s):
            moved = await answers.get()
        if isinstance(moved, OSError):
            raise moved
        return moved

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
        import asyncio  # noqa: PLC0415 - see move_pages

        found: dict[tuple[int, str], bytes | OSError] = {}
        left = deque(requests)
        while left:
            answers = _answers([partial(children.read, *request) for request in left])
            while left:
                pid, file, _ = left.popleft()
                try:
                    async with asyncio.timeout(deadline_s):
                        found[pid, file] = await answers.get()
                except TimeoutError:
                    found[pid, file] = TimeoutError(ETIMEDOUT, os.strerror(ETIMEDOUT))
                    break
        return found


DIRECT: Final = Calls()
"""The calls of this process."""


def _answers(calls: Sequence[Callable[[], T]]) -> asyncio.Queue[T | OSError]:
    """Return what will have the result or the error of each call, made one after the other.

    A thread makes them, and is left behind where one hangs: it cannot be ended.
    """
    import asyncio  # noqa: PLC0415 - see move_pages

    loop = asyncio.get_running_loop()
    answers: asyncio.Queue[T | OSError] = asyncio.Queue()

    def run() -> None:
        for call in calls:
            answer: T | OSError
            try:
                answer = call()
            except (OSError, ValueError) as error:
                answer = error if isinstance(error, OSError) else OSError(EINVAL, "makes no sense")
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(answers.put_nowait, answer)

    threading.Thread(target=run, daemon=True).start()
    return answers
