"""Which threads were made real-time ones, and the class that each had before."""

from __future__ import annotations

from typing import Final

from kata_pin.daemon.store.database import Database
from kata_pin.model.measured.scheduling import Scheduling
from kata_pin.model.thread import ThreadKey

_TABLE: Final = """CREATE TABLE IF NOT EXISTS rt_threads (
    sandbox_id TEXT NOT NULL, tgid INTEGER NOT NULL, tid INTEGER NOT NULL,
    starttime INTEGER NOT NULL, policy INTEGER NOT NULL, priority INTEGER NOT NULL,
    PRIMARY KEY (tgid, tid, starttime)) WITHOUT ROWID"""


class RtThreads:
    """Reads and writes the table; every method raises StateError when the file cannot be used."""

    def __init__(self, db: Database) -> None:
        """Make the table where it is missing."""
        self._db = db
        db.run(_TABLE)

    def of(self, sandbox_id: str) -> dict[ThreadKey, Scheduling]:
        """Return the threads of a sandbox with their first class."""
        query = "SELECT tgid, tid, starttime, policy, priority FROM rt_threads WHERE sandbox_id = ?"
        rows = self._db.rows(query, (sandbox_id,))
        return {ThreadKey(*row[:3]): Scheduling(row[3], row[4], row[2]) for row in rows}

    def keep(self, sandbox_id: str, key: ThreadKey, first: Scheduling) -> None:
        """Remember a thread before its class is changed; the first one that is told stays."""
        values = (sandbox_id, *key, first.policy, first.priority)
        self._db.run("INSERT OR IGNORE INTO rt_threads VALUES (?, ?, ?, ?, ?, ?)", values)

    def forget(self, key: ThreadKey) -> None:
        """Forget a thread that has its first class again, or ended."""
        self._db.run(
            "DELETE FROM rt_threads WHERE tgid = ? AND tid = ? AND starttime = ?", tuple(key)
        )

    def sandboxes(self) -> list[str]:
        """Return the sandboxes that have such threads."""
        return [row[0] for row in self._db.rows("SELECT DISTINCT sandbox_id FROM rt_threads")]
