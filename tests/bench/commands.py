"""What the command line costs: from exec to exit, beside the same interpreter doing nothing."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence

from tests.bench.figures import MS, BenchError, Row, Samples, in_turns, median_row, timed
from tests.bench.node import BenchNode
from tests.bench.service import KATA_PIN, service

HELP_MS, SHOW_MS, COMPLETION_MS = 45.0, 90.0, 60.0
"""CPU time from exec to exit."""

BARE = (sys.executable, "-c", "pass")


def measure(node: BenchNode, rounds: int) -> Iterator[Row]:
    """Yield the rows of `--help` and of `show` with one sandbox, with the daemon and without."""
    node.start(1)
    bare, usage = in_turns(rounds, lambda: run_s(BARE), lambda: run_s((*KATA_PIN, "--help")))
    yield median_row("kata-pin --help", usage, bare)
    yield _cpu_row("kata-pin --help", rounds, (*KATA_PIN, "--help"), HELP_MS)
    with service(node):
        yield from show_rows(node, rounds, suffix=", 1 sandbox")
        config = str(node.root / "config.yaml")
        show = (*KATA_PIN, "--config", config, "show")
        yield _cpu_row("kata-pin show, 1 sandbox", rounds, show, SHOW_MS)
        words = {"COMP_WORDS": f"kata-pin --config {config} show v", "COMP_CWORD": "4"}
        asked = {"_KATA_PIN_COMPLETE": "bash_complete", **words}
        yield _cpu_row("completion of show, 1 sandbox", rounds, KATA_PIN, COMPLETION_MS, asked)
    yield from show_rows(node, rounds, suffix=", 1 sandbox, daemon away")


def show_rows(node: BenchNode, rounds: int, *, suffix: str) -> Iterator[Row]:
    """Yield the row of `show`."""
    show = (*KATA_PIN, "--config", str(node.root / "config.yaml"), "show")
    bare, shown = in_turns(rounds, lambda: run_s(BARE), lambda: run_s(show))
    yield median_row(f"kata-pin show{suffix}", shown, bare)


def _cpu_row(
    name: str,
    rounds: int,
    command: Sequence[str],
    bar_ms: float,
    environ: Mapping[str, str] | None = None,
) -> Row:
    """Return the row of a command's CPU time, its own and the kernel's for it."""
    samples = Samples([_cpu_s(command, environ or {}) for _ in range(rounds)])
    return Row(
        name, samples.median * MS, "ms CPU", rounds, bar=bar_ms, bar_on_ratio=False,
        detail=samples.spread,
    )  # fmt: skip


def _cpu_s(command: Sequence[str], environ: Mapping[str, str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    env = {**os.environ, **environ}
    subprocess.run(command, capture_output=True, check=True, timeout=120, env=env)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def run_s(command: Sequence[str]) -> float:
    """Run a command to its end; return the seconds."""

    def run() -> None:
        done = subprocess.run(command, capture_output=True, check=False, timeout=120)
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip()
            raise BenchError(f"{' '.join(command)}: status {done.returncode}: {said[-300:]}")

    return timed(run)
