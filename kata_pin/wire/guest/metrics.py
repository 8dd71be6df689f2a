"""The agent's metrics (GetMetrics, or the shim's /metrics): how busy a guest's CPUs were.

    kata_guest_cpu_time{cpu="1",item="user"} 12340

One gauge per item of each `cpuN` line of the guest's /proc/stat, in ms. The label is not the CPU's
number but its rank: the agent counts the lines (src/agent/src/metrics.rs, `enumerate`), and
/proc/stat lists online CPUs only. With CPUs 0 and 3 online the labels are 0 and 1. Gauges are never
removed: after an unplug the last ranks remain, with times that no longer change.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Final

from kata_pin.errors import ParseError

MAX_METRICS: Final = 2 << 20  # longest text accepted, in characters

_SAMPLE: Final = re.compile(
    r'^kata_guest_cpu_time\{cpu="([0-9]{1,4})",item="([a-z_]{1,16})"\} ([0-9.e+]{1,24})$',
    re.MULTILINE | re.ASCII,
)
_KINDS: Final = {
    **dict.fromkeys(("user", "nice", "system", "irq", "softirq"), "busy"),
    **dict.fromkeys(("idle", "iowait"), "idle"),
    "steal": "steal",
}


@dataclass(frozen=True, slots=True)
class RankTime:
    """Times in ms of one rank among the guest's online CPUs, since it was first online.

    `steal` is the time that the guest counts as taken by the host. `user` includes `guest`.
    """

    rank: int
    busy_ms: float = 0.0
    idle_ms: float = 0.0
    steal_ms: float = 0.0

    @property
    def total_ms(self) -> float:
        """All time; if it does not grow between two readings, the CPU is offline."""
        return self.busy_ms + self.idle_ms + self.steal_ms


def parse_cpu_times(text: str) -> tuple[RankTime, ...]:
    """Return the times of every rank, 0 upwards; ParseError for no times, or gaps."""
    if len(text) > MAX_METRICS:
        raise ParseError(f"longer than {MAX_METRICS} characters", source="metrics")
    times: dict[str, dict[int, float]] = {"busy": {}, "idle": {}, "steal": {}}
    for match in _SAMPLE.finditer(text):
        rank, value = int(match[1]), _time(match[3])
        if kind := _KINDS.get(match[2]):
            times[kind][rank] = times[kind].get(rank, 0.0) + value
    busy = times["busy"]
    if not busy or sorted(busy) != list(range(len(busy))):
        raise ParseError("CPU times of some ranks are missing", source="metrics")
    return tuple(
        RankTime(rank, busy[rank], times["idle"].get(rank, 0.0), times["steal"].get(rank, 0.0))
        for rank in range(len(busy))
    )


def _time(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ParseError("invalid time", source="metrics", text=text)
    return value
