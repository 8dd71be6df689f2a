"""Rings of perf: recorded ones, and bytes that no kernel writes."""

from __future__ import annotations

import struct
from itertools import pairwise
from pathlib import Path

import pytest

from kata_pin.base.errors import ParseError
from kata_pin.linux.perf import (
    DEAD,
    HEAD_AT,
    TAIL_AT,
    Came,
    Forked,
    Left,
    Lost,
    Ran,
    TaskNamed,
    between,
    parse_records,
)

DATA = Path(__file__).parents[2] / "data" / "perf"
PAGE = 4096
OUT = 1 << 13


def recorded(name: str) -> tuple[bytes, int, int]:
    """Return a recorded ring's data, and from where to where it was not read."""
    whole = (DATA / f"{name}.ring").read_bytes()
    (tail,) = struct.unpack_from("=Q", whole, TAIL_AT)
    (head,) = struct.unpack_from("=Q", whole, HEAD_AT)
    return whole[PAGE:], tail, head


def switch(time_ns: int, tid: int, next_tid: int, *, misc: int = OUT) -> bytes:
    """Return a record of a switch; a process has the number of its thread."""
    return struct.pack("=IHHIIIIQII", 15, misc, 40, next_tid, next_tid, tid, tid, time_ns, 1, 0)


@pytest.mark.parametrize(("name", "lost"), [("wrapped", 275), ("lost", 4971)])
def test_a_recorded_ring(name: str, lost: int) -> None:
    """Who came is who leaves next, or has died, or an arrival tells who was there meanwhile."""
    area, tail, head = recorded(name)
    found = parse_records(between(area, tail, head))
    leaves = [one for one in found.events if isinstance(one, Left)]
    assert found.records in range((head - tail) // 56, (head - tail) // 40 + 1)
    assert [one for one in found.events if isinstance(one, Lost)] == [Lost(lost)]
    assert len(leaves) >= 100
    assert all(a.time_ns < b.time_ns for a, b in pairwise(leaves))
    here: int | None = None
    for one in found.events:
        if isinstance(one, Left):
            assert here in {None, one.tid} or one.tid == DEAD
            here = one.next_tid
        elif isinstance(one, Came):
            assert here in {None, one.from_tid}
            here = one.tid


def test_a_task_without_records() -> None:
    """A task of which no record was written shows in the arrival of the next one."""
    area, tail, head = recorded("wrapped")
    events = parse_records(between(area, tail, head)).events
    (came,) = [one for one in events if isinstance(one, Came)]
    assert (came.from_tid, came.tid) == (69, 31034)


def test_a_ring_that_wraps() -> None:
    """A record over the end of the data is read as if it were whole."""
    area, tail, head = recorded("wrapped")
    assert head // len(area) > tail // len(area), "it does wrap"
    data = between(area, tail, head)
    assert len(data) == head - tail
    shifted = area[1000:] + area[:1000]
    assert between(shifted, tail + len(area) - 1000, head + len(area) - 1000) == data


def test_kinds_of_records() -> None:
    """Leaves, samples, names, new tasks and losses are told; arrivals and others are counted."""
    data = b"".join(
        [
            switch(5, 7, 0),
            switch(6, 0, 7, misc=0),
            switch(7, 8, 6, misc=0),
            struct.pack("=IHHIIQII", 9, 1, 32, 7, 8, 9, 1, 0),
            struct.pack("=IHHII16s", 3, 0, 32, 7, 8, b"a\xffb\0junk") + b"",
            struct.pack("=IHHIIIIQ", 7, 0, 32, 20, 7, 21, 8, 10),
            struct.pack("=IHHQQ", 2, 0, 24, 1, 33),
            struct.pack("=IHHQ", 99, 0, 16, 0),
        ]
    )
    found = parse_records(data)
    assert found.records == 8
    assert found.events == (
        Left(5, 7, 7, 0, 0),
        Came(7, 8, 8, 6, 6),
        Ran(9, 8, 7),
        TaskNamed(8, 7, "a\\xffb"),
        Forked(21, 20, 7),
        Lost(33),
    )


@pytest.mark.parametrize(
    "data",
    [
        switch(1, 2, 3)[:-1],
        switch(1, 2, 3) + b"\x0f\0",
        struct.pack("=IHH", 15, OUT, 0) + bytes(40),
        struct.pack("=IHH", 15, OUT, 7) + bytes(40),
        struct.pack("=IHHQQ", 15, OUT, 24, 0, 0),
        struct.pack("=IHHQ", 2, 0, 16, 0),
        struct.pack("=IHHQ", 9, 0, 16, 0),
        struct.pack("=IHH", 3, 0, 8),
        struct.pack("=IHHQ", 7, 0, 16, 0),
    ],
)
def test_torn_records(data: bytes) -> None:
    """A record that is not whole is refused, and never read beyond its end."""
    with pytest.raises(ParseError):
        parse_records(data)


def test_positions_that_do_not_fit() -> None:
    """A writer that went round, and a tail before the head, are refused."""
    area = bytes(64)
    assert between(area, 100, 100) == b""
    assert between(area, 100, 164) == area
    for tail, head in ((100, 165), (101, 100)):
        with pytest.raises(ParseError):
            between(area, tail, head)
    with pytest.raises(ParseError):
        between(b"", 0, 0)
