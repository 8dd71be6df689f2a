"""Figures: samples of a measurement and of its floor, taken in turns, and the rows made of them.

Bars are in docs/design.md. Ratios are of medians unless a row says otherwise: what disturbs a
shared machine disturbs measurement and floor alike, because each takes its turn in every round.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

MS = 1000.0


class BenchError(Exception):
    """The benchmark cannot be run, or what it measures did something wrong."""


@dataclass(frozen=True)
class Row:
    """One line of the table. `floor` and `ratio` are None where there is no floor to compare with.

    `bar` is the limit: on `ratio` if `bar_on_ratio`, else on `value`; None for figures without one.
    """

    name: str
    value: float
    unit: str
    n: int
    floor: float | None = None
    ratio: float | None = None
    bar: float | None = None
    bar_on_ratio: bool = True
    detail: str = ""

    @property
    def held(self) -> bool | None:
        """Whether the bar holds; None without one."""
        if self.bar is None:
            return None
        against = self.ratio if self.bar_on_ratio else self.value
        return against is not None and against <= self.bar

    def as_json(self) -> str:
        """Return the row as one line of JSON."""
        return json.dumps(
            {
                "name": self.name,
                "value": _rounded(self.value),
                "unit": self.unit,
                "floor": _rounded(self.floor),
                "ratio": _rounded(self.ratio),
                "n": self.n,
                "bar": self.bar,
                "bar_on": None if self.bar is None else "ratio" if self.bar_on_ratio else "value",
                "held": self.held,
            }
        )


@dataclass(frozen=True)
class Samples:
    """Times of one thing in seconds."""

    seconds: Sequence[float]

    @property
    def median(self) -> float:
        """The middle one."""
        return statistics.median(self.seconds)

    def percentile(self, percent: int) -> float:
        """Return the smallest sample that so many percent of all are not above."""
        ordered = sorted(self.seconds)
        return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]

    @property
    def spread(self) -> str:
        """The higher percentiles, in milliseconds."""
        p90, p99 = self.percentile(90) * MS, self.percentile(99) * MS
        return f"p90 {p90:.2f}, p99 {p99:.2f}, max {max(self.seconds) * MS:.2f}"


def in_turns(rounds: int, *measures: Callable[[], float]) -> list[Samples]:
    """Take one sample of each measure in every round; a measure returns seconds."""
    taken: list[list[float]] = [[] for _ in measures]
    for _ in range(rounds):
        for samples, measure in zip(taken, measures, strict=True):
            samples.append(measure())
    return [Samples(samples) for samples in taken]


def timed(work: Callable[[], object]) -> float:
    """Return the seconds that something takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def median_row(
    name: str, samples: Samples, floor: Samples | None, *, bar: float | None = None
) -> Row:
    """Return the row of a median in milliseconds; the bar is on the ratio to the floor's median."""
    return Row(
        name,
        samples.median * MS,
        "ms",
        len(samples.seconds),
        floor=None if floor is None else floor.median * MS,
        ratio=None if floor is None else samples.median / floor.median,
        bar=bar,
        detail=samples.spread,
    )


def requests_row(name: str, rounds: Sequence[Sequence[str]]) -> Row:
    """Return the row of the least that any round asked of the broker, with its rows by number."""
    least = min(rounds, key=len)
    rows = ", ".join(f"{count} {row}" for row, count in Counter(least).most_common())
    return Row(name, len(least), "requests", len(rounds), detail=rows)


def count_row(
    name: str, value: float, n: int, detail: str = "", *, unit: str = "", bar: float | None = 0
) -> Row:
    """Return the row of a number with a bar on itself: by default there may be none."""
    return Row(name, value, unit, n, bar=bar, bar_on_ratio=False, detail=detail)


def tail_row(name: str, samples: Samples, floor: Samples, *, bar_ms: float | None = None) -> Row:
    """Return the row of a p99 in milliseconds, with a bar in milliseconds; the floor is a p99."""
    value, least = samples.percentile(99), floor.percentile(99)
    return Row(
        name,
        value * MS,
        "ms",
        len(samples.seconds),
        floor=least * MS,
        ratio=samples.median / floor.median,
        bar=bar_ms,
        bar_on_ratio=False,
        detail=f"p50 {samples.median * MS:.2f}, floor {floor.median * MS:.2f}; {samples.spread}",
    )


def with_floor(row: Row, loop_ms: float, interpreter_mib: float) -> Row:
    """Return a row without a floor of its own with one of the same run, so that it has a ratio.

    Time and shares of a core are related to a fixed loop of Python (LOOP), memory to that of an
    interpreter that does nothing. Counts have no floor. The bar stays where it was.
    """
    floors = {"ms": loop_ms, "ms CPU": loop_ms, "% of a core": loop_ms / 10}
    floor = floors.get(row.unit) or {"MiB": interpreter_mib}.get(row.unit)
    if row.floor is not None or floor is None:
        return row
    return replace(row, floor=floor, ratio=row.value / floor)


LOOP: Final = 20_000
"""Additions of the loop."""


def loop_ms() -> float:
    """Return the CPU time of the loop, the median of some, in milliseconds."""
    taken = []
    for _ in range(15):
        start = time.thread_time()
        total = 0
        for number in range(LOOP):
            total += number
        taken.append(time.thread_time() - start)
    return statistics.median(taken) * MS


def interpreter_mib() -> float:
    """Return the RSS of this interpreter doing nothing, in MiB."""
    code = "print(next(x for x in open('/proc/self/status') if x.startswith('VmRSS')).split()[1])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=60)
    return int(done.stdout) / 1024


def table(rows: Sequence[Row]) -> str:
    """Return the rows as text."""
    head = ("name", "value", "unit", "floor", "ratio", "bar", "", "n", "detail")
    lines = [head, *map(_cells, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def markdown(rows: Sequence[Row]) -> str:
    """Return the rows as the table of docs/performance.md."""
    lines = ["| name | floor | value | ratio | bar | held |", "|---|---|---|---|---|---|"]
    for row in rows:
        name, value, unit, floor, ratio, bar, held, *_ = _cells(row)
        ratio = ratio and f"{ratio} x"
        lines.append(f"| {name} | {floor} | {value} {unit} | {ratio} | {bar} | {held} |")
    return "\n".join(lines)


def _cells(row: Row) -> tuple[str, ...]:
    bar = ""
    if row.bar is not None:
        bar = f"<= {row.bar:g} x" if row.bar_on_ratio else f"<= {row.bar:g} {row.unit}"
    verdict = {True: "ok", False: "MISSED", None: ""}[row.held]
    floor = "" if row.floor is None else f"{row.floor:.2f}"
    ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
    value = str(row.value) if isinstance(row.value, int) else f"{row.value:.2f}"  # a count
    return (row.name, value, row.unit, floor, ratio, bar, verdict, str(row.n), row.detail)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
