"""What passes remember beyond a restart (D15).

These are pairs, first affinities, accepted VMMs, and cpusets that were sent to guests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from kata_pin.base.cpuset import CpuSet
from kata_pin.base.errors import ParseError, StateError
from kata_pin.base.placement import Binding
from kata_pin.base.sandbox import ProcessKey, Vmm
from kata_pin.base.threads import ThreadKey
from kata_pin.base.values import ThreadRole
from kata_pin.records.database import Database
from kata_pin.vmm.claims import Accepted

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
    """CREATE TABLE IF NOT EXISTS bindings (
    sandbox_id TEXT PRIMARY KEY, vcpus TEXT NOT NULL, cpus TEXT NOT NULL, overhead TEXT NOT NULL,
    until_ns INTEGER, until TEXT NOT NULL) WITHOUT ROWID""",
)


class Pins:
    """Reads and writes the tables; every method raises StateError when the file cannot be used.

    What was read is kept until it is written: each pass asks, and nothing else writes meanwhile.
    """

    def __init__(self, db: Database) -> None:
        """Make the tables where they are missing."""
        self._db = db
        self._kept: dict[str, tuple[dict[ThreadKey, int], dict[ThreadRole, CpuSet]]] = {}
        self._released: frozenset[str] | None = None
        self._bindings: dict[str, Binding] | None = None
        with db.transaction():
            for statement in _SCHEMA:
                db.run(statement)

    def pairs(self, sandbox_id: str) -> Mapping[ThreadKey, int]:
        """Return the pCPU of each paired vCPU thread."""
        return self._of(sandbox_id)[0]

    def first_seen(self, sandbox_id: str) -> Mapping[ThreadRole, CpuSet]:
        """Return the affinity each role had before the first pin; empty when never pinned."""
        return self._of(sandbox_id)[1]

    def _of(self, sandbox_id: str) -> tuple[dict[ThreadKey, int], dict[ThreadRole, CpuSet]]:
        known = self._kept.get(sandbox_id)
        if known is None:
            query = "SELECT tgid, tid, starttime, cpu FROM pairs WHERE sandbox_id = ?"
            pairs = {ThreadKey(*row[:3]): row[3] for row in self._db.rows(query, (sandbox_id,))}
            query = "SELECT role, cpus FROM first_seen WHERE sandbox_id = ?"
            rows = self._db.rows(query, (sandbox_id,))
            known = pairs, {ThreadRole(role): CpuSet.parse(cpus) for role, cpus in rows}
            if not self._db.is_changing:  # else it may be rolled back
                self._kept[sandbox_id] = known
        return known

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
            self._clear(sandbox_id, "pairs", "first_seen", "released", "bindings")

    def released(self) -> frozenset[str]:
        """Return the sandboxes that an operator unpinned: unmanaged until they are pinned again."""
        if self._released is not None:
            return self._released
        released = frozenset(row[0] for row in self._db.rows("SELECT sandbox_id FROM released"))
        if not self._db.is_changing:
            self._released = released
        return released

    def set_released(self, sandbox_ids: Iterable[str], *, released: bool) -> None:
        """Remember or forget that an operator unpinned these sandboxes; that ends bindings."""
        statement = (
            "INSERT OR IGNORE INTO released VALUES (?)"
            if released
            else "DELETE FROM released WHERE sandbox_id = ?"
        )
        ids = list(sandbox_ids)
        with self._db.transaction():
            self._released = None
            self._db.insert(statement, [(one,) for one in ids])
            if released:
                for one in ids:
                    self._clear(one, "bindings")

    def bindings(self) -> Mapping[str, Binding]:
        """Return the CPUs that were named by hand, by sandbox."""
        if self._bindings is not None:
            return self._bindings
        bindings = {row[0]: _binding(row) for row in self._db.rows("SELECT * FROM bindings")}
        if not self._db.is_changing:
            self._bindings = bindings
        return bindings

    def binding(self, sandbox_id: str) -> Binding | None:
        """Return the CPUs that were named by hand for a sandbox; None: none were."""
        return self.bindings().get(sandbox_id)

    def bind(self, sandbox_id: str, binding: Binding | None) -> None:
        """Remember a binding in place of the one before; None: forget it."""
        with self._db.transaction():
            self._clear(sandbox_id, "bindings")
            if binding is not None:
                named = (str(binding.vcpus), str(binding.cpus), str(binding.overhead))
                self._db.insert(
                    "INSERT INTO bindings VALUES (?, ?, ?, ?, ?, ?)",
                    [(sandbox_id, *named, binding.until_ns, binding.until)],
                )

    def live_threads(self) -> bool:
        """Return whether new threads were reported to the daemon that set the pins last."""
        row = self._db.row("SELECT value FROM meta WHERE key = 'live_threads'")
        return row is not None and row[0] == "yes"

    def set_live_threads(self, *, live: bool) -> None:
        """Remember it for later passes without a daemon: it decides about the main thread."""
        statement = "INSERT OR REPLACE INTO meta VALUES ('live_threads', ?)"
        self._db.run(statement, ("yes" if live else "no",))

    def _clear(self, sandbox_id: str, *tables: str) -> None:
        self._kept.pop(sandbox_id, None)
        self._released = self._bindings = None
        for table in tables:
            self._db.run(f"DELETE FROM {table} WHERE sandbox_id = ?", (sandbox_id,))  # noqa: S608 - constants


def _binding(row: tuple[Any, ...]) -> Binding:
    _sandbox_id, vcpus, cpus, overhead, until_ns, until = row
    named = (CpuSet.parse(vcpus), CpuSet.parse(cpus), CpuSet.parse(overhead))
    return Binding(*named, until_ns, until)


# The VMM that was accepted for each sandbox, beyond a restart and beyond the sandbox's end (D24).
#
# Kept so that another process cannot take the place of a VMM that died: not with weaker evidence
# while the sandbox lives, and never by the pid that the VMM had.

KEPT: Final = 4096
"""VMMs of ended sandboxes that are remembered, the newest ones."""

_VMMS_SCHEMA: Final = """CREATE TABLE IF NOT EXISTS vmms (
    sandbox_id TEXT PRIMARY KEY, pid INTEGER NOT NULL, starttime INTEGER NOT NULL,
    strength INTEGER NOT NULL)"""


class AcceptedVmms:
    """Reads and writes the table; every method raises StateError when the file cannot be used."""

    def __init__(self, db: Database) -> None:
        """Make the table where it is missing."""
        self._db = db
        db.run(_VMMS_SCHEMA)

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


# The cpuset of each container that was sent to its guest, as long as the container lives (D15).
#
# Written before the guest is asked: a daemon that is killed in between knows later that the
# container may be confined. A cpuset in a guest cannot be removed, only widened, so a container
# that was confined once is followed until it ends.

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
