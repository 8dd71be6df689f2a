"""TOML from outside: bounded before it is parsed.

tomllib takes memory and time in the square of a key's dots (256 KiB of `a.a.a...` took 20 GB), and
a kilobyte for each table. Kata's longest key has three parts, and its files some two hundred keys,
so both are counted first, outside texts and comments.
"""

from __future__ import annotations

import re
from typing import Final

from kata_pin.base.errors import ParseError

MAX_CHARACTERS: Final = 256 * 1024
"""Longest document accepted; Kata ships about 30 KiB, most of it comments."""

MAX_DOTS: Final = 7
"""Most dots in one key. A file name without quotes has dots too, but is no TOML."""

MAX_MARKS: Final = 8192
"""Most dots, brackets, commas and equals signs outside texts and comments in one document."""

_TEXT_OR_COMMENT: Final = re.compile(
    r'''
      """ [^"\\]* (?: (?: \\(?:.|\Z) | "(?!"") ) [^"\\]* )* (?: "{3,5} | \Z)
    | \'\'\' [^']* (?: '(?!\'\') [^']* )* (?: '{3,5} | \Z)
    | " [^"\\\n]* (?: \\[^\n] [^"\\\n]* )* "?
    | ' [^'\n]* '?
    | \# [^\n]*
    ''',
    re.VERBOSE | re.DOTALL,
)
"""What TOML's grammar takes as one token, wherever it begins outside another. One that does not end
is taken to the end of its line or of the document: tomllib refuses it there, and reads no further.
"""

_PART_END: Final = re.compile(r"[=,\[\]{}\n]")


def load(text: str, *, source: str) -> dict[str, object]:
    """Return the document's values; ParseError names `source` and what is wrong."""
    if len(text) > MAX_CHARACTERS:
        raise ParseError(f"longer than {MAX_CHARACTERS} characters", source=source)
    text = text.removeprefix("\ufeff")  # a byte order mark, which other parsers skip
    _check_structure(text, source)
    import tomllib  # noqa: PLC0415 - only where there is such a file

    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ParseError("nested too deeply", source=source) from None
    except ValueError as error:  # also TOMLDecodeError, an int too long
        raise ParseError(f"not TOML: {str(error)[:200]}", source=source) from error


def _check_structure(text: str, source: str) -> None:
    """Raise ParseError for a key with too many dots, and for too many keys and values."""
    structure = _TEXT_OR_COMMENT.sub("_", text)
    marks = structure.count(".") + len(_PART_END.findall(structure)) - structure.count("\n")
    if marks > MAX_MARKS:
        raise ParseError(f"more than {MAX_MARKS} keys and values", source=source)
    for part in _PART_END.split(structure):
        if part.count(".") > MAX_DOTS:
            raise ParseError(
                f"a key with more than {MAX_DOTS} dots", source=source, text=part.strip()
            )
