"""Runs one target over many inputs, within its bounds, and keeps what broke them.

A run of an input must end within BOUND_S of CPU time per 64 KiB, with a value or with an error that
its target expects. CPU time of this thread is taken, because other work on a machine proves
nothing; an input that was too slow counts only if it is too slow again, without the collector.
"""

from __future__ import annotations

import gc
import multiprocessing
import resource
import signal
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Final, NoReturn

from tests.chaos.fuzz.mutator import MAX_BYTES, Mutator
from tests.chaos.fuzz.targets import TARGETS, Target

BOUND_S: Final = 0.1
STUCK_S: Final = 20
"""An input that runs for so long is taken for endless."""
MEMORY_BYTES: Final = 1 << 30
"""Address space that a target may add: beyond it MemoryError ends the input."""
RSS_MIB: Final = 128
KEPT: Final = 5  # findings per target; a second of the same kind and place says nothing new


class StuckError(BaseException):
    """An input did not end; no parser may catch this."""


@dataclass(frozen=True)
class Finding:
    """An input that broke a rule."""

    target: str
    rule: str
    data: bytes

    def __str__(self) -> str:
        return f"{self.target}: {self.rule}: {len(self.data)} bytes, {self.data[:120]!r}"


@dataclass
class Outcome:
    """What came of a campaign."""

    target: str
    inputs: int = 0
    refused: int = 0
    slowest_s: float = 0.0
    took_s: float = 0.0
    peak_mib: float = 0.0
    findings: list[Finding] = field(default_factory=list)


def campaign(name: str, inputs: int, *, seed: int = 1, target: Target | None = None) -> Outcome:
    """Run so many inputs in this process; `target` is TARGETS[name] unless another is given."""
    chosen = target or TARGETS[name]
    done = Outcome(name)
    seen: set[str] = set()
    old = signal.signal(signal.SIGALRM, _stuck)
    start = time.monotonic()
    try:
        for data in Mutator(chosen.seeds(), chosen.words, seed):
            if done.inputs == inputs:
                break
            done.inputs += 1
            if not done.inputs % 256:
                signal.setitimer(signal.ITIMER_REAL, STUCK_S)
            rule, refused, took = once(chosen, data)
            done.refused += refused
            done.slowest_s = max(done.slowest_s, took)
            place = rule.partition("\n")[0]
            if rule and place not in seen and len(seen) < KEPT:
                seen.add(place)
                done.findings.append(Finding(name, rule, data))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    done.took_s = time.monotonic() - start
    done.peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return done


def once(target: Target, data: bytes, *, bound_s: float = BOUND_S) -> tuple[str, bool, float]:
    """Run one input; return the rule that it broke (empty: none), if it was refused, its time."""
    rule, refused, took = _timed(target, data)
    bound = bound_s * max(1.0, len(data) / MAX_BYTES)
    if not rule and took > bound:
        gc.disable()
        try:
            took = min(took, *(_timed(target, data)[2] for _ in range(2)))
        finally:
            gc.enable()
        if took > bound:
            rule = f"{took:.2f} s of CPU time, more than {bound:g}"
    return rule, refused, took


def _timed(target: Target, data: bytes) -> tuple[str, bool, float]:
    rule, refused = "", False
    start = time.thread_time()
    try:
        target.run(data)
    except target.expected as error:
        refused = True
        try:
            str(error).encode()
        except UnicodeEncodeError:
            rule = f"a message that no terminal can take: {_place(error)}"
    except StuckError:
        rule = f"still running after {STUCK_S} s"
    except Exception as error:  # whatever it is, it is the finding
        rule = f"{type(error).__name__} {_place(error)}: {str(error)[:200]}"
    return rule, refused, time.thread_time() - start


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    ours = [one for one in frames if "/kata_pin/" in one.filename or "/tests/" in one.filename]
    last = (ours or frames)[-1]
    return f"at {Path(last.filename).name}:{last.name}:{last.lineno}"


def _stuck(_signal: int, _frame: FrameType | None) -> NoReturn:
    raise StuckError


def isolated(name: str, inputs: int, seed: int = 1) -> Outcome:
    """Run a campaign in a process of its own, whose memory is bounded and measured."""
    with multiprocessing.get_context("spawn").Pool(1, _bounded, (), 1) as pool:
        return pool.apply(campaign, (name, inputs), {"seed": seed})


def _bounded() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))
