"""What changed of each sandbox and of the node, when and why.

The registry keeps it, and the log has it as the journal's own entries.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, Final

from kata_pin.base.config.tree import History as Limits
from kata_pin.base.config.tree import LiveConfig
from kata_pin.base.documents.answers import Change, NodeEvent, NodeEventKind
from kata_pin.base.errors import DaemonError, StateError
from kata_pin.base.placement import GONE, NO_VMM, PassOutcome
from kata_pin.base.values import ChangeState
from kata_pin.records.database import Database

log = logging.getLogger(__name__)


# The history: what changed of each sandbox, when, why, and how long it took until it was pinned.
#
# A row is a mask or a state that changed, or threads that were moved; a pass that changes nothing
# writes none. One transaction per row, before a waiting hook receives `pinned` (D15). The number of
# rows is bounded, the oldest go first. Times are CLOCK_BOOTTIME: the file lives for one boot.

MAX_SHOWN: Final = 1000
"""Most rows that one document holds: some 10 ms of the event loop."""

MAX_SINCE_S: Final = 10 * 365 * 86400
"""Furthest that a request may reach back: longer than any boot."""

MAX_REASONS: Final = 8
"""Reasons of one pass that are kept: a storm of events has few kinds."""


_COLUMNS: Final = (
    *("sandbox_id", "pod", "boot_ns", "state", "was_state", "mask", "was_mask", "threads", "moved"),
    *("waited_us", "reasons"),
)
"""`waited_us`: from the first event that asked for the pass until its end; `reasons`: lines."""

_TABLE: Final = """
CREATE TABLE IF NOT EXISTS history (
    number INTEGER PRIMARY KEY, sandbox_id TEXT NOT NULL, pod TEXT NOT NULL,
    boot_ns INTEGER NOT NULL, state TEXT NOT NULL, was_state TEXT NOT NULL, mask TEXT,
    was_mask TEXT, threads INTEGER NOT NULL, moved INTEGER NOT NULL, waited_us INTEGER NOT NULL,
    reasons TEXT NOT NULL)"""
_INDEX: Final = "CREATE INDEX IF NOT EXISTS history_sandbox ON history (sandbox_id, number)"
_INSERT: Final = f"INSERT INTO history ({', '.join(_COLUMNS)}) VALUES (:{', :'.join(_COLUMNS)})"  # noqa: S608 - constants
_SELECT: Final = f"SELECT {', '.join(_COLUMNS)} FROM history"  # noqa: S608 - constants

StateAndMask = tuple[ChangeState, str | None]
"""State and mask of a sandbox as of its last row."""


class History:
    """Writes and reads the table; an error in writing never fails a pass."""

    def __init__(self, db: Database, live: LiveConfig) -> None:
        self.failures = 0
        """Rows that could not be written."""
        self._db = db
        self._live = live
        self._last: dict[str, StateAndMask | None] = {}
        self._pods: dict[str, str] = {}
        """The pod in the last row of each sandbox: rows before it without a name have that one."""
        self._count: int | None = None

    def _counted(self) -> int:
        """Return the number of rows; makes the table, again if it has another form."""
        if self._count is None:
            with self._db.transaction():
                there = [row[1] for row in self._db.rows("PRAGMA table_info(history)")]
                if there and there != ["number", *_COLUMNS]:
                    log.warning("registry %s: history in an unknown format dropped", self._db.path)
                    self._db.run("DROP TABLE history")
                self._db.run(_TABLE)
                self._db.run(_INDEX)
                self._count = self._db.rows("SELECT count(*) FROM history")[0][0]
        assert self._count is not None, "it was counted"
        return self._count

    def passed(self, outcome: PassOutcome) -> None:
        """Write a row if the pass changed something."""
        mask = None if outcome.mask is None else str(outcome.mask)
        now, last, moved = (outcome.state, mask), self._last_of(outcome.sandbox_id), outcome.moved
        if now == last and not moved:
            return
        if last is None and outcome.state == NO_VMM:  # another runtime's, or its VM is yet to start
            return
        self._write(outcome, now, threads=len(outcome.report.threads), moved=moved)

    def ended(self, outcome: PassOutcome) -> None:
        """Write that a sandbox has ended, if it ever had a row, and why its last pass ran."""
        if self._last_of(outcome.sandbox_id) is not None:
            self._write(outcome, (GONE, None))
        self._last.pop(outcome.sandbox_id, None)
        self._pods.pop(outcome.sandbox_id, None)

    def failed(self, operation: str, error: Exception) -> None:
        """See Observer: the next pass records what a failed one changed."""

    def _last_of(self, sandbox_id: str) -> StateAndMask | None:
        """Return the last state and mask of a sandbox, None if it has no row or has ended."""
        if sandbox_id not in self._last:
            row = None
            try:
                self._counted()
                row = self._db.row(
                    "SELECT state, mask FROM history WHERE sandbox_id = ?"
                    " ORDER BY number DESC LIMIT 1",
                    (sandbox_id,),
                )
            except StateError as error:
                self._failed(error)
            self._last[sandbox_id] = None if row is None or row[0] == GONE else (row[0], row[1])
        return self._last[sandbox_id]

    def _write(
        self, outcome: PassOutcome, now: StateAndMask, *, threads: int = 0, moved: int = 0
    ) -> None:
        was_state, was_mask = self._last.get(outcome.sandbox_id) or ("", None)
        self._last[outcome.sandbox_id] = now
        limits = self._live.now.history
        if not limits.rows:
            return
        change = {
            "sandbox_id": outcome.sandbox_id,
            "pod": outcome.pod,
            "boot_ns": time.clock_gettime_ns(time.CLOCK_BOOTTIME),
            "state": now[0],
            "was_state": was_state,
            "mask": now[1],
            "was_mask": was_mask,
            "threads": threads,
            "moved": moved,
            "waited_us": max(0, round((time.monotonic() - outcome.cause.since) * 1e6)),
            "reasons": "\n".join(outcome.cause.reasons[:MAX_REASONS]),
        }
        try:
            count = self._counted() + 1
            with self._db.transaction():
                self._db.run(_INSERT, change)
                named = outcome.sandbox_id, self._pods.get(outcome.sandbox_id)
                if outcome.pod not in named:  # a VM that only starts has no name yet
                    self._db.run(
                        "UPDATE history SET pod = ? WHERE sandbox_id = ? AND pod = sandbox_id",
                        (outcome.pod, outcome.sandbox_id),
                    )
                count -= self._evict(outcome.sandbox_id, count, limits)
            self._count, self._pods[outcome.sandbox_id] = count, outcome.pod
        except StateError as error:
            self._failed(error)

    def _evict(self, sandbox_id: str, count: int, limits: Limits) -> int:
        """Drop the oldest rows beyond the limits; return how many those were."""
        dropped = self._db.run(
            "DELETE FROM history WHERE sandbox_id = :sandbox AND number <= ("
            "SELECT number FROM history WHERE sandbox_id = :sandbox"
            " ORDER BY number DESC LIMIT 1 OFFSET :kept)",
            {"sandbox": sandbox_id, "kept": limits.sandbox_rows},
        )
        surplus = count - dropped - limits.rows
        if surplus > 0:
            dropped += self._db.run(
                "DELETE FROM history WHERE number IN ("
                "SELECT number FROM history ORDER BY number LIMIT ?)",
                (surplus,),
            )
        return dropped

    def _failed(self, error: StateError) -> None:
        """Log once that the history has a gap; the pins are not affected."""
        level = logging.DEBUG if self.failures else logging.WARNING
        self.failures += 1
        log.log(level, "history not written: %s", error)

    def changes(
        self, name: str = "", *, since_s: float | None = None, limit: int = MAX_SHOWN
    ) -> tuple[Change, ...]:
        """Return the newest rows, oldest first, of all sandboxes or of those that `name` means.

        `name` is an id, namespace/name or name of a pod, of which there may have been several
        sandboxes, or the start of an id. Raises DaemonError when it means none, StateError.
        """
        self._counted()
        conditions, values = ["1"], list[object]()
        if name:
            values += self._meant(name)
            conditions.append(f"sandbox_id IN ({', '.join('?' * len(values))})")
        if since_s is not None:
            conditions.append("boot_ns >= ?")
            values.append(time.clock_gettime_ns(time.CLOCK_BOOTTIME) - int(since_s * 1e9))
        rows = self._db.rows(
            f"{_SELECT} WHERE {' AND '.join(conditions)} ORDER BY number DESC LIMIT ?",
            [*values, limit],
        )
        return tuple(map(_change, reversed(rows)))

    def _meant(self, name: str) -> list[str]:
        for condition in (
            ":name IN (sandbox_id, pod)",
            "substr(pod, instr(pod, '/') + 1) = :name",
            "substr(sandbox_id, 1, length(:name)) = :name",
        ):
            rows = self._db.rows(
                f"SELECT DISTINCT sandbox_id FROM history WHERE {condition}",  # noqa: S608 - constants
                {"name": name},
            )
            if ids := [str(row[0]) for row in rows]:
                return ids
        raise DaemonError(f"no history of {name!r}", hint="kata-pin history shows all there is")


def _change(row: tuple[Any, ...]) -> Change:
    sandbox_id, pod, boot_ns, state, was, mask, was_mask, threads, moved, waited_us, reasons = row
    return Change(
        *(*_when(boot_ns), sandbox_id, pod, state, was, mask, was_mask, threads, moved),
        triggers=tuple(reasons.split("\n")) if reasons else (),
        latency_ms=round(waited_us / 1000, 3),
    )


def _when(boot_ns: int) -> tuple[str, float]:
    """Return a time of CLOCK_BOOTTIME as UTC, and how long ago it is in seconds."""
    age_s = max(0.0, (time.clock_gettime_ns(time.CLOCK_BOOTTIME) - boot_ns) / 1e9)
    when = datetime.fromtimestamp(time.time() - age_s, tz=UTC)
    return when.isoformat(timespec="milliseconds").replace("+00:00", "Z"), round(age_s, 3)


# Log records as the journal's own entries: a message and fields that can be asked for.
#
# > journalctl -u kata-pin SANDBOX=5f3c...
# > journalctl MESSAGE_ID=1065ad3515a14370b560c0b2d68886f1      # sandboxes that have ended
#
# The native protocol (systemd.io/JOURNAL_NATIVE_PROTOCOL): one datagram per entry, to a unix
# socket. A value that holds a newline is written in the binary form, so no text can make a field of
# its own. Nothing waits for the journal: the next entry that it accepts has the count of those it
# did not.

SOCKET: Final = "/run/systemd/journal/socket"

PRIORITIES: Final = {
    logging.DEBUG: 7,
    logging.INFO: 6,
    logging.WARNING: 4,
    logging.ERROR: 3,
    logging.CRITICAL: 2,
}
"""syslog(3) priorities by level."""

MAX_MESSAGE: Final = 32 * 1024
MAX_VALUE: Final = 1024
"""Longest message and longest other value, in bytes; what is longer is cut."""

_LENGTH: Final = struct.Struct("<Q")
_PLACEHOLDER: Final = re.compile(r"%%|(?:\b(sandbox|container) )?%[-+ #0-9.]*[a-zA-Z]")

STARTED: Final = "8c6ce6bfd4fe42c3b2861f5589ad31f9"
SANDBOX_OVER: Final = "1065ad3515a14370b560c0b2d68886f1"
DRIFT_FOUND: Final = "237eb708cefb4861969e4d06df5ccfca"
PASS_FAILED: Final = "c80ede9471bd4d0287fa301d34839d7d"  # noqa: S105 - an id
PROCESS_HUNG: Final = "0c1b7a5de6f84a0f9d0c6a1f3b5e27c4"
VMM_CLAIMED: Final = "5c1c3f0b0d0b4e6ba8f0e0b7f7c1a6d2"
"""MESSAGE_ID of entries that a machine may wait for; they never change."""


def about(message_id: str = "", **fields: str) -> dict[str, Any]:
    """Return `extra` for a log call: fields that the entry has beside its message.

    log.info("sandbox %s ended", one, extra=about(SANDBOX_OVER, source="audit"))
    """
    named = {"MESSAGE_ID": message_id} if message_id else {}
    return {"journal": named | {name.upper(): value for name, value in fields.items()}}


class JournalHandler(logging.Handler):
    """Sends records to the journal; what cannot be sent now is counted, or goes to `fallback`."""

    def __init__(self, path: str = SOCKET, *, fallback: logging.Handler) -> None:
        """`fallback` takes records while nothing listens on the socket."""
        super().__init__()
        self._path = path
        self._fallback = fallback
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.settimeout(0)
        self._lost = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record; never fails and never waits."""
        try:
            self._socket.sendto(encode(self._fields(record)), self._path)
        except (BlockingIOError, InterruptedError):
            self._lost += 1
        except OSError:  # no journal: it is being restarted, or is none
            self._fallback.handle(record)
        except Exception:  # noqa: BLE001 - logging's own way of a handler's error
            self.handleError(record)
        else:
            self._lost = 0

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()
        super().close()

    def _fields(self, record: logging.LogRecord) -> dict[str, str]:
        fields = {
            "MESSAGE": self.format(record),
            "PRIORITY": str(PRIORITIES.get(record.levelno, 6)),
            "SYSLOG_IDENTIFIER": "kata-pin",
            "LOGGER": record.name,
            **dict(_subjects(record)),
            **getattr(record, "journal", {}),
        }
        if self._lost:
            fields["LOST_BEFORE"] = str(self._lost)
        return fields


