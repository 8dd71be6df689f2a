"""JSON and short texts from outside: loading is bounded, errors name the path, ids are checked."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Final, NoReturn

from kata_pin.base.errors import ParseError

# A document is bounded before it is parsed (bytes, and brackets and commas outside texts), its
# depth by the interpreter's own limit. A repeated key is refused, because readers disagree which
# one counts (Go takes the last) and no honest writer repeats one; so is a key with a lone
# surrogate, which no honest writer has and neither checksum nor log line can take. `null` reads as
# absent, because Go writes it for an empty map or list. NaN and Infinity are not JSON (RFC 8259).

MAX_BYTES: Final = 4 * 1024 * 1024
"""Longest document accepted; the hook takes no longer a state either."""

MAX_VALUES: Final = 200_000
"""Most brackets and commas outside texts in one document: `[],[],...` grows thirtyfold when parsed.
Texts do not grow, so an annotation may have any number of commas."""

MAX_TEXT: Final = 4096  # longest single text, unless a getter says otherwise: PATH_MAX of Linux
MAX_ITEMS: Final = 4096  # most entries of one list or map, unless a getter says otherwise
_PIECE: Final = 64 * 1024  # bytes that are split at their quotes at a time


def load(data: bytes, *, source: str, limit: int = MAX_BYTES, values: int = MAX_VALUES) -> object:
    """Return the value of a UTF-8 JSON document; ParseError names `source` and what is wrong."""
    check_bounds(data, source=source, limit=limit, values=values)
    try:
        value: object = json.loads(
            data.decode(), object_pairs_hook=_unique_keys, parse_constant=_refuse_constant
        )
    except RecursionError:
        raise ParseError("nested too deeply", source=source) from None
    except UnicodeEncodeError:
        raise ParseError("half of a surrogate pair in a key", source=source) from None
    except ValueError as error:  # also UnicodeDecodeError, JSONDecodeError, an int too long
        raise ParseError(f"not JSON: {error}", source=source) from error
    return value


def load_fields(
    data: bytes, *, source: str, limit: int = MAX_BYTES, values: int = MAX_VALUES
) -> Fields:
    """Return the object that a document consists of."""
    return Fields(load(data, source=source, limit=limit, values=values), source=source)


def check_bounds(data: bytes | bytearray, *, source: str, limit: int, values: int) -> int:
    """Return about how many values a document has; ParseError if it is too much to be parsed."""
    if len(data) > limit:
        raise ParseError(f"longer than {limit} bytes", source=source)
    marks = _marks(data)
    if marks > values:
        marks = _marks_outside_texts(data)
    if marks > values:
        raise ParseError(f"more than {values} values", source=source)
    return marks


def _marks(data: bytes | bytearray) -> int:
    return data.count(b"[") + data.count(b"{") + data.count(b",")


def _marks_outside_texts(data: bytes | bytearray) -> int:
    """Return how many brackets and commas are structure, up to the first error in the JSON.

    Without escapes every second stretch between quotes is outside a text. Piece by piece, so that a
    document of quotes alone takes little memory.
    """
    plain = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    found, inside = 0, False
    for start in range(0, len(plain), _PIECE):
        stretches = plain[start : start + _PIECE].split(b'"')
        found += _marks(b"".join(stretches[inside::2]))
        inside ^= len(stretches) % 2 == 0
    return found


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a key appears twice in one object")
    "".join(values).encode()  # a lone surrogate in a key, as an escape, is a UnicodeEncodeError
    return values


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


class Fields:
    """One JSON object with its path; each getter checks the type and bounds of one value."""

    __slots__ = ("_path", "_source", "_values")

    def __init__(self, value: object, *, source: str, path: str = "") -> None:
        """Take a parsed value; ParseError if it is not an object."""
        self._source = source
        self._path = path
        if not isinstance(value, dict):
            raise ParseError("not an object", source=self._place(""))
        self._values: dict[str, object] = value

    def __contains__(self, key: object) -> bool:
        return key in self._values

    @property
    def names(self) -> list[str]:
        """The object's keys in document order."""
        return list(self._values)

    def values(self) -> list[object]:
        """Return the object's values in document order, unchecked."""
        return list(self._values.values())

    def folded(self) -> Fields:
        """Return the object with lower-case keys: Go reads keys in any case."""
        folded = {key.lower(): value for key, value in self._values.items()}
        if len(folded) != len(self._values):
            raise ParseError("two keys differ only by case", source=self._place(""))
        return Fields(folded, source=self._source, path=self._path)

    def get(self, key: str) -> object:
        """Return a value unchecked; None when absent."""
        return self._values.get(key)

    def fail(self, key: str, message: str, text: str = "") -> ParseError:
        """Return an error about `key`, for the caller to raise."""
        return ParseError(message, source=self._place(key), text=text)

    def need(self, *keys: str) -> Fields:
        """Return the same object; ParseError names the first of `keys` that is absent or null."""
        for key in keys:
            if self._values.get(key) is None:
                raise self.fail(key, "missing")
        return self

    def text(self, key: str, *, limit: int = MAX_TEXT) -> str:
        """Return a text that can be encoded as UTF-8 again; empty when absent."""
        value = self._values.get(key)
        return "" if value is None else self._checked_text(key, value, limit)

    def number(self, key: str, low: int, high: int) -> int | None:
        """Return an integer within low..high; None when absent. A boolean is not an integer."""
        value = self._values.get(key)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.fail(key, "not an integer")
        if not low <= value <= high:
            raise self.fail(key, f"not within {low} to {high}")
        return value

    def flag(self, key: str) -> bool:
        """Return a boolean; False when absent."""
        value = self._values.get(key)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise self.fail(key, "not true or false")
        return value

    def fields(self, key: str) -> Fields:
        """Return a nested object; an empty one when absent."""
        value = self._values.get(key)
        path = f"{self._path}.{key}" if self._path else key
        return Fields({} if value is None else value, source=self._source, path=path)

    def items(self, key: str, *, limit: int = MAX_ITEMS) -> list[object]:
        """Return a list; an empty one when absent."""
        value = self._values.get(key)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self.fail(key, "not a list")
        if len(value) > limit:
            raise self.fail(key, f"more than {limit} entries")
        return value

    def objects(self, key: str, *, limit: int = MAX_ITEMS) -> list[Fields]:
        """Return a list of objects; an empty one when absent."""
        path = f"{self._path}.{key}" if self._path else key
        return [
            Fields(item, source=self._source, path=f"{path}[{number}]")
            for number, item in enumerate(self.items(key, limit=limit))
        ]

    def texts(self, key: str, *, limit: int = MAX_ITEMS) -> dict[str, str]:
        """Return a map of texts (annotations, labels); an empty one when absent."""
        inner = self.fields(key)
        if len(inner._values) > limit:
            raise self.fail(key, f"more than {limit} entries")
        return {
            name: inner._checked_text(name, value, MAX_BYTES)
            for name, value in inner._values.items()
        }

    def chosen(self, keys: Iterable[str]) -> dict[str, str]:
        """Return the texts under these keys; others are neither checked nor counted."""
        return {
            key: self._checked_text(key, self._values[key], MAX_BYTES)
            for key in keys
            if key in self._values
        }

    def _checked_text(self, key: str, value: object, limit: int) -> str:
        if not isinstance(value, str):
            raise self.fail(key, "not a text")
        if len(value) > limit:
            raise self.fail(key, f"longer than {limit} characters")
        if not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value):
            raise self.fail(key, "half of a surrogate pair")  # cannot be stored or printed
        return value

    def _place(self, key: str) -> str:
        dotted = ".".join(part for part in (self._path, key[:80]) if part)
        return f"{self._source}: {dotted}" if dotted else self._source


