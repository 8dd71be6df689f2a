"""The watch of exclusive pCPUs, over the kernel's counters: no perf event can be opened here.

`p1` has one vCPU on the exclusive pCPU 4; its other threads share 0-3. The watch looks after
each audit.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.boundary.host import Vm
from tests.boundary.node import Node

AUDIT_S = 10
S = 1_000_000_000
TICKS = 100
"""USER_HZ: /proc/stat counts hundredths of a second."""


class Watched:
    """A sandbox on a node, and the counters that are the kernel's."""

    def __init__(self, node: Node, vm: Vm) -> None:
        self.node, self.vm = node, vm
        for tid in node.host.tids(vm.pid):
            self.ran(tid)

    def ran(self, tid: int = 0, ran_s: float = 0, waited_s: float = 0, slices: int = 0) -> None:
        """Have a thread's counters, by default the vCPU's."""
        path = f"proc/{self.vm.pid}/task/{tid or self.vm.vcpus[0]}/schedstat"
        self.node.host.write(path, f"{ran_s * S:.0f} {waited_s * S:.0f} {slices}")

    def pcpu(self, ran_s: float, slices: int) -> None:
        """Have the pCPU's counters of all that ran there."""
        text = f"version 16\ntimestamp 1\ncpu4 0 0 0 0 0 0 {ran_s * S:.0f} 0 {slices}"
        self.node.host.write("proc/schedstat", text)

    def idle(self, idle_s: float) -> None:
        """Have the time that the pCPU was idle."""
        self.node.host.write("proc/stat", f"cpu4 0 0 0 {idle_s * TICKS:.0f} 0 0 0 0 0 0")

    async def look(self) -> dict[str, Any]:
        """Have an audit; return the row of the pCPU."""
        await self.node.clock.move(AUDIT_S + 1)
        for _ in range(12):
            await self.node.pause()
        rows = (await self.node.ask("watch"))["pcpus"]
        return dict(rows[0]) if rows else {}

    def episodes(self) -> int:
        """Return how often the node reported that others ran there."""
        if not self.node.rows("sqlite_master", "1", "name = 'node_events'"):
            return 0
        return len(self.node.rows("node_events", "1", "text LIKE '%foreign tasks ran on%'"))


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    audit = {"affinity_s": AUDIT_S, "deep_s": 86400}
    async with Node(tmp_path, audit=audit, isolation={"max_foreign": 0.1}) as one:
        yield one


@pytest.fixture
async def watched(node: Node) -> Watched:
    vm = node.vm("p1", vcpus=1)
    pod = Watched(node, vm)
    await node.create(vm, "own", "4", exclusive=True)
    await node.create(vm, "log", "0-3")
    await pod.look()
    return pod


async def test_a_quiet_pcpu_is_only_looked_at(watched: Watched) -> None:
    """No episode while the vCPU runs without waiting."""
    watched.ran(ran_s=0.009)
    row = await watched.look()
    assert (row["cpu"], row["sandbox"]) == (4, "p1")
    assert (row["waited_percent"], row["others_percent"], row["episode_s"]) == (0, 0, None)
    assert watched.episodes() == 0


async def test_an_episode_is_reported_once(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a name, as nothing can be recorded; again after it was quiet in between."""
    for waited_s in (90, 180):
        watched.ran(waited_s=waited_s)
        assert (await watched.look())["episode_s"] is not None
    assert watched.episodes() == 1
    assert "others for 100.00 %, without a name" in caplog.text
    assert (await watched.look())["episode_s"] is None
    watched.ran(waited_s=900)
    await watched.look()
    assert watched.episodes() == 2


async def test_what_is_missing_is_said_before_it_is_needed(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, and a remedy counts with the next audit; then no event is opened any more."""
    node = watched.node
    assert "Permission denied" in (await node.ask("watch"))["problem"]
    await watched.look()
    records = caplog.get_records("setup") + caplog.get_records("call")
    assert sum("cannot be recorded" in record.getMessage() for record in records) == 1
    node.kernel.has_perf = True
    opened = node.kernel.opened
    for _ in range(2):
        await watched.look()
    assert (await node.ask("watch"))["problem"] == ""
    assert node.kernel.opened == opened + 1


async def test_what_ran_while_the_vcpu_slept(watched: Watched) -> None:
    """A task that made nobody wait is noticed where the kernel counts slices by pCPU."""
    watched.pcpu(0, 0)
    await watched.look()
    watched.ran(ran_s=0.001, slices=5)
    watched.pcpu(0.09, 8)
    row = await watched.look()
    assert (row["waited_percent"], row["others_slices"]) == (0, 3)
    assert watched.episodes() == 1


async def test_slices_of_own_threads_say_nothing(tmp_path: Path) -> None:
    """Where the sandbox's other threads may run on that pCPU too, only waiting counts."""
    async with Node(tmp_path, audit={"affinity_s": AUDIT_S, "deep_s": 86400}) as node:
        pod = Watched(node, node.vm("p1", vcpus=1))
        await node.create(pod.vm, "own", "4", exclusive=True)
        for step in range(4):
            pod.ran(0, 3 * step, step, step)
            pod.ran(pod.vm.pid, step, 3 * step, step)
            pod.pcpu(4 * step, 2 * step)
            await pod.look()
        assert pod.episodes() == 0


@pytest.mark.parametrize("idle", ["never", "mostly"])
async def test_who_never_leaves(watched: Watched, idle: str) -> None:
    """Nobody switches or waits, but the pCPU is not idle: a task's, or interrupts of idle time."""
    watched.pcpu(0, 0)
    for step in range(3):
        watched.idle(10 if idle == "never" else 10 + 100 * step)
        await watched.look()
    assert watched.episodes() == (idle == "never")


async def test_the_limit_and_the_switch_are_settings(watched: Watched) -> None:
    """What is not above the limit begins no episode; switched off nothing is looked at."""
    node = watched.node
    node.change(isolation={"max_foreign": 100.0})
    await node.ask("reload")
    watched.ran(waited_s=90)
    assert (await watched.look())["episode_s"] is None
    node.change(isolation={"watch": False})
    await node.ask("reload")
    assert await watched.look() == {}
    assert watched.episodes() == 0


async def test_a_pcpu_that_is_nobodys_any_more(watched: Watched) -> None:
    """Its episode ends with the container that had it, and what waited then begins none."""
    watched.ran(waited_s=90)
    await watched.look()
    await watched.node.stopped(watched.vm, "own")
    await watched.node.ask("reconcile")  # the pass that takes the pCPU back may not have run yet
    watched.ran(waited_s=180)
    assert await watched.look() == {}
    await watched.node.create(watched.vm, "own", "4", exclusive=True)
    watched.ran(waited_s=270)
    assert (await watched.look())["episode_s"] is None
    assert watched.episodes() == 1
