"""The threads of a process: identity, affinity, and what their cgroup allows.

Hot path: a stat and a cgroup file cost ten times as much as asking for an affinity, so a TaskReader
reads them again only where a thread may have changed. A thread's name is its process's to choose;
the rest is the kernel's word.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

from msgspec.structs import replace

from kata_pin.base.cpuset import EMPTY, CpuSet
from kata_pin.base.errors import ParseError, TaskGone
from kata_pin.base.placement import Report
from kata_pin.base.sandbox import Task, Thread
from kata_pin.base.steps import STEP, Steps
from kata_pin.base.threads import ThreadKey
from kata_pin.linux.cgroups import CpusetReader
from kata_pin.linux.files import GONE_ERRNOS, HOST, HostRoot, read_once, translated
from kata_pin.linux.kernel_text import parse_starttime
from kata_pin.linux.proc import parse_stat
from kata_pin.linux.process import task_names

NAMED_AFTER_S: Final = 2.0
"""A thread gets its name shortly after its birth: until it is so old, it is read in full."""

FULL_S: Final = 60.0
"""Longest that a name, flags, last CPU and CPU time are not read again."""

CROWD: Final = 4
"""With fewer threads than this in one cgroup, listing the cgroup does not pay."""

_TICKS: Final = os.sysconf("SC_CLK_TCK")


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
        affinity = root.calls.get_affinity(tid)
    except OSError as error:
        raise translated(error, "read", f"thread {tid} of process {tgid}") from error
    cgroup, cpuset = cpusets.of(tgid, tid)
    return Task(
        ThreadKey(tgid, tid, stat.starttime),
        stat.comm,
        stat.flags,
        as_cpuset(frozenset(affinity)),
        cpuset,
        cgroup,
        stat.processor,
        stat.utime + stat.stime,
    )


class TaskReader:
    """Reads the threads of a few processes repeatedly; lives as long as their sandbox.

    A thread is known by the inode of its folder in /proc: the kernel makes a new one for each task
    and drops it when the task ends, so a tid that is used again has another. What cannot change
    (start time) or hardly does (name, flags) is then as last read; affinity and cgroup are asked
    each time. A young thread, and one of a captured tree, is read in full each time.
    """

    def __init__(self) -> None:
        self._known: dict[int, dict[int, Task]] = {}
        self.read_at = 0.0
        """When last CPU and CPU time of the threads were last read (CLOCK_MONOTONIC)."""
        self.left_out = 0
        """Threads that were not read because there were too many; the caller sets it back."""

    def read(
        self, root: HostRoot, tgid: int, cpusets: CpusetReader, *, most: int = sys.maxsize
    ) -> Steps[list[Task]]:
        """Return the threads of a process by tid; one that exits meanwhile is left out.

        Of more than `most` threads those with the lowest tids. Raises TaskGone when the process is
        gone.
        """
        inodes = list_inodes(root, tgid)
        chosen = sorted(inodes)
        if len(chosen) > most:
            self.left_out += len(chosen) - most
            chosen = sorted(sorted(chosen, key=lambda tid: (tid != tgid, tid))[:most])
        known = self._known.get(tgid, {})
        cgroups = _Cgroups(tgid, cpusets, len(known))
        young_after = time.clock_gettime(time.CLOCK_BOOTTIME) - NAMED_AFTER_S
        seen: dict[int, Task] = {}
        for number, tid in enumerate(chosen, start=1):
            if number % STEP == 0:
                yield
            old = known.get(tid)
            try:
                if old is not None and old.inode == inodes[tid]:
                    task = _again(root, old, *cgroups.of(old))
                else:
                    task = read_task(root, tgid, tid, cpusets)
                    if root.live and task.key.starttime / _TICKS <= young_after:
                        task = replace(task, inode=inodes[tid])
            except TaskGone:
                continue
            seen[task.key.tid] = task  # by the number that the key has: another one takes memory
        if not seen:
            self._known.pop(tgid, None)
            raise TaskGone("list threads of", f"process {tgid}")
        self._known[tgid] = seen
        return list(seen.values())

    def inode(self, key: ThreadKey) -> int:
        """Return the inode that a thread was read with, 0 where it proves nothing or is young."""
        known = self._known.get(key.tgid, {}).get(key.tid)
        return known.inode if known and known.key == key else 0

    def inodes(self, keys: Iterable[ThreadKey]) -> dict[int, int]:
        """Return the inodes that threads were read with, by tid, where they prove something."""
        return {key.tid: inode for key in keys if (inode := self.inode(key))}

    def expire(self, tgids: frozenset[int]) -> None:
        """Forget all processes but these; forget all where names and times are too old."""
        now = time.monotonic()
        if now - self.read_at > FULL_S:
            self.read_at = now
            self._known = {}
        elif self._known.keys() - tgids:
            self._known = {tgid: known for tgid, known in self._known.items() if tgid in tgids}


@dataclass
class _Cgroups:
    """The cgroups of the threads of one process that were known before.

    Of many threads in one cgroup only one is asked; that the others are still there too is seen in
    the cgroup's own list.
    """

    tgid: int
    cpusets: CpusetReader
    size: int
    """How many threads were known."""
    lists: dict[str, tuple[CpuSet, frozenset[int]]] = field(default_factory=dict)

    def of(self, task: Task) -> tuple[str, CpuSet]:
        """Return a thread's cgroup and what that allows; raises TaskGone."""
        tid = task.key.tid
        if self.size < CROWD:
            return self.cpusets.of(self.tgid, tid)
        listed = self.lists.get(task.cgroup)
        if listed is not None and tid in listed[1]:
            return task.cgroup, listed[0]
        cgroup, cpus = self.cpusets.of(self.tgid, tid)
        if cgroup not in self.lists:
            self.lists[cgroup] = cpus, self.cpusets.tids(cgroup, among=self.size)
        return cgroup, cpus


