"""Which groups of resctrl are ours: those that were made for sandboxes, with their classes."""

from __future__ import annotations

from typing import Final

from kata_pin.daemon.store.database import Database

_TABLE: Final = """CREATE TABLE IF NOT EXISTS cache_groups (
    sandbox_id TEXT NOT NULL, class TEXT NOT NULL,
    PRIMARY KEY (sandbox_id, class)) WITHOUT ROWID"""


class CacheGroupTable:
    """Reads and writes the table; every method raises StateError when the file cannot be used."""

    def __init__(self, db: Database) -> None:
        """Make the table where it is missing."""
        self._db = db
        db.run(_TABLE)

    def all(self) -> list[tuple[str, str]]:
        """Return every group as sandbox id and class, which is empty for none."""
        return [(row[0], row[1]) for row in self._db.rows("SELECT * FROM cache_groups")]

    def keep(self, sandbox_id: str, class_name: str) -> None:
        """Remember a group; called before it is made, so that a kill leaves none behind."""
        values = sandbox_id, class_name
        self._db.run("INSERT OR IGNORE INTO cache_groups VALUES (?, ?)", values)

    def forget(self, sandbox_id: str, class_name: str) -> None:
        """Forget a group that was removed."""
        values = sandbox_id, class_name
        self._db.run("DELETE FROM cache_groups WHERE sandbox_id = ? AND class = ?", values)
