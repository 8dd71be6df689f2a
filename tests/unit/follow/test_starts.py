"""Looks for sandboxes that start: one at a time, however many processes look like a VMM."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kata_pin.base.steps import Steps
from kata_pin.engine.sandboxes import Sandboxes
from kata_pin.follow.files import FileEvents

WORK_S = 0.002
CLAIMS = 60


class Adoption:
    """Looks that take CLAIMS steps; `running` are the sandboxes that they find.

    `turns` has, per look, how often others ran meanwhile: they count `others`.
    """

    def __init__(self) -> None:
        self.others = 0
        self.turns: list[int] = []
        self.running: dict[str, int] = {}

    def all(self, known: object) -> Steps[dict[str, int]]:
        assert not known
        before = self.others
        for _ in range(CLAIMS):
            time.sleep(WORK_S)
            yield
        self.turns.append(self.others - before)
        return dict(self.running)


class Survey:
    """A survey that has nothing to read."""

    retry_s = None

    async def all(self, *, patience_s: float | None = None) -> bool:
        assert patience_s
        await asyncio.sleep(0)
        return True


def _events(adoption: Adoption, sandboxes: Sandboxes) -> FileEvents:
    node = SimpleNamespace(kubelet=None, changed=lambda: False)
    parts = cast("Any", (node, None, adoption, sandboxes, None, Survey()))
    return FileEvents(*parts)


async def test_many_starts_cost_few_looks_that_hold_nobody_up() -> None:
    """Each start asked for a look of its own, and all of these ran in one turn of the loop."""
    adoption, sandboxes = Adoption(), Sandboxes()
    events = _events(adoption, sandboxes)
    following = asyncio.create_task(events.follow_starts())
    for adoption.others in range(200):
        events.vmm_started()
        await asyncio.sleep(0.001)
    following.cancel()
    assert 1 <= len(adoption.turns) < 20
    assert min(adoption.turns) >= CLAIMS / 10


@pytest.mark.parametrize("runs", [True, False])
async def test_what_kata_wrote_of_an_unknown_sandbox_asks_for_its_pass(*, runs: bool) -> None:
    """It is marked if it runs, and if it is in the table and ended; a stranger's is not."""
    adoption, sandboxes = Adoption(), Sandboxes()
    events = _events(adoption, sandboxes)
    adoption.running = {"p1": 0} if runs else {}
    sandboxes.enter("p2")
    events._read(["p1", "p2", "p3"])
    following = asyncio.create_task(events.follow_starts())
    async with asyncio.timeout(10):
        while not (adoption.turns and sandboxes.any_due):
            await asyncio.sleep(0.01)
    following.cancel()
    assert sandboxes.ids == (["p1", "p2"] if runs else ["p2"])
    assert sandboxes.entry("p2").supervisor.is_due()