def list_inodes(root: HostRoot, tgid: int) -> dict[int, int]:
    """Return the inode of each thread's folder in /proc, by tid; empty without the process."""
    try:
        with os.scandir(f"{root.proc()}/{tgid}/task") as entries:
            return {int(entry.name): entry.inode() for entry in entries}
    except OSError as error:
        if error.errno in GONE_ERRNOS:
            return {}
        raise translated(error, "list threads of", f"process {tgid}") from error


def _again(root: HostRoot, known: Task, cgroup: str, cpuset: CpuSet) -> Task:
    """Return a known thread as it is now, the same object where nothing of it changed."""
    affinity = get_affinity(known.key.tid, root)
    if (affinity, cpuset, cgroup) == (known.affinity, known.cpuset, known.cgroup):
        return known
    return known.moved(affinity, cpuset, cgroup)


def with_usage(root: HostRoot, report: Report) -> Report:
    """Return a report with the last CPU and the CPU time of each thread as of now.

    A thread that has exited since keeps those of the report.
    """

    def used(thread: Thread) -> Thread:
        key = thread.key
        try:
            stat = parse_stat(read_once(f"{root.proc()}/{key.tgid}/task/{key.tid}/stat"))
        except (OSError, ParseError):
            return thread
        if stat.starttime != key.starttime:
            return thread
        ticks = stat.utime + stat.stime
        task = replace(thread.task, last_cpu=stat.processor, cpu_ticks=ticks)
        return thread._replace(task=task)

    return replace(report, threads=tuple(map(used, report.threads)))


def moved_since(root: HostRoot, threads: Sequence[Thread]) -> Steps[dict[ThreadKey, CpuSet]]:
    """Return the affinities, as of now, of the threads that were moved since they were read.

    In steps. Threads that have exited, or whose tid is another thread's by now, are left out.
    """
    ask = root.calls.get_affinity
    found: dict[ThreadKey, CpuSet] = {}
    known, numbers = EMPTY, as_numbers(EMPTY)
    for number, (task, _role) in enumerate(threads, start=1):
        if number % STEP == 0:
            yield
        key = task.key
        if task.affinity is not known:  # most threads of a sandbox have one and the same
            known, numbers = task.affinity, as_numbers(task.affinity)
        try:
            affinity = ask(key.tid)
            if affinity != numbers and starttime(root, key.tgid, key.tid) == key.starttime:
                found[key] = as_cpuset(frozenset(affinity))
        except (OSError, TaskGone, ParseError):
            continue
    return found


def starttime(root: HostRoot, tgid: int, tid: int) -> int:
    """Return when the thread started, in clock ticks since boot; raises TaskGone."""
    try:
        return parse_starttime(read_once(f"{root.proc()}/{tgid}/task/{tid}/stat"))
    except OSError as error:
        raise translated(error, "read", f"thread {tid} of process {tgid}") from error


def get_affinity(tid: int, root: HostRoot = HOST) -> CpuSet:
    """Return the thread's affinity, offline CPUs left out by the kernel; raises TaskGone."""
    try:
        return as_cpuset(frozenset(root.calls.get_affinity(tid)))
    except OSError as error:
        raise translated(error, "get affinity of", f"thread {tid}") from error


@lru_cache(maxsize=4096)
def as_numbers(cpus: CpuSet) -> frozenset[int]:
    """Return a set as the scheduler's calls take and give it; a node has few distinct ones."""
    return frozenset(cpus)


@lru_cache(maxsize=1024)
def as_cpuset(cpus: frozenset[int]) -> CpuSet:
    """Return the set as a CpuSet: a node has few distinct affinities, each with many threads."""
    return CpuSet(cpus)
