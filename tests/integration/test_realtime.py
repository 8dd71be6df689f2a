"""Real scheduling classes: what the broker gives and refuses, and that all is undone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from errno import EACCES, ESTALE
from pathlib import Path
from types import SimpleNamespace
from typing import Final, cast

import pytest
from msgspec.structs import replace

from kata_pin.base.config.tree import Config, LiveConfig, Paths, Rt
from kata_pin.base.counters import RtNode, Scheduling
from kata_pin.base.cpuset import CpuSet
from kata_pin.base.placement import Cause, Desired, PassOutcome, Placement, Report, SandboxMask
from kata_pin.base.sandbox import Role, Task, Thread, ThreadKey
from kata_pin.base.values import ChangeState, RoleSource, ThreadRole
from kata_pin.engine.sandbox_cache import SandboxCache
from kata_pin.engine.sandboxes import Sandboxes
from kata_pin.linux.affinity import rt_node, scheduling
from kata_pin.linux.files import HOST, HostRoot
from kata_pin.linux.process import ProcessIndex
from kata_pin.linux.tasks import starttime
from kata_pin.options.realtime import keeper as module
from kata_pin.options.realtime.keeper import RealtimeVcpus, RtThreads, restore
from kata_pin.records.containers import Registry
from kata_pin.rights.broker.protocol import AffinityChange
from kata_pin.service.privileges import Broker, brokered
from tests.support.specimen import two_cpus

PYTHON: Final = os.path.realpath(sys.executable)
FIFO: Final = os.SCHED_FIFO

_PROGRAM: Final = """
import ctypes, sys, threading
def sleep(name):
    ctypes.CDLL(None).prctl(15, name.encode(), 0, 0, 0)
    print(threading.get_native_id(), flush=True)
    threading.Event().wait()
for name in ("CPU 0/KVM", "CPU 1/KVM", "CPU 0/KVM2"):
    threading.Thread(target=sleep, args=(name,), daemon=True).start()
