"""What an audit makes of threads that are elsewhere."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from kata_pin.base.placement import Desired, Placement, Report, SandboxMask
from kata_pin.base.sandbox import Thread
from kata_pin.base.values import ThreadRole
from kata_pin.engine.audit import Auditor
from kata_pin.engine.sandbox_cache import SandboxCache
from kata_pin.engine.sandboxes import Sandboxes
from kata_pin.linux.files import HostRoot
from tests.support import world
from tests.support.hosttree import FakeCalls, grow

PID = 100
CGROUP2 = "1 0 0:1 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw"
KATA = "sys/fs/cgroup/kata_pod"
STAT = f"(qemu) S{' 0' * 18} 5 0"


def thread(tid: int = PID, *, on: str, cpuset: str = "") -> Thread:
    """Return a thread of the VMM as the last pass left it."""
    return world.thread(ThreadRole.EMULATOR, tid, on=on, cpuset=cpuset or on, tgid=PID)


class OneSandbox:
    """A node with one sandbox, whose last pass saw `threads`.

    They are on `now` since; their cgroup has the cpuset `allows`, where any is mounted.
    """

    ids = ("pod",)

    def __init__(
        self, folder: Path, *threads: Thread, now: str, allows: str = "",
        calls: FakeCalls | None = None, placement: Placement | None = None,
    ) -> None:  # fmt: skip
        calls = calls or FakeCalls()
        files = {"proc/self/mountinfo": CGROUP2 if allows else ""}
        for one in threads:
            tgid, tid = one.key.tgid, one.key.tid
            calls.affinities[tid] = frozenset(world.cpus(now))
            files[f"proc/{tgid}/task/{tid}/stat"] = f"{tid} {STAT}"
            if allows:
                files[f"proc/{tgid}/task/{tid}/cgroup"] = "0::/kata_pod"
                files[f"{KATA}/cpuset.cpus.effective"] = allows
        grow(folder, files)
        self.calls, self.marks = calls, 0
        self.known = SandboxCache(report=Report("pod", threads=threads, placement=placement))
        self.auditor = Auditor(HostRoot(str(folder), calls=calls), cast("Sandboxes", self))

    def cache(self, _sandbox_id: str) -> SandboxCache:
        return self.known

    def mark(self, _sandbox_id: str, _reason: str, *, event: bool = True) -> None:
        assert not event
        self.marks += 1

    @property
    def has_backed_off(self) -> bool:
        return bool(self.known.other_writers.backed_off(time.monotonic()))


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
    placed = thread(on="1", cpuset="0-1")
    sandbox = OneSandbox(tmp_path, placed, now="0", allows=cpuset)
    for _ in range(3):
        sandbox.known.report = Report("pod", threads=(placed,))
        await sandbox.auditor.affinity()
    assert sandbox.marks == 3
    assert sandbox.has_backed_off is blamed


async def test_a_move_that_no_pass_has_answered_yet_counts_once(tmp_path: Path) -> None:
    """On a busy machine audits come faster than passes: that is no other writer."""
    sandbox = OneSandbox(tmp_path, thread(on="1"), now="0")
    for _ in range(4):
        await sandbox.auditor.affinity()
    assert sandbox.marks == 4
    assert not sandbox.has_backed_off


@pytest.mark.parametrize(
    ("now", "cpuset", "marked"),
    [
        pytest.param("1", "0-2", False, id="something narrowed it"),
        pytest.param("1", "0-1", True, id="its cpuset changed"),
        pytest.param("2", "0-2", True, id="it may run elsewhere"),
    ],
)
async def test_a_part_of_its_cpus_is_no_drift(
    tmp_path: Path, now: str, cpuset: str, marked: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A thread that something narrowed is no finding, however often it is looked at."""
    placed, both = thread(on="0-1", cpuset="0-2"), world.cpus("0-1")
    placement = Placement("pod", SandboxMask(both), {placed.key: Desired(both, both, "")})
    sandbox = OneSandbox(tmp_path, placed, now=now, allows=cpuset, placement=placement)
    with caplog.at_level(logging.INFO):
        for _ in range(4):
            await sandbox.auditor.affinity()
    assert bool(sandbox.marks) is marked
    assert bool(caplog.text) is marked
    if not marked:
        assert sandbox.known.other_writers.writer(time.monotonic()) is None


