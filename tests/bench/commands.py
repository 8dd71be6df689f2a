"""What the command line costs: from exec to exit, beside the same interpreter doing nothing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence

from tests.bench.figures import BenchError, Row, in_turns, median_row, timed
from tests.bench.node import BenchNode
from tests.bench.service import KATA_PIN, service

BARE = (sys.executable, "-c", "pass")


def measure(node: BenchNode, rounds: int) -> Iterator[Row]:
    """Yield the rows of `--help` and of `show` with one sandbox, with the daemon and without."""
    node.start(1)
    bare, usage = in_turns(rounds, lambda: run_s(BARE), lambda: run_s((*KATA_PIN, "--help")))
    yield median_row("kata-pin --help", usage, bare)
    with service(node):
        yield from show_rows(node, rounds, suffix=", 1 sandbox")
    yield from show_rows(node, rounds, suffix=", 1 sandbox, daemon away")


def show_rows(node: BenchNode, rounds: int, *, suffix: str) -> Iterator[Row]:
    """Yield the row of `show`."""
    show = (*KATA_PIN, "--config", str(node.root / "config.yaml"), "show")
    bare, shown = in_turns(rounds, lambda: run_s(BARE), lambda: run_s(show))
    yield median_row(f"kata-pin show{suffix}", shown, bare)


def run_s(command: Sequence[str]) -> float:
    """Run a command to its end; return the seconds."""

    def run() -> None:
        done = subprocess.run(command, capture_output=True, check=False, timeout=120)
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip()
            raise BenchError(f"{' '.join(command)}: status {done.returncode}: {said[-300:]}")

    return timed(run)
