"""Processes as /proc shows them, one at a time; process_index.py has the table of all.

Every call reads anew and nothing is kept open. A process may vanish between two calls: that is
TaskGone, an ordinary event. What a process says of itself (name, arguments) is its own to change;
`exe`, `ppid`, flags and cgroup are the kernel's. Facts: proc_pid_stat(5), proc_pid_exe(5).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from errno import ENOENT, ESRCH
from typing import Final

from kata_pin.errors import HostError, TaskGone
from kata_pin.host.files import read_bytes, read_once
from kata_pin.host.root import HostRoot
from kata_pin.model.cpuset import CpuSet
from kata_pin.model.thread import PF_KTHREAD, ProcessKey
from kata_pin.wire.proc import (
    MAX_CGROUP,
    MAX_CMDLINE,
    Cgroups,
    Stat,
    parse_cgroup,
    parse_cmdline,
    parse_stat,
)

DELETED: Final = " (deleted)"
"""What the kernel appends to the path of a file that was unlinked or replaced."""

GONE_ERRNOS: Final = frozenset({ENOENT, ESRCH})
"""What opening (ENOENT) or reading (ESRCH) a file of a vanished process gives."""


@dataclass(frozen=True, slots=True)
class Process:
    """A process: who it is, its parent, its name, its task flags, its state (`Z`: a zombie)."""

    key: ProcessKey
    ppid: int
    comm: str
    flags: int
    state: str = ""

    @property
    def pid(self) -> int:
        """The process id."""
        return self.key.pid

    @property
    def kernel(self) -> bool:
        """Whether it is a kernel thread."""
        return bool(self.flags & PF_KTHREAD)


def of_stat(stat: Stat) -> Process:
    """Return the process that a stat file describes."""
    key = ProcessKey(stat.pid, stat.starttime)
    return Process(key, stat.ppid, stat.comm, stat.flags, stat.state)


def read_process(root: HostRoot, pid: int) -> Process:
    """Return the process; raises TaskGone when there is none."""
    return of_stat(parse_stat(_read(root, pid, "stat", read_once)))


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
        target = os.readlink(path)
    except OSError as error:
        if error.errno not in GONE_ERRNOS:
            hint = "needs CAP_SYS_PTRACE"
            raise HostError("read", path, error.errno or 0, hint=hint) from error
        read_process(root, pid)
        return "", False
    return target.removesuffix(DELETED), target.endswith(DELETED)


def cgroups(root: HostRoot, pid: int, tid: int | None = None) -> Cgroups:
    """Return the cgroups of a process, or of one of its threads; raises TaskGone."""
    where = "cgroup" if tid is None else f"task/{tid}/cgroup"
    return parse_cgroup(_read(root, pid, where, lambda p: read_bytes(p, MAX_CGROUP)))


def cgroup_paths(root: HostRoot, pid: int, tid: int | None = None) -> tuple[str, ...]:
    """Return the distinct cgroup paths of a process, or of one thread, in the kernel's order.

    Raises TaskGone. `cgroups` also says which hierarchy each belongs to.
    """
    return cgroups(root, pid, tid).paths


def children(root: HostRoot, pid: int) -> list[int]:
    """Return the pids of the children of all of the process's threads, ascending.

    From task/<tid>/children (CONFIG_PROC_CHILDREN), which may miss one while siblings exit
    (proc_pid_task(5)); without that file, from a scan of all processes. Raises TaskGone.
    """
    found: set[int] = set()
    for tid in task_names(root, pid):
        try:
            found.update(map(int, read_bytes(root.proc(pid, "task", tid, "children")).split()))
        except OSError as error:
            if error.errno not in GONE_ERRNOS:
                raise HostError("read children of", f"process {pid}", error.errno or 0) from error
            if tid == str(pid) and os.path.exists(root.proc(pid, "stat")):
                return _children_by_scan(root, pid)
    return sorted(found)


def task_names(root: HostRoot, pid: int) -> list[str]:
    """Return the entries of the process's task folder; raises TaskGone."""
    path = root.proc(pid, "task")
    try:
        return os.listdir(path)
    except OSError as error:
        raise translated(error, "list threads of", f"process {pid}") from error


def init_affinity(root: HostRoot) -> CpuSet:
    """Return the affinity of pid 1: what a thread has that nobody confined (DESIGN D18)."""
    try:
        return CpuSet(root.scheduler.get_affinity(1))
    except OSError as error:
        raise translated(error, "get affinity of", "process 1") from error


def translated(error: OSError, operation: str, subject: str) -> HostError:
    """Return the HostError for a system call's error: TaskGone when the task vanished."""
    kind = TaskGone if error.errno in GONE_ERRNOS else HostError
    return kind(operation, subject, error.errno or 0)


def _children_by_scan(root: HostRoot, pid: int) -> list[int]:
    found = []
    for name in os.listdir(root.proc()):
        if name.isdecimal():
            try:
                if read_process(root, int(name)).ppid == pid:
                    found.append(int(name))
            except TaskGone:
                continue
    return sorted(found)


def _read(root: HostRoot, pid: int, where: str, read: Callable[[str], bytes]) -> bytes:
    try:
        return read(root.proc(pid, where))
    except OSError as error:
        raise translated(error, f"read {where} of", f"process {pid}") from error
