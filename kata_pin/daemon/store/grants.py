"""The allocator's state in the registry's file: one row, replaced whole (DESIGN D15).

In the registry, so that it is stored in one transaction with the record that it is about, and is
copied, checked and set aside with it. A row that cannot be read counts as none: what runs tells
what there is. Lifetime: as long as its Registry. Out of scope: the format (allocator_state.py).
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

from kata_pin.daemon.store.database import Registry
from kata_pin.daemon.store.transaction import transaction
from kata_pin.errors import ParseError, StateError
from kata_pin.model.alloc import AllocState
from kata_pin.wire.allocator_state import dump_state, parse_state

log = logging.getLogger(__name__)

_TABLE = (
    "CREATE TABLE IF NOT EXISTS alloc (number INTEGER PRIMARY KEY CHECK (number = 1), state TEXT)"
)


class AllocStore:
    """Reads and writes the row. Methods raise StateError when the file cannot be used."""

    def __init__(self, registry: Registry) -> None:
        self._path = registry.path
        self._db = registry.database

    @contextmanager
    def together(self) -> Iterator[None]:
        """Make everything that is written meanwhile one transaction, the registry's writes too."""
        try:
            with transaction(self._db):
                yield
        except sqlite3.Error as error:
            raise StateError(f"{self._path}: {error}") from error

    def read(self) -> AllocState | None:
        """Return the state, None where there is none that can be read."""
        try:
            known = self._db.execute("SELECT 1 FROM sqlite_master WHERE name = 'alloc'").fetchone()
            row = known and self._db.execute("SELECT state FROM alloc").fetchone()
            return parse_state(row[0].encode()) if row else None
        except (sqlite3.Error, ParseError, AttributeError) as error:
            log.warning("registry %s: allocations not read: %s", self._path, error)
            return None

    def clear(self) -> None:
        """Have no state."""
        with self.together():
            self._db.execute(_TABLE)
            self._db.execute("DELETE FROM alloc")

    def write(self, state: AllocState) -> None:
        """Replace the state."""
        with self.together():
            self._db.execute(_TABLE)
            self._db.execute(
                "INSERT OR REPLACE INTO alloc VALUES (1, ?)", (dump_state(state).decode(),)
            )
