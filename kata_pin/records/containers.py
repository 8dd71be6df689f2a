"""The registry: containers as recorded, and each source's last report of their cpusets (D15)."""

from __future__ import annotations

import contextlib
import logging
import sqlite3
from collections.abc import Iterable, Iterator
from typing import Final

from msgspec.structs import replace

from kata_pin.base.cpuset import CpuSet
from kata_pin.base.errors import ParseError, StateError
from kata_pin.base.sandbox import Container, ReportedCpuset
from kata_pin.base.values import ContainerKind, ContainerState, CpusetSource
from kata_pin.placement.masks import LIVE, believed
from kata_pin.records.database import Database

log = logging.getLogger(__name__)


# A container's record as a row of the registry; what is kept when a later record has less.

FIELDS: Final = (
    "id", "sandbox_id", "kind", "state", "cpus", "mems", "quota_us", "period_us", "shares",
    "cgroups_path", "name", "pod_name", "pod_namespace", "pod_uid", "handler", "bundle", "source",
    "recorded_ns", "pid_hint", "note",
)  # fmt: skip
"""The columns of a row, in order."""

RESOURCES: Final = ("cpus", "mems", "quota_us", "period_us", "shares")
"""The fields of a Container that are `linux.resources.cpu`."""

_TEXTS: Final = (
    "cgroups_path", "name", "pod_name", "pod_namespace", "pod_uid", "handler", "bundle",
)  # fmt: skip


def speaks(container: Container) -> bool:
    """Whether a record reports its container's CPUs; reporting none is a report."""
    reported = any(getattr(container, name) not in {None, ""} for name in RESOURCES)
    return reported or bool(container.cgroups_path)


def merged(old: Container | None, new: Container) -> Container:
    """Keep what an earlier record has and a later one lacks.

    A message whose bundle could not be read, and Kata's own state, lack names or paths. A record
    without any of the resources reports nothing about them.
    """
    if old is None:
        return new
    kept = {name: getattr(old, name) for name in _TEXTS if not getattr(new, name)}
    if not speaks(new):
        kept |= {name: getattr(old, name) for name in RESOURCES}
    return replace(new, **kept, pid_hint=new.pid_hint or old.pid_hint)


def container_of(row: tuple[object, ...]) -> Container:
    """Return the container of a row; raises StateError when it makes no sense."""
    values = dict(zip(FIELDS, row, strict=True))
    try:
        cpus = None if values["cpus"] is None else CpuSet.parse(str(values["cpus"]))
        return Container(
            **{  # type: ignore[arg-type] # SQLite is dynamic; the schema gives the types
                **values,
                "cpus": cpus,
                "kind": ContainerKind(str(values["kind"])),
                "state": ContainerState(str(values["state"])),
            }
        )
    except (ParseError, ValueError) as error:
        raise StateError(f"registry row of container {values['id']}: {error}") from error


def _plain(value: object) -> str | int | None:
    if value is None or isinstance(value, int):
        return value
    return str(value)


# Each source's last report of a container's cpuset, in a table of the registry's file.
#
# Written in the transaction of the record that reports it, so that a restart forgets no live value.
# The record's own cpuset is the one that wins (placement/masks.py). An ended container has no rows.
#
# A message whose bundle could not be read reports no cpuset, nor does Kata's state about a
# container without `cpus`. The kubelet's file and cgroups are read in each pass, and are not kept
# here.

UPDATED: Final = "nri:PostUpdateContainer"
"""The source of a record that is an update itself, so as new as its stamp though it repeats."""

_COLUMNS: Final = ("container_id", "source", "cpus", "recorded_ns")
_SCHEMA: Final = (
    "CREATE TABLE IF NOT EXISTS told (container_id TEXT NOT NULL, source TEXT NOT NULL, cpus TEXT,"
    " recorded_ns INTEGER NOT NULL, PRIMARY KEY (container_id, source)) WITHOUT ROWID"
)


