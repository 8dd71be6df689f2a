"""Cgroups v1, v2 and hybrid: which CPUs they allow, who owns them, and what they count."""

from __future__ import annotations

import os
import posixpath
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Final

from kata_pin.base.counters import NodeBytes, Throttling
from kata_pin.base.cpuset import EMPTY, CpuSet
from kata_pin.base.errors import HostError, ParseError, is_transient
from kata_pin.linux.cgroup_mounts import CgroupMount, cgroup_mounts, read_cgroups
from kata_pin.linux.files import STAT_BYTES, HostRoot, read_bytes, read_once, read_text, translated
from kata_pin.linux.kernel_text import check_size, clipped
from kata_pin.linux.memory import parse_hugetlb, parse_numa_stat
from kata_pin.linux.proc import MAX_CGROUP, CgroupEntry

# A CpusetReader lives for one pass: it reads each cgroup once, so that all threads of a pass are
# judged by the same state. Nothing is ever written.
#
# Facts are in Documentation/admin-guide/cgroup-v1/cpusets.rst and cgroup-v2.rst,
# cgroup_namespaces(7), proc_pid_mountinfo(5).

_LIST_BYTES: Final = 256
"""Bytes of a cgroup's list of threads that cost as much as one thread's cgroup file, about."""


def cpuset_folders(mounts: Sequence[CgroupMount], cgroup: str) -> list[str]:
    """Return the folders whose written cpuset bounds a cgroup: its own and those above it.

    Innermost first, without the root, which nobody writes, and those without a cpuset of their own.
    """
    return [
        folder
        for mount in mounts
        for folder in _upwards(mount.folder(cgroup) or mount.point, mount.point)
        if os.path.exists(f"{folder}/cpuset.cpus")
    ]


def _seen(mounts: Iterable[CgroupMount], entry: CgroupEntry) -> Iterator[tuple[CgroupMount, str]]:
    """Yield where a cgroup is seen, with the mount that shows it."""
    for mount in mounts:
        folder = mount.folder(entry.path) if mount.v1 == bool(entry.controllers) else None
        if folder is not None and not entry.removed:
            yield mount, folder


def _upwards(folder: str, top: str) -> Iterator[str]:
    """Yield a folder and those above it, without the one at the top."""
    while folder != top and folder.startswith(top):
        yield folder
        folder = posixpath.dirname(folder)


class CpusetReader:
    """Effective cpusets of threads, for one pass."""

    def __init__(self, root: HostRoot, mounts: Sequence[CgroupMount] | None = None) -> None:
        """`mounts` are those of `cgroup_mounts`, where the caller has them; else they are read."""
        self._root = root
        self._mounts = cgroup_mounts(root) if mounts is None else mounts
        self._known: dict[bytes, tuple[str, CpuSet]] = {}
        self._entries: dict[str, CgroupEntry] = {}

    def of(self, tgid: int, tid: int) -> tuple[str, CpuSet]:
        """Return the thread's cgroup, as far as CPUs go, and the CPUs it allows.

        EMPTY means unknown, never none: no cgroup of Linux that holds a task has no CPU. Raises
        TaskGone when the thread exited.
        """
        try:
            path = f"{self._root.proc()}/{tgid}/task/{tid}/cgroup"
            data = read_once(path)  # one record: one read gives all of it or fills the buffer
            if len(data) == STAT_BYTES:
                data = read_bytes(path)
        except OSError as error:
            raise translated(error, "read cgroup of", f"thread {tid}") from error
        found = self._known.get(data)
        if found is None:
            entry = read_cgroups(self._root, data).cpuset
            found = ("", EMPTY) if entry is None else (entry.path, self.effective(entry))
            self._known[data] = found
            if entry is not None:
                self._entries[entry.path] = entry
        return found

    def tids(self, cgroup: str, *, among: int) -> frozenset[int]:
        """Return the threads in a cgroup that `of` gave; not all where it has many times `among`.

        Listing a cgroup of thousands would cost more than asking `among` threads. The root of
        version 1 is never listed: the kernel sorts all of a list before it gives the first number.
        """
        entry = self._entries.get(cgroup)
        if entry is None or cgroup == "/":
            return frozenset()
        name = "tasks" if entry.controllers else "cgroup.threads"
        for _mount, folder in _seen(self._mounts, entry):
            with suppress(OSError):
                data = read_once(f"{folder}/{name}", among * _LIST_BYTES)
                whole = data[: data.rfind(b"\n") + 1]  # the last number may have been cut
                return frozenset(map(int, whole.split()))
        return frozenset()

    def configured(self, tgid: int, tid: int) -> tuple[str, CpuSet]:
        """Return the thread's cgroup and the CPUs configured for it; EMPTY for none.

        A set of all CPUs that the parent cgroup allows does not count: version 1 creates cgroups
        with it. Raises TaskGone when the thread exited.
        """
        cgroup, _ = self.of(tgid, tid)
        for mount in self._mounts:
            folder = mount.folder(cgroup)
            if folder is None or folder == mount.point:
                continue
            cpus = _read(f"{folder}/cpuset.cpus")
            if cpus:
                above = posixpath.dirname(folder)
                allowed = _v1_cpus(above) if mount.v1 else _v2_cpus(above, mount.point)
                return cgroup, EMPTY if allowed <= cpus else cpus
        return cgroup, EMPTY

    def effective(self, entry: CgroupEntry) -> CpuSet:
        """Return the CPUs that a cgroup allows, EMPTY if that cannot be known."""
        for mount, folder in _seen(self._mounts, entry):
            cpus = _v1_cpus(folder) if entry.controllers else _v2_cpus(folder, mount.point)
            if cpus:
                return cpus
        return EMPTY


