"""The table of all processes, kept up cheaply: what the finder of VMMs and kernel threads asks.

Lives as long as the daemon, or one command. A refresh lists /proc and reads the stat file of those
it does not know. The inode of /proc/<pid> tells a reused pid from the old one: the kernel drops
the entry when a process ends and numbers the next one anew, and when it numbers a living process
anew (its entry was dropped to save memory) one needless read is all. Out of scope: threads.
"""

from __future__ import annotations

import os
import time

from kata_pin.errors import HostError, TaskGone
from kata_pin.host.process import Process, read_process
from kata_pin.host.root import HostRoot

YOUNG_TICKS = os.sysconf("SC_CLK_TCK")
"""For a second after its birth a process is read again: an exec or a kernel thread's naming may
still change its name and flags."""


class ProcessIndex:
    """All processes by pid, as of the last refresh; a new index is empty.

    A later exec or rename of a known process is only seen by refresh(full=True); so read what
    matters (`exe`, `cmdline`) from the process itself. About 0.3 ms for 1,000 known processes.
    """

    def __init__(self, root: HostRoot) -> None:
        self._root = root
        self._inodes: dict[int, int] = {}
        self._processes: dict[int, Process] = {}
        self._young: set[int] = set()

    def refresh(self, *, full: bool = False) -> None:
        """Look again: at new processes, or at all; raises HostError without /proc.

        A process whose parent went is read again too, because it has a new parent now.
        """
        inodes = self._list()
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
        self._read(unread)

    def get(self, pid: int) -> Process | None:
        """Return the process with this pid."""
        return self._processes.get(pid)

    def all(self) -> list[Process]:
        """Return all processes, kernel threads included, in no order."""
        return list(self._processes.values())

    def children(self, ppid: int) -> list[Process]:
        """Return the children of a process, by pid."""
        found = [process for process in self._processes.values() if process.ppid == ppid]
        return sorted(found, key=lambda process: process.pid)

    def kernel_threads(self, comm: str) -> list[Process]:
        """Return the kernel threads with exactly this name, by pid: by flag, never by name alone.

        A process can name itself `vhost-123`, but cannot get the flag of a kernel thread.
        """
        found = [p for p in self._processes.values() if p.comm == comm and p.kernel]
        return sorted(found, key=lambda process: process.pid)

    def _list(self) -> dict[int, int]:
        path = self._root.proc()
        try:
            with os.scandir(path) as entries:
                return {int(e.name): e.inode() for e in entries if e.name.isdecimal()}
        except OSError as error:
            raise HostError("list", path, error.errno or 0) from error

    def _read(self, pids: set[int]) -> None:
        young_after = time.clock_gettime(time.CLOCK_BOOTTIME) * YOUNG_TICKS - YOUNG_TICKS
        for pid in pids:
            try:
                process = read_process(self._root, pid)
            except TaskGone:
                self._processes.pop(pid, None)
                del self._inodes[pid]
                continue
            self._processes[pid] = process
            if process.key.starttime > young_after:
                self._young.add(pid)
