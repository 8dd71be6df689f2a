"""Groups of resctrl: every thread of a sandbox in its own, limits said, none of ours left."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from kata_pin.config import Config
from kata_pin.config.resctrl import Resctrl
from kata_pin.daemon.isolation.cache_groups import AGAIN_S, MOST_RETURNS, CacheGroups, remove_group
from kata_pin.daemon.live_config import LiveConfig
from kata_pin.daemon.reconcile.sandbox_cache import SandboxCache
from kata_pin.daemon.reconcile.sandboxes import Sandboxes
from kata_pin.daemon.status.cache_metrics import cache_metrics
from kata_pin.daemon.store.cache_groups import CacheGroupTable
from kata_pin.daemon.store.containers import Registry
from kata_pin.host.root import HostRoot
from kata_pin.model.alloc import RDT_KEY
from kata_pin.model.pass_outcome import Cause, PassOutcome
from kata_pin.model.placement import Report
from kata_pin.model.sandbox import Container
from kata_pin.model.settings import AllowRule, ClassRule
from kata_pin.model.thread import Thread, ThreadRole
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
        self.table = CacheGroupTable(self.registry)
        self.cache = SandboxCache()
        self.annotations: dict[str, str] = {}
        self.live = LiveConfig(replace(Config(), resctrl=settings))
        self.groups = self.restarted()
        self.state = "ok"

    def restarted(self) -> CacheGroups:
        sandboxes = SimpleNamespace(ids=["pod"], cache=lambda _: self.cache)
        self.groups = CacheGroups(
            self.root,
            self.live,
            self.table,
            cast("Sandboxes", sandboxes),
            self.containers,
            lambda *_: self.annotations,
        )
        return self.groups

    @staticmethod
    def containers(sandbox_id: str) -> tuple[Container, ...]:
        return (replace(world.shared("c1", None), pod_namespace="shop", handler="kata"),)

    def outcome(self, *tids: int, sandbox: str = "pod") -> PassOutcome:
        threads = tuple(_thread(tid) for tid in tids or TIDS)
        self.cache.report = Report(sandbox, threads=threads)
        return PassOutcome(sandbox, "shop/web", self.state, self.cache.report, Cause())

    def made(self) -> list[str]:
        return [path for verb, path in self.tree.calls if verb == "mkdir"]

    def seen(self) -> str:
        seen = self.groups.seen("pod")
        assert seen is not None
        return seen.problem


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


def test_every_thread_is_in_the_group(world_: World) -> None:
    """All threads join; a new one inherits the group, and one that strayed is put back."""
    world_.groups.passed(world_.outcome())
    assert world_.tree.members(POD) == set(TIDS)
    assert world_.seen() == ""
    world_.tree.spawn(1102, of=1100)
    written = len(world_.tree.calls)
    world_.groups.passed(world_.outcome(*TIDS, 1102))
    assert world_.tree.members(POD) == {*TIDS, 1102}
    assert len(world_.tree.calls) == written, "nothing is written when nothing changed"
    world_.tree.home[1101] = world_.tree.top
    world_.tree.spawn()
    world_.groups.look()
    assert world_.tree.members(POD) == {*TIDS, 1102}


def test_what_is_used_is_summed_over_caches(world_: World) -> None:
    """Two caches count one sum; without a number in one of them there is none."""
    world_.groups.passed(world_.outcome())
    world_.tree.count(POD, "llc_occupancy", "1024", "2048")
    world_.tree.count(POD, "mbm_total_bytes", "5", "Unavailable")
    use = world_.groups.use("pod")
    assert use is not None
    assert (use.occupancy, use.total, use.local) == (3072, None, 0)
    names = [one.name for one in cache_metrics(world_.groups, world_.registry, 5)]
    assert names == [
        "kata_pin_cache_groups",
        "kata_pin_sandbox_l3_bytes",
        "kata_pin_sandbox_memory_bytes",
    ]
    assert [one.name for one in cache_metrics(world_.groups, world_.registry, 0)] == names[:1]


def test_no_free_monitor_is_said_and_not_tried_in_a_loop(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ENOSPC: one attempt and one message, until a group is removed or minutes have passed."""
    full = World(tmp_path, rmids=1)
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            full.groups.passed(full.outcome())
            full.groups.look()
    assert len(full.made()) == 1
    assert len(caplog.records) == 1
    assert "RMID" in full.seen()
    assert full.table.all() == []
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + AGAIN_S + 1)
    full.tree.rmids = 1
    full.groups.passed(full.outcome())
    assert full.tree.members(POD) == set(TIDS)


def test_the_end_of_a_sandbox_removes_its_group_alone(world_: World) -> None:
    """Groups of others stay, with our prefix or without."""
    world_.tree.mkdir(str(world_.tree.top / "mon_groups/theirs"))
    world_.tree.mkdir(str(world_.tree.top / "mon_groups/kata-pin-foreign"))
    world_.groups.passed(world_.outcome())
    world_.groups.ended(world_.outcome())
    left = {one.name for one in (world_.tree.top / "mon_groups").iterdir()}
    assert left == {"theirs", "kata-pin-foreign"}
    assert world_.table.all() == []
    assert world_.groups.seen("pod") is None


def test_what_a_killed_daemon_left(world_: World) -> None:
    """The next one removes what is recorded of sandboxes that ended, and keeps the others."""
    world_.groups.passed(world_.outcome())
    world_.table.keep("never-made", "")  # killed between the record and mkdir
    again = world_.restarted()
    again.catch_up(["pod"])
    assert world_.table.all() == [("pod", "")]
    again.passed(world_.outcome())
    assert world_.tree.members(POD) == set(TIDS)
    world_.restarted().catch_up([])
    assert world_.table.all() == []
    assert world_.tree.members(POD) == set()