def _v1_cpus(folder: str) -> CpuSet:
    """Return what a v1 cpuset allows; before Linux 3.17 only the configured list existed."""
    return _read(f"{folder}/cpuset.effective_cpus") or _read(f"{folder}/cpuset.cpus") or EMPTY


def _v2_cpus(folder: str, top: str) -> CpuSet:
    """Return what the nearest ancestor with the cpuset controller allows.

    The file is absent in a cgroup whose parent does not hand the controller on; then the ancestor's
    set holds.
    """
    for place in (*_upwards(folder, top), top):
        cpus = _read(f"{place}/cpuset.cpus.effective")
        if cpus is not None:
            return cpus
    return EMPTY


def _read(path: str) -> CpuSet | None:
    """Return a cpuset file's CPUs, None when it is not there or makes no sense.

    HostError if it cannot be read for a passing reason: the folder above may allow more.
    """
    try:
        return CpuSet.parse(read_text(path), source=path)
    except ParseError:
        return None
    except OSError as error:
        if is_transient(error):
            raise HostError("read", path, error.errno or 0) from error
        return None


# Whose a cgroup is: whether anybody but root could have moved a process into it (D24).
#
# A process enters a cgroup if its mover may write the cgroup's cgroup.procs (v1: tasks) and, with
# v2, that of the common ancestor. So every folder from the cgroup up to the root of its hierarchy
# has to belong to root alone, and none may be marked as delegated: systemd sets trusted.delegate or
# user.delegate on what it leaves to a unit (systemd.resource-control(5), Delegate=).

_MEMBERS: Final = ("cgroup.procs", "tasks", "cgroup.threads")
"""The files of a cgroup that move processes or threads into it; v1 and v2 have two of them each."""

_MARKS: Final = ("trusted.delegate", "user.delegate")


def why_not_roots(root: HostRoot, entry: CgroupEntry) -> str:
    """Return why somebody else may have put a process into a cgroup; empty where only root can.

    A captured tree has no cgroups to look at, and counts as root's.
    """
    if not root.live:
        return ""
    if entry.removed:
        return f"cgroup {entry.path} has been removed"
    controller = entry.controllers[0] if entry.controllers else ""
    for mount, folder in _seen(cgroup_mounts(root, controller), entry):
        problems = map(_problem, (*_upwards(folder, mount.point), mount.point))
        return next(filter(None, problems), "")
    return f"cgroup {entry.path} cannot be seen from here"


