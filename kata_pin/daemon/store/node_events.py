"""What happened to the node as a whole: logged with a MESSAGE_ID, counted, and kept to be shown.

One row per event, in the registry's file, so `kata-pin history` shows it after a restart too; the
oldest go first. An event that cannot be stored is logged and counted all the same. Changes of a
single sandbox: history.py.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from typing import Final, NamedTuple

from kata_pin.daemon.journal import (
    ALLOC_DECIDES,
    ALLOC_SUSPENDED,
    CONFIGURATION_REFUSED,
    CONFIGURATION_RELOADED,
    EXCLUSIVE_CONFLICT,
    FOREIGN_TASKS,
    MEMORY_MOVED,
    MEMORY_MOVING,
    MEMORY_STAYS,
    PLUGIN_CONFLICT,
    QUIET_CHANGED,
    QUIET_FAILED,
    QUIET_WRITER,
    about,
)
from kata_pin.daemon.store.database import Database
from kata_pin.errors import StateError
from kata_pin.model.reports.history import NodeEventKind

log = logging.getLogger(__name__)

MESSAGE_IDS: Final = {
    NodeEventKind.RELOADED: CONFIGURATION_RELOADED,
    NodeEventKind.RELOAD_REFUSED: CONFIGURATION_REFUSED,
    NodeEventKind.ALLOC_SUSPENDED: ALLOC_SUSPENDED,
    NodeEventKind.ALLOC_DECIDES: ALLOC_DECIDES,
    NodeEventKind.PLUGIN_CONFLICT: PLUGIN_CONFLICT,
    NodeEventKind.EXCLUSIVE_CONFLICT: EXCLUSIVE_CONFLICT,
    NodeEventKind.FOREIGN_TASKS: FOREIGN_TASKS,
    NodeEventKind.QUIET_CHANGED: QUIET_CHANGED,
    NodeEventKind.QUIET_WRITER: QUIET_WRITER,
    NodeEventKind.QUIET_FAILED: QUIET_FAILED,
    NodeEventKind.MEMORY_MOVING: MEMORY_MOVING,
    NodeEventKind.MEMORY_MOVED: MEMORY_MOVED,
    NodeEventKind.MEMORY_STAYS: MEMORY_STAYS,
}
"""The MESSAGE_ID of each kind (docs/logs.md)."""

MAX_ROWS: Final = 1000
MAX_TEXT: Final = 1000

_TABLE: Final = """
CREATE TABLE IF NOT EXISTS node_events (
    number INTEGER PRIMARY KEY, boot_ns INTEGER NOT NULL, kind TEXT NOT NULL, text TEXT NOT NULL)"""
_INSERT: Final = "INSERT INTO node_events (boot_ns, kind, text) VALUES (?, ?, ?)"
_EVICT: Final = "DELETE FROM node_events WHERE number <= (SELECT max(number) FROM node_events) - ?"


class NodeEvent(NamedTuple):
    """One row; `boot_ns` is CLOCK_BOOTTIME."""

    boot_ns: int
    kind: str
    text: str


class NodeEvents:
    """Logs, counts and keeps events; reading raises StateError, reporting never."""

    def __init__(self, db: Database | None = None) -> None:
        """Without a file nothing is kept."""
        self._db = db
        self.counts: Counter[NodeEventKind] = Counter()

    def report(
        self,
        kind: NodeEventKind,
        message: str,
        *arguments: object,
        level: int = logging.WARNING,
        **named: str,
    ) -> None:
        """Report an event; `message` and `arguments` as for logging, `named` are fields of the log.

        Call it after the transaction that it is about.
        """
        log.log(level, message, *arguments, extra=about(MESSAGE_IDS[kind], **named))
        self.counts[kind] += 1
        if self._db is None:
            return
        text = (message % arguments if arguments else message)[:MAX_TEXT]
        try:
            self._db.run(_TABLE)
            self._db.run(_INSERT, (time.clock_gettime_ns(time.CLOCK_BOOTTIME), kind.value, text))
            self._db.run(_EVICT, (MAX_ROWS,))
        except StateError as error:
            log.debug("event of the node not stored: %s", error)

    def newest(self, limit: int, *, since_s: float | None = None) -> list[NodeEvent]:
        """Return the newest events, oldest first."""
        if self._db is None:
            return []
        since = 0
        if since_s is not None:
            since = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - int(since_s * 1e9)
        self._db.run(_TABLE)
        rows = self._db.rows(
            "SELECT boot_ns, kind, text FROM node_events WHERE boot_ns >= ?"
            " ORDER BY number DESC LIMIT ?",
            (since, limit),
        )
        return [NodeEvent(*row) for row in rows][::-1]
