"""The cpuset of each container that was sent to its guest, as long as the container lives (D15).

Written before the guest is asked: a daemon that is killed in between knows later that the container
may be confined. A cpuset in a guest cannot be removed, only widened, so a container that was
confined once is followed until it ends.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kata_pin.daemon.store.database import Database
from kata_pin.errors import ParseError, StateError
from kata_pin.model.cpuset import CpuSet

_TABLE: Final = """
CREATE TABLE IF NOT EXISTS guest_cpusets (
    sandbox_id TEXT NOT NULL, container_id TEXT NOT NULL, cpus TEXT NOT NULL,
    PRIMARY KEY (sandbox_id, container_id)) WITHOUT ROWID"""
_ORPHANS: Final = (
    "DELETE FROM guest_cpusets WHERE sandbox_id NOT IN (SELECT sandbox_id FROM containers)"
)


class GuestCpusets:
    """Reads and writes the table; every method raises StateError when the file cannot be used."""

    def __init__(self, db: Database) -> None:
        """Make the table if there is none, and forget sandboxes that nothing is recorded of."""
        self._db = db
        db.run(_TABLE)
        db.run(_ORPHANS)

    def sent(self, sandbox_id: str) -> dict[str, CpuSet]:
        """Return what was sent to the guest of a sandbox, by container."""
        query = "SELECT container_id, cpus FROM guest_cpusets WHERE sandbox_id = ?"
        try:
            return {name: CpuSet.parse(cpus) for name, cpus in self._db.rows(query, (sandbox_id,))}
        except ParseError as error:
            raise StateError(f"{self._db.path}: {error}") from error

    def send(self, sandbox_id: str, container_id: str, cpus: CpuSet) -> None:
        """Note what is about to be sent to the guest."""
        statement = "INSERT OR REPLACE INTO guest_cpusets VALUES (?, ?, ?)"
        self._db.run(statement, (sandbox_id, container_id, str(cpus)))

    def forget(self, sandbox_id: str, container_ids: Iterable[str]) -> None:
        """Forget containers that are gone."""
        self._db.insert(
            "DELETE FROM guest_cpusets WHERE sandbox_id = ? AND container_id = ?",
            [(sandbox_id, one) for one in container_ids],
        )

    def forget_all(self, sandbox_id: str) -> None:
        """Forget a sandbox that is gone."""
        self._db.run("DELETE FROM guest_cpusets WHERE sandbox_id = ?", (sandbox_id,))
