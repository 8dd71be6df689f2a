"""Samples of tracepoints in perf's rings: time, which tracepoint, and its first number.

The events have the fields TIME and RAW (linux/perf_event.h); every tracepoint's record begins with
its own number and 6 more bytes, then come its fields, of which the first is an `int` here.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from kata_pin.errors import ParseError

_HEADER: Final = struct.Struct("=IHH")
_SAMPLE: Final = struct.Struct("=QIH6xi")  # time, bytes of what follows, tracepoint, first field
_LOST: Final = struct.Struct("=QQ")
_TYPE_LOST: Final = 2
_TYPE_THROTTLE: Final = 5
_TYPE_SAMPLE: Final = 9


class Traced(NamedTuple):
    """One hit of a tracepoint."""

    time_ns: int
    event: int
    number: int


class TracedRecords(NamedTuple):
    """What a piece of a ring says; `lost` counts what had no room or was too often."""

    hits: tuple[Traced, ...]
    lost: int


def parse_traced(data: bytes) -> TracedRecords:
    """Read whole records; raises ParseError where one is cut off."""
    hits, lost, at = [], 0, 0
    while at < len(data):
        if len(data) - at < _HEADER.size:
            raise ParseError("a record's header is cut off", source="perf ring")
        kind, _, size = _HEADER.unpack_from(data, at)
        body = at + _HEADER.size
        if size < _HEADER.size or size > len(data) - at:
            raise ParseError(f"a record of {size} bytes", source="perf ring")
        if kind == _TYPE_SAMPLE:
            if size < _HEADER.size + _SAMPLE.size:
                raise ParseError(f"a sample of {size} bytes", source="perf ring")
            time_ns, _, event, number = _SAMPLE.unpack_from(data, body)
            hits.append(Traced(time_ns, event, number))
        elif kind == _TYPE_LOST:
            if size < _HEADER.size + _LOST.size:
                raise ParseError(f"a loss of {size} bytes", source="perf ring")
            lost += _LOST.unpack_from(data, body)[1]
        elif kind == _TYPE_THROTTLE:
            lost += 1
        at += size
    return TracedRecords(tuple(hits), lost)
