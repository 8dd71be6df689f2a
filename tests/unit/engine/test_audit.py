"""What an audit makes of threads that are elsewhere."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import pytest

from kata_pin.base.placement import Desired, Placement, Report, SandboxMask
from kata_pin.base.values import ThreadRole
from kata_pin.engine.audit import Auditor, Expectation, _cpuset_changed
from kata_pin.engine.sandbox_cache import FIRST_BACK_OFF_S, SandboxCache
from kata_pin.engine.sandboxes import Sandboxes
from kata_pin.linux.cgroups import CpusetReader
from kata_pin.linux.files import HostRoot
from tests.support import world
from tests.support.hosttree import FakeCalls, grow

PID = 100


class OneSandbox:
    """A node with one sandbox; its reports are made by the test."""

    ids: Sequence[str] = ("pod",)

    def __init__(self, cache: SandboxCache) -> None:
        self._cache = cache
        self.marks = 0

    def cache(self, _sandbox_id: str) -> SandboxCache:
        return self._cache

    def mark(self, _sandbox_id: str, _reason: str, *, event: bool = True) -> None:
        assert not event
        self.marks += 1


@pytest.mark.parametrize(
    ("cpuset", "blamed"),
    [
        pytest.param("0-1", True, id="nothing else changed"),
        pytest.param("0", False, id="its cpuset changed"),
    ],
)
async def test_another_writer_is_blamed_only_where_the_cpuset_is_the_same(
    tmp_path: Path, cpuset: str, blamed: bool
) -> None:
    """Before Linux 6.2 a new cpuset wipes pins: however often Kata writes one, it is no rival."""
    grow(
        tmp_path,
        {
            "proc/self/mountinfo": "1 0 0:1 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw",
            f"proc/{PID}/task/{PID}/cgroup": "0::/kata_pod",
            "sys/fs/cgroup/kata_pod/cpuset.cpus.effective": cpuset,
        },
    )
    calls = FakeCalls()
    calls.affinities[PID] = frozenset({0})
    cache = SandboxCache()
    sandboxes = OneSandbox(cache)
    auditor = Auditor(HostRoot(str(tmp_path), calls=calls), cast("Sandboxes", sandboxes))
    for _ in range(3):
        thread = world.thread(ThreadRole.EMULATOR, PID, on="1", cpuset="0-1", tgid=PID)
        cache.report = Report("pod", threads=(thread,))
        await auditor.affinity()
    assert sandboxes.marks == 3
    assert bool(cache.other_writers.backed_off(time.monotonic())) is blamed


async def test_a_move_that_no_pass_has_answered_yet_counts_once(tmp_path: Path) -> None:
    """On a busy machine audits come faster than passes: that is no other writer."""
    calls = FakeCalls()
    calls.affinities[PID] = frozenset({0})
    grow(tmp_path, {f"proc/{PID}/task/{PID}/stat": "x"})
    cache = SandboxCache()
    thread = world.thread(ThreadRole.EMULATOR, PID, on="1", tgid=PID)
    cache.report = Report("pod", threads=(thread,))
    sandboxes = OneSandbox(cache)
    auditor = Auditor(HostRoot(str(tmp_path), calls=calls), cast("Sandboxes", sandboxes))
    for _ in range(4):
        await auditor.affinity()
    assert sandboxes.marks == 4
    assert not cache.other_writers.backed_off(time.monotonic())


async def test_the_end_of_a_back_off_is_found(tmp_path: Path) -> None:
    """A thread that its other writer left where it was is looked at once the back-off is over."""
    calls = FakeCalls()
    calls.affinities[PID] = frozenset({0})
    grow(tmp_path, {f"proc/{PID}/task/{PID}/stat": "x"})
    cache = SandboxCache()
    thread = world.thread(ThreadRole.EMULATOR, PID, on="0", tgid=PID)
    cache.report = Report("pod", threads=(thread,))
    now = time.monotonic()
    for _ in range(3):
        cache.other_writers.drifted([thread.key], now - FIRST_BACK_OFF_S + 0.05)
    sandboxes = OneSandbox(cache)
    auditor = Auditor(HostRoot(str(tmp_path), calls=calls), cast("Sandboxes", sandboxes))
    await auditor.affinity()
    assert sandboxes.marks == 0
    async with asyncio.timeout(5):
        while not sandboxes.marks:
            await auditor.affinity()
            await asyncio.sleep(0.005)
    assert not cache.other_writers.backed_off(time.monotonic())
    await auditor.affinity()
    assert sandboxes.marks == 1


@pytest.mark.parametrize(
    ("on", "cpuset", "marked"),
    [
        pytest.param("1", "0-2", False, id="something narrowed it"),
        pytest.param("1", "0-1", True, id="its cpuset changed"),
        pytest.param("2", "0-2", True, id="it may run elsewhere"),
    ],
)
async def test_a_part_of_its_cpus_is_no_drift(
    tmp_path: Path, on: str, cpuset: str, marked: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A thread that something narrowed is no finding, however often it is looked at."""
    grow(
        tmp_path,
        {
            "proc/self/mountinfo": "1 0 0:1 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw",
            f"proc/{PID}/task/{PID}/cgroup": "0::/kata_pod",
            "sys/fs/cgroup/kata_pod/cpuset.cpus.effective": cpuset,
        },
    )
    calls = FakeCalls()
    calls.affinities[PID] = frozenset(world.cpus(on))
    thread = world.thread(ThreadRole.EMULATOR, PID, on="0-1", cpuset="0-2", tgid=PID)
    both = world.cpus("0-1")
    placement = Placement("pod", SandboxMask(both), {thread.key: Desired(both, both, "")})
    cache = SandboxCache(report=Report("pod", threads=(thread,), placement=placement))
    sandboxes = OneSandbox(cache)
    auditor = Auditor(HostRoot(str(tmp_path), calls=calls), cast("Sandboxes", sandboxes))
    with caplog.at_level(logging.INFO):
        for _ in range(4):
            await auditor.affinity()
    assert bool(sandboxes.marks) is marked
    assert bool(caplog.text) is marked
    if not marked:
        assert cache.other_writers.writer(time.monotonic()) is None


