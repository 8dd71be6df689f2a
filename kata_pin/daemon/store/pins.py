"""What passes must remember beyond a restart: pairs, first affinities, released sandboxes (D15)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from kata_pin.daemon.store.database import Database
from kata_pin.model.cpuset import CpuSet
from kata_pin.model.thread import ThreadKey, ThreadRole

_SCHEMA: Final = (
    """CREATE TABLE IF NOT EXISTS pairs (
    sandbox_id TEXT NOT NULL, tgid INTEGER NOT NULL, tid INTEGER NOT NULL,
    starttime INTEGER NOT NULL, cpu INTEGER NOT NULL,
    PRIMARY KEY (tgid, tid, starttime)) WITHOUT ROWID""",
    "CREATE INDEX IF NOT EXISTS pairs_sandbox ON pairs (sandbox_id)",
    """CREATE TABLE IF NOT EXISTS first_seen (
    sandbox_id TEXT NOT NULL, role TEXT NOT NULL, cpus TEXT NOT NULL,
    PRIMARY KEY (sandbox_id, role)) WITHOUT ROWID""",
    "CREATE TABLE IF NOT EXISTS released (sandbox_id TEXT PRIMARY KEY) WITHOUT ROWID",
)


class Pins:
    """Reads and writes the tables; every method raises StateError when the file cannot be used."""

    def __init__(self, db: Database) -> None:
        """Make the tables where they are missing."""
        self._db = db
        with db.transaction():
            for statement in _SCHEMA:
                db.run(statement)

    def pairs(self, sandbox_id: str) -> dict[ThreadKey, int]:
        """Return the pCPU of each paired vCPU thread."""
        query = "SELECT tgid, tid, starttime, cpu FROM pairs WHERE sandbox_id = ?"
        return {ThreadKey(*row[:3]): row[3] for row in self._db.rows(query, (sandbox_id,))}

    def first_seen(self, sandbox_id: str) -> dict[ThreadRole, CpuSet]:
        """Return the affinity each role had before the first pin; empty when never pinned."""
        query = "SELECT role, cpus FROM first_seen WHERE sandbox_id = ?"
        rows = self._db.rows(query, (sandbox_id,))
        return {ThreadRole(role): CpuSet.parse(cpus) for role, cpus in rows}

    def keep(
        self,
        sandbox_id: str,
        *,
        pairs: Mapping[ThreadKey, int],
        first_seen: Mapping[ThreadRole, CpuSet],
    ) -> None:
        """Replace what is remembered; called before the masks are set, so a kill loses nothing."""
        with self._db.transaction():
            self._clear(sandbox_id, "pairs", "first_seen")
            self._db.insert(
                "INSERT OR REPLACE INTO pairs VALUES (?, ?, ?, ?, ?)",
                [(sandbox_id, k.tgid, k.tid, k.starttime, cpu) for k, cpu in pairs.items()],
            )
            self._db.insert(
                "INSERT INTO first_seen VALUES (?, ?, ?)",
                [(sandbox_id, role.value, str(cpus)) for role, cpus in first_seen.items()],
            )

    def forget(self, sandbox_id: str) -> None:
        """Drop a sandbox that has ended."""
        with self._db.transaction():
            self._clear(sandbox_id, "pairs", "first_seen", "released")

    def released(self) -> frozenset[str]:
        """Return the sandboxes that an operator unpinned: unmanaged until they are pinned again."""
        return frozenset(row[0] for row in self._db.rows("SELECT sandbox_id FROM released"))

    def set_released(self, sandbox_ids: Iterable[str], *, released: bool) -> None:
        """Remember or forget that an operator unpinned these sandboxes."""
        statement = (
            "INSERT OR IGNORE INTO released VALUES (?)"
            if released
            else "DELETE FROM released WHERE sandbox_id = ?"
        )
        with self._db.transaction():
            self._db.insert(statement, [(one,) for one in sandbox_ids])

    def live_threads(self) -> bool:
        """Return whether new threads were reported to the daemon that set the pins last."""
        row = self._db.row("SELECT value FROM meta WHERE key = 'live_threads'")
        return row is not None and row[0] == "yes"

    def set_live_threads(self, *, live: bool) -> None:
        """Remember it for later passes without a daemon: it decides about the main thread."""
        statement = "INSERT OR REPLACE INTO meta VALUES ('live_threads', ?)"
        self._db.run(statement, ("yes" if live else "no",))

    def _clear(self, sandbox_id: str, *tables: str) -> None:
        for table in tables:
            self._db.run(f"DELETE FROM {table} WHERE sandbox_id = ?", (sandbox_id,))  # noqa: S608 - constants
