"""The history: what changed of each sandbox, when, why, and how long it took until it was pinned.

A row is a mask or a state that changed, or threads that were moved; a pass that changes nothing
writes none. One transaction per row, before a waiting hook receives `pinned` (D15). The number of
rows is bounded, the oldest go first. Times are CLOCK_BOOTTIME: the file lives for one boot.
"""

from __future__ import annotations

import logging
import time
from dataclasses import astuple, dataclass, fields
from typing import Final

from kata_pin.config.tree import History as Limits
from kata_pin.daemon.live_config import LiveConfig
from kata_pin.daemon.store.database import Database
from kata_pin.errors import DaemonError, StateError
from kata_pin.model.pass_outcome import GONE, NO_VMM, PassOutcome

log = logging.getLogger(__name__)

MAX_SHOWN: Final = 1000
"""Most rows that one document holds: some 10 ms of the event loop."""

MAX_SINCE_S: Final = 10 * 365 * 86400
"""Furthest that a request may reach back: longer than any boot."""

MAX_REASONS: Final = 8
"""Reasons of one pass that are kept: a storm of events has few kinds."""


@dataclass(frozen=True)
class Change:
    """One row. `waited_us` is from the first event that asked for the pass until its end.

    `reasons` are lines.
    """

    sandbox_id: str
    pod: str
    boot_ns: int
    state: str
    was_state: str
    mask: str | None
    was_mask: str | None
    threads: int
    moved: int
    waited_us: int
    reasons: str


_COLUMNS: Final = tuple(field.name for field in fields(Change))
_TABLE: Final = """
CREATE TABLE IF NOT EXISTS history (
    number INTEGER PRIMARY KEY, sandbox_id TEXT NOT NULL, pod TEXT NOT NULL,
    boot_ns INTEGER NOT NULL, state TEXT NOT NULL, was_state TEXT NOT NULL, mask TEXT,
    was_mask TEXT, threads INTEGER NOT NULL, moved INTEGER NOT NULL, waited_us INTEGER NOT NULL,
    reasons TEXT NOT NULL)"""
_INDEX: Final = "CREATE INDEX IF NOT EXISTS history_sandbox ON history (sandbox_id, number)"
_INSERT: Final = (
    f"INSERT INTO history ({', '.join(_COLUMNS)}) VALUES ({', '.join('?' * len(_COLUMNS))})"  # noqa: S608 - constants
)
_SELECT: Final = f"SELECT {', '.join(_COLUMNS)} FROM history"  # noqa: S608 - constants

StateAndMask = tuple[str, str | None]
"""State and mask of a sandbox as of its last row."""


