"""A real process with sleeping threads, and a cgroup of a test's own with a cpuset."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final

import pytest

from kata_pin.base.cpuset import CpuSet
from kata_pin.linux.cgroup_mounts import cgroup_mounts
from kata_pin.linux.files import HOST
from tests.support.waiting import wait_for

_PROGRAM: Final = """
import sys, threading
gates = {}
def sleep(gate):
    gate.wait()
def grow(count):
    for _ in range(count):
        gate = threading.Event()
        thread = threading.Thread(target=sleep, args=(gate,), daemon=True)
        thread.start()
        gates[thread.native_id] = (gate, thread)
        print(thread.native_id, flush=True)
for line in sys.stdin:
    verb, number = line.split()
    if verb == "grow":
        grow(int(number))
    else:
        gate, thread = gates.pop(int(number))
        gate.set()
        thread.join()
        print(number, flush=True)
"""


@dataclass
class Specimen:
    """A process that makes and ends threads when told; they sleep all their life."""

    child: subprocess.Popen[str]
    tids: list[int]

    @property
    def pid(self) -> int:
        """The process."""
        return self.child.pid

    def grow(self, count: int) -> list[int]:
        """Make threads; return their tids."""
        new = self._ask(f"grow {count}", count)
        self.tids += new
        return new

    def end(self, tid: int) -> None:
        """End one thread; its tid is free when this returns."""
        self._ask(f"end {tid}", 1)
        self.tids.remove(tid)
        path = f"/proc/{self.pid}/task/{tid}"
        wait_for(lambda: not os.path.exists(path), f"thread {tid} to be gone")

    def _ask(self, request: str, lines: int) -> list[int]:
        assert self.child.stdin is not None
        assert self.child.stdout is not None
        print(request, file=self.child.stdin, flush=True)
        return [int(self.child.stdout.readline()) for _ in range(lines)]


@contextmanager
def specimen(threads: int = 0) -> Iterator[Specimen]:
    """Run a specimen; it ends with the block, or with the test run."""
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        one = Specimen(child, [child.pid])
        try:
            one.grow(threads)
            yield one
        finally:
            child.kill()


@dataclass(frozen=True)
class CpusetCgroup:
    """A cgroup of the test's own."""

    path: str
    folder: str

    def allow(self, cpus: str) -> None:
        """Set its CPUs."""
        self._write("cpuset.cpus", cpus)

    def take(self, pid: int) -> None:
        """Move a process of the test's own into it."""
        self._write("cgroup.procs", str(pid))

    def _write(self, name: str, text: str) -> None:
        with open(f"{self.folder}/{name}", "w", encoding="ascii") as file:
            file.write(text)


@contextmanager
def cpuset_cgroup(cpus: str) -> Iterator[CpusetCgroup]:
    """Make a cgroup with a cpuset; skip the test where nobody may."""
    name = f"kata-pin-test-{secrets.token_hex(4)}"
    for mount in cgroup_mounts(HOST):
        folder = f"{mount.point}/{name}"
        try:
            os.mkdir(folder)
        except OSError:
            continue
        try:
            if not os.path.exists(f"{folder}/cpuset.cpus"):
                continue
            group = CpusetCgroup(f"/{name}", folder)
            if mount.v1:
                with open(f"{mount.point}/cpuset.mems", encoding="ascii") as mems:
                    group._write("cpuset.mems", mems.read())
            group.allow(cpus)
            yield group
            return
        finally:
            wait_for(partial(_removed, folder), f"{folder} to be empty")
    pytest.skip("no cgroup with a cpuset can be made here")


def _removed(folder: str) -> bool:
    try:
        os.rmdir(folder)
    except OSError:
        return False
    return True


def two_cpus() -> tuple[int, int]:
    """Return two CPUs that this process may use; skip the test where there is one."""
    cpus = sorted(CpuSet(os.sched_getaffinity(0)))
    if len(cpus) < 2:
        pytest.skip("needs two CPUs")
    return cpus[0], cpus[1]
