"""A number with its noun, for texts that people read."""

from __future__ import annotations


def count(number: int, noun: str, plural: str = "") -> str:
    """Return `1 thread` or `2 threads`; `plural` where it is not the noun with an s."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"
