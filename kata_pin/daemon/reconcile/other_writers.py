"""Telling another writer from ordinary drift, and backing off from it (DESIGN D13).

A thread that was put in place and found elsewhere three times within a minute has another writer.
It is then left alone, each time for longer, so that two writers never fight in a tight loop; the
rest of the sandbox is kept, and `show` says so. An event about the sandbox ends the truce.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from kata_pin.model.thread import ThreadKey

RETURNS: Final = 3
WINDOW_S: Final = 60.0
FIRST_TRUCE_S: Final = 30.0
LONGEST_TRUCE_S: Final = 600.0


@dataclass(frozen=True)
class OtherWriter:
    """Somebody who moves threads of a sandbox: how often that was seen, since when, which ones."""

    seen: int
    since: float
    keys: frozenset[ThreadKey]


@dataclass
class _Watch:
    times: list[float] = field(default_factory=list)
    until: float = 0.0
    truce_s: float = FIRST_TRUCE_S
    seen: int = 0
    first: float = 0.0
    foreign: bool = False


class ForeignWatch:
    """The drifts of one sandbox's threads; times are those of any one monotonic clock."""

    def __init__(self) -> None:
        self._threads: dict[ThreadKey, _Watch] = {}

    def drifted(self, keys: Iterable[ThreadKey], now: float) -> None:
        """Note threads that were put in place and have moved since."""
        for key in keys:
            watch = self._threads.setdefault(key, _Watch(first=now))
            watch.seen += 1
            if now < watch.until:
                continue
            watch.times = [t for t in watch.times if now - t < WINDOW_S] + [now]
            if len(watch.times) >= RETURNS:
                watch.times = []
                watch.foreign = True
                watch.until = now + watch.truce_s
                watch.truce_s = min(watch.truce_s * 2, LONGEST_TRUCE_S)

    def left_alone(self, now: float) -> frozenset[ThreadKey]:
        """Return the threads that are another writer's for now."""
        return frozenset(key for key, watch in self._threads.items() if now < watch.until)

    def writer(self) -> OtherWriter | None:
        """Return who else moves threads, also while no truce holds; None for ordinary drift."""
        known = {key: watch for key, watch in self._threads.items() if watch.foreign}
        if not known:
            return None
        since = min(watch.first for watch in known.values())
        return OtherWriter(sum(one.seen for one in known.values()), since, frozenset(known))

    def ended(self, now: float) -> bool:
        """Whether a truce has ended since the last call: the placement is due to be asserted."""
        over = [watch for watch in self._threads.values() if 0 < watch.until <= now]
        for watch in over:
            watch.until = 0.0
        return bool(over)

    def forget(self) -> None:
        """End every truce: something changed, so the placement is asserted again (D13)."""
        for watch in self._threads.values():
            watch.times = []
            watch.until = 0.0

    def keep_only(self, keys: Iterable[ThreadKey]) -> None:
        """Drop threads that are gone."""
        alive = set(keys)
        self._threads = {key: watch for key, watch in self._threads.items() if key in alive}
