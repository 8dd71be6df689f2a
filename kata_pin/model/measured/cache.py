"""What the threads of one sandbox use of caches and memory bandwidth, as resctrl counts it."""

from __future__ import annotations

from typing import NamedTuple


class CacheUse(NamedTuple):
    """Sums over the node's L3 caches, in bytes; None: not counted by this hardware, or not now.

    `occupancy` is now, the others grow with what was transferred: all of it, and from the cache's
    own NUMA node. `at_ns` is when it was read (CLOCK_MONOTONIC).
    """

    at_ns: int
    occupancy: int | None = None
    total: int | None = None
    local: int | None = None


class BandwidthRates(NamedTuple):
    """Bytes per second between two readings; None: unknown."""

    total: float | None = None
    local: float | None = None


def rates_between(before: CacheUse | None, after: CacheUse | None) -> BandwidthRates:
    """Return the bandwidth between two readings of one group."""
    if before is None or after is None or after.at_ns <= before.at_ns:
        return BandwidthRates()
    seconds = (after.at_ns - before.at_ns) / 1e9

    def rate(old: int | None, new: int | None) -> float | None:
        # a counter that runs backwards belongs to a group that was made anew
        return None if old is None or new is None or new < old else (new - old) / seconds

    return BandwidthRates(rate(before.total, after.total), rate(before.local, after.local))
