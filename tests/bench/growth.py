"""How the cost of audits grows from 10 to 1,000 sandboxes.

A thousand VMs would take 16 GiB, so stand-ins take their place (standins.py); timed is what
audits.py times.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping

from tests.bench.audits import Figures, cpu_row, figures_of
from tests.bench.figures import Row
from tests.bench.node import BenchNode
from tests.bench.standins import Crowd, StandIns

SIZES = (10, 100, 1000)

LINEAR = 1.5
"""Most that an audit's cost for one sandbox may grow, against that of a bare loop."""


def measure(node: BenchNode, rounds: int) -> Iterator[Row]:
    """Yield audits at each size; the last rows compare the cost for one sandbox with the first."""
    with contextlib.closing(StandIns(node)) as stand_ins:
        figures = {size: asyncio.run(_at(node, stand_ins, size, rounds)) for size in SIZES}
    for size, taken in figures.items():
        what = f"{size} stand-ins, {taken.threads} threads"
        for name, floor in (("affinity", "bare"), ("deep", "bare stat"), ("round", "bare stat")):
            yield cpu_row(f"{_TITLES[name]}, {what}", taken.of(name), taken.of(floor))
    for name, floor in (("affinity", "bare"), ("deep", "bare stat")):
        grown, least = _growth(figures, name), _growth(figures, floor)
        yield Row(
            f"{_TITLES[name]}, one sandbox of 1,000 against one of 10", grown, "x", rounds,
            floor=least, ratio=grown / least, bar=LINEAR,
            detail=f"a bare loop's cost grows {least:.2f} x too",
        )  # fmt: skip


def _growth(figures: Mapping[int, Figures], name: str) -> float:
    """Return how much more the same takes for one sandbox of the most than of the fewest."""
    first, last = (figures[size].of(name).median / size for size in (SIZES[0], SIZES[-1]))
    return last / first


_TITLES = {
    "affinity": "affinity audit",
    "deep": "deep audit",
    "round": "deep round with adoption",
}


async def _at(node: BenchNode, stand_ins: StandIns, size: int, rounds: int) -> Figures:
    ids = stand_ins.grow(size)
    sandboxes = Crowd(ids, f"{size} stand-ins", (str(stand_ins.executable),))
    return await figures_of(node, sandboxes, rounds)
