"""Encoding and decoding of report documents (model/reports) as JSON. Pure.

Documents are read from this program's own daemon only: their size is bounded before (control.py),
and a document that does not fit its classes is a RemoteProtocolError.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import msgspec

from kata_pin.errors import RemoteProtocolError
from kata_pin.model.reports import VERSION

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


def with_items(data: bytes, member: str, items: bytes) -> bytes:
    """Return an encoded document with encoded items, joined by commas, in its empty list `member`.

    Quotes inside texts are escaped, so the member's name in quotes is the member.
    """
    head, name, tail = data.partition(b'"%b":[]' % member.encode())
    assert name, f"{member} is an empty list"
    return b"%b%b%b]%b" % (head, name[:-1], items, tail)


def encode_items(items: Iterable[object]) -> bytes:
    """Return the items of a list as JSON, joined by commas."""
    return encode(list(items))[1:-1]


def decode(data: bytes, kind: type[Document]) -> Document:
    """Read a document of this version; unknown members are ignored. Raises RemoteProtocolError."""
    try:
        version = msgspec.json.decode(data, type=_Head).version
        if version != VERSION:
            raise RemoteProtocolError(
                f"the daemon's document has version {version}, this program reads {VERSION}",
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
