"""Runs passes one at a time, and those first that a hook or a request waits for.

A pass holds the event loop for milliseconds; between any two passes, hooks and the container
runtime are answered. A hook or a StartContainer keeps a workload from starting, so its pass goes
first, but the pass that has waited longest is not delayed for ever. A long pass pauses after each
slice, and goes on once those that waited had their turn: passes over several sandboxes may be under
way, but never two over one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Final

from kata_pin.daemon.reconcile.slices import Slices

MOST_PASSED_OVER: Final = 8
"""Passes in a row that may run before the one that has waited longest."""


class Turn(Slices):
    """The turn of one pass; work that is run in it pauses for others."""

    def __init__(self, scheduler: PassScheduler, sandbox_id: str) -> None:
        super().__init__()
        self.sandbox_id = sandbox_id
        self.held = False
        """Whether it is this one's turn: not before it began, nor while it pauses for others."""
        self.begun = False
        self._scheduler = scheduler

    async def _pause(self) -> None:
        await self._scheduler.let_others(self)


class PassScheduler:
    """Gives turns; `awaited` says whether something waits for a sandbox's pass."""

    def __init__(self, awaited: Callable[[str], bool]) -> None:
        self._awaited = awaited
        self._taken = False
        self.begun: set[str] = set()
        """Sandboxes with a pass under way, whose turn it may be or not."""
        self._waiting: dict[asyncio.Future[None], Turn] = {}
        self._passed_over = 0

    @contextlib.asynccontextmanager
    async def turn(self, sandbox_id: str) -> AsyncIterator[Turn]:
        """Wait for a turn; it lasts until the end of the block."""
        turn = Turn(self, sandbox_id)
        await self._take(turn)
        self.begun.add(sandbox_id)
        turn.begun = True
        try:
            turn.restart_clock()
            yield turn
        finally:
            self.begun.discard(sandbox_id)
            self._give_back(turn)

    async def let_others(self, turn: Turn) -> None:
        """Let the event loop run, and the passes that wait; return when it is this turn again."""
        if not self._ready():
            await asyncio.sleep(0)
            return
        waiting = self._queue(turn)
        self._give_back(turn)
        await self._given(waiting)

    async def _take(self, turn: Turn) -> None:
        if not self._taken:
            self._taken = turn.held = True
            return
        try:
            await self._given(self._queue(turn))
        except asyncio.CancelledError:
            self._give_back(turn)  # it was given in this very moment
            raise

    def _queue(self, turn: Turn) -> asyncio.Future[None]:
        waiting = asyncio.get_running_loop().create_future()
        self._waiting[waiting] = turn
        return waiting

    async def _given(self, waiting: asyncio.Future[None]) -> None:
        try:
            await waiting
        finally:
            self._waiting.pop(waiting, None)

    def _give_back(self, turn: Turn) -> None:
        """Give the turn to the next, if any waits and this one has it."""
        if not turn.held:
            return
        turn.held = False
        ready = self._ready()
        if not ready:
            self._taken = False
            return
        oldest = chosen = ready[0]
        if self._passed_over < MOST_PASSED_OVER:
            awaited = (one for one in ready if self._awaited(self._waiting[one].sandbox_id))
            chosen = next(awaited, oldest)
        self._passed_over = 0 if chosen is oldest else self._passed_over + 1
        self._waiting.pop(chosen).held = True
        chosen.set_result(None)

    def _ready(self) -> list[asyncio.Future[None]]:
        """Return what may have the turn, oldest first: never a second pass over one sandbox.

        A cancelled one is listed until its task runs again. It must not be chosen: setting its
        result would raise.
        """
        return [
            waiting
            for waiting, turn in self._waiting.items()
            if not waiting.done() and (turn.begun or turn.sandbox_id not in self.begun)
        ]
