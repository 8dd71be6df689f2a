"""scripts/bench: measure the bars of docs/design.md on this machine and print them.

    scripts/bench [NAME...] [--json | --markdown] [--quick] [--minutes N] [--compare OTHER_CHECKOUT]

Without names all but `peers` and `sync` is measured. Exit status 1 when something could not be
measured, or when what was measured did something wrong (a hook's message lost); a missed bar is
only printed. With --compare each part runs in this checkout and in another one in turns, and the
table has one row per figure: here, there, and the ratio of both.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.bench import (
    allocation,
    audits,
    commands,
    events,
    following,
    growth,
    guestmap,
    hooks,
    idle,
    measuring,
    memory,
    nrinode,
    nrireplies,
    peers,
    quiet,
    soak,
    state,
    top,
)
from tests.bench.compare import compared
from tests.bench.figures import (
    BenchError,
    Row,
    interpreter_mib,
    loop_ms,
    markdown,
    table,
    with_floor,
)
from tests.bench.machine import described
from tests.bench.node import BenchNode


@dataclass(frozen=True)
class Part:
    """A part of the benchmark: what it yields, and its rounds in full and in --quick."""

    measure: Callable[[BenchNode, int], Iterator[Row]]
    rounds: int
    quick: int
    about: str
    asked_only: bool = False
    """Whether it is left out unless it is named: it needs what nothing else needs, or is slow."""


PARTS = {
    "hook": Part(hooks.measure, 100, 20, "what a hook costs a container"),
    "event": Part(events.measure_events, 300, 60, "from a message to the last thread verified"),
    "follow": Part(following.measure, 200, 40, "from an update without a hook to its pins"),
    "thread": Part(
        events.measure_births, 40, 12, "from a thread's birth to its pin, by the VM's size"
    ),
    "nri": Part(nrireplies.measure, 100, 20, "NRI's answers while 100 sandboxes reconcile"),
    "sync": Part(
        nrinode.measure,
        40,
        4,
        "NRI with 500 containers, by real containerds; only when named",
        asked_only=True,
    ),
    "audit": Part(audits.measure, 30, 8, "audits of 5,000 threads in 250 sandboxes"),
    "idle": Part(idle.measure, 60, 20, "the daemon at rest with 250 sandboxes, and its commands"),
    "state": Part(state.measure, 30, 8, "the state document of 5,000 threads in 250 sandboxes"),
    "top": Part(top.measure, 60, 15, "a sample of kata-pin top over 1,000 threads"),
    "measure": Part(measuring.measure, 20, 8, "recording task switches, and the watch"),
    "quiet": Part(quiet.measure, 60, 15, "audits of quiet pCPUs: 500 interrupts and 64 pCPUs"),
    "growth": Part(growth.measure, 10, 4, "audits from 10 to 1,000 sandboxes"),
    "memory": Part(memory.measure, 60, 30, "memory of one sandbox of 21 threads"),
    "map": Part(guestmap.measure, 2000, 300, "which vCPU is which guest CPU, of 64"),
    "alloc": Part(allocation.measure, 300, 60, "decisions of the allocator; 1,000 pods of churn"),
    "soak": Part(soak.measure, 60, 20, "a day of churn: what stays behind (--minutes N)"),
    "command": Part(commands.measure, 20, 5, "start of the command line"),
    "peers": Part(peers.measure, 20, 5, "beside libvirt 9; only when named", asked_only=True),
}


def main(arguments: list[str]) -> int:
    """Measure what was asked for and print it; return the exit status."""
    about = "\n".join(f"  {name:8} {part.about}" for name, part in PARTS.items())
    parser = argparse.ArgumentParser(
        prog="scripts/bench", formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Measure what kata-pin costs on this machine.", epilog=f"names:\n{about}",
    )  # fmt: skip
    parser.add_argument("names", nargs="*", metavar="NAME", help="parts to measure")
    parser.add_argument("--json", action="store_true", help="print an array of rows as JSON")
    parser.add_argument(
        "--markdown", action="store_true", help="print the table of docs/performance.md"
    )
    parser.add_argument("--minutes", type=float, metavar="N", help="how long to soak")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, for a first look")
    parser.add_argument(
        "--compare", type=Path, metavar="OTHER_CHECKOUT", help="measure two checkouts in turns"
    )
    parser.add_argument(
        "--rounds", type=int, default=3, metavar="N", help="turns of --compare (default: 3)"
    )
    options = parser.parse_args(arguments)
    unknown = set(options.names) - set(PARTS)
    if unknown:
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    print(described(), file=sys.stderr if options.json else sys.stdout, flush=True)
    names = [
        name
        for name, part in PARTS.items()
        if name in options.names or not (options.names or part.asked_only)
    ]
    minutes = ["--minutes", str(options.minutes)] if options.minutes is not None else []
    if options.compare is not None:
        passed = [*(["--quick"] if options.quick else []), *minutes]
        return compared(names, options.compare, options.rounds, passed)
    rows: list[Row] = []
    failed = False
    for name in names:
        rounds = PARTS[name].quick if options.quick else PARTS[name].rounds
        if name == "soak" and options.minutes is not None:
            rounds = max(1, round(60 * options.minutes))
        failed |= _measure(name, rounds, rows)
    if options.json:
        print("[\n" + ",\n".join(row.as_json() for row in rows) + "\n]")
    else:
        print(markdown(rows) if options.markdown else table(rows))
    return 1 if failed else 0


def _measure(name: str, rounds: int, rows: list[Row]) -> bool:
    """Measure one part, adding to `rows`; return whether it failed."""
    start = time.monotonic()
    print(f"{name}: {PARTS[name].about}", file=sys.stderr, flush=True)
    try:
        with BenchNode() as node:
            loop, memory = loop_ms(), interpreter_mib()
            rows += [with_floor(row, loop, memory) for row in PARTS[name].measure(node, rounds)]
    except (BenchError, TimeoutError, OSError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return True
    print(f"{name}: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