def _problem(folder: str) -> str:
    """Return what is wrong with one folder of a hierarchy, empty for nothing."""
    for path in (folder, *(f"{folder}/{name}" for name in _MEMBERS)):
        try:
            found = os.lstat(path)
        except FileNotFoundError:
            if path == folder:
                return f"{folder} does not exist"
            continue
        except OSError as error:
            return f"cannot look at {path}: {error.strerror}"
        if found.st_uid:
            return f"{path} belongs to uid {found.st_uid}"
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return f"{path} can be written by others than root"
    return f"{folder} is delegated" if any(_marked(folder, name) for name in _MARKS) else ""


def _marked(folder: str, name: str) -> bool:
    try:
        return os.getxattr(folder, name, follow_symlinks=False) == b"1"
    except OSError:  # not set, or trusted.* without CAP_SYS_ADMIN
        return False


# cpu.stat of a cgroup: how long its CPU quota stopped it.
#
# Facts are in Documentation/scheduler/sched-bwc.rst (version 1), cgroup-v2.rst.

MAX_STAT: Final = 16 * 1024


def parse_cpu_stat(data: bytes) -> Throttling | None:
    """Return the throttling, None where no quota can be set (no cpu controller there).

    Raises ParseError.
    """
    check_size(data, MAX_STAT, "cpu.stat")
    found: dict[bytes, int] = {}
    for line in data.split(b"\n"):
        name, _, value = line.partition(b" ")
        if name:
            if not value.isdigit() or len(value) > 20:
                raise ParseError("not a name and a number", source="cpu.stat", text=clipped(line))
            found[name] = int(value)
    if b"nr_throttled" not in found:
        return None
    ns = found.get(b"throttled_time", found.get(b"throttled_usec", 0) * 1000)
    return Throttling(found[b"nr_throttled"], ns)


# Files of the cgroups that a thread is in, for one controller: cpu.stat, memory.numa_stat.
#
# The mounts are read once: a CgroupFiles lives as long as one command.


class CgroupFiles:
    """The folders of threads in the hierarchy of one controller."""

    def __init__(self, root: HostRoot, controller: str) -> None:
        self._root = root
        self._controller = controller
        self._mounts = cgroup_mounts(root, controller)

    def folders(self, tgid: int, tid: int) -> list[str] | None:
        """Return a thread's cgroup and those above it, but for the root; None: unknown."""
        try:
            path = self._root.proc(tgid, "task", tid, "cgroup")
            entry = read_cgroups(self._root, read_bytes(path, MAX_CGROUP)).of(self._controller)
        except (OSError, ParseError):
            return None
        if entry is None:
            return None
        seen = _seen(self._mounts, entry)
        return next((list(_upwards(folder, mount.point)) for mount, folder in seen), None)

    def throttling(self, folders: list[str]) -> Throttling | None:
        """Return how long quotas of these cgroups stopped them in all; None: unknown.

        A quota stops all below it, so that of each one above counts. The root has none.
        """
        found = None if folders else Throttling(0, 0)
        for folder in folders:
            with suppress(OSError, ParseError):
                one = parse_cpu_stat(read_bytes(f"{folder}/cpu.stat"))
                if one is not None:
                    times, ns = found or (0, 0)
                    found = Throttling(times + one.times, ns + one.ns)
        return found

    def memory(self, folder: str, page_size: int) -> dict[int, NodeBytes]:
        """Return the memory of a cgroup by NUMA node; raises OSError and ParseError."""
        return parse_numa_stat(read_bytes(f"{folder}/memory.numa_stat"), page_size)

    def huge_pages(self, folders: Sequence[str], beside: str) -> dict[int, NodeBytes]:
        """Return the pages of hugetlbfs by NUMA node of the cgroup that has the name of `beside`.

        Empty where nothing counts them. memory.numa_stat does not.
        """
        name = posixpath.basename(beside)
        found: dict[int, int] = {}
        for folder in folders:
            if not name or posixpath.basename(folder) != name:
                continue
            with suppress(OSError, ParseError):
                for file in os.listdir(folder):
                    if file.startswith("hugetlb.") and file.endswith(".numa_stat"):
                        for node, size in parse_hugetlb(read_bytes(f"{folder}/{file}")).items():
                            found[node] = found.get(node, 0) + size
        return {node: NodeBytes(size, size) for node, size in found.items()}
