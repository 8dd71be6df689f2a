"""Episodes of the watch: what is recorded and logged again while one lasts, and how often."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from kata_pin.base.config.tree import Isolation
from kata_pin.base.counters import PF_NO_SETAFFINITY, RanTask, SeenTask
from kata_pin.base.cpuset import CpuSet
from kata_pin.base.documents.answers import NodeEventKind
from kata_pin.base.sandbox import PF_KTHREAD
from kata_pin.base.values import TaskClass
from kata_pin.options.isolation import watch as module
from kata_pin.options.isolation.episodes import AGAIN_S, BURST, much_more
from tests.unit.options.isolation.test_watch import MS, World, recorder

PERIOD_S = 10
FOREIGN = NodeEventKind.FOREIGN_TASKS
CPU4 = CpuSet([4])


class Node:
    """A watch whose clock and counters the test moves on; `names` are the intruders' names."""

    def __init__(self, world: World, patch: pytest.MonkeyPatch) -> None:
        self.world = world
        self.patch = patch
        self.now = 1000.0
        self.waited = 0.0
        clock = SimpleNamespace(
            monotonic=lambda: self.now, monotonic_ns=lambda: int(self.now * 1e9)
        )
        patch.setattr(module, "time", clock)

    def runs(
        self, percent: float, *tids: int, comm: str = "sh", flags: int = 0, apart: bool = False
    ) -> None:
        """Have windows find a task with such a share, or several that share it.

        `apart`: each has a name of its own.
        """
        tids = tids or (900,)
        ran_ns = int(percent * 10 * MS) // len(tids)
        seen = {
            tid: SeenTask(
                *(tid, tid, f"{comm}{tid}" if apart else comm, flags, CPU4 if flags else None),
                *("/a.service", "sh"),
            )
            for tid in tids
        }
        ran = [RanTask(tid, 2, ran_ns, MS) for tid in tids]
        self.patch.setattr(module, "SwitchRecorder", recorder(*ran, seen=seen))

    async def look(self, percent: float) -> bool:
        """Look after a period in which others took such a share; return whether a window was."""
        self.now += PERIOD_S
        self.waited += percent / 100 * PERIOD_S
        self.world.counters(waited=int(self.waited * 1e9))
        await self.world.watch.look()
        taken = bool(self.world.started)
        await self.world.finish()
        return taken

    def used(self, tid: int, seconds: float) -> None:
        """Have the kernel say how long an intruder ran in all."""
        folder = self.world.root / "proc" / str(tid) / "task" / str(tid)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "schedstat").write_text(f"{int(seconds * 1e9)} 0 1\n")

    @property
    def reported(self) -> int:
        """How often others were reported."""
        return self.world.events.counts[FOREIGN]


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    return Node(World(tmp_path), monkeypatch)


