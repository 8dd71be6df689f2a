"""pCPUs that are exclusive to several sandboxes: when that is reported."""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.boundary.host import Vm
from tests.boundary.node import Node

AT_ONCE = 16
"""So many are reported by one audit."""


@pytest.fixture
async def node(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> AsyncIterator[Node]:
    caplog.set_level(logging.INFO)
    audit = {"affinity_s": 3600, "deep_s": 3600}
    async with Node(tmp_path, sysfs=32, audit=audit, guest={"enabled": False}) as one:
        yield one


async def _own(node: Node, name: str, cpus: str) -> Vm:
    """Run a sandbox with exclusive pCPUs."""
    vm = node.vm(name)
    await node.create(vm, f"c-{name}", cpus, exclusive=True)
    return vm


async def _end(node: Node, vm: Vm) -> None:
    vm.end()
    node.kernel.connector.exited(vm.pid, vm.pid)
    while await node.shown(vm):
        await node.pause()


async def _said(node: Node, caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    """Have an audit; return what it says of conflicts: level and first words."""
    await node.ask("reconcile")  # a sandbox whose pass is under way claims nothing
    caplog.clear()
    await node.clock.move(3601)
    for _ in range(5):
        await node.pause()
    said = [(one.levelno, one.getMessage()) for one in caplog.records]
    known = re.compile(r"shop/pod-\w+ \(sandbox (\w+)\)")
    return [
        (level, known.sub(r"\1", text).partition(":")[0])
        for level, text in said
        if "exclusive to" in text
    ]


async def test_a_conflict_is_said_once_and_its_end(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    """By the audit that finds it, and by the one that does not."""
    first = await _own(node, "a", "4-5")
    assert await _said(node, caplog) == []
    await _own(node, "b", "5-6")
    both = (logging.WARNING, "pCPU 5 is exclusive to both a and b")
    assert await _said(node, caplog) == [both]
    assert await _said(node, caplog) == []
    await _end(node, first)
    ((level, text),) = await _said(node, caplog)
    assert level == logging.INFO
    assert text.startswith("pCPU 5 is no longer exclusive to both a and b, after ")
    for name in ("a", "b"):
        events = (await node.ask("history", sandbox=name))["events"]
        assert [one["kind"] for one in events] == ["exclusive-conflict"] * 2


async def test_another_sandbox_or_another_pcpu_is_news(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    """A third claimant, or more pCPUs; one claimant less is still the same conflict."""
    first, second = [await _own(node, name, "4") for name in "ab"]
    await _said(node, caplog)
    third = await _own(node, "c", "4")
    assert await _said(node, caplog) == [(30, "pCPU 4 is exclusive to a, b and c")]
    await _end(node, second)
    assert await _said(node, caplog) == []
    for vm in (first, third):
        await node.create(vm, f"more-{vm.id}", "7", exclusive=True)
    assert await _said(node, caplog) == [(30, "pCPUs 4,7 are exclusive to both a and c")]


async def test_many_conflicts_do_not_flood_the_log(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    """So many with each audit, until all are said; of many claimants some are named."""
    await _own(node, "a", "0-19")
    await _said(node, caplog)
    for number in range(20):
        await _own(node, f"b{number}", str(number))
    assert [len(await _said(node, caplog)) for _ in range(3)] == [AT_ONCE, 20 - AT_ONCE, 0]
    for number in range(9):
        await _own(node, f"z{number}", "30")
    ((_, text),) = await _said(node, caplog)
    assert text == "pCPU 30 is exclusive to z0, z1, z2, z3 and 5 more"
