"""Turns of passes: one at a time, and first those that somebody waits for.

A pass holds the event loop for milliseconds, so passes take turns, and between any two of them
hooks and the container runtime are answered. A hook or a StartContainer keeps a workload from
running, so its pass goes before those that nobody waits for; but whoever has waited longest is not
passed over for ever.

Lifetime: the daemon's. Out of scope: when passes are due (supervisor.py).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Final

MOST_PASSED_OVER: Final = 8
"""Turns in a row that others may have before who has waited longest."""


class PassScheduler:
    """Gives turns; `awaited` says whether somebody waits for a sandbox's pass."""

    def __init__(self, awaited: Callable[[str], bool]) -> None:
        self._awaited = awaited
        self._taken = False
        self._waiting: dict[asyncio.Future[None], str] = {}
        self._passed_over = 0

    @contextlib.asynccontextmanager
    async def turn(self, sandbox_id: str) -> AsyncIterator[None]:
        """Wait for a turn, and have it until the end of the block."""
        await self._take(sandbox_id)
        try:
            yield
        finally:
            self._give()

    async def _take(self, sandbox_id: str) -> None:
        if not self._taken:
            self._taken = True
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting[turn] = sandbox_id
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it was given in this very moment
                self._give()
            self._waiting.pop(turn, None)
            raise

    def _give(self) -> None:
        """Give the turn to the next, if anybody waits.

        Who was cancelled is still listed until its task runs again: it must not be chosen, or the
        error of choosing it would take the place of the cancellation of who gives.
        """
        for turn in [turn for turn in self._waiting if turn.done()]:
            del self._waiting[turn]
        if not self._waiting:
            self._taken = False
            return
        oldest = next(iter(self._waiting))
        chosen = oldest
        if self._passed_over < MOST_PASSED_OVER:
            chosen = next((t for t, one in self._waiting.items() if self._awaited(one)), oldest)
        self._passed_over = 0 if chosen is oldest else self._passed_over + 1
        del self._waiting[chosen]
        chosen.set_result(None)