# Ids, names and other short texts from outside: what is accepted, and what is shown of them.
#
# Sandbox and container ids become file names, keys and words in logs, so they are checked where
# they enter. Kubernetes' own names are DNS labels and pass; anything with a slash, a space or a
# control character does not.

MAX_SHOWN: Final = 200
"""Longest text of a guest or a runtime that is kept: a version, a feature, an error message."""

_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}\Z")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,252}\Z")


def is_id(text: str) -> bool:
    """Return whether `text` can be a container or sandbox id of containerd or CRI-O."""
    return _ID.match(text) is not None


def check_id(text: str, *, source: str) -> str:
    """Return `text`, or raise ParseError when it cannot be an id."""
    if not is_id(text):
        raise ParseError("not a valid container id", source=source, text=text or "(empty)")
    return text


def is_name(text: str) -> bool:
    """Return whether `text` can be a Kubernetes name or uid (at most 253 characters)."""
    return _NAME.match(text) is not None


def printable(text: str) -> str:
    """Return a foreign text fit for a log: at most MAX_SHOWN characters, all of them printable."""
    return one_line(text[:MAX_SHOWN]) + ("..." if len(text) > MAX_SHOWN else "")


def one_line(text: str) -> str:
    """Return a foreign text of any length, all of its characters printable."""
    line = " ".join(text.splitlines())
    if not line.isprintable():
        line = "".join(char if char.isprintable() else "?" for char in line)
    return line
