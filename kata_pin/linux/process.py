"""Processes as /proc shows them: what one may write, the locks and the devices that it has."""

from __future__ import annotations

import fcntl
import math
import os
import re
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import Final

from msgspec import Struct

from kata_pin.base.errors import HostError, KataPinError, ParseError, TaskGone
from kata_pin.base.sandbox import Process, ProcessKey
from kata_pin.base.steps import STEP, Steps, finish
from kata_pin.linux.cgroup_mounts import MAX_MOUNTINFO, read_cgroups
from kata_pin.linux.files import (
    GONE_ERRNOS,
    HOST,
    HostRoot,
    host_errors,
    read_bytes,
    read_once,
    read_text,
    translated,
)
from kata_pin.linux.kernel_text import check_size
from kata_pin.linux.proc import (
    DELETED,
    MAX_CGROUP,
    MAX_CMDLINE,
    Cgroups,
    ExeFile,
    kernel_worker,
    parse_cmdline,
    parse_stat,
    status_field,
)
from kata_pin.rights.broker.living import executable_of, executables, folder_of, living
from kata_pin.rights.broker.protocol import FileStatus

# The functions read at every call; a ProcessIndex lives as long as the daemon, or one command.
# Nothing is kept open, and threads are tasks.py's business. A process may vanish between two calls:
# that is TaskGone, an ordinary event. What a process says of itself (name, arguments) is its own to
# change; `exe`, `ppid`, flags and cgroup are the kernel's. Facts are in proc_pid_stat(5),
# proc_pid_exe(5).

YOUNG_TICKS: Final = os.sysconf("SC_CLK_TCK")
"""For a second after its birth a process is read again: an exec or a kernel thread's naming may
still change its name and flags."""


ZOMBIE: Final = frozenset({"Z", "X"})
"""The states of a first thread that has exited; others may run (rights/broker/threads.py)."""

NO_FILE: Final = FileStatus(0, 0, 0, 0, 0, 0, 0)

_PID: Final = attrgetter("key.pid")


def read_process(root: HostRoot, pid: int) -> Process:
    """Return the process; raises TaskGone when there is none."""
    stat = parse_stat(_read(root.proc(pid), pid, "stat", read_once))
    key = ProcessKey(stat.pid, stat.starttime)
    return Process(key, stat.ppid, stat.comm, stat.flags, stat.state)


def is_alive(root: HostRoot, key: ProcessKey) -> bool:
    """Return whether this very process still runs: not a later one with its pid, not a zombie.

    It runs while any of its threads does: a VMM whose first thread has exited is no zombie.
    """
    try:
        process = read_process(root, key.pid)
    except TaskGone:
        return False
    return process.key == key and (
        process.state not in ZOMBIE or living(key.pid, root.proc()) is not None
    )


def cmdline(root: HostRoot, pid: int) -> list[str]:
    """Return the arguments, cut after 128 KiB; empty for a kernel thread or a zombie.

    Raises TaskGone.
    """
    folder = folder_of(pid, root.proc())
    data = _read(folder, pid, "cmdline", lambda path: read_bytes(path, MAX_CMDLINE))
    return list(parse_cmdline(data))


def exe(root: HostRoot, pid: int) -> tuple[str, bool]:
    """Return the path of the executable and whether that file was deleted or replaced since.

    The path is empty for a kernel thread or a zombie. Raises TaskGone, and HostError without
    CAP_SYS_PTRACE for another user's process.
    """
    found = exe_file(root, pid)
    return found.path, found.deleted


def exe_paths(root: HostRoot, pids: Sequence[int]) -> list[str]:
    """Return the path of the executable of each process at once; empty where `exe` has none.

    Raises HostError if none can be asked for.
    """
    with host_errors("read", root.proc("*", "exe")):
        live = root.live
        links = root.calls.executables(pids) if live else executables(pids, root.proc())
    return [link.removesuffix(DELETED) for link in links]


