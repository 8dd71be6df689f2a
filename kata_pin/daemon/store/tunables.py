"""What the node's tunables were before they were changed, and what was written (D22)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kata_pin.daemon.store.database import Database
from kata_pin.model.quiet.tunables import TunableKey, TunableKind, TunableRecord

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