class Observations:
    """Reads and writes the table; methods raise StateError when the file cannot be used."""

    def __init__(self, db: Database) -> None:
        """Make the table, again if it cannot be used: live sources repeat their reports."""
        self._db = db
        with db.transaction():
            if not self._usable():
                log.warning("registry: reported cpusets cannot be read and are dropped")
                db.run("DROP TABLE told")
            db.run(_SCHEMA)

    def _usable(self) -> bool:
        there = tuple(row[1] for row in self._db.rows("PRAGMA table_info(told)"))
        if there != _COLUMNS:
            return not there
        try:
            for row in self._db.rows("SELECT source, cpus, recorded_ns FROM told"):
                _row(*row)
        except StateError:
            return False
        return True

    def merge(self, container: Container, merged: Container) -> Container:
        """Keep what a record reports; return the record to write, with the cpuset that wins.

        `container` is the record as it came, `merged` with what was known before.
        """
        if not container.state.counts:
            self._db.run("DELETE FROM told WHERE container_id = ?", (container.id,))
            return merged
        reported = {one.source: one for one in self.of(container.id)}
        new = _reported(container)
        if new is not None:
            old = reported.get(new.source)
            if old is None or old.cpus != new.cpus or container.source == UPDATED:
                reported[new.source] = new
                self._write(container.id, new)
        winner = believed(reported.values())
        return merged if winner is None else replace(merged, cpus=winner.cpus)

    def of(self, container_id: str) -> tuple[ReportedCpuset, ...]:
        """Return what sources reported of one container."""
        rows = self._db.rows(
            "SELECT source, cpus, recorded_ns FROM told WHERE container_id = ? ORDER BY source",
            (container_id,),
        )
        return tuple(_row(*row) for row in rows)

    def with_reports(
        self, sandbox_id: str, containers: Iterable[Container]
    ) -> tuple[Container, ...]:
        """Return the containers of a sandbox with what sources reported of each."""
        rows = self._db.rows(
            "SELECT container_id, told.source, told.cpus, told.recorded_ns"
            " FROM told JOIN containers ON id = container_id WHERE sandbox_id = ?"
            " ORDER BY container_id, told.source",
            (sandbox_id,),
        )
        reported: dict[str, tuple[ReportedCpuset, ...]] = {}
        for container_id, *row in rows:
            reported[container_id] = (*reported.get(container_id, ()), _row(*row))
        return tuple(replace(one, reported=reported.get(one.id, ())) for one in containers)

    def _write(self, container_id: str, one: ReportedCpuset) -> None:
        cpus = None if one.cpus is None else str(one.cpus)
        self._db.run(
            "INSERT OR REPLACE INTO told VALUES (?, ?, ?, ?)",
            (container_id, one.source.value, cpus, one.recorded_ns),
        )


def _reported(container: Container) -> ReportedCpuset | None:
    """Return what a record reports of its container's cpuset, None for nothing."""
    if not speaks(container):
        return None
    source = _source(container.source)
    if source is CpusetSource.KATA and container.cpus is None:
        return None
    return ReportedCpuset(source, container.cpus, container.recorded_ns)


def _source(record: str) -> CpusetSource:
    """Return the live source that a record is of (`nri:StartContainer`), else the bundle's."""
    word = record.partition(":")[0]
    return CpusetSource(word) if word in LIVE else CpusetSource.BUNDLE


def _row(source: str, cpus: str | None, recorded_ns: int) -> ReportedCpuset:
    try:
        return ReportedCpuset(
            CpusetSource(source), None if cpus is None else CpuSet.parse(cpus), recorded_ns
        )
    except (ParseError, ValueError) as error:
        raise StateError(f"registry row of source {source}: {error}") from error


# The registry: containers as recorded, and the newest message seen for each (D15).
#
# One transaction per event, committed before the hook is answered.

TOMBSTONES: Final = 4096
"""Stamps of finished containers that are remembered, to ignore messages that arrive late."""

DELETED_KEPT: Final = 8
"""Deleted containers of a sandbox that are still shown."""

_SELECT: Final = f"SELECT {', '.join(FIELDS)} FROM containers"  # noqa: S608 - constants
_WRITE: Final = (
    f"INSERT INTO containers VALUES ({', '.join('?' * (len(FIELDS) + 1))})"  # noqa: S608 - constants
    " ON CONFLICT (id) DO UPDATE SET "
    + ", ".join(f"{field} = excluded.{field}" for field in FIELDS[1:])
)
_INSTANCES: Final = (
    "sandbox_id = :sandbox AND pod_uid = :pod AND name = :name AND kind = :kind"
    " AND state IN (:created, :running)"
)
_STOP_FORMER: Final = (
    f"UPDATE containers SET state = :stopped, note = :note WHERE {_INSTANCES}"  # noqa: S608 - constants
    f" AND first_ns < (SELECT max(first_ns) FROM containers WHERE {_INSTANCES})"
)

