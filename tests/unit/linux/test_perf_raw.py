"""Samples of tracepoints."""

from __future__ import annotations

import struct

import pytest

from kata_pin.base.errors import ParseError
from kata_pin.linux.tracepoints import Traced, TracedRecords, parse_traced


def sample(time_ns: int, event: int, number: int) -> bytes:
    """Return a sample as Linux 6.18 writes it: 12 bytes of a tracepoint, padded to 8."""
    raw = struct.pack("=HBBiiI", event, 0, 0, 7, number, 0)
    return struct.pack("=IHHQI", 9, 1, 8 + 8 + 4 + len(raw), time_ns, len(raw)) + raw


LOST = struct.pack("=IHHQQ", 2, 0, 24, 1, 5)
OTHER = struct.pack("=IHHQ", 4, 0, 16, 0)
THROTTLED = struct.pack("=IHHQ", 5, 0, 16, 0)


def test_hits_and_losses() -> None:
    """Other records are passed over."""
    data = sample(100, 225, 36) + OTHER + LOST + sample(110, 224, 36)
    assert parse_traced(THROTTLED) == TracedRecords((), 1)
    assert parse_traced(data) == TracedRecords(
        (Traced(100, 225, 36, 7), Traced(110, 224, 36, 7)), 5
    )


@pytest.mark.parametrize(
    "data",
    [
        sample(1, 2, 3)[:-1],
        b"\x09",
        struct.pack("=IHH", 9, 0, 0) + bytes(40),
        struct.pack("=IHHQ", 9, 0, 16, 0),
        struct.pack("=IHHQ", 2, 0, 16, 0),
    ],
)
def test_torn_samples(data: bytes) -> None:
    """A record that is not whole is refused."""
    with pytest.raises(ParseError):
        parse_traced(data)
