"""The agent's metrics (GetMetrics, or the shim's /metrics): how busy a guest's CPUs were.

    kata_guest_cpu_time{cpu="1",item="user"} 12340

One gauge for each item of each `cpuN` line of the guest's /proc/stat, in ms. The label is not the
CPU's number but its rank: the agent counts the lines (src/agent/src/metrics.rs, `enumerate`), and
/proc/stat lists the online CPUs only. With CPUs 0 and 3 online the labels are 0 and 1. A gauge is
never taken back: after an unplug the last ranks stay, with times that stand still.

Hostile input: the size is bounded by who received it, and what is read of it here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from kata_pin.errors import ParseError

MAX_METRICS: Final = 2 << 20
"""Longest text accepted, in characters."""

_SAMPLE: Final = re.compile(
    r'^kata_guest_cpu_time\{cpu="([0-9]{1,4})",item="([a-z_]{1,16})"\} ([0-9.e+]{1,24})$',
    re.MULTILINE | re.ASCII,
)
_BUSY: Final = frozenset({"user", "nice", "system", "irq", "softirq"})
_IDLE: Final = frozenset({"idle", "iowait"})


@dataclass(frozen=True, slots=True)
class RankTime:
    """What the CPU of one rank among the guest's online CPUs has done since it was first online.

    In ms. `steal` is what the guest believes that the host took. `guest` times are inside `user`.
    """

    rank: int
    busy_ms: float = 0.0
    idle_ms: float = 0.0
    steal_ms: float = 0.0

    @property
    def total_ms(self) -> float:
        """All time; what does not grow between two readings is not online any more."""
        return self.busy_ms + self.idle_ms + self.steal_ms


def parse_cpu_times(text: str) -> tuple[RankTime, ...]:
    """Read the times of every rank, 0 upwards; ParseError when there are none, or gaps."""
    if len(text) > MAX_METRICS:
        raise ParseError(f"longer than {MAX_METRICS} characters", source="metrics")
    busy: dict[int, float] = {}
    idle: dict[int, float] = {}
    steal: dict[int, float] = {}
    for rank, item, value in _samples(text):
        times = busy if item in _BUSY else idle if item in _IDLE else steal
        if item in _BUSY or item in _IDLE or item == "steal":
            times[rank] = times.get(rank, 0.0) + value
    if not busy or sorted(busy) != list(range(len(busy))):
        raise ParseError("no CPU times, or not of every rank", source="metrics")
    return tuple(
        RankTime(rank, busy[rank], idle.get(rank, 0.0), steal.get(rank, 0.0))
        for rank in range(len(busy))
    )


def _samples(text: str) -> Iterator[tuple[int, str, float]]:
    for match in _SAMPLE.finditer(text):
        yield int(match[1]), match[2], _time(match[3])


def _time(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ParseError("not a time", source="metrics", text=text) from None
    if not math.isfinite(value):
        raise ParseError("not a time", source="metrics", text=text)
    return value
