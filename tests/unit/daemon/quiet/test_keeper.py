"""The keeper over a double of /proc/irq: masks, other writers, crashes, pCPUs that go offline."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from errno import EBUSY, EIO, ENOSPC, EPERM, EROFS
from pathlib import Path

import pytest

from kata_pin.daemon.quiet.keeper import NARROW_S
from kata_pin.daemon.quiet.tuner import LEFT_S, RETURNS
from kata_pin.host import kept_files
from kata_pin.model.cpuset import CpuSet
from kata_pin.model.reports.history import NodeEventKind
from kata_pin.model.settings import QuietLevel, VfioInterrupts
from tests.support import world
from tests.support.irqtree import IrqTree, Line
from tests.support.quietnode import Clock, QuietNode

ETH, DISK, MANAGED, NEAR = 24, 25, 26, 27


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock that only tests move."""
    return Clock(monkeypatch)


@pytest.fixture
def node(tmp_path: Path, clock: Clock) -> Iterator[QuietNode]:
    """Sixteen pCPUs on two NUMA nodes; 0-3,8-11 are on the first."""
    tree = IrqTree(tmp_path / "tree", 16)
    tree.add(ETH, Line("PCI-MSIX-0000:00:02.0   1-edge      eth0-rx", "0-15"))
    tree.add(DISK, Line("PCI-MSIX-0000:00:03.0   0-edge      sda", "4"))
    tree.add(MANAGED, Line("PCI-MSIX-0000:00:04.0   1-edge      nvme0q5", "4-5", 0, EPERM, 0o444))
    tree.add(NEAR, Line("PCI-MSIX-0000:00:05.0   1-edge      eth1", "4-5", 1))
    node = QuietNode(tmp_path, tree, world.smt_host())
    yield node
    node.close()


def test_masks_while_a_pod_lives(node: QuietNode, clock: Clock) -> None:
    """What is left of the first mask; else the interrupt's NUMA node; else any pCPU."""
    first = node.tree.masks
    node.run_pod("p", "4-5")
    node.settle(clock)
    assert node.tree.masks == {ETH: "0-3,6-15", DISK: "0-3,6-15", MANAGED: "4-5", NEAR: "6-7,12-15"}
    assert node.tree.default == "0-3,6-15"
    assert [one.key.name for one in node.keeper.status.outcome.fixed] == [str(MANAGED)]
    assert node.events.counts[NodeEventKind.QUIET_CHANGED] == 1
    node.end_pod("p")
    node.round()
    assert (node.tree.masks, node.tree.default) == (first, "0-15")
    node.round()
    assert not node.records


def test_nothing_is_written_when_nothing_changed(node: QuietNode, clock: Clock) -> None:
    """Audits only read; nor is anything written for the levels that only report."""
    node.run_pod("p", "4-5")
    node.settle(clock)
    written = len(node.tree.writes)
    assert written == 4, "the default mask and three interrupts, and not the managed one"
    for _ in range(3):
        node.round()
    assert len(node.tree.writes) == written
    for level in (QuietLevel.REPORT, QuietLevel.OFF):
        node.set_level(level)
        node.round()
        node.round()
        assert (node.tree.masks[ETH], node.tree.default) == ("0-15", "0-15")
        assert not node.records
    assert len(node.tree.writes) == 2 * written


def test_uninstall(node: QuietNode, clock: Clock) -> None:
    """Everything is restored while the pod lives, and what cannot be is named."""
    node.run_pod("p", "4-5")
    node.settle(clock)
    node.tree.fails[str(DISK)] = EIO
    node.live.stop_acting()
    assert asyncio.run(node.keeper.give_back()) == ["interrupt 25: Input/output error"]
    node.round()
    assert (node.tree.masks[ETH], node.tree.default) == ("0-15", "0-15")
    assert asyncio.run(node.keeper.give_back()) == []


