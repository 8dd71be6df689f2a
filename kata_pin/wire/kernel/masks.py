"""The kernel's hexadecimal CPU masks: groups of eight digits, the highest CPUs first.

Format: lib/bitmap-str.c, bitmap_parse and `%*pb`. CpuSet.hex_mask writes them.
"""

from __future__ import annotations

import re
from typing import Final

from kata_pin.errors import ParseError
from kata_pin.model.cpuset import MAX_CPU, CpuSet
from kata_pin.wire.kernel.numbers import clipped

MAX_BYTES: Final = (MAX_CPU + 1) // 4 * 9 // 8 + 2

_MASK: Final = re.compile(rb"[0-9a-fA-F]{1,8}(?:,[0-9a-fA-F]{1,8})*\Z")


def parse_mask(data: bytes, source: str) -> CpuSet:
    """Return the CPUs of a mask such as `00000001,0000000f`; raises ParseError."""
    text = data.strip()
    if len(data) > MAX_BYTES or not _MASK.match(text):
        raise ParseError("not a mask of CPUs", source=source, text=clipped(text))
    bits = 0
    for group in text.split(b","):
        bits = bits << 32 | int(group, 16)
    return CpuSet.from_bits(bits)