def exe_file(root: HostRoot, pid: int) -> ExeFile:
    """Return the file that a process executes; raises as `exe` does."""
    status = NO_FILE
    try:
        if root.live:
            status, target = root.calls.executable(pid)
        else:  # a captured tree has the links only
            _, target = executable_of(pid, root.proc())
    except OSError as error:
        if error.errno not in GONE_ERRNOS:
            hint = "needs CAP_SYS_PTRACE"
            raise HostError("read", root.proc(pid, "exe"), error.errno or 0, hint=hint) from error
        read_process(root, pid)
        target = ""
    name, deleted = target.removesuffix(DELETED), target.endswith(DELETED)
    return ExeFile(name, deleted, status.device, status.inode, status.uid, status.mode)


def cgroups(root: HostRoot, pid: int) -> Cgroups:
    """Return the cgroups of a process; raises TaskGone."""
    folder = folder_of(pid, root.proc())
    data = _read(folder, pid, "cgroup", lambda path: read_bytes(path, MAX_CGROUP))
    return read_cgroups(root, data)


def task_names(root: HostRoot, pid: int) -> list[str]:
    """Return the entries of the process's task folder; raises TaskGone."""
    path = root.proc(pid, "task")
    try:
        return os.listdir(path)
    except OSError as error:
        raise translated(error, "list threads of", f"process {pid}") from error


def _read(folder: str, pid: int, where: str, read: Callable[[str], bytes]) -> bytes:
    try:
        return read(f"{folder}/{where}")
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
        self._as_of = -math.inf
        self._census = b""
        self._children: dict[int, list[Process]] = {}
        self._workers: dict[int, list[Process]] = {}

    def refresh(self, *, full: bool = False, since: float = math.inf) -> None:
        """Look again: at new processes, or at all; raises HostError without /proc.

        A process whose parent exited is read again too, because it has a new parent. A look that
        began at `since` (CLOCK_MONOTONIC) or later is enough.
        """
        if self._as_of < since:
            finish(self.refresh_in_steps(full=full))

    def refresh_in_steps(self, *, full: bool = False) -> Steps[None]:
        """Look again, in steps: a full look at thousands of processes takes long."""
        began, census = time.monotonic(), _census(self._root)
        if full or not census or census != self._census:
            path = self._root.proc()
            with host_errors("list", path), os.scandir(path) as entries:
                inodes = {int(e.name): e.inode() for e in entries if e.name.isdecimal()}
        else:
            inodes = self._inodes
        if not (full or self._young) and inodes == self._inodes:
            self._as_of, self._census = max(self._as_of, began), census
            return
        known = {} if full else self._inodes
        gone = self._processes.keys() - inodes.keys()
        unread = {pid for pid, inode in inodes.items() if known.get(pid) != inode}
        unread |= self._young & inodes.keys()
        if gone:
            unread |= {
                p.pid for p in self._processes.values() if p.ppid in gone and p.pid in inodes
            }
        for pid in gone:
            self._forget(pid)
        # what is not read yet is unknown to a refresh between two of these steps
        self._inodes = {pid: inode for pid, inode in inodes.items() if pid not in unread}
        self._census = b""
        self._young &= inodes.keys()
        changed = yield from self._read({pid: inodes[pid] for pid in unread})
        self._as_of, self._census = max(self._as_of, began), census
        if changed or gone:
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
        return list(self._children.get(ppid, ()))

    @property
    def kernel_workers(self) -> Mapping[int, list[Process]]:
        """The kernel threads that were made for a process, by the tid they are named after.

        By flag, never by name alone: a process can name itself `vhost-123`, but cannot get the flag
        of a kernel thread.
        """
        return self._workers

    def _read(self, inodes: Mapping[int, int]) -> Steps[bool]:
        """Read these processes; return whether any is other than was known."""
        changed = False
        young_after = time.clock_gettime(time.CLOCK_BOOTTIME) * YOUNG_TICKS - YOUNG_TICKS
        for number, (pid, inode) in enumerate(inodes.items(), start=1):
            if number % STEP == 0:
                yield
            try:
                process = read_process(self._root, pid)
            except TaskGone:
                changed |= self._forget(pid)
                self._inodes.pop(pid, None)  # another look may have noticed first
                continue
            self._inodes[pid] = inode
            self._young.discard(pid)
            if self._processes.get(pid) != process:
                self._forget(pid)
                self._processes[pid] = process
                for groups, key in self._groups_of(process):
                    insort(groups.setdefault(key, []), process, key=_PID)
                changed = True
            if process.key.starttime > young_after:
                self._young.add(pid)
        return changed

    def _forget(self, pid: int) -> bool:
        """Forget a process; return whether it was known."""
        process = self._processes.pop(pid, None)
        if process is None:
            return False
        for groups, key in self._groups_of(process):
            group = groups[key]
            del group[bisect_left(group, process.pid, key=_PID)]
            if not group:
                del groups[key]
        return True

    def _groups_of(self, process: Process) -> Iterator[tuple[dict[int, list[Process]], int]]:
        """Yield the groups that a process is in, each with its key there."""
        yield self._children, process.ppid
        worker = kernel_worker(process.comm) if process.kernel else None
        if worker is not None:
            yield self._workers, worker.owner


