"""`quiet: full` over a double of the kernel's files: what is written, and what is given back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from errno import EINVAL, EPERM, EROFS
from pathlib import Path

import pytest

from kata_pin.daemon.quiet.keeper import TunableSource
from kata_pin.daemon.quiet.kernel_work import KernelWork
from kata_pin.daemon.quiet.tuner import RETURNS
from kata_pin.daemon.status.quiet import kept_quiet, node_notes, quiet_notes, quiet_sandbox
from kata_pin.daemon.status.quiet_metrics import quiet_metrics
from kata_pin.model.cpuset import CpuSet
from kata_pin.model.reports.history import NodeEventKind
from kata_pin.model.settings import QuietLevel
from tests.support import world
from tests.support.irqtree import Line
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

    def look(self, clock: Clock) -> None:
        """A round after a deep audit was due, and one that reads what it wrote."""
        clock.now += self.live.now.audit.deep_s
        self.round()
        self.round()


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
    node.close()


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
    """New ones are moved at the next deep audit; of one that ended nothing is kept."""
    node.run_pod("p", "4-5")
    node.settle(clock)
    node.tree.add_thread(77, "kxfs", "0-15")
    node.round()
    assert node.tree.affinity(77) == "0-15", "looked for in deep audits only"
    node.look(clock)
    assert node.tree.affinity(77) == "0-3,6-15"
    node.tree.end_thread(77)
    node.look(clock)
    assert "77:900" not in {key.name for key in node.records}


def test_another_writer_is_named_and_left(node: FullNode, clock: Clock) -> None:
    """After it came back some times it is left alone; its value is not taken for ours."""
    node.run_pod("p", "4-5")
    node.settle(clock)
    for _ in range(RETURNS):
        node.tree.put(GOVERNOR, "powersave")
        node.look(clock)
    assert node.events.counts[NodeEventKind.QUIET_WRITER] == 1
    node.tree.put(GOVERNOR, "powersave")
    node.look(clock)
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


C_STATES, FREQUENCY = "cpu-c-states.crio.io", "cpu-freq-governor.crio.io"


def test_a_pod_chooses_idle_states_and_governor(node: FullNode, clock: Clock) -> None:
    """If a rule lets it; for its own pCPUs, and as before when it ends."""
    node.annotations["p"] = {C_STATES: "disable", FREQUENCY: "performance"}
    node.live.replace(replace(node.live.now, quiet_governor="leave"))
    node.run_pod("p", "4-5")
    node.run_pod("q", "6-7")
    node.settle(clock)
    assert (node.tree.get(IDLE), node.tree.get(GOVERNOR)) == ("20", "powersave")
    assert len(node.keeper.status.refusals["p"]) == 2
    node.allow()
    node.round()
    assert (node.tree.get(IDLE), node.tree.get(GOVERNOR)) == ("n/a", "performance")
    assert node.tree.get(IDLE.replace("cpu4", "cpu6")) == "20"
    assert node.tree.get(GOVERNOR.replace("policy4", "policy6")) == "powersave"
    assert not node.keeper.status.refusals
    node.annotations["p"] = {"cpu-quiet.kata-pin.io": "off", C_STATES: "max_latency:5"}
    node.round()
    assert (node.tree.get(IDLE), node.tree.get(GOVERNOR)) == ("5", "powersave")
    assert str(node.keeper.status.state.quiet) == "6-7", "the annotations do not depend on it"
    node.end_pod("p")
    node.round()
    assert (node.tree.get(IDLE), node.tree.get(GOVERNOR)) == ("0", "powersave")


def test_annotations_that_cannot_be_followed(
    node: FullNode, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """The log names pod and annotation, the documents have the same."""
    node.annotations["p"] = {C_STATES: "max_latency:fast", FREQUENCY: "turbo"}
    node.allow()
    node.run_pod("p", "4-5")
    node.settle(clock)
    (said,) = (one.message for one in caplog.records if C_STATES in one.message)
    assert said == (
        "sandbox p, pod ns/p: annotation cpu-c-states.crio.io: invalid value 'max_latency:fast'; "
        "valid: enable, disable, max_latency:MICROSECONDS"
    )
    assert (node.tree.get(IDLE), node.tree.get(GOVERNOR)) == ("20", "powersave")
    found = quiet_sandbox(node.keeper.status, "p", node.keeper.exclusive("p"))
    assert found is not None
    assert [one for one in found.problems if "available: performance, powersave" in one]
    assert (found.level, found.cpus, found.governor) == ("full", "4-5", "turbo")
    assert {one.code for one in quiet_notes(node.keeper.status, "p")} == {"quiet"}


@pytest.mark.parametrize("level", [QuietLevel.IRQ, QuietLevel.FULL])
def test_what_crio_sets_itself(node: FullNode, clock: Clock, level: QuietLevel) -> None:
    """Its idle limit and governor are left alone and verified, whatever the setting."""
    node.set_level(level)
    node.bundles = "/run/containers/storage/overlay-containers/x/userdata"
    node.annotations["p"] = {C_STATES: "disable", FREQUENCY: "performance"}
    node.tree.put(IDLE, "n/a")
    node.run_pod("p", "4-5")
    node.settle(clock)
    assert (node.tree.get(IDLE), node.tree.get(GOVERNOR)) == ("n/a", "powersave")
    said = " ".join(node.keeper.status.refusals["p"])
    assert "CRI-O sets pm_qos_resume_latency_us to n/a, but pCPUs 5 have 0" in said
    assert "CRI-O sets the governor to performance, but pCPUs 4-5 have powersave" in said
    assert not {key.kind.value for key in node.records} & {"idle-limit", "governor"}


def test_the_state_document(node: FullNode, clock: Clock) -> None:
    """Level, pCPUs, what is changed, what failed, what is left to others; None before."""
    assert kept_quiet(node.keeper.status) is None
    assert quiet_sandbox(node.keeper.status, "p", CpuSet({4})) is None
    node.tree.add(26, Line("PCI-MSIX-0000:00:04.0   1-edge      nvme0q5", "4-5", 0, EPERM, 0o444))
    node.tree.add(27, Line("PCI-MSIX-0000:00:04.0   1-edge      nvme0q9", "8-9", 0, EPERM, 0o444))
    node.tree.fails["rps eth0/rx-0"] = EPERM
    node.run_pod("p", "4-5")
    node.settle(clock)
    kept = kept_quiet(node.keeper.status)
    assert kept is not None
    assert (kept.level, kept.cpus, kept.full, kept.managed) == ("full", "4-5", "4-5", 1)
    assert (kept.changed["governor"], kept.changed["idle-limit"]) == (1, 2)
    assert kept.failed_writes == {"rps": 1}
    found = quiet_sandbox(node.keeper.status, "p", CpuSet({4, 5, 6}))
    assert found is not None
    assert (found.level, found.cpus, found.not_quiet, found.managed) == ("full", "4-5", "6", 1)
    assert [one.name for one in quiet_metrics(node.keeper.status)] == [
        "kata_pin_quiet_cpus",
        "kata_pin_quiet_values",
        "kata_pin_quiet_write_failures",
        "kata_pin_quiet_managed_interrupts",
        "kata_pin_quiet_interrupts",
    ]
    node.set_level(QuietLevel.OFF)
    node.round()
    node.round()
    assert kept_quiet(node.keeper.status) is None
    assert not [*quiet_metrics(node.keeper.status)]


def test_failed_writes_are_named_for_operators(node: FullNode, clock: Clock) -> None:
    """A note of the node per reason; a spared pCPU is named in its sandbox."""
    for number in (30, 31):
        node.tree.add(number, Line("PCI-MSIX-0000:00:02.0  1-edge  eth0", "0-15", 1, EROFS))
    node.run_pod("p", "4-7,12-15")
    node.settle(clock)
    (note,) = (one for one in node_notes(node.keeper.status) if "Read-only" in one.text)
    assert "quiet pCPUs: cannot set interrupt 3" in note.text
    (spared,) = quiet_notes(node.keeper.status, "p")
    assert "pCPU 4 is not quiet: NUMA node 1 has interrupts" in spared.text


def test_a_device_that_comes_is_looked_at(node: FullNode, clock: Clock) -> None:
    """At the next audit, although the others are read less often."""
    node.run_pod("p", "4-5")
    node.settle(clock)
    node.round()
    node.tree.put(DOG, "0-15")
    node.round()
    assert node.tree.get(DOG) == "0-15", "not read"
    node.tree.put("sys/class/net/veth1/queues/rx-0/rps_cpus", "30")
    node.round()
    assert node.tree.get("sys/class/net/veth1/queues/rx-0/rps_cpus") == "0"
    assert node.tree.get(DOG) == "0-3,6-15", "all is read then"


def test_a_pcpu_that_is_offline_when_its_pod_ends(node: FullNode, clock: Clock) -> None:
    """Its idle limit comes back with it, and is restored then."""
    node.run_pod("p", "4-5")
    node.settle(clock)
    node.round()
    online = "sys/devices/system/cpu/online"
    node.tree.offline.add(4)
    node.tree.put(online, "0-3,5-15")
    node.tree.render()
    node.end_pod("p")
    node.look(clock)
    node.tree.offline.clear()
    node.tree.put(online, "0-15")
    node.tree.render()
    node.look(clock)
    assert node.tree.get(IDLE) == "0"
    assert not node.records
