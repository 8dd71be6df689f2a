"""Sandboxes that a decision moves: each gets a pass, and who starts on their CPUs waits for it.

Lifetime: the daemon's. Out of scope: what moves (the allocator), and the passes (sandboxes.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Final

from kata_pin.daemon.reconcile.ports import PassRequests
from kata_pin.model.pass_outcome import NO_VMM, RELEASED, PassOutcome

PATIENCE_S: Final = 30.0
"""So long CPUs are held back for a sandbox whose threads cannot be moved."""


class Moves:
    """The sandboxes whose threads may be where they were before the newest decision."""

    def __init__(
        self, sandboxes: PassRequests, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`clock` is CLOCK_MONOTONIC, in seconds."""
        self._clock = clock
        self._sandboxes = sandboxes
        self._tickets: dict[str, int] = {}
        self._stuck: dict[str, float] = {}

    def ask(self, sandbox_ids: Collection[str], why: str) -> frozenset[str]:
        """Ask for a pass over each; return those that are not supervised: nothing is pinned there.

        A first pass over one of those comes by itself.
        """
        here = frozenset(sandbox_ids) & frozenset(self._sandboxes.ids)
        for sandbox_id in here:
            self._tickets[sandbox_id] = self._sandboxes.mark(sandbox_id, f"allocator: {why}")
        return frozenset(sandbox_ids) - here

    def ended(self, sandbox_id: str) -> None:
        """Take note of the end of a pass: it went by the newest decision."""
        self._tickets.pop(sandbox_id, None)

    def has_left(self, outcome: PassOutcome) -> bool:
        """Whether the threads of a sandbox are off the CPUs that it gave up, or never will be.

        Not after a pass that found no VMM or could not move every thread; such a sandbox is waited
        for so long, and then no more.
        """
        if outcome.state == RELEASED or (outcome.state != NO_VMM and outcome.report.settled):
            self._stuck.pop(outcome.sandbox_id, None)
            return True
        since = self._stuck.setdefault(outcome.sandbox_id, self._clock())
        return self._clock() - since >= PATIENCE_S

    def over(self, sandbox_id: str) -> None:
        """Forget a sandbox."""
        self._tickets.pop(sandbox_id, None)
        self._stuck.pop(sandbox_id, None)

    async def pass_over(self, sandbox_id: str) -> None:
        """Return when another pass over a sandbox has ended; at once if it is not supervised."""
        if sandbox_id in self._sandboxes.ids:
            why = "allocator: its cpuset becomes smaller"
            ticket = self._sandboxes.mark(sandbox_id, why, event=False)
            await self._sandboxes.settled(sandbox_id, ticket)

    async def all_ended(self) -> None:
        """Return when the passes asked for until now have ended; the caller has a deadline."""
        for sandbox_id, ticket in list(self._tickets.items()):
            await self._sandboxes.settled(sandbox_id, ticket)