sys.stdin.read()
"""


@contextmanager
def vm() -> Iterator[tuple[int, list[ThreadKey]]]:
    """Run a stand-in for a VMM: two vCPU threads, by their names, and a worker; all sleep."""
    with subprocess.Popen(
        [PYTHON, "-I", "-S", "-c", _PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        try:
            assert child.stdout is not None
            tids = [int(child.stdout.readline()) for _ in range(3)]
            by_name = {Path(f"/proc/{child.pid}/task/{tid}/comm").read_text(): tid for tid in tids}
            ordered = [by_name[name] for name in ("CPU 0/KVM\n", "CPU 1/KVM\n", "CPU 0/KVM2\n")]
            yield (
                child.pid,
                [ThreadKey(child.pid, tid, starttime(HOST, child.pid, tid)) for tid in ordered],
            )
        finally:
            child.kill()


@contextmanager
def broker(tmp_path: Path, *hypervisors: str) -> Iterator[Broker]:
    home = str(tmp_path)
    paths = Paths(vc=home, kata=home, bundle_roots=(home,), debugfs=home, kata_configs=())
    with brokered(Config(hypervisors=hypervisors, paths=paths, rt=Rt("fifo:1"))) as running:
        yield running


def give(running: Broker, key: ThreadKey, policy: int = FIFO, priority: int = 1) -> int:
    """Ask for a class; return the errno."""
    change = AffinityChange(*key, 0, frozenset())
    (done,) = running.calls.set_classes([change], policy, priority, "/proc")
    return done.errno


def class_of(key: ThreadKey) -> tuple[int, int]:
    found = scheduling(HOST, key)
    assert found is not None
    return found[:2]


def test_only_vcpus_with_a_cpu_of_their_own(tmp_path: Path) -> None:
    """Others of the VMM, and vCPUs that may run on several CPUs, keep their class."""
    first, _ = two_cpus()
    with vm() as (_, (vcpu, wide, worker)), broker(tmp_path, PYTHON) as running:
        os.sched_setaffinity(vcpu.tid, {first})
        os.sched_setaffinity(worker.tid, {first})
        assert give(running, vcpu) == 0
        assert class_of(vcpu) == (FIFO, 1)
        assert os.sched_getscheduler(vcpu.tid) & os.SCHED_RESET_ON_FORK
        assert give(running, wide) == EACCES
        assert give(running, worker) == EACCES
        assert give(running, vcpu._replace(starttime=vcpu.starttime + 1)) == ESTALE
        for policy, priority in ((FIFO, 0), (FIFO, 50), (0, 1), (6, 0), (77, 0)):
            with pytest.raises(OSError, match="Invalid argument"):
                give(running, vcpu, policy, priority)
        assert class_of(vcpu) == (FIFO, 1)
        assert give(running, vcpu, os.SCHED_BATCH, 0) == 0
        assert os.sched_getscheduler(vcpu.tid) == os.SCHED_BATCH


def test_nobody_else_becomes_a_real_time_thread(tmp_path: Path) -> None:
    """A process that is no VMM, whatever its threads are called."""
    first, _ = two_cpus()
    with vm() as (_, (vcpu, *_)), broker(tmp_path) as running:
        os.sched_setaffinity(vcpu.tid, {first})
        assert give(running, vcpu) == EACCES
        assert class_of(vcpu) == (0, 0)


class World:
    """A daemon's real-time vCPUs over one stand-in, whose first vCPU is paired."""

    def __init__(self, registry: Registry, running: Broker, vcpu: ThreadKey, cpu: int) -> None:
        os.sched_setaffinity(vcpu.tid, {cpu})
        cpus = CpuSet([cpu])
        task = Task(vcpu, "CPU 0/KVM", 0, cpus, cpus, "/")
        thread = Thread(task, Role(ThreadRole.VCPU, RoleSource.NAME, vcpu=0))
        desired = {vcpu: Desired(cpus, cpus, "", paired=True)}
        self.report = Report("pod", (thread,), Placement("pod", SandboxMask(cpus), desired))
        self.unpaired = replace(self.report, placement=Placement("pod", SandboxMask(cpus)))
        self.table = RtThreads(registry)
        self.root = HostRoot(calls=running.calls)
        self.live = LiveConfig(replace(Config(), rt=Rt("fifo:1")))
        self.cache = SandboxCache(report=self.report)
        self.realtime = self.restarted()

    def restarted(self) -> RealtimeVcpus:
        sandboxes = cast("Sandboxes", SimpleNamespace(ids=["pod"], cache=lambda _: self.cache))
        index = ProcessIndex(HOST)
        index.refresh()
        return RealtimeVcpus(self.root, self.live, self.table, sandboxes, index)

    def passed(self, report: Report | None = None, state: ChangeState = "ok") -> None:
        report = report or self.report
        self.cache.report = report
        self.realtime.passed(PassOutcome("pod", "shop/web", state, report, Cause()))

    def codes(self) -> list[str]:
        return [note.code for note in self.realtime.notes("pod")]


@contextmanager
def world(tmp_path: Path) -> Iterator[tuple[World, ThreadKey]]:
    first, _ = two_cpus()
    with (
        vm() as (_, (vcpu, *_)),
        broker(tmp_path, PYTHON) as running,
        closing(Registry(str(tmp_path / "registry"), boot_id="b")) as registry,
    ):
        yield World(registry, running, vcpu, first), vcpu


def met(_: object, __: object, cpus: set[int]) -> RtNode:
    """Return a node that meets every condition: kernel threads here are left as they are."""
    return RtNode(950_000, 1_000_000, guards={cpu: {f"ksoftirqd/{cpu}": 9} for cpu in cpus})


