"""Runs long work in slices: between two of them the event loop serves others."""

from __future__ import annotations

import asyncio
import time
from typing import Final, TypeVar

from kata_pin.model.steps import Steps

T = TypeVar("T")

SLICE_S: Final = 0.003
"""Longest that work holds the event loop, but for the step that it is in."""


class Slices:
    """Runs one work after another; the time between two pauses is counted over all of them."""

    def __init__(self) -> None:
        self.worked_s = 0.0
        """How long the work took, without the pauses, until the last pause."""
        self._began = time.perf_counter()

    async def run(self, steps: Steps[T]) -> T:
        """Return the result of some work."""
        while True:
            try:
                next(steps)
            except StopIteration as end:
                result: T = end.value
                return result
            await self.breathe()

    async def breathe(self) -> None:
        """Let others run if this has run for a slice."""
        if time.perf_counter() - self._began > SLICE_S:
            self.stop_clock()
            await self._pause()
            self.restart_clock()

    def restart_clock(self) -> None:
        """Do not count the time until now."""
        self._began = time.perf_counter()

    def stop_clock(self) -> None:
        """Count the time since the last pause as work."""
        now = time.perf_counter()
        self.worked_s += now - self._began
        self._began = now

    async def _pause(self) -> None:
        await asyncio.sleep(0)