async def test_a_vcpu_thread_in_another_cgroup_is_found(tmp_path: Path) -> None:
    """A vCPU thread moved alone, its affinity as before: only its cgroup file tells."""
    main, vcpu = world.main_thread(on="0-1", cpuset="0-1"), world.vcpu(0, on="0", cpuset="0-1")
    sandbox = OneSandbox(tmp_path, main, vcpu, now="0-1", allows="0-1")
    sandbox.calls.affinities[vcpu.key.tid] = frozenset({0})
    grow(tmp_path, {f"{KATA}/vcpus/cpuset.cpus.effective": "0-1"})
    await sandbox.auditor.deep()
    assert sandbox.marks == 0
    grow(tmp_path, {f"proc/{main.key.tgid}/task/{vcpu.key.tid}/cgroup": "0::/kata_pod/vcpus"})
    await sandbox.auditor.deep()
    assert sandbox.marks == 1


async def test_threads_that_no_pass_looks_at_are_not_new(tmp_path: Path) -> None:
    """Of a sandbox with too many threads only those that were looked at are compared."""
    sandbox = OneSandbox(tmp_path, thread(on="0"), now="0")
    sandbox.calls.affinities[PID + 1] = frozenset({0})
    grow(tmp_path, {f"proc/{PID}/task/{PID + 1}/stat": "x"})
    for left_out in (0, 1):
        sandbox.known.tasks.left_out = left_out
        await sandbox.auditor.affinity()
        assert sandbox.marks == 1


async def test_a_sandbox_whose_pass_is_under_way_is_not_audited(tmp_path: Path) -> None:
    """Its threads are being moved: they are no drift, and nobody else is blamed."""
    sandbox = OneSandbox(tmp_path, thread(on="0"), now="1")
    for passing, marks in ((True, 0), (False, 1)):
        sandbox.known.passing = passing
        await sandbox.auditor.affinity()
        assert sandbox.marks == marks


async def test_of_many_threads_in_one_cgroup_one_is_asked(tmp_path: Path) -> None:
    """The cgroup's list has the others; who is not in it is asked, and so found elsewhere."""
    tids = range(PID, PID + 6)
    threads = [world.thread(ThreadRole.VCPU, tid, on="1", cpuset="0-1", tgid=PID) for tid in tids]
    sandbox = OneSandbox(tmp_path, *threads, now="1", allows="0-1")
    every, without = ("\n".join(str(tid) for tid in tids if tid != out) for out in (0, PID + 3))
    grow(
        tmp_path,
        {
            f"proc/{PID}/task/{PID + 3}/cgroup": "0::/kata_pod/vcpu3",
            f"{KATA}/vcpu3/cpuset.cpus.effective": "0-1",
        },
    )
    for listed, allows, marks in ((every, "0-1", 0), (without, "0-1", 1), (every, "0", 2)):
        grow(tmp_path, {f"{KATA}/cgroup.threads": listed, f"{KATA}/cpuset.cpus.effective": allows})
        await sandbox.auditor.deep()
        assert sandbox.marks == marks


class PassMeanwhile(FakeCalls):
    """Affinities in memory; a pass over the sandbox begins or ends while an audit reads them."""

    meanwhile: Callable[[], None]

    def get_affinity(self, tid: int) -> set[int]:
        found = super().get_affinity(tid)
        self.meanwhile()
        return found


@pytest.mark.parametrize("moment", ["a pass began", "a pass ended"])
async def test_an_audit_that_a_pass_overtook_judges_nothing(tmp_path: Path, moment: str) -> None:
    """What it read is older than the pass: no drift, no other writer, no mark."""
    calls = PassMeanwhile()
    sandbox = OneSandbox(tmp_path, thread(on="0"), now="1", calls=calls)

    def meanwhile() -> None:
        if moment == "a pass began":
            sandbox.known.passing = True
        else:
            sandbox.known.report = Report("pod", threads=(thread(on="0"),))

    calls.meanwhile = meanwhile
    for _ in range(4):
        sandbox.known.passing = False
        await sandbox.auditor.affinity()
    assert sandbox.marks == 0
    assert not sandbox.has_backed_off