def encode(fields: Mapping[str, str]) -> bytes:
    """Return an entry's datagram; the names are ours, the values anybody's."""
    return b"".join(_field(name, value) for name, value in fields.items())


def _field(name: str, value: str) -> bytes:
    limit = MAX_MESSAGE if name == "MESSAGE" else MAX_VALUE
    data = value.encode("utf-8", "backslashreplace")
    if len(data) > limit:
        data = data[:limit].decode("utf-8", "ignore").encode()
    if b"\n" in data:
        return name.encode() + b"\n" + _LENGTH.pack(len(data)) + data + b"\n"
    return name.encode() + b"=" + data + b"\n"


def _subjects(record: logging.LogRecord) -> Iterator[tuple[str, str]]:
    """Yield the fields that a message's own words name: `sandbox %s`, `container %s`."""
    if not isinstance(record.args, tuple):
        return
    found = (one for one in _PLACEHOLDER.finditer(str(record.msg)) if one[0] != "%%")
    for one, argument in zip(found, record.args, strict=False):
        if one[1]:
            yield one[1].upper(), str(argument)


def reads_stderr(environ: Mapping[str, str]) -> bool:
    """Whether standard error is connected to the journal (systemd.exec(5), JOURNAL_STREAM)."""
    try:
        status = os.fstat(sys.stderr.fileno())
    except (OSError, ValueError):
        return False
    return environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"


