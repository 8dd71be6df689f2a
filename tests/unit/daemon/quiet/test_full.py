"""`quiet: full` over a double of the kernel's files: what is written, and what is given back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from errno import EINVAL, EPERM
from pathlib import Path

import pytest

from kata_pin.daemon.quiet.keeper import TunableSource
from kata_pin.daemon.quiet.kernel_work import KernelWork
from kata_pin.daemon.quiet.tuner import RETURNS
from kata_pin.model.reports.history import NodeEventKind
from kata_pin.model.settings import QuietLevel
from tests.support import world
from tests.support.quietnode import Clock, QuietNode
from tests.support.worktree import WorkTree

WORK = "sys/devices/virtual/workqueue/cpumask"
DOG = "proc/sys/kernel/watchdog_cpumask"
RPS = "sys/class/net/eth0/queues/rx-0/rps_cpus"
XPS = "sys/class/net/eth0/queues/tx-0/xps_cpus"
IDLE = "sys/devices/system/cpu/cpu4/power/pm_qos_resume_latency_us"
GOVERNOR = "sys/devices/system/cpu/cpufreq/policy4/scaling_governor"


class FullNode(QuietNode):
    """A node whose keeper has the source of `full`."""

    tree: WorkTree

    def sources(self) -> Sequence[TunableSource]:
        """Return what `full` looks at."""
        return [KernelWork(self.tree.host, self.live)]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock that only tests move."""
    return Clock(monkeypatch)


@pytest.fixture
def node(tmp_path: Path, clock: Clock) -> Iterator[FullNode]:
    """Sixteen pCPUs with a policy of each two, and three kernel threads."""
    tree = WorkTree(tmp_path / "tree", 16)
    tree.add_thread(33, "kswapd0", "0-15")
    tree.add_thread(34, "kcompactd1", "4-5")
    tree.add_thread(35, "khelper", "0-15", refuses=EINVAL)
    node = FullNode(tmp_path, tree, world.smt_host())
    node.set_level(QuietLevel.FULL)
    yield node
    node.database.close()


def _values(tree: WorkTree) -> dict[str, str]:
    files = {name: tree.get(name) for name in (WORK, DOG, RPS, XPS, IDLE, GOVERNOR)}
    return files | {str(tid): tree.affinity(tid) for tid in tree.threads}


def test_a_pod_comes_and_goes(node: FullNode, clock: Clock) -> None:
    """Everything leaves its pCPUs, and is as it was afterwards."""
    first = _values(node.tree)
    node.run_pod("p", "4-5")
    node.settle(clock)
    assert _values(node.tree) == {
        WORK: "ffcf",
        DOG: "0-3,6-15",
        RPS: "2",
        XPS: "0",
        IDLE: "20",
        GOVERNOR: "performance",
        "33": "0-3,6-15",
        "34": "0-3,6-15",
        "35": "0-15",
    }
    assert node.tree.get("sys/class/net/eth0/queues/rx-1/rps_cpus") == "0"
    assert node.tree.get(IDLE.replace("cpu4", "cpu6")) == "0"
    assert node.keeper.status.outcome.problems == {}
    assert [one.key.name for one in node.keeper.status.outcome.fixed] == ["35:900"]
    node.end_pod("p")
    node.round()
    node.round()
    assert {name: _mask(value) for name, value in _values(node.tree).items()} == {
        name: _mask(value) for name, value in first.items()
    }
    assert not node.records


def _mask(value: str) -> str:
    return value.replace(",", "").lstrip("0") or "0" if "-" not in value else value


def test_nothing_is_written_twice(node: FullNode, clock: Clock) -> None:
    """Audits only read; the level irq gives all of it back and keeps interrupts."""
    first = _values(node.tree)
    node.run_pod("p", "4-5")
    node.settle(clock)
    written = len(node.tree.writes)
    node.round()
    assert len(node.tree.writes) == written
    node.set_level(QuietLevel.IRQ)
    node.round()
    assert node.tree.get(GOVERNOR) == first[GOVERNOR]
    assert node.tree.affinity(33) == "0-15"
    node.round()
    assert {key.kind.value for key in node.records} == {"default-mask"}


