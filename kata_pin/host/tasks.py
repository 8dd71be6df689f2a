"""The threads of a process: who they are, where they may run, what their cgroup allows.

Hot path: one stat, one cgroup file and one system call a thread, no cache of its own. What a thread
is called is its process's to choose; the rest is the kernel's word.
"""

from __future__ import annotations

from functools import lru_cache

from kata_pin.errors import TaskGone
from kata_pin.host.cpuset import CpusetReader
from kata_pin.host.files import read_once
from kata_pin.host.process import task_names, translated
from kata_pin.host.root import HOST, HostRoot
from kata_pin.model.cpuset import CpuSet
from kata_pin.model.thread import Task, ThreadKey
from kata_pin.wire.proc import parse_starttime, parse_stat


def list_tids(root: HostRoot, tgid: int) -> list[int]:
    """Return the thread ids of a process, ascending; raises TaskGone.

    Threads born while the kernel lists may be missing: list until two lists are equal.
    """
    return sorted(map(int, task_names(root, tgid)))


def read_task(root: HostRoot, tgid: int, tid: int, cpusets: CpusetReader) -> Task:
    """Return one thread; raises TaskGone when it exited, or is none of this process.

    `cpusets` is the pass's reader: threads of one cgroup cost one look at its cpuset.
    """
    try:
        stat = parse_stat(read_once(f"{root.proc()}/{tgid}/task/{tid}/stat"))
        affinity = root.scheduler.get_affinity(tid)
    except OSError as error:
        raise translated(error, "read", f"thread {tid} of process {tgid}") from error
    cgroup, cpuset = cpusets.of(tgid, tid)
    return Task(
        ThreadKey(tgid, tid, stat.starttime),
        stat.comm,
        stat.flags,
        _as_cpuset(frozenset(affinity)),
        cpuset,
        cgroup,
        stat.processor,
        stat.utime + stat.stime,
    )


def read_tasks(root: HostRoot, tgid: int, cpusets: CpusetReader) -> list[Task]:
    """Return the threads of a process by tid; one that exits meanwhile is left out.

    Raises TaskGone when the process is gone.
    """
    tasks = []
    for tid in list_tids(root, tgid):
        try:
            tasks.append(read_task(root, tgid, tid, cpusets))
        except TaskGone:
            continue
    if not tasks:
        raise TaskGone("list threads of", f"process {tgid}")
    return tasks


def starttime(root: HostRoot, tgid: int, tid: int) -> int:
    """Return when the thread started, in clock ticks since boot; raises TaskGone."""
    try:
        return parse_starttime(read_once(f"{root.proc()}/{tgid}/task/{tid}/stat"))
    except OSError as error:
        raise translated(error, "read", f"thread {tid} of process {tgid}") from error


def get_affinity(tid: int, root: HostRoot = HOST) -> CpuSet:
    """Return the thread's affinity, offline CPUs left out by the kernel; raises TaskGone."""
    try:
        return _as_cpuset(frozenset(root.scheduler.get_affinity(tid)))
    except OSError as error:
        raise translated(error, "get affinity of", f"thread {tid}") from error


@lru_cache(maxsize=1024)
def _as_cpuset(cpus: frozenset[int]) -> CpuSet:
    """Return the set as a CpuSet: a node has few distinct affinities, each with many threads."""
    return CpuSet(cpus)
