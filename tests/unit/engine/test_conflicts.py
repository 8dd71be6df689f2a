"""pCPUs that are exclusive to several sandboxes: when that is reported."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import cast

import pytest

from kata_pin.base.cpuset import CpuSet
from kata_pin.base.placement import Placement, Report, SandboxMask
from kata_pin.engine.node import MOST, ExclusiveConflicts, PcpuOwners
from kata_pin.engine.sandbox_cache import SandboxCache
from kata_pin.engine.sandboxes import Sandboxes
from kata_pin.records.history import NodeEvents


class World:
    """Sandboxes with exclusive pCPUs, and what is reported of them."""

    def __init__(self) -> None:
        self.caches: dict[str, SandboxCache] = {}
        sandboxes = SimpleNamespace(ids=self.caches, cache=self.caches.get)
        claims = PcpuOwners(cast("Sandboxes", sandboxes), lambda _: ())
        self.events = NodeEvents()
        self.conflicts = ExclusiveConflicts(claims, self.events)

    def has(self, sandbox_id: str, cpus: str) -> None:
        """Have a pass give a sandbox these exclusive pCPUs."""
        mask = SandboxMask(CpuSet.parse(cpus), exclusive=CpuSet.parse(cpus))
        report = Report(sandbox_id, placement=Placement(sandbox_id, mask, {}))
        self.caches[sandbox_id] = SandboxCache(report=report)


@pytest.fixture
def world(caplog: pytest.LogCaptureFixture) -> World:
    caplog.set_level(logging.INFO)
    return World()


def said(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    """Return what was logged since the last time: level and first words."""
    found = [(one.levelno, one.getMessage().partition(":")[0]) for one in caplog.records]
    caplog.clear()
    return found


def test_a_conflict_is_said_once_and_its_end(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """From the audit that finds it until one that does not; metrics have it elsewhere."""
    world.has("a", "4-5")
    world.conflicts.look()
    assert said(caplog) == []
    world.has("b", "5-6")
    for _ in range(3):
        world.conflicts.look()
    assert said(caplog) == [(logging.WARNING, "pCPU 5 is exclusive to both a and b")]
    del world.caches["a"]
    for _ in range(2):
        world.conflicts.look()
    assert said(caplog) == [
        (logging.INFO, "pCPU 5 is no longer exclusive to both a and b, after 0 s")
    ]
    assert not world.events.counts


def test_another_sandbox_or_another_pcpu_is_news(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """A third claimant, or more pCPUs; one claimant less is still the same conflict."""
    for name in "ab":
        world.has(name, "4")
    world.conflicts.look()
    caplog.clear()
    world.has("c", "4")
    world.conflicts.look()
    assert said(caplog) == [(logging.WARNING, "pCPU 4 is exclusive to a, b and c")]
    del world.caches["b"]
    world.conflicts.look()
    assert said(caplog) == []
    for name in "ac":
        world.has(name, "4,7")
    world.conflicts.look()
    assert said(caplog) == [(logging.WARNING, "pCPUs 4,7 are exclusive to both a and c")]


def test_many_conflicts_do_not_flood_the_log(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """So many with each audit, until all are said; of many claimants some are named."""
    for number in range(2 * MOST):
        world.has(f"a{number}", str(number))
        world.has(f"b{number}", str(number))
    world.conflicts.look()
    assert len(said(caplog)) == MOST
    for _ in range(2):
        world.conflicts.look()
    assert len(said(caplog)) == MOST
    for number in range(9):
        world.has(f"z{number}", "200")
    world.conflicts.look()
    assert said(caplog) == [(30, "pCPU 200 is exclusive to z0, z1, z2, z3 and 5 more")]
