"""What to do about one tunable, from what is remembered, what is there and what should be.

A value that we did not write is another writer's. It stays where it does no harm. Where it does,
it is set again, unless the writer is one that came back before (`backed_off`). Only values that are
still ours are given back.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from kata_pin.model.quiet.tunables import Goal, Observed, TunableRecord


class StepKind(Enum):
    """What is due."""

    NOTHING = "nothing"
    WRITE = "write"
    FORGET = "forget"  # it is as it was first, or another writer's: nothing is left to give back
    LEFT = "left"  # another writer's value that does harm, left for now
    FIXED = "fixed"  # it does harm, and nobody can change it
    IMPOSSIBLE = "impossible"  # it does harm, and no value is possible


class Step(NamedTuple):
    """What is due, and the record to store before it; its `written` is the value to write.

    `overrides`: the value that is there is another writer's.
    """

    kind: StepKind
    record: TunableRecord | None = None
    overrides: bool = False


def step(
    record: TunableRecord | None, seen: Observed, goal: Goal | None, *, backed_off: bool = False
) -> Step:
    """Return what to do about one tunable; without a goal it is given back."""
    if record is not None and record.identity != seen.identity:  # what it was about is gone
        due = step(None, seen, goal)
        return Step(StepKind.FORGET) if due.kind is StepKind.NOTHING else due
    if goal is None:
        return _give_back(record, seen)
    harms = not goal.holds(seen.value)
    if seen.fixed:
        return Step(StepKind.FIXED if harms else StepKind.NOTHING)
    ours = record is not None and record.is_ours(seen.value)
    if not ours and not harms:
        return Step(StepKind.NOTHING)
    first = record.first if record is not None else seen.value
    wanted = goal.value(first)
    if not wanted:
        return Step(StepKind.IMPOSSIBLE if harms else StepKind.NOTHING)
    if wanted == seen.value:
        return Step(StepKind.NOTHING)
    theirs = record is not None and not ours
    if theirs and backed_off:
        return Step(StepKind.LEFT, overrides=True)
    fresh = TunableRecord(seen.key, seen.identity, first, wanted, seen.value)
    return Step(StepKind.WRITE, fresh, overrides=theirs)


def _give_back(record: TunableRecord | None, seen: Observed) -> Step:
    if record is None:
        return Step(StepKind.NOTHING)
    if seen.value == record.first or not record.is_ours(seen.value):
        return Step(StepKind.FORGET, overrides=seen.value != record.first)
    fresh = TunableRecord(seen.key, seen.identity, record.first, record.first, seen.value)
    return Step(StepKind.WRITE, fresh)
