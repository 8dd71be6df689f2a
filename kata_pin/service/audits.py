"""The audit loop, and reading the configuration again (D1)."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from kata_pin.base.config.tree import Config, LiveConfig
from kata_pin.base.documents.answers import NodeEventKind
from kata_pin.base.documents.document import RefusedReload
from kata_pin.base.errors import ConfigError, reason_of
from kata_pin.engine.audit import Auditor
from kata_pin.engine.counters import Counters
from kata_pin.service.documents import utc
from kata_pin.service.options import Core
from kata_pin.service.process import ServiceStatus, set_level

log = logging.getLogger(__name__)


@dataclass
class AuditLoop:
    """Runs audits until cancelled.

    `before` and `after` are called around each deep audit; what they return is awaited, if it can.
    `each` is called after every audit, in the same way. A step that fails skips no other.
    """

    _live: LiveConfig
    _auditor: Auditor
    _counters: Counters
    _before: Sequence[Callable[[], object]]
    _after: Sequence[Callable[[], object]]
    _each: Sequence[Callable[[], object]]
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
            if time.monotonic() < deep_at:
                passed = await self._all_of([self._auditor.affinity])
            else:
                deep_at = time.monotonic() + self._live.now.audit.deep_s
                passed = await self.deep()
            if await self._all_of(self._each) and passed:
                self._counters.audited_at = time.time()

    async def deep(self) -> bool:
        """Run a deep audit: what any lost event would have reported; whether all of it worked."""
        return await self._all_of([*self._before, self._auditor.deep, *self._after])

    async def _all_of(self, steps: Sequence[Callable[[], object]]) -> bool:
        """Run each step, also after one that failed; return whether none did."""
        passed = True
        for step in steps:
            try:
                found = step()
                if inspect.isawaitable(found):
                    await found
            except Exception as error:  # a fault barrier: the next audit looks again
                passed = False
                self._counters.failed("audit", error)
                log.error("audit failed: %s", reason_of(error))
                log.debug("audit failed", exc_info=True)
        return passed

    async def _new_periods_within(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._periods_changed.wait()
        changed = self._periods_changed.is_set()
        self._periods_changed.clear()
        return changed


# Reading the configuration again (SIGHUP, `kata-pin reload`).
#
# A configuration that is wrong is reported, and the former one stays in force. It is reported until
# one is accepted: in the state document, in the `config` document and as a metric.

BOUND: Final = (
    *("runtime_dir", "user", "group", "paths", "hypervisors", "new_threads", "changes", "nri"),
    *("metrics", "alloc", "resctrl"),
)
"""Settings and sections that the components are made of: changing them needs a restart."""


@dataclass
class Reload:
    """Puts another configuration in force.

    `reread` returns the configuration as it is now; raises ConfigError when it is wrong. `reloaded`
    is called when another one is in force.
    """

    _core: Core
    _reread: Callable[[], Config]
    _audits: AuditLoop
    _status: ServiceStatus
    _reloaded: Callable[[], None]
    refused: RefusedReload | None = field(default=None, init=False)
    """The newest reload, if it was refused."""

    def __call__(self) -> str:
        """Return what is wrong with the configuration; empty when it is in force."""
        self._status.reloading()
        before = self._core.live.now
        try:
            fresh = self._reread()
            for key in BOUND:
                if getattr(fresh, key) != getattr(before, key):
                    raise ConfigError("cannot change while the daemon runs", key=key)
        except ConfigError as error:
            self.refused = RefusedReload(time=utc(time.time()), error=str(error))
            self._core.events.report(
                NodeEventKind.RELOAD_REFUSED,
                "configuration not reloaded: %s",
                error,
                level=logging.ERROR,
            )
            return str(error)
        else:
            if fresh.log_level is not before.log_level:
                set_level(fresh.log_level.value)
            self._core.live.replace(fresh)
            self._reloaded()
            if fresh.audit != before.audit:
                self._audits.follow_periods()
            self._core.sandboxes.mark_all("configuration reloaded", event=True)
            self.refused = None
            self._core.events.report(
                NodeEventKind.RELOADED, "configuration reloaded", level=logging.INFO
            )
            return ""
        finally:
            self._status.ready()
