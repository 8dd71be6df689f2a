"""Groups of resctrl: every thread of a sandbox in its own, limits said, none of ours left."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from msgspec.structs import replace

from kata_pin.base.allocation import RDT_KEY
from kata_pin.base.config.alloc import Resctrl
from kata_pin.base.config.tree import Config, LiveConfig
from kata_pin.base.placement import Cause, PassOutcome, Report
from kata_pin.base.sandbox import Thread
from kata_pin.base.settings import AllowRule, ClassRule
from kata_pin.base.values import ChangeState, ThreadRole
from kata_pin.engine.sandbox_cache import SandboxCache
from kata_pin.linux.files import HostRoot
from kata_pin.options.caches import MOST_RETURNS, CacheGroups, CacheGroupTable, remove_group
from kata_pin.records.containers import Registry
from kata_pin.service.options import Core
from tests.support import world
from tests.support.resctrl_tree import ResctrlCalls, ResctrlTree

OPEN: list[Registry] = []
POD = "mon_groups/kata-pin-pod"
TIDS = (world.VMM_PID, 1100, 1101)
CLASSES = {"fast": "L3:0=ff0;1=ff0", "wrong": "L3:0=f000"}


class World:
    """A daemon's groups over one sandbox whose VMM has three threads."""

    def __init__(self, root: Path, settings: Resctrl | None = None, **limits: int) -> None:
        settings = settings or Resctrl(enabled=True)
        self.tree = ResctrlTree(root, **limits)
        self.tree.spawn(*TIDS)
        self.calls = ResctrlCalls(self.tree, settings.classes)
        self.root = HostRoot(str(root), calls=self.calls)
        self.registry = Registry(str(root / "registry"), boot_id="b")
        OPEN.append(self.registry)
        known = replace(world.shared("c1", None), sandbox_id="pod", pod_namespace="shop")
        self.registry.adopt(replace(known, handler="kata"))
        self.table = CacheGroupTable(self.registry)
        self.cache = SandboxCache()
        self.annotations: dict[str, str] = {}
        self.live = LiveConfig(replace(Config(), resctrl=settings))
        self.groups = self.restarted()
        self.state: ChangeState = "ok"

    def restarted(self) -> CacheGroups:
        core = SimpleNamespace(
            root=self.root,
            live=self.live,
            registry=self.registry,
            sandboxes=SimpleNamespace(ids=["pod"], cache=lambda _: self.cache),
            kata_pinning=SimpleNamespace(annotations=lambda *_: self.annotations),
        )
        self.groups = CacheGroups(cast("Core", core))
        return self.groups

    def outcome(self, *tids: int, sandbox: str = "pod") -> PassOutcome:
        threads = tuple(_thread(tid) for tid in tids or TIDS)
        self.cache.report = Report(sandbox, threads=threads)
        return PassOutcome(sandbox, "shop/web", self.state, self.cache.report, Cause())

    def seen(self) -> str:
        problem: str = self.groups.facts("pod")["cache"].problem
        return problem


def _thread(tid: int) -> Thread:
    return world.thread(ThreadRole.EMULATOR, tid)


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    while OPEN:
        OPEN.pop().close()


@pytest.fixture
def world_(tmp_path: Path) -> World:
    return World(tmp_path)


def test_threads_of_a_pass_under_way_are_left_to_it(world_: World) -> None:
    """An audit moves none of them meanwhile."""
    world_.groups.passed(world_.outcome())
    world_.tree.home[1101] = world_.tree.top
    world_.tree.spawn()
    world_.cache.passing = True
    world_.groups.look()
    assert world_.tree.members(POD) == set(TIDS) - {1101}


def test_what_a_killed_daemon_left(world_: World) -> None:
    """The next one removes what is recorded of sandboxes that nothing else is recorded of."""
    world_.groups.passed(world_.outcome())
    world_.table.keep("never-made", "")  # killed between the record and mkdir
    again = world_.restarted()
    again.catch_up(["pod"])
    assert world_.table.all() == [("pod", "")]
    again.catch_up([])
    assert (world_.table.all(), world_.tree.members(POD)) == ([], set())


