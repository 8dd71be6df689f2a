"""How a setting is declared, and the kinds of values: how each is read and written back.

A file gives a setting as text, a list of texts or a mapping of texts: YAML's own guesses (`010` is
8, `on` is true, `1:30` is 90) never reach this module. Reading raises ParseError without a place;
service/configuration.py adds the file and the key. Why not msgspec or cattrs:
docs/adr/0014-config-decoding.md.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Callable, Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final, Generic, TypeAlias, TypeVar, cast

from msgspec import Struct, field

from kata_pin.base.cpuset import CpuSet
from kata_pin.base.errors import ParseError
from kata_pin.base.settings import Overhead, OverheadKind

T = TypeVar("T")
E = TypeVar("E", bound=StrEnum)

Raw: TypeAlias = "str | list[Raw] | dict[str, Raw]"
"""What a YAML document is once its scalars are kept as text."""

MAX_ENTRIES: Final = 256
"""Longest list or mapping that a setting accepts."""

MAX_RESERVE: Final = 64
"""Largest k of `reserve:k`; more CPUs than that for overhead is a mistake."""

_NUMBER: Final = r"[0-9]{1,9}(\.[0-9]{1,6})?"
_INTEGER: Final = r"0|[1-9][0-9]{0,8}"
_NAME: Final = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}"


class Kind(Struct, Generic[T], frozen=True):
    """One kind of value; `words` says in a phrase what may be written."""

    words: str
    read: Callable[[Raw], T]
    write: Callable[[T], Raw] = str


def text_of(raw: Raw) -> str:
    """Return a scalar's text; ParseError for a list, a mapping or nothing at all."""
    if isinstance(raw, list):
        raise ParseError("expected a single value, not a list")
    if isinstance(raw, dict):
        raise ParseError("expected a single value, not a mapping")
    return raw.strip()


def expected(words: str, text: str) -> ParseError:
    """Return the error for a text that is not what `words` describe."""
    return ParseError(
        f"expected {words}" if text else f"expected {words}, found nothing", text=text
    )


def choice(words: type[E]) -> Kind[E]:
    """One word of an enumeration."""
    offered = ", ".join(word.value for word in words)

    def read(raw: Raw) -> E:
        text = text_of(raw)
        try:
            return words(text)
        except ValueError:
            raise expected(f"one of {offered}", text) from None

    return Kind(f"one of {offered}", read, lambda value: value.value)


def _read_boolean(raw: Raw) -> bool:
    text = text_of(raw)
    if text not in {"true", "false"}:
        raise expected("true or false", text)
    return text == "true"


BOOLEAN: Final = Kind("true or false", _read_boolean, lambda value: "true" if value else "false")


def integer(low: int, high: int, unit: str = "") -> Kind[int]:
    """A whole number in decimal, without sign or leading zeros."""

    def read(raw: Raw) -> int:
        text = _matched(raw, _INTEGER, "a whole number")
        if not low <= int(text) <= high:
            raise ParseError(f"expected {low} to {high}", text=text)
        return int(text)

    return Kind(f"a whole number{_of(unit)} from {low} to {high}", read)


def number(low: float, high: float, unit: str = "") -> Kind[float]:
    """A decimal number, without sign or exponent."""

    def read(raw: Raw) -> float:
        text = _matched(raw, _NUMBER, "a number")
        if not low <= float(text) <= high:
            raise ParseError(f"expected {low:g} to {high:g}", text=text)
        return float(text)

    return Kind(f"a number{_of(unit)} from {low:g} to {high:g}", read, _plain)


def _of(unit: str) -> str:
    return f" of {unit}" if unit else ""


def _plain(value: float) -> str:
    """Write a number without exponent, so that it reads back as itself."""
    return f"{value:.6f}".rstrip("0").rstrip(".")


def _read_path(raw: Raw) -> str:
    text = text_of(raw)
    if not text.startswith("/"):
        raise expected("an absolute path", text)
    if not text.isprintable() or len(text) > 4096:
        raise ParseError("not a path", text=text)
    return os.path.normpath("/" + text.lstrip("/"))


