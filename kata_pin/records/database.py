"""One SQLite file of this boot: opening it, setting it aside if damaged, reading and writing.

The file lives on a tmpfs; its boot id is checked, so thread identities of an earlier boot are never
believed. A damaged file, or one of another version, is set aside with its name in the log and an
empty one takes its place: the daemon always starts.

While the file cannot be written (the file system is full) everything goes on in memory, and `keep`
writes it to the file again; it does so too where somebody removed or replaced the file.

Write-ahead logging with synchronous=OFF: a killed process loses no committed transaction (the
pages are in the kernel's cache); a power cut loses /run as a whole.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import stat
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from errno import EACCES, EISDIR, ELOOP, ENXIO, EPERM
from typing import Any, Final, Self
from urllib.parse import quote

from kata_pin.base.documents.document import UNWRITTEN
from kata_pin.base.errors import StateError, reason_of
from kata_pin.base.placement import Note
from kata_pin.base.values import NoteLevel
from kata_pin.linux.owned_files import as_owner, owners_in

log = logging.getLogger(__name__)

VERSION: Final = 1

BUSY_S: Final = 0.1
"""Longest wait for another holder of the file's lock: it holds the event loop; hooks spool."""

_OPEN: Final = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC

_NOT_OURS: Final = frozenset({EACCES, EISDIR, ELOOP, ENXIO, EPERM})
"""Errors of opening what is no file, or one that this user cannot use."""

_META: Final = "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID"

_REFUSED: Final = (sqlite3.Error, OverflowError, UnicodeError)
"""What SQLite raises, also for a number beyond 64 bits and for half of a surrogate pair."""

_SIDES: Final = ("-wal", "-shm")
"""What SQLite keeps beside the file."""

_TYPES: Final = {"TEXT": "text", "INTEGER": "integer"}
"""The declared types of columns, and what typeof() says of their values (datatype3.html)."""

_UNWRITABLE: Final = {
    *(sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN)
}
"""Errors that say nothing against what is stored: the file cannot be written."""

Values = Sequence[object] | Mapping[str, object]

