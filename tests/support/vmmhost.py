"""The running host as the vmm package sees it, a private debugfs, and processes to leave alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from kata_pin.host.cpuset import CpusetReader
from kata_pin.host.process import ProcessIndex, cgroups, cmdline, exe, read_process
from kata_pin.host.root import HostRoot
from kata_pin.host.tasks import TaskReader
from kata_pin.model.thread import Task
from kata_pin.vmm.host_access import HostAccess
from tests.support.waiting import wait_for

NO_DEBUGFS = "/nonexistent"

_LOOKALIKE = """
import sys, threading
try:
    with open("/proc/self/comm", "w") as file:
        file.write(sys.argv[1])
except PermissionError:
    pass  # another user now
for _ in range(3):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
print("ready", flush=True)
sys.stdin.read()
"""


def facts(root: HostRoot) -> HostAccess:
    """Compose what the vmm package needs, as the daemon does; the process table is fresh."""
    index = ProcessIndex(root)
    index.refresh()
    return HostAccess(
        root,
        index,
        partial(read_process, root),
        partial(cmdline, root),
        partial(exe, root),
        partial(cgroups, root),
    )


def live(debugfs: str | Path = NO_DEBUGFS) -> HostAccess:
    """Return the running host; without `debugfs` it has none."""
    return facts(HostRoot(debugfs=str(debugfs)))


def tasks(pid: int) -> list[Task]:
    """Return the threads of a process, with their affinities."""
    root = HostRoot()
    return TaskReader().read(root, pid, CpusetReader(root))


@contextmanager
def private_debugfs(at: Path) -> Iterator[Path]:
    """Mount debugfs at a directory of the test's own."""
    at.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "debugfs", "none", str(at)], check=True, timeout=10)
    try:
        yield at
    finally:
        subprocess.run(["umount", str(at)], check=True, timeout=10)


@contextmanager
def lookalike(
    *arguments: str,
    comm: str = "qemu-system-x86",
    executable: str = sys.executable,
    prefix: Sequence[str] = (),
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process with threads, a name and arguments like a VMM's that is none."""
    argv = [*prefix, executable, "-c", _LOOKALIKE, comm, *arguments]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            yield process
        finally:
            process.kill()


class Bystander:
    """A process beside the sandbox under test: nothing may name it, nothing may move it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        wait_for(lambda: len(os.listdir(f"/proc/{pid}/task")) > 3, "bystander's threads")
        self._before = self._masks()

    def check(self) -> None:
        """Assert that its threads are as they were."""
        assert self._masks() == self._before

    def _masks(self) -> dict[int, str]:
        return {task.key.tid: str(task.affinity) for task in tasks(self.pid)}
