"""The watch: what it looks at, when it records, and what it reports."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Coroutine, Iterable
from dataclasses import replace
from errno import EACCES
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kata_pin.config import Config
from kata_pin.config.tree import Isolation
from kata_pin.daemon.isolation import watch as module
from kata_pin.daemon.isolation.claims import Claims
from kata_pin.daemon.isolation.watch import MOST_RESTS, Watch
from kata_pin.daemon.live_config import LiveConfig
from kata_pin.daemon.reconcile.sandbox_cache import SandboxCache
from kata_pin.daemon.reconcile.sandboxes import Sandboxes
from kata_pin.daemon.status.watch import watch_report
from kata_pin.daemon.store.node_events import NodeEvents
from kata_pin.host.measure import taskruns
from kata_pin.host.root import HostRoot
from kata_pin.model.cpuset import CpuSet
from kata_pin.model.measured.counters import TaskRun
from kata_pin.model.measured.windows import (
    PF_NO_SETAFFINITY,
    CpuWindow,
    Measured,
    Method,
    RanTask,
    SeenTask,
    TaskClass,
    Verdict,
)
from kata_pin.model.placement import Desired, Placement, Report, SandboxMask
from kata_pin.model.reports.history import NodeEventKind
from kata_pin.model.thread import PF_KTHREAD, Thread, ThreadRole
from tests.support import world
from tests.support.hosttree import FakeCalls

VCPU = world.thread(ThreadRole.VCPU, 1100, on="4")
EMULATOR = world.thread(ThreadRole.EMULATOR, 1001, on="0-3")
MS = 1_000_000
S = 1000 * MS
"""Waits are longer than any time between two looks, also on a busy machine: a share is 100 %."""
BOUND = PF_KTHREAD | PF_NO_SETAFFINITY


class Denied(FakeCalls):
    """Calls of a process that may open no perf event; `opened` counts attempts."""

    opened = 0

    def switches(self, cpu: int) -> int:
        self.opened += 1
        raise PermissionError(EACCES, os.strerror(EACCES))


def report() -> Report:
    cpu = CpuSet([4])
    desired = {
        VCPU.key: Desired(VCPU.key, cpu, cpu, "", paired=True),
        EMULATOR.key: Desired(EMULATOR.key, CpuSet.parse("0-3"), CpuSet.parse("0-3"), ""),
    }
    mask = SandboxMask(cpu, exclusive=cpu)
    return Report("pod", threads=(VCPU, EMULATOR), placement=Placement("pod", mask, desired))


class World:
    """A watch over one sandbox, with counters in files."""

    def __init__(self, root: Path, *, limit: float = 0.1, watch: bool = True) -> None:
        self.root = root
        self.cache = SandboxCache(report=report())
        sandboxes = SimpleNamespace(ids=["pod"], cache=lambda _: self.cache)
        self.config = replace(Config(), isolation=Isolation(watch=watch, max_foreign=limit))
        self.events = NodeEvents()
        self.started: list[Coroutine[object, object, None]] = []
        self.claims = Claims(cast("Sandboxes", sandboxes), lambda _: ())
        self.watch = Watch(
            HostRoot(str(root), calls=Denied()),
            self.claims,
            LiveConfig(self.config),
            self.events,
            self.started.append,
            lambda: CpuSet.parse("0-7"),
        )
        self.counters()

    def counters(
        self, ran: int = 0, waited: int = 0, slices: int = 0, thread: Thread = VCPU
    ) -> None:
        folder = self.root / "proc" / str(thread.key.tgid) / "task" / str(thread.key.tid)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "schedstat").write_text(f"{ran} {waited} {slices}\n")

    def moved(self, times: int) -> None:
        """Have the kernel say how often the vCPU was moved."""
        folder = self.root / "proc" / str(VCPU.key.tgid) / "task" / str(VCPU.key.tid)
        text = f"CPU 0/KVM (1100, #threads: 3)\nse.nr_migrations : {times}\n"
        (folder / "sched").write_text(f"{text}nr_involuntary_switches : 0\n")

    def node_counters(self, ran: int, slices: int) -> None:
        text = f"version 16\ntimestamp 1\ncpu4 0 0 0 0 0 0 {ran} 0 {slices}\n"
        (self.root / "proc" / "schedstat").write_text(text)

    def node_times(self, idle: int) -> None:
        (self.root / "proc" / "stat").write_text(f"cpu4 0 0 0 {idle} 0 0 0 0 0 0\n")

    def place(self, cpus: str) -> None:
        """Have the emulator thread's affinity be these CPUs."""
        place = Desired(EMULATOR.key, CpuSet.parse(cpus), CpuSet.parse(cpus), "")
        base = report()
        assert base.placement is not None
        desired = {**base.placement.desired, EMULATOR.key: place}
        self.cache.report = replace(base, placement=replace(base.placement, desired=desired))

    async def look(self) -> None:
        await self.watch.look()
        await asyncio.sleep(0.005)  # some time has to pass between two looks

    async def finish(self) -> None:
        for work in self.started:
            await work
        self.started.clear()