async def test_a_vcpu_thread_in_another_cgroup_is_found(tmp_path: Path) -> None:
    """A vCPU thread moved alone, its affinity as before: only its cgroup file tells."""
    main, vcpu = world.main_thread(on="0-1", cpuset="0-1"), world.vcpu(0, on="0", cpuset="0-1")
    folder = f"proc/{main.key.tgid}/task"
    calls = FakeCalls()
    stat = " ".join(["S", *["0"] * 18, "5", "0"])
    files = {"proc/self/mountinfo": "1 0 0:1 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw"}
    for thread in (main, vcpu):
        calls.affinities[thread.key.tid] = frozenset(thread.task.affinity)
        files[f"{folder}/{thread.key.tid}/stat"] = f"{thread.key.tid} (qemu) {stat}"
        files[f"{folder}/{thread.key.tid}/cgroup"] = "0::/kata_pod"
    for name in ("kata_pod", "kata_pod/vcpus"):
        files[f"sys/fs/cgroup/{name}/cpuset.cpus.effective"] = "0-1"
    grow(tmp_path, files)
    cache = SandboxCache(report=Report("pod", threads=(main, vcpu)))
    sandboxes = OneSandbox(cache)
    auditor = Auditor(HostRoot(str(tmp_path), calls=calls), cast("Sandboxes", sandboxes))
    await auditor.deep()
    assert sandboxes.marks == 0
    (tmp_path / folder / str(vcpu.key.tid) / "cgroup").write_text("0::/kata_pod/vcpus\n")
    await auditor.deep()
    assert sandboxes.marks == 1


async def test_threads_that_no_pass_looks_at_are_not_new(tmp_path: Path) -> None:
    """Of a sandbox with too many threads only those that were looked at are compared."""
    calls = FakeCalls()
    calls.affinities[PID] = calls.affinities[PID + 1] = frozenset({0})
    grow(tmp_path, {f"proc/{PID}/task/{tid}/stat": "x" for tid in (PID, PID + 1)})
    thread = world.thread(ThreadRole.EMULATOR, PID, on="0", tgid=PID)
    cache = SandboxCache(report=Report("pod", threads=(thread,)))
    sandboxes = OneSandbox(cache)
    auditor = Auditor(HostRoot(str(tmp_path), calls=calls), cast("Sandboxes", sandboxes))
    await auditor.affinity()
    assert sandboxes.marks == 1
    cache.tasks.left_out = 1
    await auditor.affinity()
    assert sandboxes.marks == 1


