"""When bindings end."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kata_pin.base.cpuset import CpuSet
from kata_pin.base.errors import StateError
from kata_pin.base.placement import Binding
from kata_pin.engine.sandboxes import Sandboxes
from kata_pin.service import bindings
from kata_pin.service.bindings import Bindings


class Pins:
    """A registry that cannot be written at first; `p1` is bound, and its time has ended."""

    def __init__(self) -> None:
        self.tries = 0
        self._bound = {"p1": Binding(CpuSet.parse("0"), CpuSet.parse("1"), CpuSet(), 1, "")}

    def bindings(self) -> dict[str, Binding]:
        return dict(self._bound)

    def bind(self, sandbox_id: str, binding: None) -> None:
        self.tries += 1
        if self.tries == 1:
            raise StateError("database or disk is full")
        assert binding is None
        del self._bound[sandbox_id]


async def test_a_full_disk_delays_the_end_of_a_binding(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ends bindings runs until the daemon ends: its failure would be the daemon's."""
    monkeypatch.setattr(bindings, "RETRY_S", 0.01, raising=False)
    pins, events = Pins(), SimpleNamespace(report=lambda *_, **__: None)
    parts = cast("Any", (Sandboxes(), None, pins, None, events, None))
    running = asyncio.create_task(Bindings(*parts).run())
    async with asyncio.timeout(10):
        while pins.bindings() and not running.done():
            await asyncio.sleep(0.01)
    assert not running.done()
    running.cancel()
    assert (pins.tries, pins.bindings()) == (2, {})
