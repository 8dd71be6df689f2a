"""The control protocol: one JSON object per line each way.

    request   {"version": 1, "verb": "state", ...}     at most MAX_REQUEST bytes
    reply     {"version": 1, "ok": true, "document": {...}}
              {"version": 1, "ok": false, "error": "...", "hint": "..."}

Framing, version and the members of every line; documents pass through encoded. All violations are
RemoteProtocolError. Out of scope: reading requests (request.py), and what the verbs mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from kata_pin.errors import DaemonError, RemoteProtocolError
from kata_pin.wire.reports import encode

VERSION: Final = 1
MAX_REQUEST: Final = 64 * 1024  # longest request line, newline included

MAX_REPLY: Final = 64 * 1024 * 1024
"""Longest reply line a client takes: a node with 250 sandboxes fills about 3 MiB."""


class LineDecoder:
    """Cuts a stream of bytes into lines of bounded length."""

    def __init__(self, limit: int = MAX_REQUEST) -> None:
        self._limit = limit
        self._buffer = bytearray()
        self._searched = 0

    def feed(self, data: bytes) -> list[bytes]:
        """Take more bytes; return the lines completed by them, without their newlines."""
        self._buffer += data
        lines: list[bytes] = []
        start = 0
        while (end := self._buffer.find(b"\n", max(start, self._searched))) >= 0:
            self._check(end + 1 - start)
            lines.append(bytes(self._buffer[start:end]))
            start = end + 1
        del self._buffer[:start]
        self._searched = len(self._buffer)
        self._check(self._searched)
        return lines

    def _check(self, length: int) -> None:
        if length > self._limit:
            raise RemoteProtocolError(f"line longer than {self._limit} bytes")


def encode_request(verb: str, arguments: Mapping[str, object] | None = None) -> bytes:
    """Return the line of a request."""
    return _line({"version": VERSION, "verb": verb} | dict(arguments or {}))


def encode_reply(document: bytes) -> bytes:
    """Return the line of a positive reply with an encoded document (wire/reports.py)."""
    return b'{"version":%d,"ok":true,"document":%b}\n' % (VERSION, document)


def encode_error(error: str, hint: str = "") -> bytes:
    """Return the line of a reply that refuses the request."""
    return _line({"version": VERSION, "ok": False, "error": error, "hint": hint})


def parse_reply(line: bytes) -> bytes:
    """Return the encoded document of a reply; DaemonError if the daemon refused the request."""
    try:
        reply = msgspec.json.decode(line, type=_Reply)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"not a reply: {error}") from error
    check_version("reply", reply.version)
    if not reply.ok:
        raise DaemonError(reply.error or "refused without a reason", hint=reply.hint)
    return bytes(reply.document)


class _Reply(msgspec.Struct):
    version: int
    ok: bool
    document: msgspec.Raw = msgspec.Raw(b"{}")
    error: str = ""
    hint: str = ""


def check_version(what: str, version: int) -> None:
    """Raise RemoteProtocolError for a line of another version."""
    if version != VERSION:
        raise RemoteProtocolError(f"{what} of version {version}, this is version {VERSION}")


def _line(members: Mapping[str, object]) -> bytes:
    return encode(members) + b"\n"
