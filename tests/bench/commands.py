"""What the command line costs: CPU time and time from exec to exit.

The floor of both is the same interpreter doing nothing. What is imported is compiled before, as an
installed package is.
"""

from __future__ import annotations

import compileall
import os
import resource
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import kata_pin
from tests.bench.figures import BenchError, Row, Samples, in_turns, median_row, timed
from tests.bench.node import BenchNode
from tests.bench.service import KATA_PIN, service

HELP, SHOW, SHOW_MANY, SHOW_AWAY, COMPLETION = 1.8, 3.5, 6.0, 10.0, 2.5
"""CPU time from exec to exit, as a ratio to that of BARE."""

BARE = (sys.executable, "-c", "pass")


def measure(node: BenchNode, rounds: int) -> Iterator[Row]:
    """Yield the rows of `--help`, of completion, and of `show` with the daemon and without."""
    node.start(1)
    config = str(node.config_file())
    yield from command_rows("kata-pin --help", rounds, (*KATA_PIN, "--help"), HELP)
    with service(node):
        yield from show_rows(node, rounds, SHOW, suffix=", 1 sandbox")
        words = {"COMP_WORDS": f"kata-pin --config {config} show v", "COMP_CWORD": "4"}
        asked = {"_KATA_PIN_COMPLETE": "bash_complete", **words}
        name = "completion of show, 1 sandbox"
        yield from command_rows(name, rounds, KATA_PIN, COMPLETION, asked)
    yield from show_rows(node, rounds, SHOW_AWAY, suffix=", 1 sandbox, daemon away")


def show_rows(node: BenchNode, rounds: int, bar: float, *, suffix: str) -> Iterator[Row]:
    """Yield the rows of `show`."""
    show = (*KATA_PIN, "--config", str(node.root / "config.yaml"), "show")
    yield from command_rows(f"kata-pin show{suffix}", rounds, show, bar)


def command_rows(
    name: str,
    rounds: int,
    command: Sequence[str],
    bar: float,
    environ: Mapping[str, str] | None = None,
) -> Iterator[Row]:
    """Yield the rows of a command's CPU time, on which its bar is, and of its time on the wall."""
    compileall.compile_dir(Path(kata_pin.__file__).parent, quiet=2)
    spent: dict[Sequence[str], list[float]] = {BARE: [], command: []}

    def run(argv: Sequence[str]) -> float:
        before = _children_s()
        wall = run_s(argv, environ)
        spent[argv].append(_children_s() - before)
        return wall

    bare, wall = in_turns(rounds, lambda: run(BARE), lambda: run(command))
    cpu = median_row(f"{name}, CPU", Samples(spent[command]), Samples(spent[BARE]), bar=bar)
    yield replace(cpu, unit="ms CPU")
    yield median_row(name, wall, bare)


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run_s(command: Sequence[str], environ: Mapping[str, str] | None = None) -> float:
    """Run a command to its end; return the seconds."""
    env = {**os.environ, **(environ or {})}

    def run() -> None:
        done = subprocess.run(command, capture_output=True, check=False, timeout=120, env=env)
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip()
            raise BenchError(f"{' '.join(command)}: status {done.returncode}: {said[-300:]}")

    return timed(run)
