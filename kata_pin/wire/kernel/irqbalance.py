"""What irqbalance answers on its socket (irqbalance.c, sock_handle).

`setup`: `SLEEP 10 IRQ 24 LOAD 3 ... BANNED 0000000c`; what stands between is of no use here.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from kata_pin.errors import ParseError
from kata_pin.model.cpuset import CpuSet
from kata_pin.wire.kernel.masks import parse_mask
from kata_pin.wire.kernel.numbers import check_size, clipped

MAX_BYTES: Final = 64 * 1024
MAX_SLEEP_S: Final = 86400

_SOURCE: Final = "irqbalance's setup"


@dataclass(frozen=True, slots=True)
class Setup:
    """`sleep_s`: how often it acts, in seconds; `banned`: the pCPUs that it keeps clear."""

    sleep_s: int
    banned: CpuSet


def parse_setup(data: bytes) -> Setup:
    """Return irqbalance's settings in force; raises ParseError."""
    check_size(data, MAX_BYTES, _SOURCE)
    words = data.rstrip(b"\0").split()
    named = dict(pairwise(words))
    sleep, banned = named.get(b"SLEEP", b""), named.get(b"BANNED", b"")
    if not sleep.isdigit() or len(sleep) > 9 or not banned:
        raise ParseError("neither SLEEP nor BANNED", source=_SOURCE, text=clipped(data))
    return Setup(min(int(sleep), MAX_SLEEP_S), parse_mask(banned, _SOURCE))