def _census(root: HostRoot) -> bytes:
    """Return what is another one when a task of the node was born or reaped; empty if unknown.

    The kernel's number of tasks, and the last number that it gave to one (proc_loadavg(5)): where
    that is the same, none was born. A birth that is under way may be missed, if a task is reaped at
    the same time, until the next birth on the node.
    """
    if not root.live:
        return b""
    try:
        words = read_once(f"{root.proc()}/loadavg").split()
    except OSError:
        return b""
    return b" ".join((words[3].rpartition(b"/")[2], words[4])) if len(words) == 5 else b""


# Taking a lock of flock(2), and who holds it: for the message of a process that did not get it.
#
# The kernel names the process in /proc/locks (proc_locks(5)); its cgroup says whether it is a
# service of the node or a pod's. Nothing is decided by it: the process may have ended meanwhile.

_POD: Final = re.compile(r"pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12})\b")
"""A pod's uid in a cgroup's name; systemd's names have `_` in place of `-`."""

_UNIT: Final = re.compile(r"([^/\s]+\.(?:service|scope))\b")


class LockHolder(Struct, frozen=True):
    """A process, and the pod or the unit that it belongs to; `pid` is 0 where nobody is known.

    `since` is when the process started, in local time; locks are taken at the start.
    """

    pid: int = 0
    pod: str = ""
    unit: str = ""
    since: str = ""

    def __str__(self) -> str:
        """Return ` (process 812 of kata-pin.service, since 2026-11-24 09:06:14)` or nothing."""
        owner = f" of pod {self.pod}" if self.pod else f" of {self.unit}" if self.unit else ""
        since = f", since {self.since}" if self.since else ""
        return f" (process {self.pid}{owner}{since})" if self.pid else ""


def open_locked(path: str, flags: int, taken: Callable[[LockHolder], KataPinError]) -> int:
    """Return the descriptor of a locked file, which a killed holder leaves unlocked.

    Raises what `taken` makes of its holder when another process has locked it, else OSError.
    """
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise taken(flock_holder(descriptor)) from error
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def flock_holder(descriptor: int, root: HostRoot = HOST) -> LockHolder:
    """Return who has locked an open file."""
    found = os.fstat(descriptor)
    place = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    try:
        for line in read_text(root.proc("locks")).splitlines():
            fields = line.split()  # 1: FLOCK ADVISORY WRITE 812 00:19:1234 0 EOF
            if len(fields) > 5 and fields[1] == "FLOCK" and fields[5] == place:
                return _member(int(fields[4]), root)
    except (OSError, ValueError):
        pass
    return LockHolder()


