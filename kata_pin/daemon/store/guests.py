"""What guests were told: the cpuset of each container, for as long as the container lives.

A table of its own in the registry's file, so that it is copied, checked and set aside with it
(DESIGN D15). Written before the guest is asked: a daemon that is killed in between knows later that
the container may be restricted, and can give it back. A cpuset in a guest can not be taken away
again, only made wide, so a container that was told once is looked after until it is gone.

Lifetime: as long as its Registry.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable

from kata_pin.daemon.store.database import Registry
from kata_pin.daemon.store.transaction import transaction
from kata_pin.errors import ParseError, StateError
from kata_pin.model.cpuset import CpuSet

_TABLE = """
CREATE TABLE IF NOT EXISTS guest_cpusets (
    sandbox_id TEXT NOT NULL, container_id TEXT NOT NULL, cpus TEXT NOT NULL,
    PRIMARY KEY (sandbox_id, container_id)) WITHOUT ROWID"""


_ORPHANS = """
DELETE FROM guest_cpusets WHERE sandbox_id NOT IN (SELECT sandbox_id FROM containers)"""
_TELL = "INSERT OR REPLACE INTO guest_cpusets VALUES (?, ?, ?)"
_FORGET = "DELETE FROM guest_cpusets WHERE sandbox_id = ? AND container_id = ?"
_FORGET_ALL = "DELETE FROM guest_cpusets WHERE sandbox_id = ?"


class GuestBook:
    """Reads and writes the table; every method raises StateError when the file does not let it."""

    def __init__(self, registry: Registry) -> None:
        """Make the table if there is none, and forget sandboxes that nothing is recorded of."""
        self._path = registry.path
        self._db = registry.database
        self._write(_TABLE)
        self._write(_ORPHANS)

    def told(self, sandbox_id: str) -> dict[str, CpuSet]:
        """Return what the guest of a sandbox was told, by container."""
        query = "SELECT container_id, cpus FROM guest_cpusets WHERE sandbox_id = ?"
        try:
            rows = self._db.execute(query, (sandbox_id,)).fetchall()
            return {name: CpuSet.parse(cpus) for name, cpus in rows}
        except (sqlite3.Error, ParseError) as error:
            raise StateError(f"{self._path}: {error}") from error

    def tell(self, sandbox_id: str, container_id: str, cpus: CpuSet) -> None:
        """Note what the guest is about to be told."""
        self._write(_TELL, (sandbox_id, container_id, str(cpus)))

    def forget(self, sandbox_id: str, container_ids: Iterable[str]) -> None:
        """Forget containers that are gone."""
        for one in container_ids:
            self._write(_FORGET, (sandbox_id, one))

    def forget_all(self, sandbox_id: str) -> None:
        """Forget a sandbox that is gone."""
        self._write(_FORGET_ALL, (sandbox_id,))

    def _write(self, statement: str, row: tuple[str, ...] = ()) -> None:
        try:
            with transaction(self._db):
                self._db.execute(statement, row)
        except sqlite3.Error as error:
            raise StateError(f"{self._path}: {error}") from error
