"""Damages seeds: bytes, pieces, numbers, and the values of JSON documents.

Every seed of a run gives the same inputs for the same number. Few inputs are long: one in LONG is
repeated up to MAX_BYTES, which is where work that grows with the square of a length shows.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator, Sequence
from typing import Any, Final

MAX_BYTES: Final = 64 * 1024
LONG: Final = 500
SPLICED: Final = 48  # most bytes that one mutation moves

ODD: Final = tuple(
    text.encode()
    for text in (
        "0", "-1", "1", "255", "4096", "8191", "8192", "65536", "2147483648", "4294967295",
        "9223372036854775807", "18446744073709551616", "9" * 40, "1e308", "0x10", "010", "nan",
    )
)  # fmt: skip
ODD_VALUES: Final[tuple[Any, ...]] = (
    None, True, False, 0, -1, 1 << 63, 1 << 70, 1.5, 1e308, "", "\0", "\ud800", "0-3",
    "0-99999999999", "../x", "a" * 300, "é\x1b[31m\n", [], {}, [[]], {"": ""}, {"a": None},
)  # fmt: skip


class Mutator:
    """Yields damaged seeds without end; `words` are pieces to insert."""

    def __init__(self, seeds: Sequence[bytes], words: Sequence[bytes], seed: int) -> None:
        self._seeds = [one for one in seeds if len(one) <= MAX_BYTES] or [b""]
        self._words = [*words, *ODD, b"\0", b"\n", b" ", b"\xff", b"\xed\xa0\x80"]
        self._dice = random.Random(seed)
        self._documents = [one for one in map(_document, self._seeds) if one is not None]

    def __iter__(self) -> Iterator[bytes]:
        yield from self._seeds
        yield b""
        dice = self._dice
        while True:
            if self._documents and dice.random() < 0.3:
                yield self._odd_document()
                continue
            data = bytearray(dice.choice(self._seeds))
            for _ in range(1 + int(dice.expovariate(0.5))):
                self._damage(data)
            if not dice.randrange(LONG):
                data = self._long(data)
            yield bytes(data[:MAX_BYTES])

    def _damage(self, data: bytearray) -> None:
        dice = self._dice
        at = dice.randrange(len(data) + 1)
        end = min(len(data), at + 1 + dice.randrange(SPLICED))
        match dice.randrange(8):
            case 0:
                data[at:at] = dice.choice(self._words)
            case 1:
                data[at:end] = dice.choice(self._words)
            case 2:
                del data[at:end]
            case 3:
                data[at:at] = data[at:end] * dice.choice((1, 1, 2, 8))
            case 4:
                other = dice.choice(self._seeds)
                start = dice.randrange(len(other) + 1)
                data[at:end] = other[start : start + SPLICED]
            case 5 if at < len(data):
                data[at] ^= 1 << dice.randrange(8)
            case 6 if at < len(data):
                data[at] = dice.randrange(256)
            case _:
                self._change_number(data)

    def _change_number(self, data: bytearray) -> None:
        """Replace the first number at or after a random place."""
        digits = b"0123456789"
        start = self._dice.randrange(len(data) + 1)
        while start < len(data) and data[start] not in digits:
            start += 1
        end = start
        while end < len(data) and data[end] in digits:
            end += 1
        data[start:end] = self._dice.choice(ODD)

    def _long(self, data: bytearray) -> bytearray:
        """Return data with one piece repeated until it is long."""
        dice = self._dice
        piece = bytes(dice.choice(self._words))
        if data and dice.random() < 0.7:
            at = dice.randrange(len(data))
            piece = bytes(data[at : at + 1 + dice.randrange(SPLICED)])
        size = dice.choice((4096, 16384, MAX_BYTES))
        at = dice.randrange(len(data) + 1)
        data[at:at] = piece * max(1, (size - len(data)) // max(1, len(piece)))
        return data

    def _odd_document(self) -> bytes:
        """Return a JSON document with one to three values replaced, removed or doubled."""
        dice = self._dice
        document = json.loads(dice.choice(self._documents))
        for _ in range(dice.choice((1, 1, 2, 3))):
            document = self._changed(document)
        return json.dumps(document, ensure_ascii=dice.random() < 0.8).encode("utf-8", "replace")

    def _changed(self, value: Any) -> Any:
        dice = self._dice
        if not isinstance(value, dict | list) or not value or dice.random() < 0.1:
            return copy.deepcopy(dice.choice(ODD_VALUES))
        key: Any = dice.choice(list(value) if isinstance(value, dict) else range(len(value)))
        match dice.randrange(6):
            case 0:
                del value[key]
            case 1 if isinstance(value, list):
                value.append(copy.deepcopy(value[key]))
            case 1:
                other: Any = dice.choice(("x", "", "\ud800", str(key).upper()))
                value[other] = copy.deepcopy(value[key])
            case _:
                value[key] = self._changed(value[key])
        return value


def _document(data: bytes) -> bytes | None:
    try:
        found = json.loads(data)
    except ValueError:
        return None
    return data if isinstance(found, dict | list) else None
