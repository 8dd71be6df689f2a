"""Quiet pCPUs while everything around them changes: in the end every value is the first one."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from errno import EPERM
from pathlib import Path

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kata_pin.base.cpuset import CpuSet
from kata_pin.base.values import QuietLevel
from kata_pin.options.quiet.tuner import LEFT_S
from kata_pin.rights.broker.tunables import TunableWrite, TunableWritten
from tests.support import world
from tests.support.irqtree import Line
from tests.support.quietnode import Clock, QuietNode
from tests.support.worktree import WorkTree

CPUS = 16
EVERY = CpuSet(range(CPUS))
TOPOLOGY = world.smt_host()
MANAGED = 40
DEFAULT = -1
"""Stands for the default mask among the interrupts' numbers."""

LINES = {
    30: ("PCI-MSIX-0000:00:02.0   1-edge      eth0-rx", "0-15", -1),
    31: ("PCI-MSIX-0000:00:03.0   0-edge      sda", "4", -1),
    32: ("PCI-MSIX-0000:00:05.0   1-edge      eth1", "4-7,12-15", 1),
    33: ("PCI-MSIX-0000:00:06.0   1-edge      eth2", "2-5", 0),
}
FILES = (
    "sys/devices/virtual/workqueue/cpumask",
    "proc/sys/kernel/watchdog_cpumask",
    "sys/class/net/eth0/queues/rx-0/rps_cpus",
    "sys/class/net/eth0/queues/tx-0/xps_cpus",
    *(f"sys/devices/system/cpu/cpu{cpu}/power/pm_qos_resume_latency_us" for cpu in range(CPUS)),
    *(f"sys/devices/system/cpu/cpufreq/policy{n}/scaling_governor" for n in range(0, CPUS, 2)),
)
THREAD = 33

masks = st.sets(st.integers(0, CPUS - 1), min_size=1).map(CpuSet)


class KilledError(Exception):
    """The daemon ends here, as by kill -9."""


