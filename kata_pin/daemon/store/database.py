"""The registry: what must survive a restart of the daemon, in one SQLite file (DESIGN D15).

It holds containers as recorded, the newest message seen for each, pins that pairing should keep,
and the affinity each role had before the first pin. Everything else is read from the kernel anew.
One transaction per event, committed before the hook is answered.

Lifetime: one boot. The file lives on a tmpfs; its boot id is checked, so thread identities of an
earlier boot are never believed. A damaged file, or one of another version, is set aside with its
name in the log and an empty registry takes its place: the daemon always starts.

Write-ahead logging with synchronous=OFF: a killed process loses no committed transaction (the
pages are in the kernel's cache); a power cut loses /run as a whole.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Concatenate, Final, ParamSpec, TypeVar
from urllib.parse import quote

from kata_pin.daemon.store.containers import FIELDS, container_of, merged, row_of
from kata_pin.daemon.store.observations import Observations
from kata_pin.daemon.store.transaction import transaction
from kata_pin.errors import StateError
from kata_pin.model.cpuset import CpuSet
from kata_pin.model.sandbox import Container, ContainerState
from kata_pin.model.thread import ThreadKey, ThreadRole

log = logging.getLogger(__name__)

VERSION: Final = 1

BUSY_S: Final = 0.1
"""Longest wait for another holder of the file's lock: it holds the event loop; hooks spool."""

TOMBSTONES: Final = 4096
"""Stamps of finished containers that are remembered, to ignore messages that arrive late."""

DELETED_KEPT: Final = 8
"""Deleted containers of a sandbox that are still shown."""

_SCHEMA: Final = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE containers (
    id TEXT PRIMARY KEY, sandbox_id TEXT NOT NULL, kind TEXT NOT NULL, state TEXT NOT NULL,
    cpus TEXT, mems TEXT NOT NULL, quota_us INTEGER, period_us INTEGER, shares INTEGER,
    cgroups_path TEXT NOT NULL, name TEXT NOT NULL, pod_name TEXT NOT NULL,
    pod_namespace TEXT NOT NULL, pod_uid TEXT NOT NULL, handler TEXT NOT NULL,
    bundle TEXT NOT NULL, source TEXT NOT NULL, recorded_ns INTEGER NOT NULL,
    pid_hint INTEGER NOT NULL, note TEXT NOT NULL, first_ns INTEGER NOT NULL);
CREATE INDEX containers_sandbox ON containers (sandbox_id);
CREATE TABLE seen (
    container_id TEXT PRIMARY KEY, stamp_ns INTEGER NOT NULL, pid INTEGER NOT NULL);
CREATE INDEX seen_stamp ON seen (stamp_ns);
CREATE TABLE pairs (
    sandbox_id TEXT NOT NULL, tgid INTEGER NOT NULL, tid INTEGER NOT NULL,
    starttime INTEGER NOT NULL, cpu INTEGER NOT NULL,
    PRIMARY KEY (tgid, tid, starttime)) WITHOUT ROWID;
CREATE INDEX pairs_sandbox ON pairs (sandbox_id);
CREATE TABLE first_seen (
    sandbox_id TEXT NOT NULL, role TEXT NOT NULL, cpus TEXT NOT NULL,
    PRIMARY KEY (sandbox_id, role)) WITHOUT ROWID;
