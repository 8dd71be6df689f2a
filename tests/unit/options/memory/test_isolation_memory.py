"""Moving memory makes room for hooks and passes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from kata_pin.options.memory import keeper as module
from kata_pin.options.memory.keeper import MemoryMover


async def test_hooks_and_passes_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing moves while a hook waits; passes alone are waited for a while."""
    now = SimpleNamespace(s=0.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now.s))
    passes = SimpleNamespace(any_awaited=True, any_due=True)

    async def sleep(seconds: float) -> None:
        now.s += seconds
        passes.any_awaited = now.s < 2 * module.PASSES_S

    nothing = cast("Any", None)
    mover = MemoryMover(nothing, nothing, nothing, cast("Any", passes), nothing, nothing, sleep)
    await mover._let_others()
    assert 2 * module.PASSES_S <= now.s < 2 * module.PASSES_S + 2 * module.LOOK_S
    began = now.s
    await mover._let_others()
    assert module.PASSES_S <= now.s - began < module.PASSES_S + 2 * module.LOOK_S
