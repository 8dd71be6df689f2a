"""Processes as /proc shows them: one at a time, or the table of all.

The functions read at every call; a ProcessIndex lives as long as the daemon, or one command.
Nothing is kept open, and threads are tasks.py's business. A process may vanish between two calls:
that is TaskGone, an ordinary event. What a process says of itself (name, arguments) is its own to
change; `exe`, `ppid`, flags and cgroup are the kernel's. Facts: proc_pid_stat(5), proc_pid_exe(5).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from errno import ENOENT, ESRCH
from typing import Final, TypeVar

from kata_pin.errors import HostError, TaskGone
from kata_pin.host.cgroup_mounts import read_cgroups
from kata_pin.host.files import read_bytes, read_once
from kata_pin.host.root import HostRoot
from kata_pin.model.steps import STEP, Steps, finish
from kata_pin.model.thread import Process, ProcessKey
from kata_pin.wire.proc import (
    DELETED,
    MAX_CGROUP,
    MAX_CMDLINE,
    Cgroups,
    ExeFile,
    kernel_worker,
    parse_cmdline,
    parse_stat,
)

GONE_ERRNOS: Final = frozenset({ENOENT, ESRCH})
"""What opening (ENOENT) or reading (ESRCH) a file of a vanished process gives."""

YOUNG_TICKS: Final = os.sysconf("SC_CLK_TCK")
"""For a second after its birth a process is read again: an exec or a kernel thread's naming may
still change its name and flags."""


K = TypeVar("K")


def read_process(root: HostRoot, pid: int) -> Process:
    """Return the process; raises TaskGone when there is none."""
    stat = parse_stat(_read(root, pid, "stat", read_once))
    key = ProcessKey(stat.pid, stat.starttime)
    return Process(key, stat.ppid, stat.comm, stat.flags, stat.state)


def is_alive(root: HostRoot, key: ProcessKey) -> bool:
    """Return whether this very process still runs: not a later one with its pid, not a zombie."""
    try:
        process = read_process(root, key.pid)
    except TaskGone:
        return False
    return process.key == key and process.state not in {"Z", "X"}


def cmdline(root: HostRoot, pid: int) -> list[str]:
    """Return the arguments, cut after 128 KiB; empty for a kernel thread or a zombie.

    Raises TaskGone.
    """
    return list(parse_cmdline(_read(root, pid, "cmdline", lambda p: read_bytes(p, MAX_CMDLINE))))


def exe(root: HostRoot, pid: int) -> tuple[str, bool]:
    """Return the path of the executable and whether that file was deleted or replaced since.

    The path is empty for a kernel thread or a zombie. Raises TaskGone, and HostError without
    CAP_SYS_PTRACE for another user's process.
    """
    path = root.proc(pid, "exe")
    try:
        target = root.calls.readlink(path)
    except OSError as error:
        if error.errno not in GONE_ERRNOS:
            hint = "needs CAP_SYS_PTRACE"
            raise HostError("read", path, error.errno or 0, hint=hint) from error
        read_process(root, pid)
        return "", False
    return target.removesuffix(DELETED), target.endswith(DELETED)


def exe_file(root: HostRoot, pid: int) -> ExeFile:
    """Return the file that a process executes; raises as `exe` does."""
    path, deleted = exe(root, pid)
    if not root.live:  # a captured tree has the links only
        return ExeFile(path, deleted, device=0, inode=0, uid=0, mode=0)
    try:
        found = root.calls.stat(root.proc(pid, "exe"))
    except OSError as error:
        raise translated(error, "look at the executable of", f"process {pid}") from error
    return ExeFile(path, deleted, found.device, found.inode, found.uid, found.mode)


def cgroups(root: HostRoot, pid: int) -> Cgroups:
    """Return the cgroups of a process; raises TaskGone."""
    return read_cgroups(root, _read(root, pid, "cgroup", lambda p: read_bytes(p, MAX_CGROUP)))


def task_names(root: HostRoot, pid: int) -> list[str]:
    """Return the entries of the process's task folder; raises TaskGone."""
    path = root.proc(pid, "task")
    try:
        return os.listdir(path)
    except OSError as error:
        raise translated(error, "list threads of", f"process {pid}") from error


def translated(error: OSError, operation: str, subject: str) -> HostError:
    """Return the HostError for a system call's error: TaskGone when the task vanished."""
    kind = TaskGone if error.errno in GONE_ERRNOS else HostError
    return kind(operation, subject, error.errno or 0)


