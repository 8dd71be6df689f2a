"""Cgroups for a test, version 1 or 2, with or without a cpuset, removed at its end."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
from collections.abc import Iterator
from pathlib import Path

from tests.e2e.node import Node


class Cpuset:
    """A cgroup whose cpuset the test rewrites, as Kata does on an update."""

    def __init__(self, folder: Path, version: int) -> None:
        self.folder = folder
        self._version = version

    def write(self, cpus: str) -> None:
        """Set the CPUs, by one write of the whole list."""
        (self.folder / "cpuset.cpus").write_text(cpus)

    def effective(self) -> str:
        """Return the CPUs that the kernel grants."""
        name = "cpuset.cpus.effective" if self._version == 2 else "cpuset.effective_cpus"
        return (self.folder / name).read_text().strip()

    def add(self, pid: int) -> None:
        """Move a whole process in."""
        (self.folder / "cgroup.procs").write_text(str(pid))

    def add_thread(self, tid: int) -> None:
        """Move one thread in: version 1, or a threaded cgroup of version 2."""
        name = "cgroup.threads" if self._version == 2 else "tasks"
        (self.folder / name).write_text(str(tid))

    def pids(self) -> list[int]:
        """Return the processes in it: none once it was removed."""
        try:
            return [int(word) for word in (self.folder / "cgroup.procs").read_text().split()]
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENODEV):
                return []
            raise


def top(node: Node) -> Path:
    """Return the folder of the root cgroup, of the cpuset tree with version 1."""
    return Path("/sys/fs/cgroup") if node.cgroup == 2 else Path("/sys/fs/cgroup/cpuset")


@contextlib.contextmanager
def cpuset(node: Node, name: str, cpus: str) -> Iterator[Cpuset]:
    """Make a top-level cgroup with that cpuset; at the end kill what is in it and remove it."""
    with cgroup(node, f"kata-pin-e2e-{name}", cpus) as group:
        yield group


@contextlib.contextmanager
def cgroup(node: Node, path: str, cpus: str = "") -> Iterator[Cpuset]:
    """Make a cgroup below the root, with a cpuset if `cpus` are given.

    At the end what is in it is killed, and it is removed with the folders that were made above it.
    systemd may have been faster: it removes what is empty below a slice that it stops.
    """
    made: list[Path] = []
    folder = top(node)
    for part in Path(path).parts:
        if node.cgroup == 2 and cpus:
            (folder / "cgroup.subtree_control").write_text("+cpuset")
        folder /= part
        if not folder.exists():
            folder.mkdir()
            made.append(folder)
            if node.cgroup == 1:
                _inherit(folder)
    group = Cpuset(folder, node.cgroup)
    try:
        if cpus:
            group.write(cpus)
        yield group
    finally:
        for pid in group.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        node.wait(lambda: _removed(folder), f"{folder} empty and removed")
        for one in reversed(made[:-1]):
            with contextlib.suppress(OSError):  # another test's cgroup is still below it
                one.rmdir()


def _removed(folder: Path) -> bool:
    """Whether the cgroup could be removed: what was in it may still be exiting."""
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _inherit(folder: Path) -> None:
    """Give a cpuset of version 1 its parent's values: without them it takes no task."""
    for name in ("cpuset.cpus", "cpuset.mems"):
        (folder / name).write_text((folder.parent / name).read_text())
