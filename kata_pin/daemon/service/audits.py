"""The audit loop: affinities every few seconds, everything else less often (D1)."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from kata_pin.daemon.live_config import LiveConfig
from kata_pin.daemon.reconcile.audit import Auditor
from kata_pin.daemon.reconcile.counters import Counters
from kata_pin.errors import reason_of

log = logging.getLogger(__name__)


@dataclass
class AuditLoop:
    """Runs audits until cancelled.

    `before` and `after` are called around each deep audit; what they return is awaited, if it can.
    `each` is awaited after every audit.
    """

    _live: LiveConfig
    _auditor: Auditor
    _counters: Counters
    _before: Sequence[Callable[[], object]]
    _after: Sequence[Callable[[], object]]
    _each: Callable[[], Awaitable[None]]
    _periods_changed: asyncio.Event = field(default_factory=asyncio.Event)

    def follow_periods(self) -> None:
        """Start the periods again: the configuration has others."""
        self._periods_changed.set()

    async def run(self) -> None:
        """Audit until cancelled."""
        deep_at = time.monotonic() + self._live.now.audit.deep_s
        while True:
            if await self._new_periods_within(self._live.now.audit.affinity_s):
                deep_at = time.monotonic() + self._live.now.audit.deep_s
                continue
            try:
                if time.monotonic() < deep_at:
                    await self._auditor.affinity()
                else:
                    deep_at = time.monotonic() + self._live.now.audit.deep_s
                    await self.deep()
                await self._each()
                self._counters.audited()
            except Exception as error:  # a fault barrier: the next audit looks again
                self._counters.failed("audit", error)
                log.error("audit failed: %s", reason_of(error))
                log.debug("audit failed", exc_info=True)

    async def deep(self) -> None:
        """Run one deep audit, which finds what any lost event would have reported."""
        for one in self._before:
            found = one()
            if inspect.isawaitable(found):
                await found
        await self._auditor.deep()
        for one in self._after:
            one()

    async def _new_periods_within(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._periods_changed.wait()
        changed = self._periods_changed.is_set()
        self._periods_changed.clear()
        return changed
