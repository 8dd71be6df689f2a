"""Containers that take the runtime long to change, and the little time that all of them share.

containerd makes and changes containers under NRI's lock, so whoever is slow holds up every pod of
the node. A VM that hangs takes the whole deadline each time, and a tenant may have many. So after a
slow one all slow ones rest, for many times as long as it took; fast ones do not. Who is new is not
known to be slow: each has one try.

Lifetime: a mark stays until that container was fast once, or is gone. Out of scope: the calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

SLOW_S: Final = 2.0
"""Who takes longer is slow; a healthy container takes some ten milliseconds."""

REST: Final = 20
"""Slow containers rest for so many times what one has taken: they have a twentieth of the time."""

LONGEST_S: Final = 600.0
"""Longest rest that grows: it doubles each time that a container is slow again."""


class Slowness:
    """Who was slow when it was last changed, and until when all those are left alone."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` tells seconds that never go back."""
        self._clock = clock
        self._times: dict[str, int] = {}
        self._until = 0.0

    def __contains__(self, container_id: str) -> bool:
        """Whether a container was slow the last time."""
        return container_id in self._times

    def until(self, container_id: str) -> float:
        """Return when a container may be changed, by the clock; 0 for one that is not slow."""
        return self._until if container_id in self._times else 0.0

    def took(self, container_id: str, seconds: float) -> None:
        """Take note of how long a container took, whatever came of it."""
        if seconds <= SLOW_S:
            self._times.pop(container_id, None)
            return
        times = self._times[container_id] = self._times.get(container_id, 0) + 1
        now, least = self._clock(), REST * seconds
        until = max(self._until, now) + least * 2 ** min(times - 1, 10)
        self._until = min(until, now + max(LONGEST_S, least))

    def keep(self, exists: Callable[[str], bool]) -> None:
        """Forget containers that are gone."""
        self._times = {one: times for one, times in self._times.items() if exists(one)}
