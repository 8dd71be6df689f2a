"""The audit loop: each step has its barrier."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from kata_pin.base.config.tree import Config, LiveConfig
from kata_pin.engine.audit import Auditor
from kata_pin.engine.counters import Counters
from kata_pin.service.audits import AuditLoop


async def test_a_step_that_fails_skips_no_other() -> None:
    """Whether it is called or awaited, before the audit of the sandboxes or after it."""
    done: list[str] = []

    def fails() -> None:
        raise OSError(28, "No space left on device")

    async def fails_later() -> None:
        fails()

    async def audited() -> None:
        done.append("sandboxes")

    loop = AuditLoop(
        LiveConfig(Config()),
        cast("Auditor", SimpleNamespace(deep=audited)),
        Counters(),
        [fails, fails_later, lambda: done.append("before")],
        [fails, lambda: done.append("after")],
        [],
    )
    assert not await loop.deep(), "so that it does not count as an audit"
    assert done == ["before", "sandboxes", "after"]
