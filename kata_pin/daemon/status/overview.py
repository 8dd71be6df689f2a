"""What documents show of each sandbox, gathered from its last pass."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from kata_pin.daemon.guests.manager import Guests
from kata_pin.daemon.reconcile.engine import Engine
from kata_pin.daemon.reconcile.other_writers import writers_of
from kata_pin.daemon.reconcile.sandbox_cache import SandboxCache
from kata_pin.daemon.reconcile.sandboxes import Sandboxes
from kata_pin.daemon.status.documents import Conflicts, conflict_notes
from kata_pin.daemon.status.sandbox import SandboxFacts
from kata_pin.daemon.store.containers import Registry
from kata_pin.daemon.store.pins import Pins
from kata_pin.errors import DaemonError
from kata_pin.model.reports.names import Names, SandboxName
from kata_pin.model.sandbox import Sandbox
from kata_pin.policy.explain.sandbox import explain


class Overview:
    """Keeps nothing itself."""

    def __init__(
        self,
        sandboxes: Sandboxes,
        engine: Engine,
        registry: Registry,
        pins: Pins,
        guests: Guests,
    ) -> None:
        self._sandboxes = sandboxes
        self._engine = engine
        self._registry = registry
        self._pins = pins
        self._guests = guests

    def facts(self, ids: Iterable[str] | None = None) -> Iterator[SandboxFacts]:
        """Yield what documents show of these sandboxes, of all by default, in the order of ids."""
        released = self._pins.released()
        now = time.monotonic()
        for sandbox_id in self._sandboxes.ids if ids is None else ids:
            cache = self._sandboxes.cache(sandbox_id)
            if cache is None:  # it ended a moment ago
                continue
            sandbox = self._sandbox(sandbox_id, cache)
            yield SandboxFacts(
                sandbox=sandbox,
                report=cache.report,
                checked_s=now - cache.checked_at if cache.report else None,
                problem=cache.problem,
                released=sandbox_id in released,
                backed_off=frozenset(key.tid for key in cache.other_writers.backed_off(now)),
                guest=self._guests.view(sandbox, cache.report),
                writers=writers_of(cache, now),
            )

    def conflicts(self) -> Conflicts:
        """Return the notes about exclusive pCPUs that several sandboxes claim."""
        reports = {one: self._sandboxes.entry(one).cache.report for one in self._sandboxes.ids}
        placements = {
            one: report.placement
            for one, report in reports.items()
            if report is not None and report.placement is not None
        }
        return conflict_notes(placements, self._pod)

    def names(self) -> Names:
        """Return the id and pod of every sandbox."""
        ids = self._sandboxes.ids
        return Names(sandboxes=tuple(SandboxName(one, self._pod(one)) for one in ids))

    def explanation(self, sandbox_id: str) -> tuple[str, ...]:
        """Return the lines that explain a sandbox's last pass; DaemonError before the first."""
        cache = self._sandboxes.entry(sandbox_id).cache
        if cache.report is None or cache.report.placement is None:
            raise DaemonError(f"no pass over sandbox {sandbox_id} has ended yet")
        sandbox = self._sandbox(sandbox_id, cache)
        return explain(
            sandbox,
            cache.report.threads,
            cache.report.placement,
            self._engine.node(),
            guest=self._guests.lines(sandbox, cache.report),
            now_ns=time.clock_gettime_ns(time.CLOCK_BOOTTIME),
        )

    def _pod(self, sandbox_id: str) -> str:
        return Sandbox(sandbox_id, self._registry.containers(sandbox_id)).pod

    def _sandbox(self, sandbox_id: str, cache: SandboxCache) -> Sandbox:
        """Return a sandbox as its passes go by it."""
        containers = self._registry.containers(sandbox_id)
        return Sandbox(sandbox_id, self._engine.believed(containers, cache), cache.vmm)
