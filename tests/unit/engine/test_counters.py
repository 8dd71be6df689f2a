"""Counts of passes, errors and durations, as metrics tell them."""

from __future__ import annotations

import errno

import pytest

from kata_pin.base.cpuset import CpuSet
from kata_pin.base.errors import StateError
from kata_pin.base.placement import (
    Action,
    ActionResult,
    Cause,
    Drift,
    DriftKind,
    PassOutcome,
    Report,
)
from kata_pin.base.threads import ThreadKey
from kata_pin.base.values import Outcome
from kata_pin.engine.counters import Counters, Histogram

KEY = ThreadKey(1, 2, 3)
ONE = CpuSet.parse("1")


def _result(outcome: Outcome) -> ActionResult:
    return ActionResult(Action(KEY, ONE, ONE, "test"), outcome, ONE)


def test_a_duration_counts_in_every_bound_above_it() -> None:
    """Bounds are inclusive, the last is +Inf, a clock that went back gives no duration at all."""
    histogram = Histogram((0.01, 0.1))
    for seconds in (0.01, 0.05, 3.0, -5.0):
        histogram.observe(seconds)
    assert list(histogram.cumulative()) == [("0.01", 2), ("0.1", 3), ("+Inf", 4)]
    assert histogram.sum == pytest.approx(3.06)


def test_a_pass_counts_what_it_found_and_did() -> None:
    """Drift by its kind, refusals by their errno, durations of passes that set something."""
    counters = Counters()
    drift = Drift(KEY, DriftKind.MOVED, ONE, ONE)
    results = tuple(map(_result, (Outcome.DONE, Outcome.REFUSED, Outcome.DENIED, Outcome.GONE)))
    report = Report("s", drifts=(drift, drift), results=results, duration_ns=2_000_000)
    counters.passed(PassOutcome("s", "s", "ok", report, Cause()))
    counters.passed(PassOutcome("s", "s", "ok", Report("s", duration_ns=10**9), Cause()))
    assert counters.drifts[DriftKind.MOVED] == 2
    assert counters.drifts[DriftKind.OTHER_WRITER] == 0
    assert dict(counters.errors) == {
        ("sched_setaffinity", "EINVAL"): 1,
        ("sched_setaffinity", "EPERM"): 1,
    }
    assert counters.apply.sum == pytest.approx(0.002)


def test_errors_are_counted_by_their_errno() -> None:
    """Also one that was translated; what has none, or one that nobody knows, has no name."""
    counters = Counters()
    counters.failed("spool", OSError(errno.ENOSPC, "full"))
    translated = StateError("registry.db: disk is full")
    translated.__cause__ = OSError(errno.ENOSPC, "full")
    counters.failed("spool", translated)
    counters.failed("pass", ValueError("x"))
    counters.failed("pass", OSError(99999, "x"))
    assert dict(counters.errors) == {("spool", "ENOSPC"): 2, ("pass", "none"): 2}
