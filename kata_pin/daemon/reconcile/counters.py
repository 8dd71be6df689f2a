"""Counts of what the daemon did since its start; metrics.py gives them names."""

from __future__ import annotations

import errno
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

from kata_pin.model.pass_outcome import PassOutcome
from kata_pin.model.placement import DriftKind, Outcome

APPLY_BUCKETS: Final = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0,
)  # fmt: skip
"""Upper bounds in seconds; docs/design.md has bars at 5 and 20 ms."""

HOOK_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.25, 0.5, 1.0, 5.0)
"""Upper bounds in seconds; the budgets of a hook are 200 and 250 ms by default."""

NO_ERRNO: Final = "none"
"""Label of an error without an errno."""

_REFUSALS: Final = {
    Outcome.REFUSED: "EINVAL",
    Outcome.DENIED: "EPERM",
    Outcome.UNVERIFIED: "EACCES",
}


class Histogram:
    """Counts of durations by upper bound, and their sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, seconds: float) -> None:
        """Count one duration; a negative one (a clock was set) counts as 0."""
        seconds = max(0.0, seconds)
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self.sum += seconds

    def cumulative(self) -> Iterator[tuple[str, float]]:
        """Yield each bound as text with the count of what is not above it; the last is +Inf."""
        total = 0
        for bound, count in zip((*self._bounds, None), self._counts, strict=True):
            total += count
            yield ("+Inf" if bound is None else f"{bound:g}"), total


class Counters:
    """The counts; an Observer of passes."""

    def __init__(self) -> None:
        self.apply = Histogram(APPLY_BUCKETS)
        self.hooks = Histogram(HOOK_BUCKETS)
        self.drifts: Counter[DriftKind] = Counter(dict.fromkeys(DriftKind, 0))
        self.errors: Counter[tuple[str, str]] = Counter()
        self.overruns = 0
        self.audited_at: float | None = None
        """Unix time of the last audit's end, None before the first."""

    def passed(self, outcome: PassOutcome) -> None:
        """Count what a pass found and did."""
        report = outcome.report
        for drift in report.drifts:
            self.drifts[drift.kind] += 1
        if report.results:
            self.apply.observe(report.duration_ns / 1e9)
        for result in report.results:
            if result.outcome in _REFUSALS:
                self.errors["sched_setaffinity", _REFUSALS[result.outcome]] += 1

    def ended(self, outcome: PassOutcome) -> None:
        """See Observer: a pass that found that a sandbox ended did nothing."""

    def failed(self, operation: str, error: Exception) -> None:
        """Count an error; `operation` is one of few words of ours."""
        number = getattr(error, "errno", None) or getattr(error.__cause__, "errno", None)
        name = errno.errorcode.get(number, NO_ERRNO) if isinstance(number, int) else NO_ERRNO
        self.errors[operation, name] += 1

    def hook(self, stamp_ns: int) -> None:
        """Count a hook that was answered; it read CLOCK_BOOTTIME before it connected."""
        self.hooks.observe((time.clock_gettime_ns(time.CLOCK_BOOTTIME) - stamp_ns) / 1e9)

    def overrun(self) -> None:
        """Count events that the kernel dropped."""
        self.overruns += 1

    def audited(self) -> None:
        """Note that an audit has ended."""
        self.audited_at = time.time()