@pytest.fixture
def world_(tmp_path: Path) -> World:
    return World(tmp_path)


async def test_a_quiet_pcpu_is_only_looked_at(world_: World) -> None:
    """Two looks without waiting: nothing is recorded, nothing reported."""
    await world_.look()
    world_.counters(ran=9 * MS)
    await world_.look()
    assert world_.started == []
    (row,) = watch_report(world_.watch, world_.claims, 0.1).pcpus
    assert (row.cpu, row.sandbox, row.waited_percent, row.others_percent) == (4, "pod", 0.0, 0.0)
    assert (row.episode_s, row.window, row.others_slices) == (None, None, None)


async def test_what_is_missing_is_known_before_it_is_needed(
    world_: World, caplog: pytest.LogCaptureFixture
) -> None:
    """An event is opened at the first look, also while there is nothing to watch, once."""
    world_.cache.passing = True
    await world_.look()
    assert world_.watch.sights == {}
    assert "Permission denied" in world_.watch.problem
    world_.cache.passing = False
    for _ in range(3):
        await world_.look()
    assert caplog.text.count("cannot be recorded") == 1
    calls = world_.watch._root.calls
    assert isinstance(calls, Denied)
    assert calls.opened == 1


async def test_only_paired_vcpus_are_looked_at(world_: World) -> None:
    """Not what is shared, nor a sandbox whose pass is under way."""
    await world_.look()
    assert [one.cpu for one in world_.claims.watched()] == [4]
    world_.cache.passing = True
    looked_at = world_.watch.sights["pod", 4].look
    world_.counters(waited=90 * MS)
    await world_.look()
    assert world_.started == []
    assert world_.watch.sights["pod", 4].look is looked_at
    world_.cache.report = None
    world_.cache.passing = False
    await world_.look()
    assert world_.watch.sights == {}


async def test_a_pass_under_way_ends_no_episode(world_: World) -> None:
    """It is still reported, and not begun again after the pass."""
    for waited in (0, 90):
        world_.counters(waited=waited * S)
        await world_.look()
        await world_.finish()
    for passing in (True, False):
        world_.cache.passing = passing
        world_.counters(waited=180 * S)
        await world_.look()
        await world_.finish()
        (row,) = watch_report(world_.watch, world_.claims, 0.1).pcpus
        assert row.episode_s is not None
        assert row.waited_percent == 100, "it waited for longer than between these looks"
    assert world_.events.counts == {NodeEventKind.FOREIGN_TASKS: 1}


