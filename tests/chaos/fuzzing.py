"""The part `fuzz`: a campaign per target, blind and, where atheris is installed, guided.

Bars: no finding; an input of 64 KiB within 100 ms of CPU time; the process below 128 MiB. What
breaks a rule is written to a folder, and its name is printed.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.bench.figures import MS, BenchError, Row, count_row
from tests.chaos.fuzz.campaign import BOUND_S, RSS_MIB, Outcome, isolated
from tests.chaos.fuzz.targets import TARGETS

GUIDED_SHARE = 10
"""Guided inputs are a tenth of the blind ones: each costs about ten times as much."""


def measure(inputs: int, only: tuple[str, ...]) -> Iterator[Row]:
    """Yield the rows of all targets together; each target's figures go to stderr."""
    unknown = set(only) - set(TARGETS)
    if unknown:
        raise BenchError(f"no such target: {', '.join(sorted(unknown))}")
    names = [name for name in TARGETS if name in only or not only]
    kept = Path(tempfile.mkdtemp(prefix="kata-pin-fuzz-"))
    done = [_told(isolated(name, inputs), kept) for name in names]
    findings = sum(len(one.findings) for one in done)
    slowest = max(done, key=lambda one: one.slowest_s)
    largest = max(done, key=lambda one: one.peak_mib)
    count = sum(one.inputs for one in done)
    detail = f"{len(done)} targets" + (f"; see {kept}" if findings else "")
    yield count_row("fuzz: findings", findings, count, detail)
    # As first taken: an input that is too slow again is a finding.
    yield Row("fuzz: slowest input", slowest.slowest_s * MS, "ms", count, detail=slowest.target)
    peak = largest.peak_mib
    yield count_row("fuzz: largest process", peak, count, largest.target, unit="MiB", bar=RSS_MIB)
    if importlib.util.find_spec("atheris") is None:
        print("fuzz: atheris is not installed (pip install atheris)", file=sys.stderr)
        return
    guided = max(1, inputs // GUIDED_SHARE)
    broken = [name for name in names if _guided(name, guided, kept)]
    detail = f"{len(names)} targets" + (f": {', '.join(broken)}; see {kept}" if broken else "")
    by_coverage = "fuzz: findings, guided by coverage"
    yield count_row(by_coverage, len(broken), guided * len(names), detail)
    if not findings and not broken:
        shutil.rmtree(kept)


def _told(done: Outcome, kept: Path) -> Outcome:
    """Print a campaign's figures and keep its findings; return it."""
    print(
        f"  {done.target:24} {done.inputs} inputs in {done.took_s:.0f} s, {done.refused} refused, "
        f"slowest {done.slowest_s * MS:.1f} ms, {done.peak_mib:.0f} MiB, bound {BOUND_S * MS:g} ms",
        file=sys.stderr, flush=True,
    )  # fmt: skip
    for number, finding in enumerate(done.findings):
        (kept / f"{done.target}-{number}").write_bytes(finding.data)
        print(f"    {finding}", file=sys.stderr, flush=True)
    return done


def _guided(name: str, inputs: int, kept: Path) -> bool:
    """Run a guided campaign; return whether it found something."""
    folder = kept / f"{name}-guided"
    folder.mkdir()
    command = [sys.executable, "-m", "tests.chaos.fuzz.guided", name, str(inputs), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"  {name}: {done.stdout[-300:]}{done.stderr[-1500:]}", file=sys.stderr, flush=True)
        return True
    shutil.rmtree(folder)
    return False
