"""Brings tunables to where they should be: records first, then writes, then makes sure (D22)."""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from errno import EACCES, EINVAL, EIO, ENOENT, EPERM, EROFS
from typing import Final, NamedTuple

from msgspec.structs import replace

from kata_pin.base.errors import ParseError
from kata_pin.options.quiet.values import Goal, Observed, TunableKey, TunableRecord
from kata_pin.records.database import Database
from kata_pin.rights.broker.tunables import TunableKind

log = logging.getLogger(__name__)


# What to do about one tunable, from what is remembered, what is there and what should be.
#
# A value that we did not write is another writer's. It stays where it does no harm. Where it does,
# it is set again, unless the writer is one that came back before (`backed_off`). Only values that
# are still ours are given back.


class StepKind(Enum):
    """What is due."""

    NOTHING = "nothing"  # also where it does harm, and nobody can change it or no value is possible
    WRITE = "write"
    FORGET = "forget"  # it is as it was first, or another writer's: nothing is left to give back
    LEFT = "left"  # another writer's value that does harm, left for now


class TunableStep(NamedTuple):
    """What is due, and the record to store before it; its `written` is the value to write.

    `overrides`: the value that is there is another writer's.
    """

    kind: StepKind
    record: TunableRecord | None = None
    overrides: bool = False


NOTHING: Final = TunableStep(StepKind.NOTHING)
FORGET: Final = TunableStep(StepKind.FORGET)


def step(
    record: TunableRecord | None, seen: Observed, goal: Goal | None, *, backed_off: bool = False
) -> TunableStep:
    """Return what to do about one tunable; without a goal it is given back."""
    if record is not None and record.identity != seen.identity:  # what it was about is gone
        due = step(None, seen, goal)
        return FORGET if due is NOTHING else due
    if goal is None:
        return _give_back(record, seen)
    harms = not goal.holds(seen.value)
    ours = record is not None and record.is_ours(seen.value)
    if seen.fixed or not (ours or harms):
        return NOTHING
    first = record.first if record is not None else seen.value
    wanted = goal.value(first)
    if wanted in {"", seen.value}:
        return NOTHING
    theirs = record is not None and not ours
    if theirs and backed_off:
        return TunableStep(StepKind.LEFT)
    fresh = TunableRecord(seen.key, seen.identity, first, wanted, seen.value)
    return TunableStep(StepKind.WRITE, fresh, overrides=theirs)


def _give_back(record: TunableRecord | None, seen: Observed) -> TunableStep:
    if record is None:
        return NOTHING
    if seen.value == record.first or not record.is_ours(seen.value):
        return FORGET
    fresh = TunableRecord(seen.key, seen.identity, record.first, record.first, seen.value)
    return TunableStep(StepKind.WRITE, fresh)


# What the node's tunables were before they were changed, and what was written (D22).

_TABLE: Final = """CREATE TABLE IF NOT EXISTS tunables (
    kind TEXT NOT NULL, name TEXT NOT NULL, identity TEXT NOT NULL, first TEXT NOT NULL,
    written TEXT NOT NULL, previous TEXT NOT NULL, PRIMARY KEY (kind, name)) WITHOUT ROWID"""
_COLUMNS: Final = "kind, name, identity, first, written, previous"


class Tunables:
    """Reads and writes the table; every method raises StateError when the file cannot be used.

    The file is of one boot: after a reboot nothing is remembered, and nothing is to be undone.
    """

    def __init__(self, db: Database) -> None:
        """Make the table where it is missing."""
        self._db = db
        db.run(_TABLE)

    def all(self) -> dict[TunableKey, TunableRecord]:
        """Return every record; one of a kind that this version does not know is left out."""
        found = {}
        for kind, name, *rest in self._db.rows(f"SELECT {_COLUMNS} FROM tunables"):  # noqa: S608 - constants
            if kind in set(TunableKind):
                key = TunableKey(TunableKind(kind), name)
                found[key] = TunableRecord(key, *rest)
        return found

    def keep(self, records: Iterable[TunableRecord]) -> None:
        """Store records, before anything is written; all of them or none."""
        with self._db.transaction():
            self._db.insert(
                "INSERT OR REPLACE INTO tunables VALUES (?, ?, ?, ?, ?, ?)",
                [
                    (r.key.kind.value, r.key.name, r.identity, r.first, r.written, r.previous)
                    for r in records
                ],
            )

    def forget(self, keys: Iterable[TunableKey]) -> None:
        """Drop records of what was given back, or is gone."""
        with self._db.transaction():
            for key in keys:
                self._db.run("DELETE FROM tunables WHERE kind = ? AND name = ?", tuple(key))