def test_what_is_used_is_summed_over_caches(world_: World) -> None:
    """Two caches count one sum; without a number in one of them there is none."""
    world_.groups.passed(world_.outcome())
    world_.tree.count(POD, "llc_occupancy", "1024", "2048")
    world_.tree.count(POD, "mbm_total_bytes", "5", "Unavailable")
    use = world_.groups.use("pod")
    assert use is not None
    assert (use.occupancy, use.total, use.local) == (3072, None, 0)


def chosen(one: World, value: str, *allow: AllowRule) -> str:
    """Return the class of a sandbox whose pod chose one."""
    one.annotations = {RDT_KEY: value}
    one.live.replace(replace(one.live.now, alloc=replace(one.live.now.alloc, allow=allow)))
    one.groups.passed(one.outcome())
    class_name: str = one.groups.facts("pod")["cache"].class_name
    return class_name


def test_a_class_by_annotation(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where a rule names it for the pod; it wins over the administrator's default."""
    rules = (ClassRule(class_name="fast"),)
    classes = {**CLASSES, "slow": "L3:0=00f;1=00f"}
    one = World(tmp_path, Resctrl(enabled=True, classes=classes, rules=rules))
    one.groups.passed(one.outcome())
    allow = AllowRule(namespace="shop", handler="kata", rdt=frozenset({"slow", "gone"}))
    assert chosen(one, "slow", allow) == "slow"
    assert one.tree.members(f"kata-pin-slow/{POD}") == set(TIDS)
    assert not (one.tree.top / "kata-pin-fast").exists(), "the former class's last sandbox"
    assert not list(one.groups.notes("pod"))
    with caplog.at_level(logging.WARNING):
        assert chosen(one, "slow", AllowRule(namespace="other", rdt=frozenset({"slow"}))) == "fast"
        one.groups.look()
    (note,) = one.groups.notes("pod")
    assert note.text == f"annotation {RDT_KEY}: 'slow' ignored: no rule of alloc.allow names it"
    assert len(caplog.records) == 1, "said once"
    assert chosen(one, "gone", allow) == "fast"
    (note,) = one.groups.notes("pod")
    assert note.text.endswith("'gone' ignored: no class of resctrl.classes")
    for value in ("fast", ""):
        assert chosen(one, value) == "fast"
        assert not list(one.groups.notes("pod"))
    assert chosen(one, "../../x" * 99, allow) == "fast"
    (note,) = one.groups.notes("pod")
    assert len(note.text) < 150, "users write it"


def test_threads_that_end_meanwhile_are_no_problem(world_: World) -> None:
    """ESRCH of the kernel, and a tid that belongs to another thread by now."""
    world_.tree.alive.discard(1101)
    stat = world_.tree.top.parents[2] / f"proc/{world.VMM_PID}/task/1100/stat"
    stat.write_text(stat.read_text().replace(" 5 0\n", " 6 0\n"))
    world_.groups.passed(world_.outcome())
    assert world_.tree.members(POD) == {world.VMM_PID}
    assert world_.seen() == ""


def test_an_undo_without_a_daemon(world_: World) -> None:
    """The record alone is enough, and a group that is gone already is no error."""
    world_.groups.passed(world_.outcome())
    remove_group(world_.table, world_.calls, "pod", "")
    remove_group(world_.table, world_.calls, "pod", "")
    assert world_.tree.members(POD) == set()


def test_a_tid_that_is_given_out_again_was_moved_by_nobody(world_: World) -> None:
    """A thread that ends and another of its number, outside of the group: that is no fight."""
    for _ in range(MOST_RETURNS + 2):
        world_.groups.passed(world_.outcome())
        assert world_.tree.members(POD) == set(TIDS)
        world_.groups.passed(world_.outcome(*TIDS[:2]))  # 1101 has ended
        world_.tree.home[1101] = world_.tree.top
        world_.tree.spawn()
    world_.groups.passed(world_.outcome())
    assert (world_.tree.members(POD), world_.seen()) == (set(TIDS), "")
