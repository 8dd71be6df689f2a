"""A cpuset cgroup for a test, version 1 or 2, removed at its end."""

from __future__ import annotations

import contextlib
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

    def pids(self) -> list[int]:
        """Return the processes in it."""
        return [int(word) for word in (self.folder / "cgroup.procs").read_text().split()]


@contextlib.contextmanager
def cpuset(node: Node, name: str, cpus: str) -> Iterator[Cpuset]:
    """Make a top-level cgroup with that cpuset; at the end kill what is in it and remove it."""
    root = Path("/sys/fs/cgroup") if node.cgroup == 2 else Path("/sys/fs/cgroup/cpuset")
    if node.cgroup == 2:
        (root / "cgroup.subtree_control").write_text("+cpuset")
    folder = root / f"kata-pin-e2e-{name}"
    folder.mkdir()
    group = Cpuset(folder, node.cgroup)
    try:
        if node.cgroup == 1:  # version 1 takes no task before it knows its memory nodes
            (folder / "cpuset.mems").write_text((root / "cpuset.mems").read_text())
        group.write(cpus)
        yield group
    finally:
        for pid in group.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        node.wait(lambda: not group.pids(), f"{folder} empty")
        folder.rmdir()