# One tuner serves every kind. Each call of `apply` looks at what is there now, so nothing depends
# on what an earlier one did, in this process or in one that was killed.

RETURNS: Final = 3
"""How often another writer may change a tunable before it is left to it."""

CALM_S: Final = 600.0
"""After so long without another writer the count begins again."""

LEFT_S: Final = 600.0
"""How long a tunable is left to another writer before the next attempt."""

_FIXED: Final = {
    TunableKind.INTERRUPT: frozenset({EIO, EPERM}),
    TunableKind.KERNEL_THREAD: frozenset({EINVAL, EPERM}),
}
"""What nobody can change: a managed interrupt (EIO on Linux 6.1, EPERM on 6.12), and a
kernel thread whose affinity the kernel keeps."""

_NO_RIGHTS: Final = frozenset({EROFS, EACCES})
_NOT_SERVED: Final = "not writable until a restart with a level of `quiet` that includes it"
"""The broker serves what belongs to the level that the daemon started with."""


class Written(NamedTuple):
    """What became of a write: its errno, and the value that is there now; None if not known yet."""

    errno: int
    value: str | None = None


Writer = Callable[[Sequence[TunableRecord]], Awaitable[Sequence[Written]]]
"""Makes the writes of one kind: each record's `written`."""


@dataclass
class _Other:
    """Another writer of one tunable: when it came, and until when the tunable is left to it."""

    times: list[float] = field(default_factory=list)
    left_until: float = 0.0


@dataclass
class TunerOutcome:
    """What one `apply` found and did."""

    written: int = 0
    given_back: int = 0
    left: list[Observed] = field(default_factory=list)
    overridden: list[Observed] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)
    """Why writes failed, by what was written."""
    failed: Counter[TunableKind] = field(default_factory=Counter)
    """How many writes failed, but for those that nobody can make."""


@dataclass
class _Round:
    """One `apply`: what is to be written, and forgotten, and what came of it."""

    goals: Mapping[TunableKey, Goal]
    outcome: TunerOutcome = field(default_factory=TunerOutcome)
    due: list[TunableRecord] = field(default_factory=list)
    forget: list[TunableKey] = field(default_factory=list)


