"""Lies on the way from a hook to a thread: what bundles and states say that cannot be."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.boundary.host import Vm
from tests.boundary.node import Node


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with Node(tmp_path) as one:
        yield one


@pytest.fixture
async def vm(node: Node) -> Vm:
    """Return a sandbox with a container on CPU 4."""
    vm = node.vm("p1")
    await node.create(vm, vm.id)
    await node.create(vm, "c1", "4")
    return vm


def _records(node: Node) -> dict[str, tuple[Any, ...]]:
    """Return sandbox, cpuset and note of each container."""
    return {row[0]: row[1:] for row in node.rows("containers", "id, sandbox_id, cpus, note")}


@pytest.mark.parametrize(
    "sandbox", ["../../etc", "a/b", "", ".", "-x", "x" * 200, "a\nb", "\x1b[31m"]
)
async def test_sandbox_ids_that_cannot_be(node: Node, sandbox: str) -> None:
    """A container that names such a sandbox is refused; nothing of it is recorded."""
    vm = node.vm("p1")
    vm.bundle("c1", "1", annotations={"io.kubernetes.cri.sandbox-id": sandbox})
    said = await node.hook("createRuntime", "c1", vm.pid)
    assert "refused" in said
    assert said.rstrip("\n").isprintable()
    assert _records(node) == {}


async def test_a_state_that_names_another_sandbox(node: Node, vm: Vm) -> None:
    """Its id does not move a container out of its config.json's pod."""
    other = node.vm("p2")
    await node.create(other, "c2", "5")
    other.bundle("c9", "6")
    await node.hook("createRuntime", "c9", other.pid, state_id=vm.id)
    await node.placed(other, main="5-6")
    assert vm.masks["main"] == "4"
    sandbox, _, note = _records(node)["c9"]
    assert sandbox == other.id
    assert "state's id" in note


async def test_bundles_that_cannot_be_believed(node: Node, vm: Vm) -> None:
    """Symlinked, huge, unreadable and absent ones are recorded without a cpuset, and noted."""
    bundles, outside = node.host.bundles, node.folder / "outside"
    whole = (vm.bundle("good", "9") / "config.json").read_text()
    (bundles / "good").rename(outside)
    (bundles / "linked").symlink_to(outside)
    files = {
        name: bundles / name / "config.json" for name in ("file", "huge", "fifo", "foreign", "cut")
    }
    for file in files.values():
        file.parent.mkdir()
    files["file"].symlink_to(outside / "config.json")
    files["huge"].touch()
    os.truncate(files["huge"], 1 << 33)
    os.mkfifo(files["fifo"])
    files["foreign"].write_text(whole)
    os.chown(files["foreign"], 65534, 65534)
    files["cut"].write_text(whole[:100])
    for name in ("linked", "absent", *files):
        assert await node.hook("poststart", name, vm.shim, state_id=vm.id) == ""
        sandbox, cpus, note = _records(node)[name]
        assert (sandbox, cpus, bool(note)) == (vm.id, None, True), name
    assert vm.masks["main"] == "4"
    await node.create(vm, "c2", "5")
    assert vm.masks["main"] == "4-5"


@pytest.mark.parametrize(
    "cpus",
    ["0-99999999999", "99999999999999999999", "1-0", "0x1", "0-8191,", "\u0661", "0," * 5000],
)
async def test_absurd_cpu_lists(node: Node, vm: Vm, cpus: str) -> None:
    """A cpu list that cannot be is noted; the container counts for nothing."""
    file = vm.bundle("c2") / "config.json"
    config = json.loads(file.read_text())
    config["linux"]["resources"]["cpu"]["cpus"] = cpus
    file.write_text(json.dumps(config))
    await node.hook("createRuntime", "c2", vm.pid)
    assert vm.masks["main"] == "4"
    _, known, note = _records(node)["c2"]
    assert known is None
    assert "cpu" in note


async def test_cpus_that_do_not_exist(node: Node, vm: Vm) -> None:
    """Offline and absent ones of a cpuset are left out; with none left all may be used."""
    await node.create(vm, "c2", "5,4000")
    assert vm.masks["main"] == "4-5"
    await node.stopped(vm, "c1")
    await node.stopped(vm, "c2")
    await node.create(vm, "c3", "4000-4001")
    await node.placed(vm, main="0-15")
