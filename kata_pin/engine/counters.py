"""What all of the engine uses.

These are counts since the start, the observers of passes, and slices of long work.
"""

from __future__ import annotations

import asyncio
import errno
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Generic, Protocol, TypeVar

from msgspec import Struct, field

from kata_pin.base.placement import DriftKind, PassOutcome
from kata_pin.base.steps import Steps
from kata_pin.base.values import Outcome

T = TypeVar("T")

# Counts of what the daemon did since its start, and how metrics are declared.

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


class Observer(Protocol):
    """Gets the outcome of every pass, before a waiting hook is answered; must be quick.

    By default nothing happens.
    """

    def passed(self, outcome: PassOutcome) -> None:
        """Take a pass after which the sandbox goes on."""
        return

    def ended(self, outcome: PassOutcome) -> None:
        """Take a pass that found that the sandbox has ended."""
        return

    def failed(self, operation: str, error: Exception) -> None:
        """Take the error of a pass that failed; `operation` is a word for metrics.

        The next pass repeats what a failed one left undone.
        """
        return


class Counters(Observer):
    """The counts."""

    def __init__(self) -> None:
        self.apply = Histogram(APPLY_BUCKETS)
        self.hooks = Histogram(HOOK_BUCKETS)
        self.drifts: Counter[DriftKind] = Counter(dict.fromkeys(DriftKind, 0))
        self.errors: Counter[tuple[str, str]] = Counter()
        self.overruns = 0
        """How often the kernel dropped events."""
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

    def failed(self, operation: str, error: Exception) -> None:
        """Count an error; `operation` is one of few words of ours."""
        number = getattr(error, "errno", None) or getattr(error.__cause__, "errno", None)
        name = errno.errorcode.get(number, NO_ERRNO) if isinstance(number, int) else NO_ERRNO
        self.errors[operation, name] += 1

    def hook(self, stamp_ns: int) -> None:
        """Count a hook that was answered; it read CLOCK_BOOTTIME before it connected."""
        self.hooks.observe((time.clock_gettime_ns(time.CLOCK_BOOTTIME) - stamp_ns) / 1e9)


Reading = float | Mapping[Any, float] | Histogram
"""A metric's number, its numbers by label value (by a tuple if it has several labels), or times."""


class MetricRow(Struct, Generic[T], frozen=True):
    """A metric: docs/metrics.md, the checks of dashboard and rules, and the scrape are made of it.

    `name` is as a scrape shows it, with its unit: `kata_pin_foreign_seconds_total`. What ends with
    `_total` is a counter, the rest are gauges, or `times`: then the value is a Histogram.
    `value` reads it from the object that counts; None: it is not shown now. If reading takes long,
    `value` returns a function, which is called beside the event loop. `labels` has the values
    that each label can have, none where they are not a short list. `more` is for docs/metrics.md.
    """

    name: str
    help: str
    value: Callable[[T], Reading | Callable[[], Reading] | None]
    labels: Mapping[str, Iterable[str]] = field(default_factory=dict)
    more: str = ""
    times: bool = False

    @property
    def kind(self) -> str:
        """Its type as Prometheus names it."""
        return "histogram" if self.times else "counter" if self.name.endswith("_total") else "gauge"


Shown = tuple[MetricRow[Any], Reading | Callable[[], Reading]]


def readings(rows: Iterable[MetricRow[T]], source: T) -> Iterator[Shown]:
    """Yield the metrics that are shown now."""
    for row in rows:
        value = row.value(source)
        if value is not None:
            yield row, value


# Runs long work in slices: between two of them the event loop serves others.

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
