"""Which CPUs a thread's cgroup allows: cgroup v1, v2, and the hybrid of both.

A CpusetReader lives for one pass: it reads each cgroup once, so that all threads of a pass are
judged by the same state. Nothing is ever written.

Facts: Documentation/admin-guide/cgroup-v1/cpusets.rst and cgroup-v2.rst, cgroup_namespaces(7),
proc_pid_mountinfo(5).
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Final

from kata_pin.errors import HostError, ParseError, is_transient
from kata_pin.host.cgroup_mounts import CgroupMount, cgroup_mounts, read_cgroups
from kata_pin.host.files import STAT_BYTES, read_bytes, read_once, read_text
from kata_pin.host.process import translated
from kata_pin.host.root import HostRoot
from kata_pin.model.cpuset import EMPTY, CpuSet
from kata_pin.wire.proc import CgroupEntry

_LIST_BYTES: Final = 256
"""Bytes of a cgroup's list of threads that cost as much as one thread's cgroup file, about."""


def cpuset_folders(mounts: Sequence[CgroupMount], cgroup: str) -> list[str]:
    """Return the folders whose written cpuset bounds a cgroup: its own and those above it.

    Innermost first, without the root, which nobody writes, and those without a cpuset of their own.
    """
    found: list[str] = []
    for mount in mounts:
        folder = mount.folder(cgroup)
        while folder is not None and folder != mount.point:
            if os.path.exists(f"{folder}/cpuset.cpus"):
                found.append(folder)
            folder = posixpath.dirname(folder)
    return found


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
        for _mount, folder in self._folders(entry):
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
        for mount, folder in self._folders(entry):
            cpus = _v1_cpus(folder) if entry.controllers else _v2_cpus(folder, mount.point)
            if cpus:
                return cpus
        return EMPTY

    def _folders(self, entry: CgroupEntry) -> Iterator[tuple[CgroupMount, str]]:
        """Yield where a cgroup is seen, with the mount that shows it."""
        for mount in self._mounts:
            folder = mount.folder(entry.path) if mount.v1 == bool(entry.controllers) else None
            if folder is not None and not entry.removed:
                yield mount, folder


def _v1_cpus(folder: str) -> CpuSet:
    """Return what a v1 cpuset allows; before Linux 3.17 only the configured list existed."""
    return _read(f"{folder}/cpuset.effective_cpus") or _read(f"{folder}/cpuset.cpus") or EMPTY


def _v2_cpus(folder: str, top: str) -> CpuSet:
    """Return what the nearest ancestor with the cpuset controller allows.

    The file is absent in a cgroup whose parent does not hand the controller on; then the ancestor's
    set holds.
    """
    while folder.startswith(top):
        cpus = _read(f"{folder}/cpuset.cpus.effective")
        if cpus is not None:
            return cpus
        if folder == top:
            break
        folder = posixpath.dirname(folder)
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