PATH: Final = Kind("an absolute path", _read_path)


def matching(pattern: str, words: str) -> Kind[str]:
    """A text that matches a regular expression as a whole."""
    return Kind(words, lambda raw: _matched(raw, pattern, words))


def _matched(raw: Raw, pattern: str, words: str) -> str:
    text = text_of(raw)
    if re.fullmatch(pattern, text) is None:
        raise expected(words, text)
    return text


NAME: Final = matching(_NAME, "a name of letters, digits, _ . and -")


def listing(kind: Kind[T]) -> Kind[tuple[T, ...]]:
    """A list of values of one kind; nothing at all is the empty list."""

    def read(raw: Raw) -> tuple[T, ...]:
        items: Raw = [] if raw == "" else raw
        if not isinstance(items, list):
            raise ParseError("expected a list")
        if len(items) > MAX_ENTRIES:
            raise ParseError(f"more than {MAX_ENTRIES} entries")
        return tuple(kind.read(item) for item in items)

    return Kind(f"a list, each {kind.words}", read, lambda value: [kind.write(v) for v in value])


K = TypeVar("K", bound=str)


def mapping(key: Kind[K], value: Kind[T]) -> Kind[Mapping[K, T]]:
    """A mapping of one kind to another; nothing at all is the empty mapping."""

    def read(raw: Raw) -> Mapping[K, T]:
        items: Raw = {} if raw == "" else raw
        if not isinstance(items, dict):
            raise ParseError("expected a mapping")
        if len(items) > MAX_ENTRIES:
            raise ParseError(f"more than {MAX_ENTRIES} entries")
        return MappingProxyType({key.read(k): _entry(k, value, v) for k, v in items.items()})

    def write(values: Mapping[K, T]) -> Raw:
        return {str(key.write(k)): value.write(v) for k, v in values.items()}

    return Kind(f"a mapping from {key.words} to {value.words}", read, write)


def _entry(name: str, kind: Kind[T], raw: Raw) -> T:
    """Read one entry of a mapping; its errors name it."""
    try:
        return kind.read(raw)
    except ParseError as error:
        raise ParseError(error.message, source=name) from error


CPUS: Final = Kind("a cpu list such as 0-3,8", lambda raw: CpuSet.parse(text_of(raw)))


def _read_overhead(raw: Raw) -> Overhead:
    """Read one of the modes of D11."""
    text = text_of(raw)
    if text[:1].isdigit():
        return Overhead(OverheadKind.CPUS, cpus=CpuSet.parse(text))
    word, colon, count = text.partition(":")
    if word == "reserve" and colon:
        return Overhead(OverheadKind.RESERVE, reserve=integer(1, MAX_RESERVE).read(count))
    if word in {"auto", "sandbox", "housekeeping", "leave"} and not colon:
        return Overhead(OverheadKind(word))
    raise expected(_OVERHEAD_WORDS, text)


_OVERHEAD_WORDS: Final = "auto, sandbox, housekeeping, leave, reserve:k or a cpu list"
OVERHEAD: Final = Kind(_OVERHEAD_WORDS, _read_overhead)


class SettingRow(Struct, frozen=True):
    """What is known of a setting but its key. Its field's default factory: called, the default."""

    kind: Kind[Any]
    default: object
    help: str
    example: str = ""

    def __call__(self) -> object:
        """Return the default."""
        return self.default


def setting(default: T, help_text: str, kind: Kind[Any] | None = None, *, example: str = "") -> T:
    """Declare one setting as a field; most kinds follow from the default."""
    row = SettingRow(kind or _kind_of(default), default, help_text, example)
    made: T = field(default_factory=cast("Callable[[], T]", row))
    return made


def _kind_of(default: object) -> Kind[Any]:
    kinds: dict[type, Kind[Any]] = {bool: BOOLEAN, CpuSet: CPUS, Overhead: OVERHEAD}
    return choice(type(default)) if isinstance(default, StrEnum) else kinds[type(default)]
