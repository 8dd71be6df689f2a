"""Two checkouts on one machine, in turns: whether a change made a figure worse.

Each turn runs one part of `scripts/bench --json` here and there, the first of both alternating. A
figure that has a floor is compared by its ratio to it, so what else ran meanwhile matters less.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

HERE: Final = Path(__file__).resolve().parents[2]

Figures = Mapping[str, float]
"""A figure by the name of its row."""


def compared(parts: Sequence[str], other: Path, rounds: int, passed: Sequence[str]) -> int:
    """Measure both checkouts and print the table; return 1 if a run failed, else 0."""
    failed = False
    ours: list[Figures] = []
    theirs: list[Figures] = []
    for part in parts:
        for turn in range(rounds):
            sides = [(HERE, ours), (other, theirs)]
            for checkout, runs in sides if turn % 2 == 0 else reversed(sides):
                figures = _run(checkout, part, passed)
                failed |= figures is None
                runs.append(figures or {})
    print("\n".join(lines(ours, theirs)))
    return 1 if failed else 0


def lines(ours: Sequence[Figures], theirs: Sequence[Figures]) -> list[str]:
    """Return the table: medians here and there, and here in relation to there."""
    here, there = _medians(ours), _medians(theirs)
    rows = [("name", "here", "there", "here/there")]
    for name in dict.fromkeys([*here, *there]):
        mine, their = here.get(name), there.get(name)
        ratio = f"{mine / their:.2f}" if mine is not None and their else "-"
        rows.append((name, _text(mine), _text(their), ratio))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return [
        "  ".join(
            [
                row[0].ljust(widths[0]),
                *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True)),
            ]
        )
        for row in rows
    ]


def figures_of(rows: Iterable[Mapping[str, Any]]) -> Figures:
    """Return what is compared of the rows of `scripts/bench --json`."""
    found = {}
    for row in rows:
        by_floor = row["ratio"] is not None
        unit = "x its floor" if by_floor else row["unit"]
        found[f"{row['name']}, {unit}"] = row["ratio"] if by_floor else row["value"]
    return found


def _run(checkout: Path, part: str, passed: Sequence[str]) -> Figures | None:
    """Measure one part in a checkout; None, with the reason on stderr, if that failed."""
    print(f"{part} in {checkout}", file=sys.stderr, flush=True)
    done = subprocess.run(
        [checkout / "scripts/bench", part, "--json", *passed],
        stdout=subprocess.PIPE, check=False, cwd=checkout,
    )  # fmt: skip
    if done.returncode:
        print(f"{part} failed in {checkout}: exit status {done.returncode}", file=sys.stderr)
        return None
    return figures_of(json.loads(done.stdout))


def _medians(runs: Iterable[Figures]) -> dict[str, float]:
    every: dict[str, list[float]] = {}
    for figures in runs:
        for name, value in figures.items():
            every.setdefault(name, []).append(value)
    return {name: statistics.median(values) for name, values in every.items()}


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