# What happened to the node as a whole: logged with a MESSAGE_ID, counted, and kept to be shown.
#
# One row per event, in the registry's file, so `kata-pin history` shows it after a restart too; the
# oldest go first. An event that cannot be stored is logged and counted all the same.

MESSAGE_IDS: Final = {
    NodeEventKind.RELOADED: "e52c7a1d94b04b3c8f6019d7a3b8c5e4",
    NodeEventKind.RELOAD_REFUSED: "f7427f4844154fd1b2fd3f3ed7e21ee2",
    NodeEventKind.ALLOC_SUSPENDED: "3f6b4f2d0f6c4b0a9d2c8e5a71b94c60",
    NodeEventKind.ALLOC_DECIDES: "a41f0c9be7d64d2f8a5b3c6d1e907f28",
    NodeEventKind.PLUGIN_CONFLICT: "7d0b9a64c3e14f5fb2a86e1d40c5f933",
    NodeEventKind.EXCLUSIVE_CONFLICT: "b86884964edd4ceca1ad637ac448ed17",
    NodeEventKind.FOREIGN_TASKS: "907d1fa07ca343cca9ace1b28bf0007c",
    NodeEventKind.QUIET_CHANGED: "3c5f1a0e7b8d4d5c9a6f2e1b0c7d8a94",
    NodeEventKind.QUIET_WRITER: "b0e4c7d2915a4f3e8d6b1c0f7a29e5d8",
    NodeEventKind.QUIET_FAILED: "e9a7d3c1f04b4b6a9258d7c3e1f0ab62",
    NodeEventKind.MEMORY_MOVING: "ea809d631b554f02a24e8045f1f14eee",
    NodeEventKind.MEMORY_MOVED: "d4d87214b6f9451fa05203514b6bd1bc",
    NodeEventKind.MEMORY_STAYS: "9c35e332554c4160a3cb325561a8af7f",
    NodeEventKind.BOUND: "f62b39d7242d4f9b8cf756a1a92c3c43",
    NodeEventKind.UNBOUND: "b9d3839db91f41d292743633180cbe17",
}
"""The MESSAGE_ID of each kind (docs/logs.md); they never change either."""