def test_new_quiet_pcpus_wait_and_free_ones_do_not(node: QuietNode, clock: Clock) -> None:
    """Pods that start together cost one round of writes."""
    node.run_pod("a", "4")
    node.settle(clock)
    node.run_pod("b", "5")
    node.round()
    assert node.tree.masks[ETH] == "0-3,5-15"
    clock.now += NARROW_S / 2
    node.run_pod("c", "6")
    node.end_pod("a")
    node.round()
    assert node.tree.masks[ETH] == "0-15", "free again at once"
    clock.now += NARROW_S / 2 + 0.1
    node.round()
    assert node.tree.masks[ETH] == "0-4,7-15"


def test_a_replaced_pod(node: QuietNode, clock: Clock) -> None:
    """The new pod's pCPUs stay quiet when the old one, which had the same ones, ends late."""
    node.run_pod("old", "4-5")
    node.settle(clock)
    node.run_pod("new", "4-5")
    node.settle(clock)
    node.end_pod("old")
    node.settle(clock)
    assert node.tree.masks[ETH] == "0-3,6-15"


def test_killed_between_record_and_write(node: QuietNode, clock: Clock) -> None:
    """Nobody knows whether the last write was made: both values are ours."""
    first = node.tree.masks
    node.run_pod("p", "4-5")
    write = node.tree.write_tunables
    node.tree.write_tunables = lambda *_: (_ for _ in ()).throw(RuntimeError("killed"))  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="killed"):
        node.settle(clock)
    node.tree.write_tunables = write  # type: ignore[method-assign]
    assert node.records, "recorded before the write"
    node.start()
    node.settle(clock)
    assert node.tree.masks[ETH] == "0-3,6-15"
    node.pods.clear()
    node.start()
    node.round()
    node.round()
    assert (node.tree.masks, node.tree.default) == (first, "0-15")
    assert not node.records


def test_a_harmless_other_writer_is_left_alone(node: QuietNode, clock: Clock) -> None:
    """irqbalance moves interrupts among the housekeeping pCPUs; those masks stay for ever."""
    node.run_pod("p", "4-5")
    node.settle(clock)
    node.tree.set_mask(ETH, "7")
    node.round()
    assert node.tree.masks[ETH] == "7"
    node.end_pod("p")
    node.round()
    assert node.tree.masks[ETH] == "7"
    assert node.tree.masks[DISK] == "4"


def test_a_harmful_other_writer_is_named_and_not_fought(node: QuietNode, clock: Clock) -> None:
    """It is corrected some times, then reported and left for a while."""
    node.run_pod("p", "4-5")
    node.settle(clock)
    for _ in range(RETURNS):
        node.tree.set_mask(ETH, "4")
        node.round()
        assert node.tree.masks[ETH] == "0-3,6-15"
        clock.now += 10
    assert node.events.counts[NodeEventKind.QUIET_WRITER] == 1
    node.tree.set_mask(ETH, "4")
    node.round()
    assert node.tree.masks[ETH] == "4"
    assert [one.key.name for one in node.keeper.status.outcome.left] == [str(ETH)]
    clock.now += LEFT_S
    node.round()
    assert node.tree.masks[ETH] == "0-3,6-15"


def test_a_writer_that_was_there_before_is_no_fight(node: QuietNode, clock: Clock) -> None:
    """What irqbalance chose before a pCPU became quiet is moved, as often as pods come."""
    for number in range(2 * RETURNS):
        node.tree.set_mask(ETH, "4")
        node.run_pod(f"p{number}", "4-5")
        node.settle(clock)
        assert node.tree.masks[ETH] == "0-3,6-15"
        node.end_pod(f"p{number}")
        node.settle(clock)
    assert not node.events.counts[NodeEventKind.QUIET_WRITER]


def test_pcpus_that_go_offline(node: QuietNode, clock: Clock) -> None:
    """virtio-net rewrites its masks then, as often as it happens: that is no other writer."""
    node.run_pod("p", "4-5")
    node.settle(clock)
    for _ in range(2 * RETURNS):
        node.tree.offline = {15} ^ node.tree.offline
        node.tree.set_mask(ETH, "0-15")
        node.tree.render()
        node.round()
        assert CpuSet.parse(node.tree.masks[ETH]).isdisjoint(CpuSet.parse("4-5"))
    assert not node.events.counts[NodeEventKind.QUIET_WRITER]
    node.tree.offline = set()
    node.tree.render()
    node.end_pod("p")
    node.round()
    assert node.tree.masks[ETH] == "0-15"


