"""Numbers in the kernel's text: decimal, not negative, of at most 20 digits."""

from __future__ import annotations

import re
from typing import Final

from kata_pin.errors import ParseError

_NUMBERS: Final = re.compile(rb"[0-9]{1,20}(?:[ \t]+[0-9]{1,20})*\Z")


def numbers(data: bytes, source: str) -> list[int]:
    """Return the numbers of a line, which has nothing else; raises ParseError."""
    line = data.strip(b" \t\n")
    if not _NUMBERS.match(line):
        raise ParseError("not a line of numbers", source=source, text=clipped(line))
    return [int(word) for word in line.split()]


def check_size(data: bytes, most: int, source: str) -> None:
    """Raise ParseError for a text that is longer than the kernel's can be."""
    if len(data) > most:
        raise ParseError(f"longer than {most} bytes", source=source)


def clipped(data: bytes) -> str:
    """Return the start of some bytes for an error text."""
    return data[:100].decode("utf-8", "backslashreplace")
