"""Sandboxes that a decision moves: each gets a pass, and a start on their former CPUs waits for it.

Lifetime: the daemon's. Out of scope: which sandboxes move (allocator.py), and the passes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Final

from kata_pin.daemon.reconcile.sandboxes import Sandboxes
from kata_pin.model.pass_outcome import NO_VMM, RELEASED, PassOutcome
from kata_pin.model.sandbox import Vmm

PATIENCE_S: Final = 30.0
"""How long CPUs are held back for a sandbox whose threads cannot be moved."""


class PendingPasses:
    """The sandboxes whose threads may still be where they were before the newest decision."""

    def __init__(self, passes: Sandboxes, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` is CLOCK_MONOTONIC, in seconds."""
        self._passes = passes
        self._clock = clock
        self._tickets: dict[str, int] = {}
        self._stuck_since: dict[str, float] = {}

    def request(self, sandbox_ids: Collection[str], why: str) -> frozenset[str]:
        """Request passes; return the sandboxes that are not supervised: nothing is pinned there.

        A first pass over one of those comes by itself.
        """
        here = frozenset(sandbox_ids) & frozenset(self._passes.ids)
        for sandbox_id in here:
            self._tickets[sandbox_id] = self._passes.mark(sandbox_id, f"allocator: {why}")
        return frozenset(sandbox_ids) - here

    def vmm(self, sandbox_id: str) -> Vmm | None:
        """Return the VMM that the last pass over a sandbox found."""
        return self._passes.known_vmm(sandbox_id)

    def passed(self, outcome: PassOutcome) -> bool:
        """Record a pass; return whether the threads are off their former CPUs, or never will be.

        Not after a pass that began before the decision, for another follows. Nor after one that
        found no VMM or could not move every thread; such a sandbox is waited for PATIENCE_S, and
        then no more.
        """
        sandbox_id = outcome.sandbox_id
        if self._tickets.get(sandbox_id, 0) > self._passes.began(sandbox_id):
            return False
        self._tickets.pop(sandbox_id, None)
        if outcome.state == RELEASED or (outcome.state != NO_VMM and outcome.report.settled):
            self._stuck_since.pop(sandbox_id, None)
            return True
        since = self._stuck_since.setdefault(sandbox_id, self._clock())
        return self._clock() - since >= PATIENCE_S

    def ended(self, sandbox_id: str) -> None:
        """Forget a sandbox."""
        self._tickets.pop(sandbox_id, None)
        self._stuck_since.pop(sandbox_id, None)

    async def another(self, sandbox_id: str) -> None:
        """Return when another pass over a sandbox has ended; at once if it is not supervised."""
        if sandbox_id in self._passes.ids:
            why = "allocator: its cpuset becomes smaller"
            ticket = self._passes.mark(sandbox_id, why, event=False)
            await self._passes.settled(sandbox_id, ticket)

    async def all_ended(self) -> None:
        """Return when the passes requested until now have ended; the caller has a deadline."""
        for sandbox_id, ticket in list(self._tickets.items()):
            await self._passes.settled(sandbox_id, ticket)
