"""Runs passes one at a time, and those first that a hook or a request waits for.

A pass holds the event loop for milliseconds; between any two passes, hooks and the container
runtime are answered. A hook or a StartContainer keeps a workload from starting, so its pass goes
first, but the pass that has waited longest is not delayed for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Final

MOST_PASSED_OVER: Final = 8
"""Passes in a row that may run before the one that has waited longest."""


class PassScheduler:
    """Gives turns; `awaited` says whether something waits for a sandbox's pass."""

    def __init__(self, awaited: Callable[[str], bool]) -> None:
        self._awaited = awaited
        self._taken = False
        self._waiting: dict[asyncio.Future[None], str] = {}
        self._passed_over = 0

    @contextlib.asynccontextmanager
    async def turn(self, sandbox_id: str) -> AsyncIterator[None]:
        """Wait for a turn; it lasts until the end of the block."""
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
        """Give the turn to the next, if any waits.

        A cancelled one is listed until its task runs again. It must not be chosen: setting its
        result would raise here.
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