async def test_a_sandbox_whose_pass_is_under_way_is_not_audited(tmp_path: Path) -> None:
    """Its threads are being moved: they are no drift, and nobody else is blamed."""
    calls = FakeCalls()
    calls.affinities[PID] = frozenset({1})
    grow(tmp_path, {f"proc/{PID}/task/{PID}/stat": "x", "proc/self/mountinfo": ""})
    thread = world.thread(ThreadRole.EMULATOR, PID, on="0", tgid=PID)
    cache = SandboxCache(report=Report("pod", threads=(thread,)), passing=True)
    sandboxes = OneSandbox(cache)
    auditor = Auditor(HostRoot(str(tmp_path), calls=calls), cast("Sandboxes", sandboxes))
    await auditor.affinity()
    assert sandboxes.marks == 0
    cache.passing = False
    await auditor.affinity()
    assert sandboxes.marks == 1


def test_of_many_threads_in_one_cgroup_one_is_asked(tmp_path: Path) -> None:
    """The cgroup's list has the others; who is not in it is asked, and so found elsewhere."""
    tids = range(PID, PID + 6)
    vcpus = [world.thread(ThreadRole.VCPU, tid, on="1", cpuset="0-1", tgid=PID) for tid in tids]
    expected = Expectation.of(Report("pod", threads=tuple(vcpus)))
    every = "\n".join(map(str, tids))
    grow(
        tmp_path,
        {
            "proc/self/mountinfo": "1 0 0:1 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw",
            f"proc/{PID}/task/{PID}/cgroup": "0::/kata_pod",
            f"proc/{PID}/task/{PID + 3}/cgroup": "0::/kata_pod/vcpu3",
            "sys/fs/cgroup/kata_pod/cpuset.cpus.effective": "0-1",
            "sys/fs/cgroup/kata_pod/vcpu3/cpuset.cpus.effective": "0-1",
            "sys/fs/cgroup/kata_pod/cgroup.threads": f"{every}\n",
        },
    )
    root, threads = HostRoot(str(tmp_path)), tmp_path / "sys/fs/cgroup/kata_pod/cgroup.threads"
    assert not _cpuset_changed(expected, CpusetReader(root))
    threads.write_text(every.replace(str(PID + 3), "") + "\n")
    assert _cpuset_changed(expected, CpusetReader(root))
    threads.write_text(f"{every}\n")
    (tmp_path / "sys/fs/cgroup/kata_pod/cpuset.cpus.effective").write_text("0")
    assert _cpuset_changed(expected, CpusetReader(root))


class PassMeanwhile(FakeCalls):
    """Affinities in memory; a pass over the sandbox begins or ends while an audit reads them."""

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        super().__init__()
        self._meanwhile = meanwhile

    def get_affinity(self, tid: int) -> set[int]:
        found = super().get_affinity(tid)
        self._meanwhile()
        return found


@pytest.mark.parametrize("moment", ["a pass began", "a pass ended"])
async def test_an_audit_that_a_pass_overtook_judges_nothing(tmp_path: Path, moment: str) -> None:
    """What it read is older than the pass: no drift, no other writer, no mark."""
    grow(tmp_path, {f"proc/{PID}/task/{PID}/stat": "x", "proc/self/mountinfo": ""})
    thread = world.thread(ThreadRole.EMULATOR, PID, on="0", tgid=PID)
    cache = SandboxCache(report=Report("pod", threads=(thread,)))

    def meanwhile() -> None:
        if moment == "a pass began":
            cache.passing = True
        else:
            cache.report = Report("pod", threads=(thread,))

    calls = PassMeanwhile(meanwhile)
    calls.affinities[PID] = frozenset({1})
    sandboxes = OneSandbox(cache)
    auditor = Auditor(HostRoot(str(tmp_path), calls=calls), cast("Sandboxes", sandboxes))
    for _ in range(4):
        cache.passing = False
        await auditor.affinity()
    assert sandboxes.marks == 0
    assert not cache.other_writers.backed_off(time.monotonic())