def _grouped(entries: Iterable[tuple[K, Process]]) -> dict[K, list[Process]]:
    """Return the processes by key, each group by pid."""
    groups: dict[K, list[Process]] = {}
    for key, process in entries:
        groups.setdefault(key, []).append(process)
    for group in groups.values():
        group.sort(key=lambda process: process.pid)
    return groups


def _read(root: HostRoot, pid: int, where: str, read: Callable[[str], bytes]) -> bytes:
    try:
        return read(root.proc(pid, where))
    except OSError as error:
        raise translated(error, f"read {where} of", f"process {pid}") from error


class ProcessIndex:
    """All processes by pid, as of the last refresh; a new index is empty.

    A refresh lists /proc and reads the stat file of those it does not know. The inode of
    /proc/<pid> distinguishes a reused pid: the kernel drops the entry when a process ends and gives
    the next one another number. A living process whose entry was dropped to save memory gets
    another number too, which costs one needless read. A later exec or rename of a known process is
    only seen after `note_exec` or by refresh(full=True): read what matters (`exe`, `cmdline`) from
    the process itself.
    """

    def __init__(self, root: HostRoot) -> None:
        self._root = root
        self._inodes: dict[int, int] = {}
        self._processes: dict[int, Process] = {}
        self._young: set[int] = set()
        self.version = 0
        """Another one whenever a refresh found anything else than before."""
        self._by_parent: dict[int, list[Process]] | None = None
        self._workers: dict[int, list[Process]] | None = None

    def refresh(self, *, full: bool = False) -> None:
        """Look again: at new processes, or at all; raises HostError without /proc.

        A process whose parent exited is read again too, because it has a new parent.
        """
        finish(self.refresh_in_steps(full=full))

    def refresh_in_steps(self, *, full: bool = False) -> Steps[None]:
        """Look again, in steps: a full look at thousands of processes takes long."""
        path = self._root.proc()
        try:
            with os.scandir(path) as entries:
                inodes = {int(e.name): e.inode() for e in entries if e.name.isdecimal()}
        except OSError as error:
            raise HostError("list", path, error.errno or 0) from error
        known = {} if full else self._inodes
        gone = self._processes.keys() - inodes.keys()
        unread = {pid for pid, inode in inodes.items() if known.get(pid) != inode}
        unread |= self._young & inodes.keys()
        if gone:
            unread |= {
                p.pid for p in self._processes.values() if p.ppid in gone and p.pid in inodes
            }
        for pid in gone:
            del self._processes[pid]
        self._inodes = inodes
        self._young = set()
        changed = yield from self._read(unread)
        if changed or gone:
            self._by_parent = self._workers = None
            self.version += 1

    def note_exec(self, pid: int) -> None:
        """Read a known process again at the next refresh: it runs another program now.

        Between its fork and its exec it has its parent's name, on a busy machine for seconds.
        """
        if pid in self._processes:
            self._young.add(pid)

    def note_change(self) -> None:
        """Count what else was read of processes as a change: `version` is another one."""
        self.version += 1

    def get(self, pid: int) -> Process | None:
        """Return the process with this pid."""
        return self._processes.get(pid)

    def all(self) -> list[Process]:
        """Return all processes, kernel threads included, in no order."""
        return list(self._processes.values())

    def children(self, ppid: int) -> list[Process]:
        """Return the children of a process, by pid."""
        if self._by_parent is None:
            self._by_parent = _grouped((p.ppid, p) for p in self._processes.values())
        return list(self._by_parent.get(ppid, ()))

    @property
    def kernel_workers(self) -> Mapping[int, list[Process]]:
        """The kernel threads that were made for a process, by the tid they are named after.

        By flag, never by name alone: a process can name itself `vhost-123`, but cannot get the flag
        of a kernel thread.
        """
        if self._workers is None:
            named = ((kernel_worker(p.comm), p) for p in self._processes.values() if p.kernel)
            self._workers = _grouped((worker.owner, p) for worker, p in named if worker)
        return self._workers

    def _read(self, pids: set[int]) -> Steps[bool]:
        """Read these processes; return whether any is other than was known."""
        changed = False
        young_after = time.clock_gettime(time.CLOCK_BOOTTIME) * YOUNG_TICKS - YOUNG_TICKS
        for number, pid in enumerate(pids, start=1):
            if number % STEP == 0:
                yield
            try:
                process = read_process(self._root, pid)
            except TaskGone:
                changed |= self._processes.pop(pid, None) is not None
                self._inodes.pop(pid, None)  # another look may have noticed first
                continue
            if self._processes.get(pid) != process:
                self._processes[pid] = process
                changed = True
            if process.key.starttime > young_after:
                self._young.add(pid)
        return changed
