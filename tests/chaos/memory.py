"""The part `memory`: each input made to exhaust memory, in a process that has what a daemon has."""

from __future__ import annotations

from collections.abc import Iterator

from tests.bench.figures import Row, count_row
from tests.support.memory_attacks import CEILING_MIB, figures


def measure(_count: int, only: tuple[str, ...]) -> Iterator[Row]:
    """Yield the largest of all attacks, or of those whose names begin with one of `only`."""
    done = figures(*only)
    largest = max(done, key=lambda one: one.peak)
    slowest = max(done, key=lambda one: one.cpu_s)
    kept = max(done, key=lambda one: one.after)
    detail = f"{largest.name}, {largest.before:.0f} MiB before"
    peak = largest.peak
    yield count_row("memory: largest process", peak, len(done), detail, unit="MiB", bar=CEILING_MIB)
    yield Row("memory: most that stayed", kept.after, "MiB", len(done), detail=kept.name)
    yield Row("memory: most CPU time", slowest.cpu_s, "s", len(done), detail=slowest.name)