class Tuner:
    """Brings tunables to where they should be: records first, then writes, then makes sure.

    `writers` make the writes, by kind.
    """

    def __init__(self, store: Tunables, writers: Mapping[TunableKind, Writer]) -> None:
        """Raises StateError."""
        self._store = store
        self._writers = writers
        self._records = store.all()
        self._others: dict[TunableKey, _Other] = {}
        self._held: dict[TunableKey, Goal] = {}
        """The goals that tunables fulfilled when they were last looked at."""
        self._fixed: dict[TunableKey, str] = {}
        self._settled: dict[TunableKey, tuple[Observed, Goal | None, TunableRecord | None]] = {}
        """For what nothing was due, with what was looked at then."""
        self._calm: tuple[Sequence[Observed], Mapping[TunableKey, Goal], TunerOutcome] | None = None
        """The last call of `apply`, if nothing was due."""
        self._no_rights: set[TunableKind] = set()

    @property
    def records(self) -> Mapping[TunableKey, TunableRecord]:
        """What is changed now."""
        return self._records

    @property
    def calm(self) -> bool:
        """Whether nothing was due when `apply` looked last."""
        return self._calm is not None

    def forgive(self) -> None:
        """Forget what others wrote: the kernel itself rewrites masks when pCPUs come and go."""
        self._others.clear()
        self._held.clear()
        self._settled.clear()
        self._calm = None

    async def apply(
        self, seen: Sequence[Observed], goals: Mapping[TunableKey, Goal]
    ) -> TunerOutcome:
        """Bring what is seen to its goals, and give back what has none; raises StateError.

        What is seen may be the same objects again, and the goals the same mapping: that costs
        next to nothing.
        """
        if self._calm is not None and self._calm[1] is goals and self._calm[0] == seen:
            return self._calm[2]
        self._calm = None
        now = _Round(goals)
        for one in seen:
            self._decide(one, now)
        await self._write(now)
        self.forget(now.forget)
        if not (now.due or now.forget or now.outcome.left or now.outcome.problems):
            self._calm = seen, goals, now.outcome
        return now.outcome

    def adopt(self, records: Sequence[TunableRecord]) -> None:
        """Take values for ours that others made of ours, such as masks of new interrupts."""
        if records:
            self._calm = None
            self._store.keep(records)
            self._records |= {one.key: one for one in records}

    def drop_gone(self, seen: Iterable[TunableKey], kinds: Iterable[TunableKind]) -> None:
        """Forget what was changed of these kinds and is no longer there; raises StateError."""
        there, of = set(seen), set(kinds)
        self.forget([key for key in self._records if key.kind in of and key not in there])

    def _decide(self, one: Observed, now: _Round) -> None:
        goal, record = now.goals.get(one.key), self._records.get(one.key)
        if goal is None and record is None:
            return
        same = self._settled.get(one.key)
        if same is not None and same[0] is one and same[2] is record and same[1] == goal:
            return  # as in the last round, in which nothing was due
        if self._fixed.get(one.key) == one.identity:
            one = one._replace(fixed=True)
        other = self._others.get(one.key)
        left = other is not None and time.monotonic() < other.left_until
        try:
            what = step(record, one, goal, backed_off=left)
        except ParseError as error:
            now.outcome.problems[str(one.key)] = error.message
            return
        self._settled.pop(one.key, None)
        match what.kind:
            case StepKind.NOTHING:
                if goal is not None and goal.holds(one.value):
                    self._holds(one, goal, record)
                self._settled[one.key] = (one, goal, self._records.get(one.key))
            case StepKind.WRITE if what.record is not None:
                if what.overrides and goal is not None and self._held.get(one.key) == goal:
                    self._came_back(one, now.outcome)
                now.due.append(what.record)
            case StepKind.FORGET:
                now.forget.append(one.key)
            case StepKind.LEFT:
                now.outcome.left.append(one)

    def _holds(self, one: Observed, goal: Goal, record: TunableRecord | None) -> None:
        """Take down that a tunable is as it should be, and that its last write was made."""
        self._held[one.key] = goal
        if record is not None and record.previous and record.written == one.value:
            self._records[one.key] = replace(record, previous="")

    def _came_back(self, one: Observed, outcome: TunerOutcome) -> None:
        """Another writer changed what was as it should be; after some times it is left alone."""
        now = time.monotonic()
        other = self._others.setdefault(one.key, _Other())
        other.times = [at for at in other.times if now - at < CALM_S] + [now]
        if len(other.times) >= RETURNS:
            other.times.clear()
            other.left_until = now + LEFT_S
            outcome.overridden.append(one)

    async def _write(self, now: _Round) -> None:
        by_kind: dict[TunableKind, list[TunableRecord]] = {}
        for record in now.due:
            by_kind.setdefault(record.key.kind, []).append(record)
        for kind, records in by_kind.items():
            # one attempt shows whether the rights are there by now
            chosen = records[:1] if kind in self._no_rights else records
            self._store.keep(chosen)
            before = {one.key: self._records.get(one.key) for one in chosen}
            self._records |= {one.key: one for one in chosen}
            answers = await self._writers[kind](chosen)
            self._no_rights.discard(kind)
            for record, answer in zip(chosen, answers, strict=True):
                if answer.errno:
                    self._failed(record, before[record.key], answer.errno, now)
                else:
                    self._succeeded(record, answer, now)

    def _succeeded(self, record: TunableRecord, answer: Written, now: _Round) -> None:
        goal = now.goals.get(record.key)
        if goal is None:
            now.outcome.given_back += 1
            if answer.value == record.first:
                now.forget.append(record.key)
            return
        now.outcome.written += 1
        if answer.value is None:
            return
        sure = replace(record, written=answer.value, previous="")
        if answer.value != record.written:  # the kernel keeps it in another form
            self._store.keep([sure])
        self._records[record.key] = sure
        if goal.holds(answer.value):
            self._held[record.key] = goal

    def _failed(
        self, record: TunableRecord, before: TunableRecord | None, errno: int, now: _Round
    ) -> None:
        """Take down why; what was never written has nothing to give back."""
        key = record.key
        if errno in _FIXED.get(key.kind, ()) and record.written != record.first:
            self._fixed[key] = record.identity
        elif errno != ENOENT:
            now.outcome.problems[str(key)] = _NOT_SERVED if errno == EACCES else os.strerror(errno)
            now.outcome.failed[key.kind] += 1
            if errno in _NO_RIGHTS:
                self._no_rights.add(key.kind)
        if before is None or errno == ENOENT:
            now.forget.append(key)
        else:
            self._records[key] = before
            self._store.keep([before])

    def forget(self, keys: Iterable[TunableKey]) -> None:
        """Drop what is remembered of these; raises StateError."""
        gone = [key for key in keys if self._records.pop(key, None) is not None]
        if gone:
            self._calm = None
            self._store.forget(gone)
        for key in gone:
            self._others.pop(key, None)
            self._held.pop(key, None)
