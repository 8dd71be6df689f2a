"""Files of the cgroups that a thread is in, for one controller: cpu.stat, memory.numa_stat.

The mounts are read once: a CgroupFiles lives as long as one command.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Sequence
from contextlib import suppress

from kata_pin.errors import ParseError
from kata_pin.host.cgroup_mounts import CgroupMount, cgroup_mounts, read_cgroups
from kata_pin.host.files import read_bytes
from kata_pin.host.root import HostRoot
from kata_pin.model.measured.counters import Throttling
from kata_pin.model.measured.memory import NodeBytes
from kata_pin.wire.kernel.cgroup import parse_cpu_stat
from kata_pin.wire.kernel.memory import parse_hugetlb, parse_numa_stat
from kata_pin.wire.proc import MAX_CGROUP


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
        if entry is None or entry.removed:
            return None
        for mount in self._mounts:
            if mount.v1 == bool(entry.controllers) and (folder := mount.folder(entry.path)):
                return _upwards(mount, folder)
        return None

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


def _upwards(mount: CgroupMount, folder: str) -> list[str]:
    found = []
    while folder != mount.point and folder.startswith(mount.point):
        found.append(folder)
        folder = posixpath.dirname(folder)
    return found