def test_a_policy_that_others_share(node: FullNode, clock: Clock) -> None:
    """The governor stays where it would change a foreign pCPU's frequency, the idle limit not."""
    node.run_pod("p", "4")
    node.settle(clock)
    assert node.tree.get(GOVERNOR) == "powersave"
    assert node.tree.get(IDLE) == "20"
    node.run_pod("q", "5")
    node.settle(clock)
    assert node.tree.get(GOVERNOR) == "performance"


def test_settings(node: FullNode, clock: Clock) -> None:
    """Both can be left alone, and a governor that is not there is never written."""
    now = replace(node.live.now, quiet_idle_us=0, quiet_governor="leave")
    node.live.replace(now)
    node.run_pod("p", "4-5")
    node.settle(clock)
    assert (node.tree.get(IDLE), node.tree.get(GOVERNOR)) == ("0", "powersave")
    node.live.replace(replace(now, quiet_idle_us=5, quiet_governor="schedutil"))
    node.round()
    assert (node.tree.get(IDLE), node.tree.get(GOVERNOR)) == ("5", "powersave")
    assert "governor" not in str([one.kind for one in node.tree.writes])


def test_a_daemon_that_is_killed(node: FullNode, clock: Clock) -> None:
    """The next one gives back what the former one found."""
    first = _values(node.tree)
    node.run_pod("p", "4-5")
    node.settle(clock)
    node.start()
    node.settle(clock)
    node.end_pod("p")
    node.round()
    node.round()
    assert _values(node.tree)[IDLE] == first[IDLE]
    assert node.tree.affinity(34) == "4-5"
    assert not node.records


def test_threads_that_come_and_go(node: FullNode, clock: Clock) -> None:
    """New ones are moved at the next audit; of one that ended nothing is kept."""
    node.run_pod("p", "4-5")
    node.settle(clock)
    node.tree.add_thread(77, "kxfs", "0-15")
    node.round()
    assert node.tree.affinity(77) == "0-3,6-15"
    node.tree.end_thread(77)
    node.round()
    assert "77:900" not in {key.name for key in node.records}


def test_another_writer_is_named_and_left(node: FullNode, clock: Clock) -> None:
    """After it came back some times it is left alone; its value is not taken for ours."""
    node.run_pod("p", "4-5")
    node.settle(clock)
    for _ in range(RETURNS):
        node.tree.put(GOVERNOR, "powersave")
        node.round()
    assert node.events.counts[NodeEventKind.QUIET_WRITER] == 1
    node.tree.put(GOVERNOR, "powersave")
    node.round()
    assert node.tree.get(GOVERNOR) == "powersave"
    node.tree.put(DOG, "0-1")
    node.end_pod("p")
    node.round()
    assert node.tree.get(DOG) == "0-1"


@pytest.mark.parametrize("file", [WORK, DOG, RPS, IDLE, GOVERNOR])
def test_what_is_not_there(node: FullNode, clock: Clock, file: str) -> None:
    """A kernel without one of these does not keep the others from being set."""
    (node.tree.root / file).unlink()
    node.run_pod("p", "4-5")
    node.settle(clock)
    assert node.tree.affinity(33) == "0-3,6-15"


def test_rights_are_missing(node: FullNode, clock: Clock) -> None:
    """RPS needs CAP_NET_ADMIN: said so, and nothing is remembered as changed."""
    before = node.tree.get(RPS)
    node.tree.fails["rps eth0/rx-0"] = EPERM
    node.run_pod("p", "4-5")
    node.round()
    assert node.keeper.status.outcome.problems["rps eth0/rx-0"] == "Operation not permitted"
    assert node.tree.get(RPS) == before
