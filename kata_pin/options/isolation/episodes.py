"""Episodes of others on an exclusive pCPU: when they are recorded again, and when that is logged.

An episode begins when a window finds foreign tasks, and ends at the first look that finds none. In
between, small noise must not hide a hog: a much larger share, or time that the known intruders did
not use, asks for a new window at once. What a window finds is logged if it is news. All times are
CLOCK_MONOTONIC in seconds, shares are percent of the pCPU's time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from kata_pin.base.documents.measured import ProvedPcpu
from kata_pin.base.threads import TaskRun
from kata_pin.engine.node import Watched
from kata_pin.placement.proof import Growth, Look

AGAIN_S: Final = 300.0
"""How often who runs there is recorded again while an episode lasts and nothing seems new."""

FIRST_PAUSE_S: Final = 10.0
"""Time after a window in which unknown tasks ask for no other; it doubles up to AGAIN_S."""

TIMES_MORE: Final = 3.0
POINTS_MORE: Final = 25.0
"""A share is much larger if it is so many times, or so many percent points, larger."""

MOST_NAMES: Final = 64
"""Most intruders of an episode that are remembered: names are theirs to choose."""

BURST: Final = 5
"""Reports of one pCPU at once; afterwards one per AGAIN_S, unless a share is much larger."""

NOTHING: Final = Growth(0, 0, 0, None)


def much_more(percent: float, before: float) -> bool:
    """Whether a share is much larger than another."""
    return percent >= min(TIMES_MORE * before, before + POINTS_MORE)


@dataclass
class Pace:
    """Bounds how often one pCPU is reported, whatever comes and goes there."""

    left: float = BURST
    at: float = 0.0
    loudest: float = 0.0
    """Largest share that was reported since it was quiet."""

    def allows(self, percent: float, now: float) -> bool:
        """Whether a share may be reported."""
        self.left = min(BURST, self.left + (now - self.at) / AGAIN_S)
        self.at = now
        if self.left == BURST:
            self.loudest = 0.0
        return self.left >= 1 or much_more(percent, self.loudest)

    def reported(self, percent: float) -> None:
        """Note that a share was reported."""
        self.left = max(0.0, self.left - 1)
        self.loudest = max(self.loudest, percent)


@dataclass
class Episode:
    """Others on one pCPU, from a window that found them until they are gone.

    `recorded` is the share by the counters when the last window was taken, `found` the share that
    the window found; both come down while the counters say that less is taken.
    """

    since: float
    recorded: float = 0.0
    found: float = 0.0
    is_reported: bool = False
    """Whether the log has its beginning, so that it shall have its end."""
    is_owed: bool = True
    """Whether news was not reported yet."""
    names: frozenset[str] = frozenset()
    """The intruders that were seen."""
    tids: frozenset[tuple[int, int]] = frozenset()
    """Their threads, as process and thread id."""
    runs: Mapping[int, TaskRun] = field(default_factory=dict)
    unknown: float = 0.0
    """The share that other threads than these had in the last window."""
    pause_s: float = FIRST_PAUSE_S

    def took(self, percent: float, runs: Mapping[int, TaskRun], length_ns: int) -> bool:
        """Note what others took since the last look; return whether most is not the known ones'.

        Not if as much was not in the last window, beside a crowd. `runs` are the counters of the
        known intruders' threads now.
        """
        pairs = [(self.runs[tid], now) for tid, now in runs.items() if tid in self.runs]
        known_ns = sum(max(0, now.ran_ns - before.ran_ns) for before, now in pairs)
        self.runs = runs
        unknown = percent - 100 * known_ns / length_ns
        return bool(self.names) and unknown > percent / 2 and much_more(unknown, self.unknown)

    def is_due(
        self, percent: float, pace: Pace, window_at: float, now: float, *, new: bool
    ) -> bool:
        """Whether it is time for a window; `new`: others than the known ones take most."""
        due = (
            much_more(percent, self.recorded)
            or now - window_at > (self.pause_s if new else AGAIN_S)
            or (self.is_owed and pace.allows(percent, now))
        )
        if not due:
            self.recorded = min(self.recorded, percent)
        self.found = min(self.found, percent)
        return due

    def found_by_window(
        self, percent: float, names: Collection[str], recorded: float, unknown: float = 0.0
    ) -> None:
        """Note what a window found; it is to be reported if that is news."""
        news = much_more(percent, self.found) or not self.names.issuperset(names)
        self.pause_s = FIRST_PAUSE_S if news else min(2 * self.pause_s, AGAIN_S)
        self.is_owed |= news
        self.found, self.recorded, self.unknown = percent, recorded, unknown
        known = self.names if len(self.names) < MOST_NAMES else frozenset()
        self.names = known | frozenset(names)


@dataclass
class WatchedCpu:
    """What is known of one pCPU."""

    watched: Watched
    look: Look
    growth: Growth | None = None
    exact: bool = False
    """Whether every own thread was told from others; else others had it less than `growth` says."""
    window: ProvedPcpu | None = None
    window_at: float = 0.0
    episode: Episode | None = None
    pace: Pace = field(default_factory=Pace)
    percent: float = 0.0
    """What others than the vCPUs took at most since the last look."""
    recorded: float = 0.0
    """The same when the last window was taken."""
    empty_windows: int = 0
    """Windows in a row that found nobody."""
    skipped_audits: int = 0
    """Audits that it is still left alone."""

    @property
    def is_left_alone(self) -> bool:
        """Whether windows found nobody, and what is taken is still about what was taken then."""
        return self.skipped_audits > 0 and not much_more(self.percent, self.recorded)