_Identities = tuple[tuple[int, int] | None, ...]
"""Device and inode of the file and of each side, None for one that is not there."""


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
        self.problem = ""
        """Why the file cannot be written, empty if it can: until then all is in memory alone."""
        self._boot_id = boot_id
        self._file: _Identities | None = None
        if source:
            self._connection = self._copied(source)
            return
        try:
            with as_owner(os.path.dirname(path) or "."):
                self._connection = self._opened()
        except OSError as error:
            raise StateError(f"{path}: {reason_of(error)}") from error

    @classmethod
    def copy_of(cls, path: str, *, boot_id: str) -> Self:
        """Return a copy in memory, for looking without a daemon; empty where there is no file.

        A file that cannot be used is left where it is and counts as empty.
        """
        return cls(":memory:", boot_id=boot_id, source=path)

    def close(self) -> None:
        """Close the file; the object is of no use afterwards."""
        self._file = None
        self._connection.close()

    def keep(self) -> bool:
        """Make sure that the file has everything; return whether it does.

        Where it is gone or another one, or could not be written, it is written anew.
        """
        if self._file is None or self.is_changing:
            return not self.problem
        if not self.problem:
            if self._file == _identities(self.path):
                return True
            self._in_memory("it was removed or replaced")
        try:
            file = self._opened()
        except StateError as error:
            self.problem = str(error).removeprefix(f"{self.path}: ")
            return False
        try:
            self._connection.backup(file)
        except sqlite3.Error as error:
            file.close()
            self.problem = str(error)
            return False
        self._connection.close()
        self._connection, self.problem = file, ""
        log.warning("registry %s is written again", self.path)
        return True

    @property
    def notes(self) -> tuple[Note, ...]:
        """What an operator should know of the file."""
        if not self.problem:
            return ()
        text = (
            f"the registry {self.path} cannot be written ({self.problem}): what is recorded is kept"
            " in memory, and lost if the daemon ends"
        )
        return (Note(UNWRITTEN, text, NoteLevel.WARNING),)

    def _is_unwritable(self, error: BaseException | None) -> bool:
        return self._file is not None and not self.problem and _code(error) in _UNWRITABLE

    def _in_memory(self, problem: str) -> None:
        """Go on in memory, with all that is committed."""
        memory = sqlite3.connect(":memory:", isolation_level=None)
        try:
            self._connection.backup(memory)
        except sqlite3.Error as error:
            log.error("registry %s cannot be copied: %s", self.path, error)
            memory.close()
            return
        self._connection.close()
        self._connection, self.problem = memory, problem
        log.error("registry %s cannot be written: %s; continuing in memory", self.path, problem)

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

    def has_rows(self, table: str) -> bool:
        """Whether a table is there and not empty."""
        query = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?"
        if self.row(query, (table,)) is None:
            return False
        return self.row(f"SELECT 1 FROM {table} LIMIT 1") is not None  # noqa: S608 - a constant

    def run(self, statement: str, values: Values = ()) -> int:
        """Run a statement; return how many rows it changed."""
        try:
            return self._connection.execute(statement, values).rowcount
        except _REFUSED as error:
            if self._is_unwritable(error) and not self.is_changing:
                return self._run_in_memory(statement, values, error)
            raise StateError(f"{self.path}: {error}") from error

    def _run_in_memory(self, statement: str, values: Values, error: Exception) -> int:
        self._in_memory(reason_of(error))
        try:
            return self._connection.execute(statement, values).rowcount
        except _REFUSED as again:
            raise StateError(f"{self.path}: {again}") from again

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
        except BaseException as error:
            if self._connection.in_transaction:  # SQLite itself rolls back after some errors
                self.run("ROLLBACK")
            if self._is_unwritable(error.__cause__):  # the next try is made in memory
                self._in_memory(str(error.__cause__))
            raise

    def _copied(self, source: str) -> sqlite3.Connection:
        db = sqlite3.connect(":memory:", isolation_level=None)
        try:
            if not stat.S_ISREG(os.lstat(source).st_mode):
                raise _Unusable("not a regular file", "foreign")
            address = f"file:{quote(source)}?mode=ro"
            with contextlib.closing(sqlite3.connect(address, uri=True, timeout=2.0)) as file:
                file.backup(db)
            self._check(db)
        except (OSError, sqlite3.Error, _Unusable):
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
            for suffix in (*_SIDES, ""):
                try:
                    os.rename(self.path + suffix, aside + suffix)
                except FileNotFoundError:
                    continue
                except OSError as error:
                    raise StateError(f"{self.path}{suffix}: {reason_of(error)}") from error
            try:
                return self._connected()
            except _Unusable as again:
                raise StateError(f"{self.path}: {again}") from again

    def _connected(self) -> sqlite3.Connection:
        try:
            file = self._checked_file()
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
        # read after _check, which makes SQLite open all of them
        self._file = (file, *_identities(self.path)[1:])
        return db

    def _checked_file(self) -> tuple[int, int]:
        """Return the identity of the file, which is made if need be.

        Raises OSError, and _Unusable for any other than a regular file of root's, of our own or of
        the folder's owner.
        """
        for side in _SIDES:
            with contextlib.suppress(FileNotFoundError):
                if not stat.S_ISREG(os.lstat(self.path + side).st_mode):
                    raise _Unusable(f"{side} is not a regular file", "foreign")
        try:
            descriptor = os.open(self.path, _OPEN | os.O_NONBLOCK, 0o600)
        except OSError as error:
            if os.path.lexists(self.path) and error.errno in _NOT_OURS:
                raise _Unusable(f"not a file of ours ({error.strerror})", "foreign") from error
            raise
        try:
            found = os.fstat(descriptor)
        finally:
            os.close(descriptor)
        if not stat.S_ISREG(found.st_mode) or (
            found.st_uid not in owners_in(os.path.dirname(self.path))
        ):
            raise _Unusable("not a regular file of ours", "foreign")
        return found.st_dev, found.st_ino

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
        for table in sorted(tables):
            _check_types(db, table)
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


def _check_types(db: sqlite3.Connection, table: str) -> None:
    """Raise _Unusable where a value of a table is not of its column's type: SQLite takes any."""
    for _, column, declared, *_ in db.execute("SELECT * FROM pragma_table_info(?)", (table,)):
        name, of = (quoted.replace('"', '""') for quoted in (column, table))
        query = f'SELECT 1 FROM "{of}" WHERE typeof("{name}") NOT IN (?, \'null\') LIMIT 1'  # noqa: S608 - quoted
        if db.execute(query, (_TYPES.get(declared, ""),)).fetchone() is not None:
            raise _Unusable(f"column {column} of {table} has values of another type", "damaged")


def _identities(path: str) -> _Identities:
    """Return the identity of the file and of what SQLite keeps beside it."""
    return tuple(_identity(path + suffix) for suffix in ("", *_SIDES))


def _identity(path: str) -> tuple[int, int] | None:
    """Return what distinguishes a file from a later one of that name; None if there is none."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _code(error: BaseException | None) -> int:
    """Return SQLite's primary result code of an error (sqlite.org/rescode.html), 0 without one."""
    return int(getattr(error, "sqlite_errorcode", 0) or 0) & 0xFF


def _is_damage(error: sqlite3.Error) -> bool:
    """Whether the file's content is to blame (sqlite.org/rescode.html), not the circumstances."""
    code = _code(error) or sqlite3.SQLITE_CORRUPT
    return code in {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR}