def test_released_and_observing_sandboxes_have_no_group(world_: World) -> None:
    """Unpin and uninstall remove groups; so does a start with the setting off."""
    world_.groups.passed(world_.outcome())
    world_.state = "released"
    world_.groups.passed(world_.outcome())
    assert world_.table.all() == []
    world_.state = "ok"
    world_.groups.passed(world_.outcome())
    world_.live.stop_acting()
    world_.groups.passed(world_.outcome())
    assert world_.table.all() == []
    world_.table.keep("pod", "")
    world_.live.replace(Config())
    world_.groups.catch_up(["pod"])
    assert world_.table.all() == []


def test_a_class_by_rule(tmp_path: Path) -> None:
    """The class's control group is made with its schemata, and removed with its last sandbox."""
    rules = (ClassRule("fast", handler="other"), ClassRule("fast", namespace="sh*"))
    one = World(tmp_path, Resctrl(enabled=True, classes=CLASSES, rules=rules))
    one.groups.passed(one.outcome())
    assert one.tree.members(f"kata-pin-fast/{POD}") == set(TIDS)
    assert (one.tree.top / "kata-pin-fast/schemata").read_text() == "L3:0=ff0;1=ff0\n"
    seen = one.groups.seen("pod")
    assert seen is not None
    assert (seen.class_name, seen.group) == ("fast", f"kata-pin-fast/{POD}")
    one.groups.ended(one.outcome())
    assert not (one.tree.top / "kata-pin-fast").exists()
    assert one.tree.home == dict.fromkeys(TIDS, one.tree.top)


def chosen(one: World, value: str, *allow: AllowRule) -> str:
    """Return the class of a sandbox whose pod chose one."""
    one.annotations = {RDT_KEY: value}
    one.live.replace(replace(one.live.now, alloc=replace(one.live.now.alloc, allow=allow)))
    one.groups.passed(one.outcome())
    seen = one.groups.seen("pod")
    assert seen is not None
    return seen.class_name


def test_a_class_by_annotation(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where a rule names it for the pod; it wins over the administrator's default."""
    rules = (ClassRule("fast"),)
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


def test_schemata_that_the_kernel_refuses(tmp_path: Path) -> None:
    """Its own reason is shown, and no half-made class stays."""
    rules = (ClassRule("wrong"),)
    one = World(tmp_path, Resctrl(enabled=True, classes=CLASSES, rules=rules))
    one.groups.passed(one.outcome())
    assert one.seen() == "Mask out of range"
    assert not (one.tree.top / "kata-pin-wrong").exists()
    assert one.table.all() == []


def test_threads_in_a_control_group_of_others_stay_there(world_: World) -> None:
    """Without a class of ours nothing is taken out of a group that somebody else made."""
    world_.tree.mkdir(str(world_.tree.top / "theirs"))
    world_.tree.home[1100] = world_.tree.top / "theirs"
    world_.groups.passed(world_.outcome())
    assert world_.tree.members(POD) == set(TIDS) - {1100}
    assert world_.tree.members("theirs") == {1100}
    assert "1 of 3 threads stay outside: another program has them" in world_.seen()


def test_threads_that_end_meanwhile_are_no_problem(world_: World) -> None:
    """ESRCH of the kernel, and a tid that belongs to another thread by now."""
    world_.tree.alive.discard(1101)
    stat = world_.tree.top.parents[2] / f"proc/{world.VMM_PID}/task/1100/stat"
    stat.write_text(stat.read_text().replace(" 5 0\n", " 6 0\n"))
    world_.groups.passed(world_.outcome())
    assert world_.tree.members(POD) == {world.VMM_PID}
    assert world_.seen() == ""


def test_another_program_that_moves_threads_is_named_and_not_fought(world_: World) -> None:
    """After a few returns nothing is moved for minutes."""
    world_.groups.passed(world_.outcome())
    for _ in range(MOST_RETURNS + 1):
        world_.tree.home[1100] = world_.tree.top
        world_.tree.spawn()
        world_.groups.look()
    assert "another program moves 1 thread out" in world_.seen()
    written = len(world_.tree.calls)
    world_.groups.look()
    assert len(world_.tree.calls) == written


def test_a_group_that_somebody_removed_is_made_again(
    world_: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is said first; minutes later there is a new one."""
    world_.groups.passed(world_.outcome())
    world_.tree.rmdir(str(world_.tree.top / POD))
    world_.groups.look()
    assert "No such file" in world_.seen()
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + AGAIN_S + 1)
    world_.groups.look()
    assert world_.tree.members(POD) == set(TIDS)


def test_without_resctrl(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What is missing is named: the kernel's support, the mount, or monitoring."""
    one = World(tmp_path)
    top = one.tree.top
    (top / "info/L3_MON").rmdir()
    for expected, gone in (("not monitor", "schemata"), ("not mounted", ""), ("no resctrl", "")):
        one.restarted().passed(one.outcome())
        assert expected in one.seen()
        if gone:
            (top / gone).unlink()
        elif top.exists():
            top.rename(tmp_path / "elsewhere")
    assert one.made() == []
    assert len(caplog.records) == 3


def test_an_undo_without_a_daemon(world_: World) -> None:
    """The record alone is enough, and a group that is gone already is no error."""
    world_.groups.passed(world_.outcome())
    remove_group(world_.table, world_.calls, "pod", "")
    remove_group(world_.table, world_.calls, "pod", "")
    assert world_.tree.members(POD) == set()