class History:
    """Writes and reads the table; an error in writing never fails a pass."""

    def __init__(self, db: Database, live: LiveConfig) -> None:
        self.failures = 0
        """Rows that could not be written."""
        self._db = db
        self._live = live
        self._last: dict[str, StateAndMask | None] = {}
        self._count: int | None = None

    def _counted(self) -> int:
        """Return the number of rows; makes the table, again if it has another form."""
        if self._count is None:
            with self._db.transaction():
                there = [row[1] for row in self._db.rows("PRAGMA table_info(history)")]
                if there and there != ["number", *_COLUMNS]:
                    log.warning("registry %s: history of another form dropped", self._db.path)
                    self._db.run("DROP TABLE history")
                self._db.run(_TABLE)
                self._db.run(_INDEX)
                self._count = self._db.rows("SELECT count(*) FROM history")[0][0]
        assert self._count is not None, "it was counted"
        return self._count

    def passed(self, outcome: PassOutcome) -> None:
        """Write a row if the pass changed something."""
        mask = None if outcome.mask is None else str(outcome.mask)
        now, last, moved = (outcome.state, mask), self._last_of(outcome.sandbox_id), outcome.moved
        if now == last and not moved:
            return
        if last is None and outcome.state == NO_VMM:  # another runtime's, or its VM is yet to start
            return
        self._write(outcome, now, threads=len(outcome.report.threads), moved=moved)

    def ended(self, outcome: PassOutcome) -> None:
        """Write that a sandbox has ended, if it ever had a row, and why its last pass ran."""
        if self._last_of(outcome.sandbox_id) is not None:
            self._write(outcome, (GONE, None))
        self._last.pop(outcome.sandbox_id, None)

    def failed(self, operation: str, error: Exception) -> None:
        """See Observer: the next pass records what a failed one changed."""

    def _last_of(self, sandbox_id: str) -> StateAndMask | None:
        """Return the last state and mask of a sandbox, None if it has no row or has ended."""
        if sandbox_id not in self._last:
            row = None
            try:
                self._counted()
                row = self._db.row(
                    "SELECT state, mask FROM history WHERE sandbox_id = ?"
                    " ORDER BY number DESC LIMIT 1",
                    (sandbox_id,),
                )
            except StateError as error:
                self._failed(error)
            self._last[sandbox_id] = None if row is None or row[0] == GONE else (row[0], row[1])
        return self._last[sandbox_id]

    def _write(
        self, outcome: PassOutcome, now: StateAndMask, *, threads: int = 0, moved: int = 0
    ) -> None:
        was_state, was_mask = self._last.get(outcome.sandbox_id) or ("", None)
        self._last[outcome.sandbox_id] = now
        limits = self._live.now.history
        if not limits.rows:
            return
        change = Change(
            sandbox_id=outcome.sandbox_id,
            pod=outcome.pod,
            boot_ns=time.clock_gettime_ns(time.CLOCK_BOOTTIME),
            state=now[0],
            was_state=was_state,
            mask=now[1],
            was_mask=was_mask,
            threads=threads,
            moved=moved,
            waited_us=max(0, round((time.monotonic() - outcome.cause.since) * 1e6)),
            reasons="\n".join(outcome.cause.reasons[:MAX_REASONS]),
        )
        try:
            count = self._counted() + 1
            with self._db.transaction():
                self._db.run(_INSERT, astuple(change))
                if change.pod != change.sandbox_id:  # a VM that only starts has no name yet
                    self._db.run(
                        "UPDATE history SET pod = ? WHERE sandbox_id = ? AND pod = sandbox_id",
                        (change.pod, change.sandbox_id),
                    )
                count -= self._evict(outcome.sandbox_id, count, limits)
            self._count = count
        except StateError as error:
            self._failed(error)

    def _evict(self, sandbox_id: str, count: int, limits: Limits) -> int:
        """Drop the oldest rows beyond the limits; return how many those were."""
        dropped = self._db.run(
            "DELETE FROM history WHERE sandbox_id = :sandbox AND number <= ("
            "SELECT number FROM history WHERE sandbox_id = :sandbox"
            " ORDER BY number DESC LIMIT 1 OFFSET :kept)",
            {"sandbox": sandbox_id, "kept": limits.sandbox_rows},
        )
        surplus = count - dropped - limits.rows
        if surplus > 0:
            dropped += self._db.run(
                "DELETE FROM history WHERE number IN ("
                "SELECT number FROM history ORDER BY number LIMIT ?)",
                (surplus,),
            )
        return dropped

    def _failed(self, error: StateError) -> None:
        """Log once that the history has a gap; the pins are not affected."""
        level = logging.DEBUG if self.failures else logging.WARNING
        self.failures += 1
        log.log(level, "history not written: %s", error)

    def changes(
        self, name: str = "", *, since_s: float | None = None, limit: int = MAX_SHOWN
    ) -> list[Change]:
        """Return the newest rows, oldest first, of all sandboxes or of those that `name` means.

        `name` is an id, namespace/name or name of a pod, of which there may have been several
        sandboxes, or the start of an id. Raises DaemonError when it means none, StateError.
        """
        self._counted()
        conditions, values = ["1"], list[object]()
        if name:
            values += self._meant(name)
            conditions.append(f"sandbox_id IN ({', '.join('?' * len(values))})")
        if since_s is not None:
            conditions.append("boot_ns >= ?")
            values.append(time.clock_gettime_ns(time.CLOCK_BOOTTIME) - int(since_s * 1e9))
        rows = self._db.rows(
            f"{_SELECT} WHERE {' AND '.join(conditions)} ORDER BY number DESC LIMIT ?",
            [*values, limit],
        )
        return [Change(*row) for row in rows][::-1]

    def _meant(self, name: str) -> list[str]:
        for condition in (
            ":name IN (sandbox_id, pod)",
            "substr(pod, instr(pod, '/') + 1) = :name",
            "substr(sandbox_id, 1, length(:name)) = :name",
        ):
            rows = self._db.rows(
                f"SELECT DISTINCT sandbox_id FROM history WHERE {condition}",  # noqa: S608 - constants
                {"name": name},
            )
            if ids := [str(row[0]) for row in rows]:
                return ids
        raise DaemonError(f"no history of {name!r}", hint="kata-pin history shows all there is")
