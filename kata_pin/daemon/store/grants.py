"""The allocator's state in the registry's file: one row, replaced whole (D15).

In that file, so that it is stored in one transaction with the record that it is about. A row that
cannot be read counts as none: the state is then rebuilt from what runs.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from typing import Final

from kata_pin.daemon.store.database import Database
from kata_pin.errors import ParseError, StateError
from kata_pin.model.alloc import AllocState
from kata_pin.wire.allocator_state import dump_state, parse_state

log = logging.getLogger(__name__)

_TABLE: Final = (
    "CREATE TABLE IF NOT EXISTS alloc (number INTEGER PRIMARY KEY CHECK (number = 1), state TEXT)"
)


class AllocStore:
    """Reads and writes the row. Methods raise StateError when the file cannot be used."""

    def __init__(self, db: Database) -> None:
        """Make the table if there is none."""
        self._db = db
        db.run(_TABLE)

    def together(self) -> AbstractContextManager[None]:
        """Make all writes of the block one transaction, the registry's included."""
        return self._db.transaction()

    def read(self) -> AllocState | None:
        """Return the state, None where there is none that can be read."""
        try:
            row = self._db.row("SELECT state FROM alloc")
            return parse_state(row[0].encode()) if row else None
        except (StateError, ParseError, AttributeError) as error:
            log.warning("registry %s: allocations cannot be read: %s", self._db.path, error)
            return None

    def clear(self) -> None:
        """Delete the state."""
        self._db.run("DELETE FROM alloc")

    def write(self, state: AllocState) -> None:
        """Replace the state."""
        self._db.run("INSERT OR REPLACE INTO alloc VALUES (1, ?)", (dump_state(state).decode(),))
