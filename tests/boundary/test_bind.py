"""CPUs that an administrator names for a sandbox: tried, applied, ended, by the control socket."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import pytest

from tests.boundary.host import Vm
from tests.boundary.node import Node

BY_POLICY: Final = {"v0": "4-7", "v1": "4-7", "io": "4-7", "main": "4-7"}
NAMED: Final = {"vcpus": "0", "cpus": "4", "overhead": "5"}
BOUND: Final = {"v0": "4", "v1": "5-7", "io": "5", "main": "5"}


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with Node(tmp_path) as one:
        yield one


@pytest.fixture
async def vm(node: Node) -> Vm:
    vm = node.vm("p1")
    await node.create(vm, "c1", "4-7")
    assert vm.masks == BY_POLICY
    return vm


async def test_it_is_tried_applied_and_cleared(node: Node, vm: Vm) -> None:
    """A trial shows where threads would be, and changes nothing."""
    tried = await node.ask("bind", sandbox=vm.id, dry_run=True, **NAMED)
    (shown,) = tried["sandboxes"]
    assert {one["label"]: one["expected"] for one in shown["threads"]}["vcpu 0"] == "4"
    assert (vm.masks, node.rows("bindings")) == (BY_POLICY, [])
    await node.ask("bind", sandbox=vm.id, **NAMED)
    assert vm.masks == BOUND
    await node.ask("bind", clear=True)
    assert vm.masks == BY_POLICY


async def test_it_ends_in_time(node: Node, vm: Vm) -> None:
    """Without any other event."""
    await node.ask("bind", sandbox=vm.id, for_s=3, **NAMED)  # a busy machine may take 1 s for it
    assert vm.masks == BOUND
    await node.until(lambda: vm.masks == BY_POLICY, "the end of the binding", within_s=15)
    assert node.rows("bindings") == []


async def test_a_full_disk_delays_its_end(
    node: Node, vm: Vm, caplog: pytest.LogCaptureFixture
) -> None:
    """What ends bindings runs until the daemon ends: its failure would be the daemon's."""
    await node.ask("bind", sandbox=vm.id, for_s=3, **NAMED)
    with node.registry_refuses("bindings"):
        await node.until(
            lambda: caplog.text.count("cannot end a binding now") == 2, "two tries", within_s=15
        )
        assert vm.masks == BOUND
    await node.until(lambda: vm.masks == BY_POLICY, "the end of the binding", within_s=15)


async def test_a_pass_that_fails_ends_it(node: Node, vm: Vm) -> None:
    """It is not applied in part, nor later by a pass that nobody asked for."""

    def broken(_: int) -> None:
        raise RuntimeError("no broker")

    node.kernel.before_set = broken
    refused = await node.request("bind", sandbox=vm.id, **NAMED)
    assert "the pass over it failed" in str(refused)
    assert node.rows("bindings") == []
    node.kernel.before_set = lambda _: None
    await node.ask("reconcile")
    assert vm.masks == BY_POLICY


async def test_a_released_sandbox_is_not_bound(node: Node, vm: Vm) -> None:
    """Its threads are left alone until it is pinned again."""
    await node.ask("unpin", sandbox=vm.id)
    refused = await node.request("bind", sandbox=vm.id, **NAMED)
    assert "the sandbox was released by unpin" in str(refused)
    assert set(vm.masks.values()) == {"0-15"}