REPLACED: Final = "a later container of its pod has its name"
"""The note of a container whose end nothing reported."""


class Registry(Database):
    """The tables of containers; every public writer is one transaction, and raises StateError."""

    schema = (
        """CREATE TABLE containers (
    id TEXT PRIMARY KEY, sandbox_id TEXT NOT NULL, kind TEXT NOT NULL, state TEXT NOT NULL,
    cpus TEXT, mems TEXT NOT NULL, quota_us INTEGER, period_us INTEGER, shares INTEGER,
    cgroups_path TEXT NOT NULL, name TEXT NOT NULL, pod_name TEXT NOT NULL,
    pod_namespace TEXT NOT NULL, pod_uid TEXT NOT NULL, handler TEXT NOT NULL,
    bundle TEXT NOT NULL, source TEXT NOT NULL, recorded_ns INTEGER NOT NULL,
    pid_hint INTEGER NOT NULL, note TEXT NOT NULL, first_ns INTEGER NOT NULL)""",
        "CREATE INDEX containers_sandbox ON containers (sandbox_id)",
        """CREATE TABLE seen (
    container_id TEXT PRIMARY KEY, stamp_ns INTEGER NOT NULL, pid INTEGER NOT NULL)""",
        "CREATE INDEX seen_stamp ON seen (stamp_ns)",
    )
    _unread_schema = "CREATE TABLE IF NOT EXISTS unread (container_id TEXT PRIMARY KEY)"
    """The containers whose config.json was never read: their sandbox and kind are a guess."""

    def __init__(self, path: str, *, boot_id: str, source: str = "") -> None:
        super().__init__(path, boot_id=boot_id, source=source)
        try:
            self._observations = Observations(self)
            self.run(self._unread_schema)
        except BaseException:
            self.close()
            raise
        self._known: dict[str, tuple[Container, ...]] = {}
        self.version = 0
        """Another number after each change of a container's record."""

    def record(
        self, container: Container, *, stamp_ns: int, pid: int = 0, unread: bool = False
    ) -> bool:
        """Take a message's record; False (nothing written) if it is not newer than what is known.

        A message is identified by its stamp and the hook's pid (0: no hook sent it), so one that
        was both acknowledged late and spooled counts once. A record without facts of its own (a
        poststop whose bundle could not be read) keeps those of the earlier record. `unread`: no
        config.json of the container was ever read, so its sandbox is a guess that `adopt` corrects.
        """
        with self._changing(container.sandbox_id):
            if not self._newer(container.id, stamp_ns, pid):
                return False
            old = self.container(container.id)
            self._write(self._observations.merge(container, merged(old, container)), old)
            self._mark_unread(container.id, unread=unread)
            if container.state is ContainerState.DELETED:
                self._trim(container.sandbox_id)
            elif old is None and container.name and container.kind is ContainerKind.CONTAINER:
                self._stop_former(container)
        return True

    def adopt(self, container: Container) -> bool:
        """Take a record from what Kata keeps now; False where it makes no difference.

        Only the cpuset and the state of a known container change, unless it is unread. The newest
        message seen stays what it is, so that late ones are recognised.
        """
        with self._changing(container.sandbox_id):
            old = self.container(container.id)
            fresh = self._observations.merge(container, merged(old, container))
            same = old is not None and (fresh.cpus, fresh.state) == (old.cpus, old.state)
            if same and not self.is_unread(container.id):
                return False
            self._write(fresh, old)
            self._mark_unread(container.id, unread=False)
        return True

    def is_unread(self, container_id: str) -> bool:
        """Whether no config.json of a container was read: its sandbox and kind are a guess."""
        row = self.row("SELECT 1 FROM unread WHERE container_id = ?", (container_id,))
        return row is not None

    def container(self, container_id: str) -> Container | None:
        """Return one container's record."""
        row = self.row(f"{_SELECT} WHERE id = ?", (container_id,))
        return None if row is None else container_of(row)

    def containers(self, sandbox_id: str) -> tuple[Container, ...]:
        """Return a sandbox's containers in the order they were first recorded."""
        known = self._known.get(sandbox_id)
        if known is None:
            rows = self.rows(f"{_SELECT} WHERE sandbox_id = ? ORDER BY first_ns, id", (sandbox_id,))
            known = self._observations.with_reports(sandbox_id, map(container_of, rows))
            if not self.is_changing:  # else it may be rolled back
                self._known[sandbox_id] = known
        return known

    def sandboxes(self) -> list[str]:
        """Return the ids of all sandboxes that have a record."""
        rows = self.rows("SELECT DISTINCT sandbox_id FROM containers ORDER BY sandbox_id")
        return [row[0] for row in rows]

    def forget(self, sandbox_id: str) -> None:
        """Drop a sandbox that has ended; late messages about its containers stay recognised."""
        with self._changing(sandbox_id):
            self.run("DELETE FROM containers WHERE sandbox_id = ?", (sandbox_id,))
            self._trim_tombstones()

    @contextlib.contextmanager
    def _changing(self, sandbox_id: str) -> Iterator[None]:
        """Run a transaction that changes a sandbox's containers; they are read again after it."""
        try:
            with self.transaction():
                yield
        finally:
            self._known.pop(sandbox_id, None)
            self.version += 1

    def _newer(self, container_id: str, stamp_ns: int, pid: int) -> bool:
        seen = self.row("SELECT stamp_ns, pid FROM seen WHERE container_id = ?", (container_id,))
        if seen is not None and (stamp_ns, pid) <= seen:
            return False
        self.run("INSERT OR REPLACE INTO seen VALUES (?, ?, ?)", (container_id, stamp_ns, pid))
        return True

    def _mark_unread(self, container_id: str, *, unread: bool) -> None:
        if unread:
            self.run("INSERT OR IGNORE INTO unread VALUES (?)", (container_id,))
        else:
            self.run("DELETE FROM unread WHERE container_id = ?", (container_id,))

    def _stop_former(self, container: Container) -> None:
        """Record as stopped all instances of a container but the latest.

        Kubernetes makes the next one when the former has ended. Of one whose creation or start
        failed containerd reports no end.
        """
        self.run(
            _STOP_FORMER,
            {
                "sandbox": container.sandbox_id,
                "pod": container.pod_uid,
                "name": container.name,
                "kind": container.kind,
                "created": ContainerState.CREATED,
                "running": ContainerState.RUNNING,
                "stopped": ContainerState.STOPPED,
                "note": REPLACED,
            },
        )

    def _write(self, container: Container, old: Container | None) -> None:
        if old is not None:  # it may have been another sandbox's
            self._known.pop(old.sandbox_id, None)
        row = [_plain(getattr(container, field)) for field in FIELDS]
        self.run(_WRITE, [*row, container.recorded_ns])

    def _trim(self, sandbox_id: str) -> None:
        """Drop deleted containers but the last: one that keeps failing has many."""
        self.run(
            "DELETE FROM containers WHERE sandbox_id = :sandbox AND state = :state AND id NOT IN ("
            "SELECT id FROM containers WHERE sandbox_id = :sandbox AND state = :state"
            " ORDER BY recorded_ns DESC LIMIT :kept)",
            {"sandbox": sandbox_id, "state": ContainerState.DELETED, "kept": DELETED_KEPT},
        )
        self._trim_tombstones()

    def _trim_tombstones(self) -> None:
        for table in ("told", "unread"):
            self.run(f"DELETE FROM {table} WHERE container_id NOT IN (SELECT id FROM containers)")  # noqa: S608 - constants
        self.run(
            "DELETE FROM seen WHERE container_id NOT IN (SELECT id FROM containers)"
            " AND stamp_ns <= coalesce((SELECT stamp_ns FROM seen"
            " ORDER BY stamp_ns DESC LIMIT 1 OFFSET ?), -1)",
            (TOMBSTONES,),
        )

    def _read_all(self, db: sqlite3.Connection) -> None:
        for row in db.execute(_SELECT):
            container_of(row)
