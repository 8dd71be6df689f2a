"""The control protocol: one JSON object per line each way.

    request   {"version": 1, "verb": "state", ...}     at most MAX_REQUEST bytes
    reply     {"version": 1, "ok": true, ...}
              {"version": 1, "ok": false, "error": "...", "hint": "..."}

Framing, version and the members every line has; what the verbs mean is the daemon's and the command
line's. LineDecoder is fed whatever the socket gives and does no I/O. All violations are
RemoteProtocolError.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from kata_pin.errors import DaemonError, ParseError, RemoteProtocolError
from kata_pin.wire.json_text import Fields, load

VERSION: Final = 1

MAX_REQUEST: Final = 64 * 1024
"""Longest request line, newline included."""

MAX_REPLY: Final = 64 * 1024 * 1024
"""Longest reply line a client takes: a node with 250 sandboxes fills about 3 MiB."""

MAX_REPLY_VALUES: Final = 10_000_000
"""Most brackets and commas in a reply; the daemon is trusted further than a pod is."""

_RESERVED: Final = frozenset({"version", "verb", "ok", "error", "hint"})


@dataclass(frozen=True, slots=True)
class Request:
    """One request; `arguments` are the members beside version and verb."""

    verb: str
    arguments: Mapping[str, object] = field(default_factory=dict, hash=False)

    @property
    def fields(self) -> Fields:
        """The arguments with typed getters (ParseError names the argument)."""
        return Fields(dict(self.arguments), source=f"request {self.verb}")


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

    @property
    def pending(self) -> int:
        """How many bytes of an unfinished line are held."""
        return len(self._buffer)

    def _check(self, length: int) -> None:
        if length > self._limit:
            raise RemoteProtocolError(f"line longer than {self._limit} bytes")


def encode_request(verb: str, arguments: Mapping[str, object] | None = None) -> bytes:
    """Return the line of a request."""
    return _line({"version": VERSION, "verb": verb}, arguments or {})


def parse_request(line: bytes) -> Request:
    """Read a request line, with or without its newline."""
    fields, members = _members(line, MAX_REQUEST, "request")
    try:
        verb = fields.need("verb").text("verb", limit=64)
    except ParseError as error:
        raise RemoteProtocolError(str(error)) from error
    return Request(verb, {key: value for key, value in members.items() if key not in _RESERVED})


def encode_reply(members: Mapping[str, object] | None = None) -> bytes:
    """Return the line of a reply that says yes."""
    return _line({"version": VERSION, "ok": True}, members or {})


def encode_error(error: str, hint: str = "") -> bytes:
    """Return the line of a reply that says no, and why."""
    return _line({"version": VERSION, "ok": False, "error": error, "hint": hint}, {})


def parse_reply(line: bytes) -> dict[str, object]:
    """Return the members of a reply beside version and ok; DaemonError when it says no."""
    fields, members = _members(line, MAX_REPLY, "reply")
    try:
        granted = fields.need("ok").flag("ok")
        error, hint = fields.text("error"), fields.text("hint")
    except ParseError as problem:
        raise RemoteProtocolError(str(problem)) from problem
    if not granted:
        raise DaemonError(error or "refused without a reason", hint=hint)
    return {key: value for key, value in members.items() if key not in ("version", "ok")}


def _line(head: dict[str, object], members: Mapping[str, object]) -> bytes:
    clash = _RESERVED & members.keys()
    assert not clash, f"reserved members: {clash}"
    return json.dumps(head | dict(members), separators=(",", ":")).encode("ascii") + b"\n"


def _members(line: bytes, limit: int, source: str) -> tuple[Fields, dict[str, object]]:
    values = MAX_REPLY_VALUES if source == "reply" else limit
    try:
        value = load(line, source=source, limit=limit, values=values)
        fields = Fields(value, source=source)
        version = fields.need("version").number("version", 0, 1 << 31)
    except ParseError as error:
        raise RemoteProtocolError(str(error)) from error
    if version != VERSION:
        raise RemoteProtocolError(f"{source} of version {version}, this is version {VERSION}")
    assert isinstance(value, dict)
    return fields, value
