"""The watch: what it looks at, when it records, and what it reports."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine, Iterable, Mapping
from errno import EACCES
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from kata_pin.base.config.tree import Config, Isolation, LiveConfig
from kata_pin.base.counters import PF_NO_SETAFFINITY, CpuWindow, Measured, RanTask, SeenTask
from kata_pin.base.cpuset import CpuSet
from kata_pin.base.documents.answers import NodeEventKind
from kata_pin.base.placement import Desired, Placement, Report, SandboxMask
from kata_pin.base.sandbox import PF_KTHREAD, Thread
from kata_pin.base.threads import TaskRun
from kata_pin.base.values import Method, TaskClass, ThreadRole, Verdict
from kata_pin.engine.node import PcpuOwners
from kata_pin.engine.sandbox_cache import SandboxCache
from kata_pin.engine.sandboxes import Sandboxes
from kata_pin.linux import task_counters
from kata_pin.linux.files import HostRoot
from kata_pin.options.isolation import watch as module
from kata_pin.options.isolation.watch import MOST_SKIPPED, Watch
from kata_pin.records.history import NodeEvents
from tests.support import world
from tests.support.hosttree import FakeCalls

VCPU = world.thread(ThreadRole.VCPU, 1100, on="4")
EMULATOR = world.thread(ThreadRole.EMULATOR, 1001, on="0-3")
MS = 1_000_000
S = 1000 * MS
"""Waits are longer than any time between two looks, also on a busy machine: a share is 100 %."""
BOUND = PF_KTHREAD | PF_NO_SETAFFINITY


class Denied(FakeCalls):
    """Calls of a process that may open no perf event."""

    def switches(self, cpu: int) -> int:
        raise PermissionError(EACCES, os.strerror(EACCES))


def report() -> Report:
    cpu = CpuSet([4])
    desired = {
        VCPU.key: Desired(cpu, cpu, "", paired=True),
        EMULATOR.key: Desired(CpuSet.parse("0-3"), CpuSet.parse("0-3"), ""),
    }
    mask = SandboxMask(cpu, exclusive=cpu)
    return Report("pod", threads=(VCPU, EMULATOR), placement=Placement("pod", mask, desired))


class World:
    """A watch over one sandbox, with counters in files."""

    def __init__(self, root: Path, *, watch: bool = True) -> None:
        self.root = root
        self.cache = SandboxCache(report=report())
        self.caches = {"pod": self.cache}
        sandboxes = SimpleNamespace(ids=self.caches.keys(), cache=self.caches.get)
        self.config = replace(Config(), isolation=Isolation(watch=watch, max_foreign=0.1))
        self.events = NodeEvents()
        self.started: list[Coroutine[object, object, None]] = []
        self.claims = PcpuOwners(cast("Sandboxes", sandboxes), lambda _: ())
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

    def place(self, cpus: str) -> None:
        """Have the emulator thread's affinity be these CPUs."""
        place = Desired(CpuSet.parse(cpus), CpuSet.parse(cpus), "")
        base = report()
        assert base.placement is not None
        desired = {**base.placement.desired, EMULATOR.key: place}
        self.cache.report = replace(base, placement=replace(base.placement, desired=desired))

    def claim_again(self, name: str) -> None:
        """Have one more sandbox with the same threads and pCPU."""
        assert self.cache.report is not None
        self.caches[name] = SandboxCache(report=replace(self.cache.report, sandbox_id=name))

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
        (row,) = world_.watch.report().pcpus
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


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """The threads whose counters were read at once, time after time."""
    read: list[set[int]] = []

    def task_runs(root: HostRoot, threads: Iterable[tuple[int, int]]) -> dict[int, TaskRun]:
        threads = list(threads)
        read.append({tid for _, tid in threads})
        return task_counters.task_runs(root, threads)

    monkeypatch.setattr(module, "task_runs", task_runs)
    return read


async def test_threads_confined_there_are_read_only_while_that_is_needed(
    tmp_path: Path, read: list[set[int]]
) -> None:
    """What the sandbox's own emulator runs there is no episode; while it rests nobody reads it."""
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


def recorder(*tasks: RanTask, seen: Mapping[int, SeenTask] | None = None) -> type:
    """Return a recorder that has recorded these tasks; `seen` are more that it knows."""

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
            known = {
                1100: SeenTask(1100, 1000, "CPU 0/KVM"),
                23: SeenTask(23, 23, "ksoftirqd/4", BOUND, CpuSet([4])),
                900: SeenTask(900, 900, "sh", 0, CpuSet.parse("0-7"), "/system.slice/a.service"),
            }
            return Measured(Method.PERF, {4: window}, {**known, **(seen or {})})

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
    (row,) = world_.watch.report().pcpus
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
        found.append(world_.watch.thread(VCPU.key)["unmoved_s"])
    assert found == [10, 20, 10, 20, 10]
    assert world_.watch.thread(EMULATOR.key) == {}, "it may move as the scheduler likes"
    world_.cache.report = None
    await world_.look()
    assert world_.watch.moves == {}


async def test_moves_that_a_kernel_does_not_tell_are_unknown(world_: World) -> None:
    """No /proc/PID/sched: no time, rather than one since the start."""
    await world_.look()
    await world_.look()
    assert world_.watch.thread(VCPU.key) == {}


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
    assert world_.watch.sights["pod", 4].skipped_audits <= MOST_SKIPPED


async def test_a_pcpu_of_two_sandboxes_is_recorded_once(world_: World) -> None:
    """Where several claim it, one window is enough; while its episode lasts there is no other."""
    world_.claim_again("other")
    for number in range(4):
        world_.counters(waited=number * 90 * MS)
        await world_.look()
        await world_.finish()
    assert len(world_.watch.sights) == 2
    assert world_.events.counts == {NodeEventKind.FOREIGN_TASKS: 1}


async def test_of_several_sandboxes_all_threads_of_one_are_read(
    world_: World, read: list[set[int]]
) -> None:
    """A window of the pCPU shows whoever runs there, so the others' threads need no look."""
    world_.place("4")
    for name in ("other", "third"):
        world_.claim_again(name)
    vcpu, both = {VCPU.key.tid}, {VCPU.key.tid, EMULATOR.key.tid}
    for waited in (0, 90):
        read.clear()
        world_.counters(waited=waited * MS)
        world_.counters(thread=EMULATOR)
        await world_.look()
    assert read == [vcpu, both, vcpu, vcpu]
    await world_.finish()


async def test_one_window_at_a_time(world_: World) -> None:
    """While who runs is being recorded, further looks begin no second recording."""
    for waited in (0, 90, 180, 270):
        world_.counters(waited=waited * S)
        await world_.look()
    assert len(world_.started) == 1
    await world_.finish()


async def test_another_vcpu_begins_without_an_episode(world_: World) -> None:
    """What others took from the vCPU before is no news of the one that has the pCPU now."""
    for waited in (0, 90):
        world_.counters(waited=waited * S)
        await world_.look()
        await world_.finish()
    (row,) = world_.watch.report().pcpus
    assert row.episode_s is not None
    base, later = report(), world.thread(ThreadRole.VCPU, 1101, on="4")
    assert base.placement is not None
    desired = {later.key: base.placement.desired[VCPU.key]}
    placement = replace(base.placement, desired=desired)
    world_.cache.report = Report("pod", threads=(later, EMULATOR), placement=placement)
    world_.counters(thread=later)
    await world_.look()
    (row,) = world_.watch.report().pcpus
    assert row.episode_s is None
