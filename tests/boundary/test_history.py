"""What changed, when and why: rows of the verb `history`, over passes by hooks and files."""

from __future__ import annotations

import time
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


async def _changes(node: Node, **asked: object) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = (await node.ask("history", **asked))["changes"]
    return rows


async def _seen(node: Node, **asked: object) -> list[tuple[str, str, str | None]]:
    rows = await _changes(node, **asked)
    return [(row["sandbox"], row["state"], row["mask"]) for row in rows]


async def _run(node: Node, name: str = "p1", cpus: str = "4") -> Vm:
    vm = node.vm(name)
    vm.bundle(f"c-{name}", cpus)
    await node.hook("createRuntime", f"c-{name}", vm.pid)  # it has the pod's name
    vm.persist(**{f"c-{name}": cpus})
    return vm


async def test_only_changes_are_rows(node: Node) -> None:
    """Another mask, another state, moved threads; a pass after which all is as before is none."""
    vm = await _run(node)
    for _ in range(3):
        await node.ask("reconcile")
    assert await _seen(node) == [("p1", "ok", "4")]
    vm.persist(**{"c-p1": "5-6"})
    await node.placed(vm, main="5-6")
    node.host.affinities[vm.iothread] = {9}
    await node.ask("reconcile")
    await node.ask("unpin", sandbox="p1")
    await node.ask("reconcile")
    rows = await _changes(node)
    turns = [(row["previous_mask"], row["mask"], row["state"], row["moved"] > 0) for row in rows]
    assert turns == [
        (None, "4", "ok", True),
        ("4", "5-6", "ok", True),
        ("5-6", "5-6", "ok", True),
        ("5-6", None, "released", True),
    ]
    assert [row["previous_state"] for row in rows] == ["", "ok", "ok", "ok"]


async def test_a_row_says_why_and_how_long(node: Node) -> None:
    """Its triggers are those of the pass; its time is UTC."""
    await _run(node)
    (row,) = await _changes(node)
    assert "hook:createRuntime" in row["triggers"]
    assert 0 < row["latency_ms"] < 5000
    written = time.strptime(row["time"][:19], "%Y-%m-%dT%H:%M:%S")
    assert 0 <= time.time() - time.mktime(written) + time.timezone < 10
    assert row["time"].endswith("Z")
    assert row["threads"] >= row["moved"] > 0


async def test_rows_outlive_the_daemon_and_the_sandbox(node: Node) -> None:
    """A restart writes nothing; the end is a row; the next sandbox of that id begins anew."""
    vm = await _run(node)
    await node.kill()
    await node.start()
    await node.ask("reconcile")
    assert await _seen(node) == [("p1", "ok", "4")]
    vm.end()
    node.kernel.connector.exited(vm.pid, vm.pid)
    await node.until(lambda: not node.rows("containers"), "p1 is forgotten")
    await _run(node)
    rows = await _changes(node)
    assert [row["state"] for row in rows] == ["ok", "gone", "ok"]
    assert rows[-1]["previous_state"] == ""


async def test_rows_are_bounded(node: Node) -> None:
    """The oldest of a sandbox go at its own bound, the oldest of all at the whole one; 0 is off."""
    node.change(history={"rows": 8, "sandbox_rows": 3})
    await node.ask("reload")
    busy = await _run(node, "busy")
    for cpu in (5, 6, 7, 8):
        busy.persist(**{"c-busy": str(cpu)})
        await node.placed(busy, main=str(cpu))
    assert [mask for _, _, mask in await _seen(node)] == ["6", "7", "8"]
    for number in range(6):
        await _run(node, f"p{number}")
    names = [name for name, _, _ in await _seen(node)]
    assert names == ["busy", "busy", *(f"p{number}" for number in range(6))]
    node.change(history={"rows": 0})
    await node.ask("reload")
    await _run(node, "late")
    assert "late" not in {name for name, _, _ in await _seen(node)}


async def test_a_name_means_a_pod_or_the_start_of_an_id(node: Node) -> None:
    """It is compared as it is: neither a pattern nor SQL. A limit keeps the newest rows."""
    for name in ("abc1", "abd2", "old3"):
        await _run(node, name)
    for name, found in (
        *(("", ["abc1", "abd2", "old3"]), ("abc1", ["abc1"]), ("shop/pod-abc1", ["abc1"])),
        *(("pod-old3", ["old3"]), ("ab", ["abc1", "abd2"])),
    ):
        asked = {"sandbox": name} if name else {}
        assert [one for one, _, _ in await _seen(node, **asked)] == found
    for name in ("x", "%", "a_c1", "shop", "' OR 1=1 --"):
        reply = await node.request("history", sandbox=name)
        assert (reply["ok"], "no history of" in reply["error"]) == (False, True)
    assert [one for one, _, _ in await _seen(node, limit=2)] == ["abd2", "old3"]
    assert await _seen(node, since_s=0) == []


async def test_a_history_that_cannot_be_written_disturbs_nobody(node: Node) -> None:
    """Pods are pinned all the same; the next row is written when that is possible."""
    await _run(node)
    with node.registry_refuses("history"):
        vm = await _run(node, "p2", "5")
        assert vm.masks["main"] == "5"
    await _run(node, "p3", "6")
    assert [name for name, _, _ in await _seen(node)] == ["p1", "p3"]
