"""The VMM that was accepted for each sandbox, beyond a restart and beyond the sandbox's end (D24).

Kept so that another process cannot take the place of a VMM that died: not with weaker evidence
while the sandbox lives, and never by the pid that the VMM had.
"""

from __future__ import annotations

from typing import Final

from kata_pin.daemon.store.database import Database
from kata_pin.model.sandbox import Vmm
from kata_pin.model.thread import ProcessKey
from kata_pin.vmm.witnesses import Accepted

KEPT: Final = 4096
"""VMMs of ended sandboxes that are remembered, the newest ones."""

_SCHEMA: Final = """CREATE TABLE IF NOT EXISTS vmms (
    sandbox_id TEXT PRIMARY KEY, pid INTEGER NOT NULL, starttime INTEGER NOT NULL,
    strength INTEGER NOT NULL)"""


class AcceptedVmms:
    """Reads and writes the table; every method raises StateError when the file cannot be used."""

    def __init__(self, db: Database) -> None:
        """Make the table where it is missing."""
        self._db = db
        db.run(_SCHEMA)

    def of(self, sandbox_id: str) -> Accepted | None:
        """Return the VMM that was accepted last, None for none; without strength after its end."""
        query = "SELECT pid, starttime, strength FROM vmms WHERE sandbox_id = ?"
        row = self._db.row(query, (sandbox_id,))
        return None if row is None else Accepted(ProcessKey(row[0], row[1]), row[2])

    def keep(self, sandbox_id: str, vmm: Vmm) -> None:
        """Remember a VMM that was accepted, with the strongest evidence that it ever had."""
        known = self.of(sandbox_id)
        same = known is not None and known.process == vmm.process
        strength = max(vmm.strength, known.strength) if known and same else vmm.strength
        if known == Accepted(vmm.process, strength):
            return
        with self._db.transaction():
            self._db.run(
                "INSERT OR REPLACE INTO vmms VALUES (?, ?, ?, ?)",
                (sandbox_id, vmm.process.pid, vmm.process.starttime, strength),
            )
            self._db.run(
                "DELETE FROM vmms WHERE strength = 0 AND rowid NOT IN"
                " (SELECT rowid FROM vmms ORDER BY rowid DESC LIMIT ?)",
                (KEPT,),
            )

    def ended(self, sandbox_id: str) -> None:
        """Note that a sandbox has ended: one of the same name may have other evidence."""
        self._db.run("UPDATE vmms SET strength = 0 WHERE sandbox_id = ?", (sandbox_id,))
