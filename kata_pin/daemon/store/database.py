"""One SQLite file of this boot: opening it, setting it aside if damaged, reading and writing.

The file lives on a tmpfs; its boot id is checked, so thread identities of an earlier boot are never
believed. A damaged file, or one of another version, is set aside with its name in the log and an
empty one takes its place: the daemon always starts.

Write-ahead logging with synchronous=OFF: a killed process loses no committed transaction (the
pages are in the kernel's cache); a power cut loses /run as a whole.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Self
from urllib.parse import quote

from kata_pin.errors import StateError, reason_of

log = logging.getLogger(__name__)

VERSION: Final = 1

BUSY_S: Final = 0.1
"""Longest wait for another holder of the file's lock: it holds the event loop; hooks spool."""

_OPEN: Final = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC

_META: Final = "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID"

_REFUSED: Final = (sqlite3.Error, OverflowError, UnicodeError)
"""What SQLite raises, also for a number beyond 64 bits and for half of a surrogate pair."""

Values = Sequence[object] | Mapping[str, object]


class Database:
    """Reads and writes the file; every method raises StateError when that fails."""

    schema: tuple[str, ...] = ()
    """Statements that make the tables of an empty file."""

    def __init__(self, path: str, *, boot_id: str, source: str = "") -> None:
        """Open or create the file at `path` (0600); `boot_id` is the kernel's.

        With a `source` it is a copy of that file. Raises StateError when the folder cannot be
        written, or the file is intact but cannot be opened.
        """
        self.path = path
        self._boot_id = boot_id
        self._connection = self._copied(source) if source else self._opened()

    @classmethod
    def copy_of(cls, path: str, *, boot_id: str) -> Self:
        """Return a copy in memory, for looking without a daemon; empty where there is no file.

        A file that cannot be used is left where it is and counts as empty.
        """
        return cls(":memory:", boot_id=boot_id, source=path)

    def close(self) -> None:
        """Close the file; the object is of no use afterwards."""
        self._connection.close()

    def rows(self, statement: str, values: Values = ()) -> list[tuple[Any, ...]]:
        """Return the rows of a query."""
        try:
            return self._connection.execute(statement, values).fetchall()
        except _REFUSED as error:
            raise StateError(f"{self.path}: {error}") from error

    def row(self, statement: str, values: Values = ()) -> tuple[Any, ...] | None:
        """Return the first row of a query, None without one."""
        found = self.rows(statement, values)
        return found[0] if found else None

    def run(self, statement: str, values: Values = ()) -> int:
        """Run a statement; return how many rows it changed."""
        try:
            return self._connection.execute(statement, values).rowcount
        except _REFUSED as error:
            raise StateError(f"{self.path}: {error}") from error

    def insert(self, statement: str, rows: Iterable[Sequence[object]]) -> None:
        """Run a statement once for each row."""
        for row in rows:
            self.run(statement, row)

    @property
    def is_changing(self) -> bool:
        """Whether a transaction is open."""
        return self._connection.in_transaction

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Commit what the block writes, or nothing of it; a failed commit leaves nothing open.

        Inside another one it is a part of that: the outermost commits.
        """
        if self.is_changing:
            yield
            return
        self.run("BEGIN IMMEDIATE")
        try:
            yield
            self.run("COMMIT")
        except BaseException:
            if self._connection.in_transaction:  # SQLite itself rolls back after some errors
                self.run("ROLLBACK")
            raise

    def _copied(self, source: str) -> sqlite3.Connection:
        db = sqlite3.connect(":memory:", isolation_level=None)
        try:
            address = f"file:{quote(source)}?mode=ro"
            with contextlib.closing(sqlite3.connect(address, uri=True, timeout=2.0)) as file:
                file.backup(db)
            self._check(db)
        except (sqlite3.Error, _Unusable):
            db.close()
            db = sqlite3.connect(":memory:", isolation_level=None)
            self._check(db)
        return db

    def _opened(self) -> sqlite3.Connection:
        try:
            return self._connected()
        except _Unusable as problem:
            aside = f"{self.path}.{problem.label}-{time.time_ns()}"
            log.warning("registry %s: %s; set aside as %s", self.path, problem, aside)
            for suffix in ("-wal", "-shm", ""):
                with contextlib.suppress(FileNotFoundError):
                    os.rename(self.path + suffix, aside + suffix)
            try:
                return self._connected()
            except _Unusable as again:
                raise StateError(f"{self.path}: {again}") from again

    def _connected(self) -> sqlite3.Connection:
        try:
            os.close(os.open(self.path, _OPEN, 0o600))
            db = sqlite3.connect(self.path, isolation_level=None, timeout=BUSY_S)
        except (OSError, sqlite3.Error) as error:
            raise StateError(f"{self.path}: {reason_of(error)}") from error
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
        """Make the tables of an empty file; raise _Unusable for a file that is not ours, or bad."""
        tables = {row[0] for row in db.execute("SELECT name FROM sqlite_master")}
        if not tables:
            db.execute("BEGIN IMMEDIATE")
            for statement in (_META, *self.schema):
                db.execute(statement)
            values = [("version", str(VERSION)), ("boot_id", self._boot_id)]
            db.executemany("INSERT INTO meta VALUES (?, ?)", values)
            db.execute("COMMIT")
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
            self._read_all(db)
        except StateError as error:
            raise _Unusable(f"damaged ({error})", "damaged") from error

    def _read_all(self, db: sqlite3.Connection) -> None:
        """Raise StateError for rows that make no sense."""


class _Unusable(Exception):  # noqa: N818 - says what is so, and never leaves this module
    """The file cannot be used as it is; `label` goes into the name it is set aside under."""

    def __init__(self, message: str, label: str) -> None:
        super().__init__(message)
        self.label = label


def _is_damage(error: sqlite3.Error) -> bool:
    """Whether the file's content is to blame (sqlite.org/rescode.html), not the circumstances."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
    return code in {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR}
