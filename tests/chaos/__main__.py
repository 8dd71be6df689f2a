"""scripts/chaos: attack kata-pin in parts, by name, and say which bars held.

    scripts/chaos                         lists the parts
    scripts/chaos PART... [--short|--full|--count N] [--only NAME...] [--json]

Exit status 1 when a bar was missed, or when a part could not be run.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import partial

from tests.bench.figures import BenchError, Row, table
from tests.bench.machine import described
from tests.chaos import (
    attacks,
    bursts,
    churning,
    faults,
    fuzzing,
    hostile_daemon,
    identity,
    kills,
    memory,
)
from tests.chaos.attacks import ATTACKS


class Size(IntEnum):
    """How much a part does: a first look, the usual, what docs/verification.md reports."""

    SHORT = 0
    USUAL = 1
    FULL = 2


@dataclass(frozen=True)
class Part:
    """One part: what it yields, given a count of its own units, and its counts by size."""

    run: Callable[[int, tuple[str, ...]], Iterator[Row]]
    counts: tuple[int, int, int]
    unit: str
    about: str


def _attack(name: str, hooks: int, _only: tuple[str, ...]) -> Iterator[Row]:
    return attacks.measure(name, hooks)


PARTS = {
    **{
        name: Part(
            partial(_attack, name), (40, 120, 600), "hooks of healthy sandboxes", attack.about
        )
        for name, attack in ATTACKS.items()
    },
    "identity": Part(
        identity.measure, (600, 2000, 10_000), "tries", "processes that claim to be a VMM"
    ),
    "hostile": Part(
        hostile_daemon.measure, (20_000, 100_000, 1_000_000), "requests",
        "a daemon that was taken over, at its broker",
    ),
    "memory": Part(memory.measure, (1, 1, 1), "round", "inputs made to exhaust memory"),
    "records": Part(
        faults.records, (40, 200, 1000), "hooks", "passing errors when config.json is opened"
    ),
    "disk": Part(faults.disk, (5, 20, 60), "sandboxes", "a full disk that is freed again"),
    "checkpoint": Part(
        faults.checkpoint, (100, 1000, 5000), "files", "whatever the kubelet's checkpoint holds"
    ),
    "kill": Part(
        kills.measure, (40, 250, 1000), "kills", "kill -9 at random moments while hooks come"
    ),
    "hooks500": Part(bursts.measure, (200, 500, 500), "hooks", "hooks at once"),
    "churn": Part(
        churning.measure, (2_000, 10_000, 100_000), "lives", "containers that come and go"
    ),
    "fuzz": Part(
        fuzzing.measure, (20_000, 100_000, 1_000_000), "inputs per parser",
        "damaged inputs for every parser; --only names targets",
    ),
}  # fmt: skip


def main(arguments: list[str]) -> int:
    """Run the parts that were named and print their rows; return the exit status."""
    about = "\n".join(
        f"  {name:12} {part.about} ({'/'.join(map(str, part.counts))} {part.unit})"
        for name, part in PARTS.items()
    )
    parser = argparse.ArgumentParser(
        prog="scripts/chaos", formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Attack kata-pin on this machine and say which bars held.",
        epilog=f"parts (--short/usual/--full):\n{about}",
    )  # fmt: skip
    parser.add_argument("parts", nargs="*", metavar="PART", help="parts to run; none lists them")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--short", dest="size", action="store_const", const=Size.SHORT)
    size.add_argument("--full", dest="size", action="store_const", const=Size.FULL)
    size.add_argument("--count", type=int, metavar="N", help="so many of the part's units")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="pieces of a part")
    parser.add_argument("--json", action="store_true", help="print an array of rows as JSON")
    options = parser.parse_args(arguments)
    unknown = set(options.parts) - set(PARTS)
    if unknown:
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    if not options.parts:
        print(parser.format_help())
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is ended
    print(described(), file=sys.stderr, flush=True)
    rows: list[Row] = []
    failed = False
    for name in options.parts:
        usual = PARTS[name].counts[Size.USUAL if options.size is None else options.size]
        count = usual if options.count is None else max(1, options.count)
        failed |= _run(name, count, tuple(options.only), rows)
    if options.json:
        print("[\n" + ",\n".join(row.as_json() for row in rows) + "\n]")
    else:
        print(table(rows))
    return 1 if failed or any(row.held is False for row in rows) else 0


def _run(name: str, count: int, only: tuple[str, ...], rows: list[Row]) -> bool:
    """Run one part, adding to `rows`; return whether it could not be run."""
    start = time.monotonic()
    print(f"{name}: {PARTS[name].about}", file=sys.stderr, flush=True)
    try:
        for row in PARTS[name].run(count, only):
            rows.append(row)
            print(f"  {table([row]).splitlines()[1]}", file=sys.stderr, flush=True)
    except (BenchError, TimeoutError, OSError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return True
    print(f"{name}: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
