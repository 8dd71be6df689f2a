"""The client's side of the control protocol: asking, replies, and documents as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final, TypeVar

import msgspec

from kata_pin.base.documents.document import VERSION as DOCUMENT_VERSION
from kata_pin.base.errors import DaemonError, RemoteProtocolError
from kata_pin.service.exchange import exchange

# Encoding and decoding of report documents (base/documents) as JSON.
#
# Documents are read from this program's own daemon only: their size is bounded before
# (protocol.py), and a document that does not fit its classes is a RemoteProtocolError.

Document = TypeVar("Document")


class _Head(msgspec.Struct):
    version: int = 0


def encode(document: object) -> bytes:
    """Return a document, or a part of one, as JSON without newlines.

    Undecodable bytes of a path, which Python holds as half surrogate pairs, are escaped.
    """
    try:
        return msgspec.json.encode(document)
    except UnicodeEncodeError:
        return msgspec.json.encode(_encodable(msgspec.to_builtins(document)))


def with_items(data: bytes, member: str, items: Iterable[bytes]) -> bytes:
    """Return an encoded document with encoded items in its empty list `member`.

    Quotes inside texts are escaped, so the member's name in quotes is the member. The items may
    take megabytes, so they are copied only once.
    """
    name = b'"%b":[' % member.encode()
    start = data.index(name + b"]") + len(name)
    pieces = list(items)
    if pieces:
        pieces[0] = data[:start] + pieces[0]
        pieces[-1] += data[start:]
    return b",".join(pieces) if pieces else data


def encode_items(items: Iterable[object]) -> bytes:
    """Return the items of a list as JSON, joined by commas."""
    return encode(list(items))[1:-1]


def decode(data: bytes | memoryview, kind: type[Document]) -> Document:
    """Read a document of this version; unknown members are ignored. Raises RemoteProtocolError."""
    try:
        version = msgspec.json.decode(data, type=_Head).version
        if version != DOCUMENT_VERSION:
            raise RemoteProtocolError(
                f"the daemon's document has version {version},"
                f" this program reads {DOCUMENT_VERSION}",
                hint="restart the daemon after an upgrade",
            )
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError(
            f"the daemon's document is not a {kind.__name__}: {error}",
            hint="restart the daemon after an upgrade",
        ) from error


def as_data(document: object) -> object:
    """Return a document as plain dicts, lists and values."""
    value: object = msgspec.to_builtins(document)
    return value


def _encodable(value: object) -> object:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, list | tuple):
        return [_encodable(one) for one in value]
    if isinstance(value, dict):
        return {_encodable(key): _encodable(one) for key, one in value.items()}
    return value


# The control protocol: one JSON object per line each way.
#
# > request   {"version": 1, "verb": "state", ...}     at most MAX_REQUEST bytes
# > reply     {"version": 1, "ok": true, "document": {...}}
# > {"version": 1, "ok": false, "error": "...", "hint": "..."}
#
# The version and the members of every line; documents pass through encoded. All violations are
# RemoteProtocolError.

VERSION: Final = 1


def encode_request(verb: str, arguments: Mapping[str, object] | None = None) -> bytes:
    """Return the line of a request."""
    return _line({"version": VERSION, "verb": verb} | dict(arguments or {}))


def encode_reply(document: bytes) -> bytes:
    """Return the line of a positive reply with an encoded document (service/protocol.py).

    Joined: formatting megabytes takes a hundred times as long.
    """
    return b"".join((b'{"version":%d,"ok":true,"document":' % VERSION, document, b"}\n"))


def encode_error(error: str, hint: str = "") -> bytes:
    """Return the line of a reply that refuses the request."""
    return _line({"version": VERSION, "ok": False, "error": error, "hint": hint})


def parse_reply(line: bytes | bytearray) -> memoryview:
    """Return the encoded document of a reply; DaemonError if the daemon refused the request."""
    try:
        reply = msgspec.json.decode(line, type=_Reply)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"not a reply: {error}") from error
    check_version("reply", reply.version)
    if not reply.ok:
        raise DaemonError(reply.error or "refused without a reason", hint=reply.hint)
    return memoryview(reply.document)


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


def ask(
    path: str,
    verb: str,
    arguments: Mapping[str, object],
    deadline_s: float,
    *,
    waiting: Callable[[float], None] | None = None,
) -> memoryview:
    """Send one request to a socket and return the reply's encoded document.

    Raises what exchange() raises, and DaemonError if the daemon refuses the request.
    """
    return parse_reply(exchange(path, encode_request(verb, arguments), deadline_s, waiting=waiting))
