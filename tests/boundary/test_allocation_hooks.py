"""Deciding without NRI: hooks report containers, threads follow; who is exclusive say overrides."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.boundary.host import Vm, cpu_numbers, kernel_list
from tests.boundary.node import Node
from tests.support.checkpoint import replace

PERIOD_US = 100_000


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    alloc = {"policy": "annotation", "shared_minimum": "1", "orders": str(tmp_path / "orders")}
    async with Node(tmp_path, sysfs=8, alloc=alloc) as one:
        yield one


async def _ours(node: Node, name: str, cpus: int = 0) -> Vm:
    """Run a pod whose container has no cpuset; `cpus` is its limit, and its request."""
    vm = node.vm(name)
    await node.create(vm, vm.id)
    file = vm.bundle(f"c-{name}") / "config.json"
    config = json.loads(file.read_text())
    if cpus:
        size = {"quota": cpus * PERIOD_US, "period": PERIOD_US, "shares": 1024 * cpus}
        config["linux"]["resources"]["cpu"] = size
    file.write_text(json.dumps(config))
    vm.persist(**{f"c-{name}": None})
    await node.hook("createRuntime", f"c-{name}", vm.pid)
    return vm


async def _allocation(node: Node) -> dict[str, Any]:
    shown: dict[str, Any] = (await node.ask("state"))["allocation"]
    return shown


async def _exclusive(node: Node, vm: Vm) -> str:
    """Order it for a pod; return its own CPUs once it has some."""
    replace(node.folder / "orders", f"{vm.id} exclusive\n")
    while not (own := (await _allocation(node))["pools"]["exclusive"]):
        await node.pause()
    return str(own)


def _rest(own: str) -> str:
    return kernel_list(set(range(8)) - cpu_numbers(own))


async def test_exclusive_among_sandboxes(node: Node) -> None:
    """Other sandboxes' threads leave the CPU, over a restart too, and may come back at the end."""
    two, one = await _ours(node, "p2"), await _ours(node, "p1", 1)
    assert two.masks["main"] == "0-7"
    own = await _exclusive(node, one)
    await node.placed(two, main=_rest(own))
    await node.placed(one, v1=own, main=_rest(own))
    assert (await _allocation(node))["guarantee"] == "sandboxes only"
    await node.kill()
    await node.start()
    assert (await _allocation(node))["pools"]["exclusive"] == own
    one.end()
    node.kernel.connector.exited(one.pid, one.pid)
    await node.placed(two, main="0-7")
    assert (await _allocation(node))["pools"]["exclusive"] == ""


async def test_cpus_that_others_gave_are_not_given_again(node: Node) -> None:
    """A container that came with exclusive CPUs keeps them alone; when it ends they are free."""
    theirs = node.vm("p1")
    await node.create(theirs, "c1", "1-7", exclusive=True)
    ours = await _ours(node, "p2", 1)
    replace(node.folder / "orders", "p2 exclusive\n")
    await node.placed(ours, main="0", v1="0")
    pools = (await _allocation(node))["pools"]
    assert (pools["exclusive"], pools["taken"]) == ("", "1-7")
    await node.stopped(theirs, "c1")
    own = await _exclusive(node, ours)
    await node.placed(ours, v1=own, main=_rest(own))


async def test_cpus_that_are_given_already_are_a_conflict(node: Node) -> None:
    """Others give out a CPU that is in a grant: nothing is moved, and a note says so."""
    ours = await _ours(node, "p2", 1)
    own = await _exclusive(node, ours)
    await node.placed(ours, v1=own, main=_rest(own))
    theirs = node.vm("p1")
    await node.create(theirs, "c1", own, exclusive=True)
    await node.placed(theirs, main=own)
    assert (ours.masks["v1"], ours.masks["main"]) == (own, _rest(own))
    notes = {one["code"] for one in (await _allocation(node))["notes"]}
    assert "alloc-conflict" in notes
