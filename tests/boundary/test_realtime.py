"""Real-time vCPUs: classes that are given with the pair and taken back, as the kernel shows them.

What the broker gives and refuses is in tests/boundary/test_broker_threads.py.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from errno import EACCES
from pathlib import Path

import pytest

from tests.boundary.host import Vm
from tests.boundary.node import Node

OTHER, FIFO, RR, BATCH = os.SCHED_OTHER, os.SCHED_FIFO, os.SCHED_RR, os.SCHED_BATCH
GUARD = 21


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    """A node that meets every condition on CPU 4."""
    audit = {"affinity_s": 10, "deep_s": 60}
    node = Node(tmp_path, audit=audit, rt={"vcpus": "fifo:1"}, guest={"enabled": False})
    for name, value in (("runtime", 950_000), ("period", 1_000_000)):
        node.host.write(f"proc/sys/kernel/sched_rt_{name}_us", str(value))
    node.host.process("ksoftirqd/4", pid=GUARD, ppid=2, flags=0x0020_8040)
    node.host.set_class(GUARD, FIFO, 9)
    async with node:
        yield node


async def _pair(node: Node) -> Vm:
    """Return a VM whose second vCPU, of class SCHED_BATCH, has CPU 4 and the real-time class."""
    vm = node.vm("p1")
    node.host.set_class(vm.vcpus[1], BATCH, 0)
    node.host.affinities[vm.shim] = {5}
    await node.create(vm, "log", "5")
    await node.create(vm, "own", "4", exclusive=True)
    await _class(node, vm, FIFO, 1)
    assert node.kernel.classes.keys() == {vm.vcpus[1]}
    return vm


async def _class(node: Node, vm: Vm, policy: int, priority: int = 0) -> None:
    """Wait until the second vCPU was given a class."""
    wanted = policy, priority
    given = node.kernel.classes
    await node.until(lambda: given.get(vm.vcpus[1]) == wanted, f"it has class {wanted}")


async def _codes(node: Node, vm: Vm) -> set[str]:
    codes = {one["code"] for one in (await node.shown(vm))["notes"]}
    return codes & {"rt", "rt-refused"}


@pytest.mark.parametrize("end", ["pair", "unpin", "setting"])
async def test_given_and_restored(node: Node, end: str) -> None:
    """With the pair; back without it, by unpin, by the setting; again when that is over."""
    vm = await _pair(node)
    assert await _codes(node, vm) == {"rt"}
    if end == "pair":
        await node.stopped(vm, "own")
    elif end == "unpin":
        await node.ask("unpin", sandbox=vm.id)
    else:
        node.change(rt={"vcpus": "none"})
        await node.ask("reload")
    await _class(node, vm, BATCH)
    assert await _codes(node, vm) == set()
    assert node.rows("rt_threads") == []


async def test_a_killed_daemon_leaves_what_the_next_one_undoes(node: Node) -> None:
    """The record is enough; a class that somebody else set meanwhile is left."""
    vm = await _pair(node)
    await node.kill()
    node.change(rt={"vcpus": "none"})
    await node.start()
    await _class(node, vm, BATCH)
    node.change(rt={"vcpus": "fifo:3"})
    await node.ask("reload")
    await _class(node, vm, FIFO, 3)
    node.host.set_class(vm.vcpus[1], RR, 7)
    await node.ask("unpin", sandbox=vm.id)
    await node.until(lambda: node.rows("rt_threads") == [], "it is nobody's any more")
    assert node.kernel.classes[vm.vcpus[1]] == (FIFO, 3)


async def test_a_class_that_cannot_be_given_back_is_remembered(node: Node) -> None:
    """The broker refuses at first; once it does not, the thread gets the class it had first."""
    vm = await _pair(node)
    node.kernel.refuse[vm.vcpus[1]] = EACCES
    await node.ask("release")
    assert len(node.rows("rt_threads")) == 1
    node.kernel.refuse.clear()
    await node.ask("release")
    await _class(node, vm, BATCH)


async def test_a_condition_that_ends_takes_the_class_back(node: Node) -> None:
    """Found by the look after an audit, without a pass; said in a note. Then the sandbox ends."""
    vm = await _pair(node)
    node.host.set_class(GUARD, FIFO, 1)
    await node.clock.move(11)
    await _class(node, vm, BATCH)
    assert await _codes(node, vm) == {"rt-refused"}
    node.host.set_class(GUARD, FIFO, 9)
    await node.clock.move(11)
    await _class(node, vm, FIFO, 1)
    vm.end()
    node.kernel.connector.exited(vm.pid, vm.pid)
    await node.until(lambda: node.rows("rt_threads") == [], "nothing of it is stored")