def test_a_first_mask_that_is_offline(node: QuietNode, clock: Clock) -> None:
    """The kernel refuses it until one of its pCPUs is back; then it is restored."""
    node.run_pod("p", "4-5")
    node.settle(clock)
    node.tree.offline = {4}
    node.tree.render()
    node.end_pod("p")
    node.round()
    assert node.tree.masks[DISK] == "0-3,6-15"
    assert any("Invalid argument" in one for one in node.keeper.status.problems)
    node.tree.offline = set()
    node.tree.render()
    node.round()
    node.round()
    assert node.tree.masks[DISK] == "4"
    assert not node.records


def test_a_device_that_is_bound_again(node: QuietNode, clock: Clock) -> None:
    """Its old number belongs to another interrupt: the first mask is that one's."""
    node.run_pod("p", "4-5")
    node.settle(clock)
    node.tree.remove(DISK)
    node.round()
    node.tree.add(DISK, Line("PCI-MSIX-0000:00:07.0   0-edge      sdb", "4-7"))
    node.round()
    assert node.tree.masks[DISK] == "6-7"
    node.end_pod("p")
    node.round()
    assert node.tree.masks[DISK] == "4-7"


@pytest.mark.parametrize("errno", [ENOSPC, EBUSY])
def test_passing_errors(node: QuietNode, errno: int) -> None:
    """No vector is free, or a move is in flight: the next round tries again."""
    node.tree.fails[str(ETH)] = errno
    node.run_pod("p", "4-5")
    node.round()
    assert node.tree.masks[ETH] == "0-15"
    assert node.keeper.status.problems
    node.round()
    assert node.tree.masks[ETH] == "0-3,6-15"
    assert not node.keeper.status.problems


def test_managed_on_old_kernels(node: QuietNode, clock: Clock) -> None:
    """Linux 6.1 shows it only by refusing: it is tried once."""
    node.tree.add(30, Line("PCI-MSI 7-edge      nvme1q1", "4-5", refuses=EIO))
    node.run_pod("p", "4-5")
    node.settle(clock)
    node.round()
    assert sum(one.name == "30" for one in node.tree.writes) == 1
    assert "30" in [one.key.name for one in node.keeper.status.outcome.fixed]
    assert not any(getattr(key, "name", "") == "30" for key in node.records)


def test_without_rights(node: QuietNode, clock: Clock) -> None:
    """A read-only /proc: said once, tried with one write per round, and nothing stays recorded."""
    for line in node.tree.lines.values():
        line.refuses = EROFS
    node.run_pod("p", "4-5")
    node.settle(clock)
    tried = len(node.tree.writes)
    for _ in range(3):
        node.round()
    assert len(node.tree.writes) == tried + 3
    assert any("Read-only" in one for one in node.keeper.status.problems)
    assert node.events.counts[NodeEventKind.QUIET_FAILED] == 1
    for line in node.tree.lines.values():
        line.refuses = 0
    node.round()
    node.round()
    assert node.tree.masks[ETH] == "0-3,6-15"


def test_a_numa_node_keeps_a_pcpu_for_its_interrupts(node: QuietNode, clock: Clock) -> None:
    """If a pod has all of them, one is not quiet, and it is said which and why."""
    node.run_pod("p", "4-7,12-15")
    node.settle(clock)
    [spared] = node.keeper.status.state.spared
    assert (spared.cpu, "NUMA node 1" in spared.reason) == (4, True)
    assert node.tree.masks[NEAR] == "4"
    assert node.tree.masks[ETH] == "0-4,8-11"