MAX_ROWS: Final = 1000
MAX_TEXT: Final = 1000

_NODE_EVENTS_TABLE: Final = """
CREATE TABLE IF NOT EXISTS node_events (
    number INTEGER PRIMARY KEY, boot_ns INTEGER NOT NULL, kind TEXT NOT NULL, text TEXT NOT NULL)"""
_NODE_EVENTS_INSERT: Final = "INSERT INTO node_events (boot_ns, kind, text) VALUES (?, ?, ?)"
_EVICT: Final = "DELETE FROM node_events WHERE number <= (SELECT max(number) FROM node_events) - ?"


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
        counts: bool = True,
        **named: str,
    ) -> None:
        """Report an event; `message` and `arguments` as for logging, `named` are fields of the log.

        `counts`: whether metrics have it, which other metrics may have already, or its beginning.
        Call it after the transaction that it is about.
        """
        log.log(level, message, *arguments, extra=about(MESSAGE_IDS[kind], **named))
        if counts:
            self.counts[kind] += 1
        if self._db is None:
            return
        text = (message % arguments if arguments else message)[:MAX_TEXT]
        try:
            self._db.run(_NODE_EVENTS_TABLE)
            self._db.run(
                _NODE_EVENTS_INSERT, (time.clock_gettime_ns(time.CLOCK_BOOTTIME), kind.value, text)
            )
            self._db.run(_EVICT, (MAX_ROWS,))
        except StateError as error:
            log.debug("event of the node not stored: %s", error)

    def newest(
        self, limit: int, *, since_s: float | None = None, naming: Collection[str] | None = None
    ) -> tuple[NodeEvent, ...]:
        """Return the newest events, oldest first; `naming`: only those that name one of these."""
        if self._db is None:
            return ()
        since = 0
        if since_s is not None:
            since = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - int(since_s * 1e9)
        self._db.run(_NODE_EVENTS_TABLE)
        rows = self._db.rows(
            "SELECT boot_ns, kind, text FROM node_events WHERE boot_ns >= ?"
            " ORDER BY number DESC LIMIT ?",
            (since, limit if naming is None else MAX_ROWS),
        )
        if naming is not None:
            rows = [row for row in rows if any(name in row[2] for name in naming)][:limit]
        return tuple(NodeEvent(*_when(when), kind, text) for when, kind, text in reversed(rows))