def test_given_and_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the pair; back without it, by unpin, by the setting. The first class is SCHED_BATCH."""
    monkeypatch.setattr(module, "rt_node", met)
    with world(tmp_path) as (one, vcpu):
        os.sched_setscheduler(vcpu.tid, os.SCHED_BATCH, os.sched_param(0))
        cases: tuple[tuple[Report, ChangeState, Config], ...] = (
            (one.unpaired, "ok", one.live.now),
            (one.report, "released", one.live.now),
            (one.report, "ok", Config()),
        )
        for report, state, config in cases:
            one.passed()
            assert class_of(vcpu) == (FIFO, 1)
            assert one.codes() == ["rt"]
            one.live.replace(config)
            one.passed(report, state)
            assert class_of(vcpu) == (os.SCHED_BATCH, 0)
            assert one.codes() == []
            one.live.replace(replace(Config(), rt=Rt("fifo:1")))


def test_a_killed_daemon_leaves_what_the_next_one_undoes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record is enough, with and without a daemon; a class that somebody else set is left."""
    monkeypatch.setattr(module, "rt_node", met)
    with world(tmp_path) as (one, vcpu):
        one.passed()
        one.live.replace(Config())
        one.realtime = one.restarted()
        one.passed()
        assert class_of(vcpu) == (0, 0)
        one.live.replace(replace(Config(), rt=Rt("fifo:3")))
        one.passed()
        assert class_of(vcpu) == (FIFO, 3)
        assert list(restore(one.root, one.table, one.table.of("pod"))) == []
        assert class_of(vcpu) == (0, 0)
        assert one.table.of("pod") == {}
        one.passed()
        os.sched_setscheduler(vcpu.tid, os.SCHED_RR, os.sched_param(7))
        one.passed(one.unpaired)
        assert class_of(vcpu) == (os.SCHED_RR, 7)
        assert one.table.of("pod") == {}


def test_a_class_that_cannot_be_given_back_is_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker refuses at first; once it does not, the thread gets the class it had first."""
    monkeypatch.setattr(module, "rt_node", met)
    with world(tmp_path) as (one, vcpu), broker(tmp_path) as unwilling:
        one.passed()
        (reason,) = restore(HostRoot(calls=unwilling.calls), one.table, one.table.of("pod"))
        assert "the broker does not take it for a vCPU" in reason
        assert class_of(vcpu) == (FIFO, 1)
        one.passed(one.unpaired)
        assert class_of(vcpu) == (0, 0)


def test_a_condition_that_ends_takes_the_class_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by the look after an audit, without a pass; said in a note."""
    monkeypatch.setattr(module, "rt_node", met)
    with world(tmp_path) as (one, vcpu):
        one.passed()
        monkeypatch.setattr(module, "rt_node", lambda *_: RtNode(-1, 1_000_000))
        one.realtime.look()
        assert class_of(vcpu) == (0, 0)
        assert one.codes() == ["rt-refused"]
        one.table.keep("pod", vcpu, Scheduling(0, 0, vcpu.starttime))
        one.realtime.ended(PassOutcome("pod", "", "gone", one.report, Cause()))
        assert one.codes() == []
        assert one.table.sandboxes() == []


def test_a_look_waits_for_the_pass_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads are on their way meanwhile: what the former pass found counts no more."""
    monkeypatch.setattr(module, "rt_node", met)
    with world(tmp_path) as (one, vcpu):
        one.passed()
        one.cache.report, one.cache.passing = one.unpaired, True
        one.realtime.look()
        assert class_of(vcpu) == (FIFO, 1)
        one.cache.passing = False
        one.realtime.look()
        assert class_of(vcpu) == (0, 0)


def test_this_node_as_it_is(tmp_path: Path) -> None:
    """Its own limits and its own ksoftirqd decide: the class is given, or refused with a reason."""
    with world(tmp_path) as (one, vcpu):
        (cpu,) = os.sched_getaffinity(vcpu.tid)
        index = ProcessIndex(HOST)
        index.refresh()
        node = rt_node(HOST, index.all(), {cpu})
        assert node.runtime_us is not None
        one.passed()
        if node.guards.get(cpu, {}).get(f"ksoftirqd/{cpu}", 0) > 1 and node.runtime_us > 0:
            assert class_of(vcpu) == (FIFO, 1)
        else:
            assert class_of(vcpu) == (0, 0)
            (note,) = one.realtime.notes("pod")
            assert "rt.vcpus fifo:1 refused: " in note.text