def _member(pid: int, root: HostRoot) -> LockHolder:
    try:
        cgroups = read_text(root.proc(pid, "cgroup"))
    except OSError:
        cgroups = ""
    pod, units = _POD.search(cgroups), _UNIT.findall(cgroups)
    owner = pod[1].replace("_", "-") if pod else ""
    return LockHolder(max(0, pid), owner, units[-1] if units else "", _start(pid, root))


def _start(pid: int, root: HostRoot) -> str:
    """Return when a process started, in local time; empty if that cannot be read."""
    try:
        ticks = read_process(root, pid).key.starttime
    except KataPinError:
        return ""
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time.time() - age))


# Which PCI devices VFIO gave to a process, by the groups and devices that it has open.
#
# Facts are in drivers/vfio: /dev/vfio/<group> stands for the devices in
# /sys/kernel/iommu_groups/<group>;
# /dev/vfio/devices/vfio<n> (Linux 6.6) for one, /sys/class/vfio-dev/vfio<n>/device.

_GROUP: Final = re.compile(r"/dev/vfio/(?:noiommu-)?([0-9]{1,9})\Z")
_DEVICE: Final = re.compile(r"/dev/vfio/devices/(vfio[0-9]{1,9})\Z")


def vfio_devices(root: HostRoot, pid: int) -> frozenset[str]:
    """Return the PCI addresses of a process's devices; none where that cannot be read.

    A process may have any number of descriptors: the first 2,048 are looked at.
    """
    found: set[str] = set()
    with suppress(OSError):
        for target in root.calls.descriptors(root.proc(pid)):
            with suppress(OSError):
                found.update(_addresses(root, target))
    return frozenset(found)


def _addresses(root: HostRoot, target: str) -> Iterator[str]:
    group, device = _GROUP.match(target), _DEVICE.match(target)
    if group is not None:
        yield from os.listdir(root.sys("kernel/iommu_groups", group[1], "devices"))
    elif device is not None:
        yield os.path.basename(os.readlink(root.sys("class/vfio-dev", device[1], "device")))


# What a process may write, from the outside: its mounts and its capabilities. Nothing is written.
#
# A write to a tree that systemd or a container runtime made read-only fails with EROFS, and nothing
# else shows that beforehand. proc_pid_mountinfo(5).

SETUID: Final = 7
NET_ADMIN: Final = 12
"""Numbers of capabilities (linux/capability.h)."""

_OCTAL: Final = re.compile(rb"\\([0-7]{3})")


def may_write(root: HostRoot, pid: int, path: str) -> bool:
    """Return whether a process sees a path on a writable mount; raises OSError or ParseError."""
    return not is_read_only(read_bytes(root.proc(pid, "mountinfo"), MAX_MOUNTINFO + 1), path)


def may_have(root: HostRoot, pid: int, capability: int) -> bool:
    """Return whether a capability is in a process's bounding set; raises OSError."""
    bounds = status_field(read_bytes(root.proc(pid, "status")), "CapBnd") or "0"
    return bool(int(bounds, 16) >> capability & 1)


def is_read_only(data: bytes, path: str) -> bool:
    """Return whether the mount that a path is on is read-only; raises ParseError.

    The deepest mount point counts, and of several on the same folder the last one.
    """
    check_size(data, MAX_MOUNTINFO, "mountinfo")
    best, read_only = b"", None
    wanted = path.encode() + b"/"
    for line in data.split(b"\n"):
        words = line.split(b" ")
        if len(words) < 6:
            continue
        place = _OCTAL.sub(lambda found: bytes([int(found[1], 8) & 0xFF]), words[4])
        point = place.rstrip(b"/") + b"/"
        if wanted.startswith(point) and len(point) >= len(best):
            best = point
            read_only = b"ro" in words[5].split(b",") or b"ro" in words[-1].split(b",")
    if read_only is None:
        raise ParseError("no mount for a path", source="mountinfo", text=path)
    return read_only