async def test_threads_that_come_and_go_hide_nobody(
    world_: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A vCPU's pCPU is watched although QEMU's other threads there are others at each audit."""
    monkeypatch.setattr(module, "SwitchRecorder", recorder(RanTask(900, 2, 100 * MS, MS)))
    for step, cpus in enumerate(("0-3", "4", "0-3", "4")):
        world_.place(cpus)
        world_.counters(waited=step * 90 * MS)
        world_.counters(thread=EMULATOR)
        await world_.look()
        await world_.finish()
    assert world_.events.counts == {NodeEventKind.FOREIGN_TASKS: 1}


async def test_threads_that_went_are_nobody_without_a_name(world_: World) -> None:
    """Where nothing can be recorded, time of the owner's ended threads begins no episode."""
    world_.place("4")
    world_.node_counters(0, 0)
    world_.counters(thread=EMULATOR)
    await world_.look()
    world_.place("0-3")
    world_.node_counters(90 * MS, 90)
    await world_.look()
    await world_.finish()
    assert world_.events.counts == {}


@pytest.mark.parametrize("gone", [True, False])
async def test_a_pcpu_that_changes_hands_in_a_window(
    world_: World, monkeypatch: pytest.MonkeyPatch, *, gone: bool
) -> None:
    """Whoever ran there then may have been allowed to: there is no verdict."""
    tasks = (RanTask(1100, 3, 900 * MS, MS), RanTask(900, 2, 100 * MS, MS))
    monkeypatch.setattr(module, "SwitchRecorder", recorder(*tasks))
    for waited in (0, 90):
        world_.counters(waited=waited * MS)
        await world_.look()
    before = report()
    assert before.placement is not None
    nobody = replace(before, threads=(), placement=replace(before.placement, desired={}))
    world_.cache.report = None if gone else nobody
    await world_.finish()
    assert world_.watch.windows == {}
    assert world_.events.counts == {}


async def test_a_vcpu_that_kata_pins_is_looked_at(tmp_path: Path) -> None:
    """It owns its pCPU as in `prove`; not before Kata's rule has put it there."""
    world, base = World(tmp_path), report()
    assert base.placement is not None
    desired = {EMULATOR.key: base.placement.desired[EMULATOR.key]}
    placement = replace(base.placement, desired=desired)
    world.cache.report = replace(base, placement=placement)
    await world.look()
    assert [(one.cpu, one.vcpus) for one in world.claims.watched()] == [(4, (VCPU.key,))]
    assert world.claims.owner("pod", 4).own == {VCPU.key.tid: VCPU.label}
    world.counters(waited=90 * MS)
    await world.look()
    assert len(world.started) == 1
    await world.finish()
    wide = VCPU._replace(task=VCPU.task.moved(CpuSet.parse("0-7"), VCPU.task.cpuset, ""))
    world.cache.report = replace(base, threads=(wide, EMULATOR), placement=placement)
    assert list(world.claims.watched()) == []


async def test_who_cannot_be_recorded_is_reported_without_a_name(
    world_: World, caplog: pytest.LogCaptureFixture
) -> None:
    """Once per episode, and again after it was quiet in between."""
    caplog.set_level(logging.WARNING)
    for waited in (0, 90, 180):
        world_.counters(waited=waited * S)
        await world_.look()
        await world_.finish()
    assert world_.events.counts == {NodeEventKind.FOREIGN_TASKS: 1}
    assert "cannot be recorded" in caplog.text
    assert "others for 100.00 %, without a name" in caplog.text
    assert "Permission denied" in watch_report(world_.watch, world_.claims, 0.1).problem
    await world_.look()  # quiet
    assert world_.watch.sights["pod", 4].episode_at is None
    world_.counters(waited=900 * S)
    await world_.look()
    await world_.finish()
    assert world_.events.counts == {NodeEventKind.FOREIGN_TASKS: 2}
    assert world_.watch.waited_ns[4] == 900 * S


async def test_what_ran_while_the_vcpu_slept(tmp_path: Path) -> None:
    """Where the kernel counts slices by pCPU, a task that made nobody wait is noticed too."""
    world = World(tmp_path)
    world.node_counters(0, 0)
    await world.look()
    world.counters(ran=MS, slices=5)
    world.node_counters(ran=90 * MS, slices=8)
    await world.look()
    assert len(world.started) == 1
    await world.finish()
    (row,) = watch_report(world.watch, world.claims, 0.1).pcpus
    assert (row.waited_percent, row.others_slices) == (0.0, 3)
    assert world.events.counts == {NodeEventKind.FOREIGN_TASKS: 1}


async def test_slices_of_threads_that_run_elsewhere_too_say_nothing(tmp_path: Path) -> None:
    """Where the owner's other threads may run there as well, only waiting counts."""
    world = World(tmp_path)
    world.place("3-4")
    world.node_counters(0, 0)
    await world.look()
    world.node_counters(90 * MS, 8)
    await world.look()
    assert world.started == []


async def test_who_came_before_the_first_look_and_never_leaves(tmp_path: Path) -> None:
    """Nothing switches and nobody waits, but the pCPU is not idle and its vCPU does not run."""
    world = World(tmp_path)
    world.node_counters(0, 0)
    world.node_times(idle=1000)
    await world.look()
    await asyncio.sleep(0.1)  # ticks are 10 ms
    await world.look()
    assert len(world.started) == 1
    await world.finish()
    assert world.events.counts == {NodeEventKind.FOREIGN_TASKS: 1}
    await asyncio.sleep(0.1)
    world.node_times(idle=2000)
    await world.look()
    assert world.watch.sights["pod", 4].episode_at is None


async def test_interrupts_of_an_idle_pcpu_are_no_episode(tmp_path: Path) -> None:
    """They may be worth a window; where perf is refused nobody says that they are tasks."""
    world = World(tmp_path)
    for idle in (0, 4):  # of 10 ticks
        world.node_counters(0, 0)
        world.node_times(idle)
        await world.look()
        await asyncio.sleep(0.1)
    assert len(world.started) == 1
    await world.finish()
    assert world.events.counts == {}


async def test_own_threads_that_wait_for_each_other_are_no_episode(tmp_path: Path) -> None:
    """As in a pod without shared CPUs, whose vCPU and emulator have one pCPU."""
    world = World(tmp_path)
    world.place("4")
    for number in range(6):
        world.counters(ran=3 * number * MS, waited=number * MS, slices=number)
        world.counters(number * MS, 3 * number * MS, number, thread=EMULATOR)
        world.node_counters(ran=4 * number * MS, slices=2 * number)
        await world.look()
        await world.finish()
    assert world.events.counts == {}


async def test_threads_confined_there_are_read_only_while_that_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the sandbox's own emulator runs there is no episode; while it rests nobody reads it."""
    read: list[set[int]] = []

    def task_runs(root: HostRoot, threads: Iterable[tuple[int, int]]) -> dict[int, TaskRun]:
        threads = list(threads)
        read.append({tid for _, tid in threads})
        return taskruns.task_runs(root, threads)

    monkeypatch.setattr(module, "task_runs", task_runs)
    world = World(tmp_path)
    world.place("4")
    vcpu, both = {VCPU.key.tid}, {VCPU.key.tid, EMULATOR.key.tid}
    windows = []
    for ran in (0, 0, 90, 180, 270, 270, 270):
        world.counters(ran * MS, 0, ran, thread=EMULATOR)
        world.node_counters(ran * MS, ran)
        await world.look()
        windows.append(len(world.started))
        await world.finish()
    assert read == [vcpu, vcpu, vcpu, both, vcpu, both, vcpu, both, vcpu, vcpu]
    assert windows == [0, 0, 1, 0, 0, 0, 0]
    assert world.events.counts == {}, "it takes two looks at all threads to say so without a window"


@pytest.mark.parametrize("limit", [100.0])
async def test_the_limit_is_a_setting(tmp_path: Path, limit: float) -> None:
    """What is not more than the limit is nobody's business."""
    world = World(tmp_path, limit=limit)
    for waited in (0, 90, 180):
        world.counters(waited=waited * MS)
        await world.look()
    assert world.started == []


async def test_the_watch_can_be_off(world_: World) -> None:
    """Then nothing is read."""
    off = replace(world_.config, isolation=Isolation(watch=False))
    world_.watch._live.replace(off)
    await world_.look()
    assert world_.watch.sights == {}


def recorder(*tasks: RanTask) -> type:
    """Return a recorder that has recorded these tasks."""

    class Recorder:
        left_s = 0.0

        def __init__(self, *_: object) -> None: ...

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None: ...

        def drain(self, most: int) -> bool:
            return False

        def end(self) -> Measured:
            window = CpuWindow(4, 0, 1000 * MS, tasks)
            seen = {
                1100: SeenTask(1100, 1000, "CPU 0/KVM"),
                23: SeenTask(23, 23, "ksoftirqd/4", BOUND, CpuSet([4])),
                900: SeenTask(900, 900, "sh", 0, CpuSet.parse("0-7"), "/system.slice/a.service"),
            }
            return Measured(Method.PERF, {4: window}, seen)

    return Recorder


async def test_an_intruder_is_named(
    world_: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Who, how long, and what keeps it away; counted by class and kept."""
    tasks = (RanTask(1100, 3, 900 * MS, MS), RanTask(900, 2, 100 * MS, MS))
    monkeypatch.setattr(module, "SwitchRecorder", recorder(*tasks))
    for waited in (0, 90):
        world_.counters(waited=waited * MS)
        await world_.look()
        await world_.finish()
    assert "sh (pid 900, a.service) 10.00 %; " in caplog.text
    assert "taskset" in caplog.text
    assert world_.watch.foreign_ns == {(4, TaskClass.USER): 100 * MS}
    assert world_.watch.foreign_slices == {(4, TaskClass.USER): 2}
    assert world_.watch.windows == {Verdict.VIOLATED: 1}
    (row,) = watch_report(world_.watch, world_.claims, 0.1).pcpus
    assert row.window is not None
    assert row.window.verdict == "violated"
    assert row.episode_s is not None
    world_.counters(waited=180 * MS)
    await world_.look()
    assert world_.started == [], "who it is was recorded a moment ago"


async def test_since_when_a_vcpu_was_not_moved(
    world_: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Since the look that found more moves, or the first; one that did not run is not read."""
    now, found = 1000.0, []
    clock = SimpleNamespace(monotonic=lambda: now, monotonic_ns=lambda: int(now * 1e9))
    monkeypatch.setattr(module, "time", clock)
    for ran, moves in ((1, 7), (2, 7), (3, 8), (3, 9), (4, 9)):
        world_.counters(ran=ran * MS)
        world_.moved(moves)
        await world_.look()
        now += 10
        found.append(world_.watch.unmoved_s(VCPU.key))
    assert found == [10, 20, 10, 20, 10]
    assert world_.watch.unmoved_s(EMULATOR.key) is None, "it may move as the scheduler likes"
    world_.cache.report = None
    await world_.look()
    assert world_.watch.moves == {}


async def test_moves_that_a_kernel_does_not_tell_are_unknown(world_: World) -> None:
    """No /proc/PID/sched: no time, rather than one since the start."""
    await world_.look()
    await world_.look()
    assert world_.watch.unmoved_s(VCPU.key) is None


@pytest.mark.parametrize(
    ("kernel_ms", "expected", "why"),
    [(500, 4, "after rests of 1, 3 and 7 audits"), (1, 7, "after rests of 1, 3, 3 and 3 audits")],
)
async def test_after_windows_that_found_nobody_it_rests(
    world_: World, monkeypatch: pytest.MonkeyPatch, kernel_ms: int, expected: int, why: str
) -> None:
    """Waiting for kernel threads that belong there is no violation, and is not recorded forever.

    Unless they are too few to be waited for: somebody comes and goes.
    """
    tasks = (RanTask(1100, 3, 400 * MS, MS), RanTask(23, 9, kernel_ms * MS, MS))
    monkeypatch.setattr(module, "SwitchRecorder", recorder(*tasks))
    windows = 0
    for number in range(25):
        world_.counters(waited=number * 90 * MS)
        await world_.look()
        windows += len(world_.started)
        await world_.finish()
    assert world_.events.counts == {}
    assert windows == expected, why
    assert world_.watch.sights["pod", 4].rests <= MOST_RESTS


async def test_a_pcpu_of_two_sandboxes_is_recorded_once(world_: World) -> None:
    """Where several claim it, one window is enough; while its episode lasts there is no other."""
    double = SandboxCache(report=replace(report(), sandbox_id="other"))
    caches = {"pod": world_.cache, "other": double}
    sandboxes = SimpleNamespace(ids=list(caches), cache=caches.get)
    world_.claims._sandboxes = cast("Sandboxes", sandboxes)
    for number in range(4):
        world_.counters(waited=number * 90 * MS)
        await world_.look()
        await world_.finish()
    assert len(world_.watch.sights) == 2
    assert world_.events.counts == {NodeEventKind.FOREIGN_TASKS: 1}
