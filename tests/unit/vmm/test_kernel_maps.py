"""debugfs and the descriptor map on written trees: what a real kernel shows only rarely."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from kata_pin.base.cpuset import EMPTY
from kata_pin.base.sandbox import PF_USER_WORKER, Task
from kata_pin.base.steps import finish
from kata_pin.base.threads import ThreadKey
from kata_pin.linux.files import HostRoot
from kata_pin.vmm import roles
from tests.support import recordings

PID = 1780
BEFORE, AFTER = 100, 10**12
"""Start times before and after any vCPU directory that a test writes, in ticks since boot."""


@pytest.fixture
def root(tmp_path: Path) -> HostRoot:
    """An empty host."""
    return HostRoot(str(tmp_path))


def _vcpu(root: HostRoot, number: int, tid: int | str, vm: str = f"{PID}-20") -> None:
    folder = Path(root.debug("kvm", vm, f"vcpu{number}"))
    folder.mkdir(parents=True)
    (folder / "pid").write_text(f"{tid}\n")


def _thread(root: HostRoot, tid: int, syscall: str, flags: int = 0) -> Task:
    folder = Path(root.proc(PID, "task", tid))
    folder.mkdir(parents=True)
    (folder / "syscall").write_text(f"{syscall}\n")
    return Task(ThreadKey(PID, tid, BEFORE), "qemu-system-x86", flags, EMPTY, EMPTY, "/")


def _fd(root: HostRoot, number: int, target: str) -> None:
    folder = Path(root.proc(PID, "fd"))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / str(number)).symlink_to(target)


def _debugfs(root: HostRoot, **starts: int) -> roles.VcpuThreads:
    keys = {int(name[1:]): ThreadKey(PID, int(name[1:]), start) for name, start in starts.items()}
    return roles.read_vcpus(root, keys, PID)


def test_debugfs_names_threads_of_this_vmm_only(root: HostRoot) -> None:
    """Other VMs, dead threads, vCPUs that never ran and damaged files name nobody."""
    _vcpu(root, 0, 1792)
    _vcpu(root, 1, 0)
    _vcpu(root, 2, 4711)
    _vcpu(root, 3, "-1")
    _vcpu(root, 4, "9" * 40)
    _vcpu(root, 5, 1793, vm="178-20")
    Path(root.debug("kvm", f"{PID}-20", "vcpux")).mkdir()
    found = _debugfs(root, t1792=BEFORE, t1793=BEFORE)
    assert found.ids == {ThreadKey(PID, 1792, BEFORE): 0}
    assert not found.doubtful


def test_a_thread_younger_than_its_vcpu_is_doubtful(root: HostRoot) -> None:
    """It may have a dead thread's tid."""
    _vcpu(root, 0, 1792)
    assert _debugfs(root, t1792=AFTER).doubtful == {ThreadKey(PID, 1792, AFTER)}


def test_a_thread_starts_in_the_tick_of_its_vcpu(root: HostRoot) -> None:
    """A fresh vCPU's thread is as old as the vCPU: that is no doubt."""
    ticks = os.sysconf("SC_CLK_TCK")
    now = int(time.clock_gettime(time.CLOCK_BOOTTIME) * ticks)
    _vcpu(root, 0, 1792)
    assert not _debugfs(root, t1792=now).doubtful


def test_a_thread_of_two_vcpus_is_doubtful(root: HostRoot) -> None:
    """Unplugged and running vCPU cannot be told apart: one entry is stale."""
    _vcpu(root, 0, 1792)
    _vcpu(root, 7, 1792)
    assert len(_debugfs(root, t1792=BEFORE).doubtful) == 1


def test_no_debugfs_is_no_answer(root: HostRoot) -> None:
    """Not mounted, or locked down."""
    assert _debugfs(root, t1792=BEFORE) == roles.NOTHING


def _recorded() -> tuple[list[tuple[int, str]], dict[int, str]]:
    """Return (tid, syscall) and descriptor links of a real Kata 3.21 sandbox."""
    text = (recordings.DATA / "kata-3.21" / "thread-identification.txt").read_text()
    calls, links = [], {}
    for line in text.splitlines():
        if line.startswith("tid "):
            call = line.partition("syscall=")[2].partition(" stack=")[0]
            calls.append((int(line.split()[1]), call))
        elif " -> " in line:
            number, target = line.split(" -> ")
            links[int(number)] = target
    return calls, links


def test_the_recorded_sandbox(root: HostRoot) -> None:
    """In real Kata, two boot vCPUs and four hotplugged ones are told without names or QMP."""
    calls, links = _recorded()
    tasks = [_thread(root, tid, call) for tid, call in calls]
    for number, target in links.items():
        _fd(root, number, target)
    waiting = finish(roles.read_waiting(root, tasks, "x86_64"))
    named = {key.tid: number for key, number in waiting.ids.items()}
    assert named == {1792: 0, 1793: 1, 1800: 15, 1801: 14, 1802: 13, 1803: 12}
    assert not waiting.running
    assert roles.open_vcpus(root, PID) == {0, 1, 12, 13, 14, 15}


@pytest.mark.parametrize(
    ("machine", "syscall", "target", "named"),
    [
        pytest.param("x86_64", "16 0x21 0xae80", "anon_inode:kvm-vcpu:3", {3}, id="x86"),
        pytest.param("aarch64", "29 0x21 0xae80", "anon_inode:kvm-vcpu:3", {3}, id="arm64"),
        pytest.param("aarch64", "16 0x21 0xae80", "anon_inode:kvm-vcpu:3", set(), id="wrong call"),
        pytest.param("x86_64", "16 0x21 0xaf01", "anon_inode:kvm-vcpu:3", set(), id="vhost"),
        pytest.param("x86_64", "16 0x21 0xae80", "anon_inode:kvm-vcpu-stats:3", set(), id="stats"),
        pytest.param("x86_64", "16 0x21 0xae80", "/tmp/anon_inode:kvm-vcpu:3", set(), id="a file"),
        pytest.param("x86_64", "nonsense", "anon_inode:kvm-vcpu:3", set(), id="nonsense"),
    ],
)
def test_what_counts_as_running_a_vcpu(
    root: HostRoot, machine: str, syscall: str, target: str, named: set[int]
) -> None:
    """Exactly ioctl(KVM_RUN) of this machine, on exactly a kvm-vcpu descriptor."""
    task = _thread(root, 1792, syscall)
    _fd(root, 0x21, target)
    assert set(finish(roles.read_waiting(root, [task], machine)).ids.values()) == named


def test_kernel_workers_are_never_asked(root: HostRoot) -> None:
    """They show their creator's call (seen on 6.12 and 6.18)."""
    task = _thread(root, 1792, "16 0x21 0xae80", flags=PF_USER_WORKER)
    _fd(root, 0x21, "anon_inode:kvm-vcpu:0")
    nothing = roles.Waiting({}, frozenset(), frozenset())
    assert finish(roles.read_waiting(root, [task], "x86_64")) == nothing


def test_busy_and_vanished_threads(root: HostRoot) -> None:
    """A running thread is reported as that; one that is gone as nothing."""
    busy = _thread(root, 1792, "running")
    gone = Task(ThreadKey(PID, 1793, BEFORE), "x", 0, EMPTY, EMPTY, "/")
    waiting = finish(roles.read_waiting(root, [busy, gone], "x86_64"))
    assert waiting.running == {busy.key}
    assert not waiting.ids