async def test_noise_hides_no_hog(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    """A much larger share is recorded, reported and counted at once; the end is logged."""
    caplog.set_level(logging.INFO)
    await node.look(0)
    node.runs(3)
    assert await node.look(3)
    assert not await node.look(4), "about the same share"
    node.runs(91.8, 901, comm="hog")
    assert await node.look(91.8)
    assert node.reported == 2
    assert "hog (pid 901, a.service) 91.80 %" in caplog.text
    assert node.world.watch.foreign_ns[4, TaskClass.USER] == 948 * MS
    assert not await node.look(95)
    await node.look(0)
    assert (
        "foreign tasks no longer run on exclusive pCPU 4 of pod; they did for 40 s" in caplog.text
    )
    assert node.reported == 2, "the end of an episode is not counted as one"


async def test_a_hog_without_a_name_is_reported_too(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    """Where perf is denied the counters alone say how much more it is."""
    for percent in (0, 0.2, 0.3, 98, 98):
        await node.look(percent)
    assert node.reported == 2
    assert "others for 0.20 %, without a name" in caplog.text
    assert "others for 98.00 %, without a name" in caplog.text


async def test_a_hog_that_comes_back_beside_noise_is_reported(node: Node) -> None:
    """What it is compared with comes down with the counters, without another window."""
    await node.look(0)
    node.runs(90)
    node.used(900, 0)
    for percent, used, taken in ((90, 0, True), (90, 9, False), (2, 9.2, False), (90, 18, True)):
        node.used(900, used)
        assert await node.look(percent) is taken
    assert node.reported == 2


async def test_a_new_intruder_with_the_same_share_is_reported(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    """The known one's own counters say that it is somebody else."""
    await node.look(0)
    node.runs(50)
    node.used(900, 0)
    assert await node.look(50)
    for step in range(1, 4):
        node.used(900, step * PERIOD_S / 2)
        assert not await node.look(50), "the known one used it"
    node.runs(50, 902, comm="another")
    assert await node.look(50)
    assert node.reported == 2
    assert "another (pid 902" in caplog.text


async def test_who_starts_again_and_again_is_one_intruder(node: Node) -> None:
    """New processes with the known name are looked at, each time later, and not reported."""
    await node.look(0)
    windows = 0
    for number in range(60):
        node.runs(50, 900 + number)
        windows += await node.look(50)
    assert node.reported == 1
    assert windows == 6, "after 20, 30, 50, 90 and 170 s"


async def test_who_of_a_crowd_is_seen_first_is_no_news(node: Node) -> None:
    """Each of many has little, and others are the first three each time; a hog is news."""
    await node.look(0)
    for tid in range(900, 916):
        node.used(tid, 0)
    node.runs(20, *range(900, 920), apart=True)
    assert await node.look(20)
    for number in range(1, 25):
        node.runs(20, *range(900 + number, 920 + number), apart=True)
        assert not await node.look(20)
    node.runs(70, 1500, comm="hog")
    assert await node.look(70)
    assert node.reported == 2


async def test_a_crowd_beside_a_known_intruder_is_not_new(node: Node) -> None:
    """What 40 threads had in the last window they may have again, though few are followed."""
    await node.look(0)
    node.used(900, 0)
    node.runs(20, *[900] * 20, *range(1000, 1040))
    assert await node.look(20)
    for number in range(1, 25):
        node.used(900, number * PERIOD_S / 15)
        assert not await node.look(20)
    node.runs(46, 1500, comm="hog")
    assert await node.look(46), "33 points more than the crowd had"
    assert node.reported == 2


async def test_a_flapping_hog_does_not_flood_the_log(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    """A few reports at once, then one per AGAIN_S, each with its end; none is lost for good."""
    caplog.set_level(logging.INFO)
    node.runs(90)
    for _ in range(360):
        await node.look(0)
        await node.look(90)
    most = BURST + 720 * PERIOD_S / AGAIN_S
    assert most - 2 <= node.reported <= most
    assert caplog.text.count("no longer run") in {node.reported, node.reported - 1}
    for _ in range(int(AGAIN_S / PERIOD_S)):
        await node.look(90)
    assert caplog.records[-1].getMessage().count("foreign tasks ran"), "it stays: reported"


async def test_flapping_noise_hides_no_hog(node: Node) -> None:
    """Also where noise has used up what may be reported."""
    node.runs(3)
    for _ in range(BURST + 5):
        await node.look(0)
        await node.look(3)
    assert node.reported == BURST
    await node.look(0)
    node.runs(92)
    await node.look(92)
    assert node.reported == BURST + 1


async def test_kernel_threads_hide_no_hog(node: Node) -> None:
    """While a pCPU is left alone because of its own kernel threads, much more is looked at."""
    await node.look(0)
    node.runs(1, 23, comm="ksoftirqd/4", flags=PF_KTHREAD | PF_NO_SETAFFINITY)
    found = [await node.look(1) for _ in range(4)]
    assert found == [True, False, True, False]
    node.runs(90)
    assert await node.look(90)
    assert node.reported == 1


@pytest.mark.parametrize("gone", ["sandbox", "setting"])
async def test_an_episode_ends_with_the_watch(
    node: Node, caplog: pytest.LogCaptureFixture, gone: str
) -> None:
    """A sandbox that ends, or a setting that is switched off, leaves no episode open in the log."""
    caplog.set_level(logging.INFO)
    node.runs(90)
    for percent in (0, 90):
        await node.look(percent)
    if gone == "sandbox":
        node.world.cache.report = None
    else:
        off = replace(node.world.config, isolation=Isolation(watch=False))
        node.world.watch._live.replace(off)
    await node.look(90)
    assert "exclusive pCPU 4 of pod is no longer watched; foreign tasks ran there" in caplog.text


@pytest.mark.parametrize(
    ("percent", "before", "expected"),
    [(3, 1, True), (2.9, 1, False), (70, 50, False), (75, 50, True), (100, 80, False)],
)
def test_what_is_much_more(percent: float, before: float, expected: bool) -> None:
    """Three times as much, or a quarter of the pCPU more."""
    assert much_more(percent, before) is expected
