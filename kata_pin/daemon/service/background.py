"""The daemon's tasks: each runs until it returns, or until the daemon ends."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field


@dataclass
class Background:
    """Starts tasks in a TaskGroup; `end` cancels those that still run."""

    _tasks: asyncio.TaskGroup
    _running: set[asyncio.Task[None]] = field(default_factory=set)
    _ended: bool = False

    def start(self, work: Coroutine[object, object, None]) -> None:
        """Run a coroutine; after `end` it is closed at once, since nothing would cancel it."""
        if self._ended:
            work.close()
            return
        task = self._tasks.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def end(self) -> None:
        """Cancel what runs."""
        self._ended = True
        for task in list(self._running):
            task.cancel()
