"""What the kernel's texts have in common: their bounds, and how an error quotes them."""

from __future__ import annotations

from kata_pin.base.errors import ParseError


def check_size(data: bytes, most: int, source: str) -> None:
    """Raise ParseError for a text that is longer than the kernel's can be."""
    if len(data) > most:
        raise ParseError(f"longer than {most} bytes", source=source)


def clipped(data: bytes) -> str:
    """Return the start of some bytes for an error text."""
    return data[:100].decode("utf-8", "backslashreplace")


def parse_starttime(data: bytes) -> int:
    """Read only the start time of a stat file, in a third of the time; ParseError likewise."""
    try:
        return int(data[data.rindex(b") ") + 2 :].split(None, 20)[19])
    except (ValueError, IndexError):
        raise ParseError("too few or wrong fields", source="stat", text=clipped(data)) from None