CREATE TABLE released (sandbox_id TEXT PRIMARY KEY) WITHOUT ROWID;
"""

P = ParamSpec("P")
R = TypeVar("R")


def _translated(
    method: Callable[Concatenate[Registry, P], R],
) -> Callable[Concatenate[Registry, P], R]:
    """Raise StateError, naming the file, for whatever SQLite raises in a method."""

    @wraps(method)
    def translated(self: Registry, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(self, *args, **kwargs)
        except (sqlite3.Error, OverflowError) as error:  # a number beyond 64 bits
            raise StateError(f"{self.path}: {error}") from error

    return translated


class Registry:
    """Typed access to the file; every public writer is one transaction.

    Every method raises StateError when the file cannot be read or written.
    """

    def __init__(self, path: str, *, boot_id: str) -> None:
        """Open or create the file at `path` (0600); `boot_id` is the kernel's.

        Raises StateError when the folder cannot be written, or the file is good but not to be had.
        """
        self.path = path
        self._boot_id = boot_id
        self._db = self._open()
        self._observations = self._begin(self._db)

    @classmethod
    def copy_of(cls, path: str, *, boot_id: str) -> Registry:
        """Return a copy in memory, for looking without a daemon; empty where there is no file.

        A file that cannot be used is left where it is and counts as empty.
        """
        copy = cls.__new__(cls)
        copy.path, copy._boot_id = ":memory:", boot_id
        copy._db = sqlite3.connect(":memory:", isolation_level=None)
        with contextlib.suppress(sqlite3.Error, _Unusable):
            source = sqlite3.connect(f"file:{quote(path)}?mode=ro", uri=True, timeout=2.0)
            try:
                source.backup(copy._db)
            finally:
                source.close()
            copy._check(copy._db)
            copy._observations = copy._begin(copy._db)
            return copy
        copy._db.close()
        copy._db = sqlite3.connect(":memory:", isolation_level=None)
        copy._check(copy._db)
        copy._observations = copy._begin(copy._db)
        return copy

    def close(self) -> None:
        """Close the file; the object is of no use afterwards."""
        self._db.close()

    @property
    def database(self) -> sqlite3.Connection:
        """The open file, for who has a table of its own in it (history.py)."""
        return self._db

    # ---- opening -------------------------------------------------------------------------

    def _open(self) -> sqlite3.Connection:
        try:
            return self._connect()
        except _Unusable as problem:
            aside = f"{self.path}.{problem.label}-{time.time_ns()}"
            log.warning("registry %s: %s; set aside as %s", self.path, problem, aside)
            for suffix in ("-wal", "-shm", ""):
                with contextlib.suppress(FileNotFoundError):
                    os.rename(self.path + suffix, aside + suffix)
            try:
                return self._connect()
            except _Unusable as again:
                raise StateError(f"{self.path}: {again}") from again

    @_translated
    def _begin(self, db: sqlite3.Connection) -> Observations:
        try:
            return Observations(db)
        except BaseException:
            db.close()
            raise

    def _connect(self) -> sqlite3.Connection:
        try:
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            db = sqlite3.connect(self.path, isolation_level=None, timeout=BUSY_S)
        except (OSError, sqlite3.Error) as error:
            raise StateError(f"{self.path}: {error}") from error
        try:
            db.execute("PRAGMA journal_mode=WAL")
            db.execute("PRAGMA synchronous=OFF")
            self._check(db)
        except sqlite3.Error as error:
            db.close()
            if not _is_damage(error):  # a full file system, a lock: what is in it is still good
                raise StateError(f"{self.path}: {error}") from error
            raise _Unusable(f"damaged ({error})", "damaged") from error
        except _Unusable:
            db.close()
            raise
        return db

    def _check(self, db: sqlite3.Connection) -> None:
        tables = {row[0] for row in db.execute("SELECT name FROM sqlite_master")}
        if not tables:
            with transaction(db):
                for statement in _SCHEMA.split(";"):
                    db.execute(statement)
                db.executemany(
                    "INSERT INTO meta VALUES (?, ?)",
                    [("version", str(VERSION)), ("boot_id", self._boot_id)],
                )
            return
        if "meta" not in tables:
            raise _Unusable("not a registry of kata-pin", "foreign")
        meta = dict(db.execute("SELECT key, value FROM meta"))
        if meta.get("version") != str(VERSION):
            raise _Unusable(f"version {meta.get('version')}, not {VERSION}", "version")
        if meta.get("boot_id") != self._boot_id:
            raise _Unusable("from an earlier boot", "boot")
        if db.execute("PRAGMA quick_check(1)").fetchone() != ("ok",):
            raise _Unusable("damaged", "damaged")
        try:
            for row in db.execute(f"SELECT {', '.join(FIELDS)} FROM containers"):  # noqa: S608 - constants
                container_of(row)
        except StateError as error:
            raise _Unusable(f"damaged ({error})", "damaged") from error

    # ---- containers ----------------------------------------------------------------------

    @_translated
    def record(self, container: Container, *, stamp_ns: int, pid: int) -> bool:
        """Take a message's record; False (nothing written) if it is not newer than what is known.

        A message is identified by its stamp and the hook's pid, so one that was both acknowledged
        late and spooled counts once. A record without facts of its own (a poststop whose bundle
        could not be read) keeps those of the earlier record.
        """
        with transaction(self._db):
            if not self._newer(container.id, stamp_ns, pid):
                return False
            old = self.container(container.id)
            self._write(self._observations.take(container, merged(old, container)))
            if container.state is ContainerState.DELETED:
                self._trim(container.sandbox_id)
        return True

    @_translated
    def adopt(self, container: Container) -> bool:
        """Take a record from what Kata keeps now; False where it makes no difference.

        Of one that is known its cpuset alone is new. The newest message seen stays what it is, so
        that late ones are recognised.
        """
        with transaction(self._db):
            old = self.container(container.id)
            fresh = self._observations.take(container, merged(old, container))
            if old is not None and fresh.cpus == old.cpus:
                return False
            self._write(fresh)
        return True

    def _newer(self, container_id: str, stamp_ns: int, pid: int) -> bool:
        row = self._db.execute(
            "SELECT stamp_ns, pid FROM seen WHERE container_id = ?", (container_id,)
        ).fetchone()
        if row is not None and (stamp_ns, pid) <= (row[0], row[1]):
            return False
        self._db.execute(
            "INSERT INTO seen VALUES (?, ?, ?) ON CONFLICT (container_id)"
            " DO UPDATE SET stamp_ns = excluded.stamp_ns, pid = excluded.pid",
            (container_id, stamp_ns, pid),
        )
        return True

    def _write(self, container: Container) -> None:
        updates = ", ".join(f"{field} = excluded.{field}" for field in FIELDS[1:])
        marks = ", ".join("?" * (len(FIELDS) + 1))
        self._db.execute(
            f"INSERT INTO containers VALUES ({marks}) ON CONFLICT (id) DO UPDATE SET {updates}",  # noqa: S608 - field names are constants
            [*row_of(container), container.recorded_ns],
        )

    @_translated
    def container(self, container_id: str) -> Container | None:
        """Return one container's record."""
        row = self._db.execute(
            f"SELECT {', '.join(FIELDS)} FROM containers WHERE id = ?",  # noqa: S608 - constants
            (container_id,),
        ).fetchone()
        return None if row is None else container_of(row)

    @_translated
    def containers(self, sandbox_id: str) -> tuple[Container, ...]:
        """Return a sandbox's containers in the order they were first recorded."""
        rows = self._db.execute(
            f"SELECT {', '.join(FIELDS)} FROM containers WHERE sandbox_id = ?"  # noqa: S608 - constants
            " ORDER BY first_ns, id",
            (sandbox_id,),
        )
        return self._observations.with_told(sandbox_id, map(container_of, rows))

    @_translated
    def sandboxes(self) -> list[str]:
        """Return the ids of all sandboxes that have a record."""
        rows = self._db.execute("SELECT DISTINCT sandbox_id FROM containers ORDER BY sandbox_id")
        return [row[0] for row in rows]

    @_translated
    def forget(self, sandbox_id: str) -> None:
        """Drop a sandbox that is gone; late messages about its containers stay recognised."""
        with transaction(self._db):
            for table in ("containers", "pairs", "first_seen", "released"):
                self._db.execute(
                    f"DELETE FROM {table} WHERE sandbox_id = ?",  # noqa: S608 - constants
                    (sandbox_id,),
                )
            self._trim_tombstones()

    def _trim(self, sandbox_id: str) -> None:
        """Drop deleted containers but the last: one that fails again and again has many."""
        self._db.execute(
            "DELETE FROM containers WHERE sandbox_id = :sandbox AND state = :state AND id NOT IN ("
            "SELECT id FROM containers WHERE sandbox_id = :sandbox AND state = :state"
            " ORDER BY recorded_ns DESC LIMIT :kept)",
            {
                "sandbox": sandbox_id,
                "state": ContainerState.DELETED.value,
                "kept": DELETED_KEPT,
            },
        )
        self._trim_tombstones()

    def _trim_tombstones(self) -> None:
        self._observations.trim()
        self._db.execute(
            "DELETE FROM seen WHERE container_id NOT IN (SELECT id FROM containers)"
            " AND stamp_ns <= coalesce((SELECT stamp_ns FROM seen"
            " ORDER BY stamp_ns DESC LIMIT 1 OFFSET ?), -1)",
            (TOMBSTONES,),
        )

    # ---- what passes need to remember ----------------------------------------------------

    @_translated
    def pairs(self, sandbox_id: str) -> dict[ThreadKey, int]:
        """Return the pCPU each paired vCPU thread was given."""
        rows = self._db.execute(
            "SELECT tgid, tid, starttime, cpu FROM pairs WHERE sandbox_id = ?", (sandbox_id,)
        )
        return {ThreadKey(*row[:3]): row[3] for row in rows}

    @_translated
    def first_seen(self, sandbox_id: str) -> dict[ThreadRole, CpuSet]:
        """Return the affinity each role had before the first pin; empty when never pinned."""
        rows = self._db.execute(
            "SELECT role, cpus FROM first_seen WHERE sandbox_id = ?", (sandbox_id,)
        )
        return {ThreadRole(role): CpuSet.parse(cpus) for role, cpus in rows}

    @_translated
    def keep(
        self,
        sandbox_id: str,
        *,
        pairs: Mapping[ThreadKey, int],
        first_seen: Mapping[ThreadRole, CpuSet],
    ) -> None:
        """Replace what is remembered; called before the masks are set, so a kill loses nothing."""
        with transaction(self._db):
            self._db.execute("DELETE FROM pairs WHERE sandbox_id = ?", (sandbox_id,))
            self._db.executemany(
                "INSERT OR REPLACE INTO pairs VALUES (?, ?, ?, ?, ?)",
                [(sandbox_id, k.tgid, k.tid, k.starttime, cpu) for k, cpu in pairs.items()],
            )
            self._db.execute("DELETE FROM first_seen WHERE sandbox_id = ?", (sandbox_id,))
            self._db.executemany(
                "INSERT INTO first_seen VALUES (?, ?, ?)",
                [(sandbox_id, role.value, str(cpus)) for role, cpus in first_seen.items()],
            )

    @_translated
    def released(self) -> frozenset[str]:
        """Return the sandboxes an operator unpinned: they are left alone until pinned again."""
        return frozenset(row[0] for row in self._db.execute("SELECT sandbox_id FROM released"))

    @_translated
    def set_released(self, sandbox_ids: Iterable[str], *, released: bool) -> None:
        """Remember or forget that an operator unpinned these sandboxes."""
        statement = (
            "INSERT OR IGNORE INTO released VALUES (?)"
            if released
            else "DELETE FROM released WHERE sandbox_id = ?"
        )
        with transaction(self._db):
            self._db.executemany(statement, [(one,) for one in sandbox_ids])

    @_translated
    def live_threads(self) -> bool:
        """Return whether who set the pins last was told of new threads as they are born."""
        row = self._db.execute("SELECT value FROM meta WHERE key = 'live_threads'").fetchone()
        return row is not None and row[0] == "yes"

    @_translated
    def set_live_threads(self, *, live: bool) -> None:
        """Remember it, for whoever judges these pins later: it decides about the main thread."""
        with transaction(self._db):
            self._db.execute(
                "INSERT OR REPLACE INTO meta VALUES ('live_threads', ?)", ("yes" if live else "no",)
            )


class _Unusable(Exception):  # noqa: N818 - says what is so, and never leaves this module
    """The file cannot be used as it is; `label` goes into the name it is set aside under."""

    def __init__(self, message: str, label: str) -> None:
        super().__init__(message)
        self.label = label


def _is_damage(error: sqlite3.Error) -> bool:
    """Whether the file's content is to blame (sqlite.org/rescode.html), not the circumstances."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
    return code in {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR}