class Node(RuleBasedStateMachine):
    """Pods, levels, pCPUs, devices, other writers and kills, in any order."""

    @initialize()
    def start(self) -> None:
        """Begin with a node that has not been touched."""
        self.patch = pytest.MonkeyPatch()
        self.clock = Clock(self.patch)
        self.folder = tempfile.TemporaryDirectory()
        tree = WorkTree(Path(self.folder.name) / "tree", CPUS)
        tree.add_all({n: Line(text, mask, node) for n, (text, mask, node) in LINES.items()})
        tree.add(MANAGED, Line("PCI-MSIX-0000:00:04.0 1-edge nvme0q5", "4-5", 0, EPERM, 0o444))
        tree.add_thread(THREAD, "kswapd0", "0-15")
        self.tree = tree
        self.node = QuietNode(Path(self.folder.name), tree, TOPOLOGY)
        self.first: dict[int, set[str]] = {n: {mask} for n, (_, mask, _) in LINES.items()}
        self.first[DEFAULT] = {str(EVERY)}
        """What each mask may be in the end: the first one, and what others wrote."""
        self.files = {name: tree.get(name) for name in FILES}
        self.unseen: set[int] = set()
        """Devices that were bound after the last round."""
        self.former: dict[int, set[str]] = {n: set() for n in LINES}
        """What masks of devices might have been before they were bound again."""
        self.looked = False
        """Whether this daemon, since its start, has seen which devices there are."""

    @rule(name=st.sampled_from("abc"), cpus=masks)
    def pod(self, name: str, cpus: CpuSet) -> None:
        """A pod comes, or gets other pCPUs, also those of a pod that has not ended yet."""
        self.node.run_pod(name, str(cpus))

    @precondition(lambda self: self.node.pods)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """A pod ends."""
        self.node.end_pod(data.draw(st.sampled_from(sorted(self.node.pods))))

    @rule(level=st.sampled_from([QuietLevel.IRQ, QuietLevel.FULL, QuietLevel.REPORT]))
    def level(self, level: QuietLevel) -> None:
        """The setting is changed."""
        self.node.set_level(level)

    @rule(cpu=st.integers(1, CPUS - 1))
    def switch(self, cpu: int) -> None:
        """A pCPU goes off- or online; an interrupt that has no other one may go anywhere then."""
        self._lose_births()
        offline = self.tree.offline
        (offline.discard if cpu in offline else offline.add)(cpu)
        self.tree.put("sys/devices/system/cpu/online", str(EVERY - CpuSet(offline)))
        for number, line in self.tree.lines.items():
            if number != MANAGED and CpuSet.parse(line.mask) <= CpuSet(offline):
                self._write(number, EVERY - CpuSet(offline))
        self.tree.render()

    @rule(number=st.sampled_from(sorted(LINES)), seen=st.booleans())
    def bind(self, number: int, seen: bool) -> None:
        """A device is bound again: its mask is made of the default mask (irq_setup_affinity)."""
        text, _, near = LINES[number]
        self.tree.remove(number)
        self.unseen.discard(number)
        if seen:
            self.round()
        made = self._initial(self.tree.default, near) or EVERY - CpuSet(self.tree.offline)
        self.former[number] = {*self.former[number], *self.first[number]}
        self.first[number] = {str(self._initial(one, near)) for one in self.first[DEFAULT]}
        self.tree.add(number, Line(text, str(made), near))
        self.unseen.add(number)

    def _initial(self, mask: str, near: int) -> CpuSet:
        """Return the mask of a new interrupt, made of a default mask."""
        there = CpuSet.parse(mask) & EVERY - CpuSet(self.tree.offline)
        return (there & TOPOLOGY.nodes[near] if near >= 0 else there) or there

    @rule(number=st.sampled_from([*LINES, DEFAULT]), mask=masks)
    def other_writer(self, number: int, mask: CpuSet) -> None:
        """Something else writes a mask."""
        if mask - CpuSet(self.tree.offline):
            self._write(number, mask)

    def _write(self, number: int, mask: CpuSet) -> None:
        self.first[number].add(str(mask))
        if number == DEFAULT:
            self.tree.set_default(str(mask))
        else:
            self.tree.set_mask(number, str(mask))

    @rule()
    def kill(self) -> None:
        """kill -9, and the next daemon."""
        self._lose_births()
        self._start()

    @rule(made=st.booleans(), left=st.integers(0, 3))
    def kill_in_a_write(self, made: bool, left: int) -> None:
        """kill -9 between record and write, or between write and answer."""
        write, calls = self.tree.write_tunables, iter(range(left))

        def dies(writes: Sequence[TunableWrite], root: str) -> list[TunableWritten]:
            if next(calls, None) is not None:
                return write(writes, root)
            if made:
                write(writes, root)
            raise KilledError

        self._lose_births()
        self.tree.write_tunables = dies  # type: ignore[method-assign]
        try:
            self.node.round()
        except KilledError:
            pass
        finally:
            self.tree.write_tunables = write  # type: ignore[method-assign]
        self._start()

    def _start(self) -> None:
        self.node.start()
        self.looked = False

    def _lose_births(self) -> None:
        """Nobody knows any more what masks of new devices were made of.

        After a kill number and text are those of the old device, and what was online counts too.
        """
        for number in self.unseen:
            near = LINES[number][2]
            self.first[number] |= {str(self._initial(one, near)) for one in self.first[DEFAULT]}
            self.first[number] |= {self.tree.lines[number].mask, *self.former[number]}

    def _see_births(self) -> None:
        """New devices are seen now: what is online now counts, not what was at their birth.

        A daemon's first look cannot tell them from the old ones.
        """
        if not self.looked:
            self._lose_births()
        for number in self.unseen:
            near = LINES[number][2]
            self.first[number] |= {str(self._initial(one, near)) for one in self.first[DEFAULT]}
        self.unseen.clear()
        self.looked = True

    @rule()
    def round(self) -> None:
        """An audit."""
        self.node.round()
        self._see_births()

    @rule()
    def settled(self) -> None:
        """After a while nothing that can be moved may fire on a quiet pCPU."""
        self._settle()
        status = self.node.keeper.status
        quiet = status.state.quiet
        for problem in status.problems:  # the first mask has offline pCPUs alone
            assert self.tree.offline, problem
            assert "Invalid argument" in problem
        for number, mask in self.tree.masks.items():
            if number != MANAGED:
                assert CpuSet.parse(mask).isdisjoint(quiet), (number, mask, str(quiet))
        assert CpuSet.parse(self.tree.default).isdisjoint(quiet)
        if self.node.live.now.quiet.acts:
            wanted = CpuSet()
            for cpus in self.node.pods.values():
                wanted |= CpuSet.parse(cpus)
            spared = CpuSet(one.cpu for one in status.state.spared)
            assert quiet == wanted - CpuSet(self.tree.offline) - spared
        else:
            assert not quiet

    def _settle(self) -> None:
        self.clock.now += LEFT_S + 1
        for _ in range(3):
            self.node.settle(self.clock)
        self._see_births()

    def teardown(self) -> None:
        """Without pods everything is as it was first, or as others left it."""
        with self._ended():
            self._lose_births()
            self.tree.offline.clear()
            self.tree.put("sys/devices/system/cpu/online", str(EVERY))
            self.tree.render()
            for name in [*self.node.pods]:
                self.node.end_pod(name)
            self._settle()
            assert not self.node.records
            for number, mask in self.tree.masks.items():
                if number != MANAGED:
                    assert mask in self.first[number], (number, mask, self.first[number])
            assert self.tree.default in self.first[DEFAULT]
            assert self.tree.lines[MANAGED].mask == "4-5"
            assert self.tree.affinity(THREAD) == "0-15"
            for name, value in self.files.items():
                assert _number(self.tree.get(name)) == _number(value), name

    @contextmanager
    def _ended(self) -> Iterator[None]:
        try:
            yield
        finally:
            self.node.close()
            self.patch.undo()
            self.folder.cleanup()


def _number(text: str) -> str:
    """Return a value without the zeros that the kernel pads masks with."""
    return text.replace(",", "").lstrip("0") or "0" if "-" not in text else text


def test_in_the_end_everything_is_as_it_was() -> None:
    """And no living quiet pCPU has an interrupt that could be moved."""
    phases = (Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink)
    chosen = settings(max_examples=20, stateful_step_count=25, deadline=None, phases=phases)
    run_state_machine_as_test(Node, settings=chosen)
