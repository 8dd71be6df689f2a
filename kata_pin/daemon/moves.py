"""Sandboxes that a decision moves: each gets a pass, and who starts on their CPUs waits for it.

Lifetime: the daemon's. Out of scope: what moves (the allocator), and the passes (sandboxes.py).
"""

from __future__ import annotations

from collections.abc import Collection

from kata_pin.daemon.sandboxes import Sandboxes


class Moves:
    """The sandboxes whose threads may be where they were before the newest decision."""

    def __init__(self) -> None:
        self._sandboxes: Sandboxes | None = None
        self._tickets: dict[str, int] = {}

    def begin(self, sandboxes: Sandboxes) -> None:
        """Know the sandboxes; before anything is asked for."""
        self._sandboxes = sandboxes

    def ask(self, sandbox_ids: Collection[str], why: str) -> frozenset[str]:
        """Ask for a pass over each; return those that are not supervised: nothing is pinned there.

        A first pass over one of those comes by itself.
        """
        assert self._sandboxes is not None, "begun"
        here = frozenset(sandbox_ids) & frozenset(self._sandboxes.ids)
        for sandbox_id in here:
            self._tickets[sandbox_id] = self._sandboxes.mark(sandbox_id, f"allocator: {why}")
        return frozenset(sandbox_ids) - here

    def ended(self, sandbox_id: str) -> None:
        """Take note of the end of a pass: it went by the newest decision."""
        self._tickets.pop(sandbox_id, None)

    async def pass_over(self, sandbox_id: str) -> None:
        """Return when another pass over a sandbox has ended; at once if it is not supervised."""
        assert self._sandboxes is not None, "begun"
        if sandbox_id in self._sandboxes.ids:
            why = "allocator: its cpuset becomes smaller"
            ticket = self._sandboxes.mark(sandbox_id, why, event=False)
            await self._sandboxes.settled(sandbox_id, ticket)

    async def all_ended(self) -> None:
        """Return when the passes asked for until now have ended; the caller has a deadline."""
        assert self._sandboxes is not None, "begun"
        for sandbox_id, ticket in list(self._tickets.items()):
            await self._sandboxes.settled(sandbox_id, ticket)