def test_annotations(node: QuietNode, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """A pod may choose less than the setting, if a rule lets it; why not is logged once."""
    node.annotations["p"] = {"cpu-quiet.kata-pin.io": "off"}
    node.run_pod("p", "4-5")
    node.settle(clock)
    assert node.tree.masks[ETH] == "0-3,6-15"
    assert [r.message for r in caplog.records if "alloc.allow" in r.message] == [
        "sandbox p, pod ns/p: annotation cpu-quiet.kata-pin.io ignored: no rule of alloc.allow"
    ]
    node.allow()
    node.round()
    assert node.tree.masks[ETH] == "0-15"
    node.annotations["p"] = {"irq-load-balancing.crio.io/c-p": "housekeeping"}
    node.settle(clock)
    assert node.tree.masks[ETH] == "0-4,6-15", "its first core stays with interrupts"


@pytest.mark.parametrize(("vfio", "mask"), [("own", "0-15"), ("housekeeping", "0-3,6-15")])
def test_interrupts_of_passed_through_devices(
    node: QuietNode, clock: Clock, vfio: str, mask: str
) -> None:
    """They may fire on their own pod's pCPUs, by setting; another device's may not."""
    node.tree.add(40, Line("PCI-MSIX-0000:3b:00.0 0-edge   vfio-msix[0](0000:3b:00.0)", "0-15"))
    node.tree.add(41, Line("PCI-MSIX-0000:3c:00.0 0-edge   vfio-intx(0000:3c:00.0)", "0-15"))
    node.devices = frozenset({"0000:3b:00.0"})
    node.live.replace(replace(node.live.now, quiet_vfio=VfioInterrupts(vfio)))
    node.run_pod("p", "4-5")
    node.settle(clock)
    assert node.tree.masks[40] == mask
    assert node.tree.masks[41] == node.tree.masks[ETH] == "0-3,6-15"


def test_what_fires_on_quiet_pcpus(node: QuietNode, clock: Clock) -> None:
    """Counters tell whether it worked, by what can be moved and what cannot."""
    node.run_pod("p", "4-5")
    node.settle(clock)
    node.round()
    node.tree.lines[MANAGED].counts[4] = 7
    node.tree.lines[ETH].counts[5] = 1
    node.tree.lines[ETH].counts[6] = 100
    node.tree.render()
    node.round()
    found = {(one.interrupt.number, str(one.cpus), one.times) for one in node.keeper.status.fired}
    assert found == {(MANAGED, "4", 7), (ETH, "5", 1)}
    assert (node.keeper.status.managed_fired, node.keeper.status.movable_fired) == (7, 1)


@pytest.mark.parametrize(
    ("near", "born", "first"), [(-1, "0-3,6-15", "0-15"), (1, "6-7,12-15", "4-7,12-15")]
)
def test_an_interrupt_that_is_set_up_while_pcpus_are_quiet(
    node: QuietNode, clock: Clock, near: int, born: str, first: str
) -> None:
    """Its mask is made of the narrowed default mask: later it gets what it would have had."""
    node.run_pod("p", "4-5")
    node.settle(clock)
    text = "PCI-MSIX-0000:00:09.0   1-edge      eth9"
    node.tree.add(50, Line(text, born, near))
    node.tree.add(51, Line(text.replace("eth9", "eth10"), "1", near))
    node.round()
    assert node.tree.masks[50] == born
    node.end_pod("p")
    node.round()
    assert (node.tree.masks[50], node.tree.masks[51]) == (first, "1")


def test_more_interrupts_than_descriptors(
    node: QuietNode, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those whose files are not kept have their first masks back as well."""
    monkeypatch.setattr(kept_files, "MOST", 1)
    node.start()
    first = node.tree.masks
    node.run_pod("p", "4-5")
    node.settle(clock)
    node.round()
    assert node.tree.masks[DISK] == "0-3,6-15"
    node.end_pod("p")
    node.round()
    assert node.tree.masks == first


def test_a_device_that_is_bound_again_at_once(node: QuietNode, clock: Clock) -> None:
    """Between two audits, with its old number and text: the old mask is not given to it."""
    node.run_pod("p", "4-5")
    node.settle(clock)
    old = node.tree.lines[DISK]
    node.tree.remove(DISK)
    node.tree.add(DISK, Line(old.text, "0-15"))
    node.round()
    assert node.tree.masks[DISK] == "0-3,6-15"
    node.end_pod("p")
    node.round()
    assert node.tree.masks[DISK] == "0-15", "it was 4"
