"""Log records as the journal's own entries: a message and fields that can be asked for.

    journalctl -u kata-pin SANDBOX=5f3c...
    journalctl MESSAGE_ID=1065ad3515a14370b560c0b2d68886f1      # sandboxes that have ended

The native protocol (systemd.io/JOURNAL_NATIVE_PROTOCOL): one datagram per entry, to a unix socket.
A value that holds a newline is written in the binary form, so no text can make a field of its own.
Nothing waits for the journal: the next entry that it accepts has the count of those it did not.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import struct
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Final

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
EXCLUSIVE_CONFLICT: Final = "b86884964edd4ceca1ad637ac448ed17"
PROCESS_HUNG: Final = "0c1b7a5de6f84a0f9d0c6a1f3b5e27c4"
VMM_CLAIMED: Final = "5c1c3f0b0d0b4e6ba8f0e0b7f7c1a6d2"
ALLOC_SUSPENDED: Final = "3f6b4f2d0f6c4b0a9d2c8e5a71b94c60"
ALLOC_DECIDES: Final = "a41f0c9be7d64d2f8a5b3c6d1e907f28"
PLUGIN_CONFLICT: Final = "7d0b9a64c3e14f5fb2a86e1d40c5f933"
FOREIGN_TASKS: Final = "907d1fa07ca343cca9ace1b28bf0007c"
QUIET_CHANGED: Final = "3c5f1a0e7b8d4d5c9a6f2e1b0c7d8a94"
QUIET_WRITER: Final = "b0e4c7d2915a4f3e8d6b1c0f7a29e5d8"
QUIET_FAILED: Final = "e9a7d3c1f04b4b6a9258d7c3e1f0ab62"
MEMORY_MOVING: Final = "ea809d631b554f02a24e8045f1f14eee"
MEMORY_MOVED: Final = "d4d87214b6f9451fa05203514b6bd1bc"
MEMORY_STAYS: Final = "9c35e332554c4160a3cb325561a8af7f"
CONFIGURATION_RELOADED: Final = "e52c7a1d94b04b3c8f6019d7a3b8c5e4"
CONFIGURATION_REFUSED: Final = "f7427f4844154fd1b2fd3f3ed7e21ee2"
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
