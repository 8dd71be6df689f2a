"""The running host as the vmm package sees it, a private debugfs, and processes to leave alone."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import cast

from kata_pin.base.sandbox import Task
from kata_pin.base.steps import finish
from kata_pin.engine.observe import Survey
from kata_pin.linux.cgroups import CpusetReader
from kata_pin.linux.files import HostRoot
from kata_pin.linux.process import (
    ProcessIndex,
    cgroups,
    cmdline,
    exe,
    exe_file,
    exe_paths,
    read_process,
)
from kata_pin.linux.tasks import TaskReader
from kata_pin.vmm.checks import DEFAULT_SHIMS
from kata_pin.vmm.find import Executables
from kata_pin.vmm.state_files import HostAccess
from tests.support.qemu import QEMU
from tests.support.waiting import wait_for

PYTHON = os.path.realpath(sys.executable)
MINIKATA = f"{Path(__file__).resolve().parents[2]}/.cache/minikata/{platform.python_version()}"
SHIMS = (*DEFAULT_SHIMS, PYTHON, f"{MINIKATA}/containerd-shim-kata-v2")
"""What plays Kata's shim (shim_process.py, minikata): its executable has to be allowed."""

EXECUTABLES = Executables((QEMU,), shims=SHIMS)

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


def facts(root: HostRoot, index: ProcessIndex | None = None) -> HostAccess:
    """Compose what the vmm package needs, as the daemon does; without `index`, on a fresh one."""
    if index is None:
        index = ProcessIndex(root)
        index.refresh()
    return HostAccess(
        root,
        index,
        partial(read_process, root),
        partial(cmdline, root),
        partial(exe, root),
        partial(exe_paths, root),
        partial(exe_file, root),
        partial(cgroups, root),
    )


class NoSurvey:
    """Stands for a Survey where every process can be read at once."""

    notes = ()
    locked = 0
    has_wanted = False
    complete = True
    retry_s: float | None = None
    _begun = False

    async def all(self, *, patience_s: float | None = None) -> None:
        """Read nothing."""

    async def before_pass(self, sandbox_id: str, hints: Mapping[int, int]) -> None:
        """Read nothing."""

    async def read_wanted(self) -> bool:
        """Return that nothing was missed."""
        return False

    def begin(self) -> None:
        """Read nothing, at once."""
        self._begun = True

    def afterwards(self, then: Callable[[], None]) -> None:
        """Call it at once if something was begun."""
        if self._begun:
            self._begun = False
            then()

    async def claims_to_be(self, _sandbox_id: str, _hints: Mapping[int, int]) -> bool:
        """Return that no process claims to be a VMM."""
        return False

    def is_due(self) -> bool:
        """Return that nothing waits."""
        return False


def no_survey() -> Survey:
    """Return one."""
    return cast("Survey", NoSurvey())


def live(debugfs: str | Path = NO_DEBUGFS) -> HostAccess:
    """Return the running host; without `debugfs` it has none."""
    return facts(HostRoot(debugfs=str(debugfs)))


def tasks(pid: int) -> list[Task]:
    """Return the threads of a process, with their affinities."""
    root = HostRoot()
    return finish(TaskReader().read(root, pid, CpusetReader(root)))


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
