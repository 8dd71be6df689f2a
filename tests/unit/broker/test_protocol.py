"""What the daemon and its broker send each other survives the way, and nonsense is refused."""

from __future__ import annotations

import struct

import pytest

from kata_pin.broker.protocol import (
    MAX_CHANGES,
    MAX_MASK,
    Change,
    Changed,
    parse_changed,
    parse_changes,
    render_changed,
    render_changes,
)

CHANGES = [
    Change(10, 11, 2**63, 7, frozenset({0, 63, 64, 300})),
    Change(10, 12, 5, 2**64 - 1, frozenset({1})),
    Change(10, 13, 5, 0, frozenset({1})),
    Change(1, 1, 0, 0, frozenset()),
]


def test_changes_survive() -> None:
    """Changes arrive as they were sent; sets that are equal travel once."""
    assert parse_changes(render_changes(CHANGES)) == CHANGES
    many = [CHANGES[1]] * MAX_CHANGES
    assert len(render_changes(many)) < MAX_CHANGES * 27


def test_answers_survive() -> None:
    """So do the errnos and affinities of the answer."""
    done = [Changed(0, frozenset({0, 8191})), Changed(13), Changed(0, frozenset())]
    assert parse_changed(render_changed(done)) == done
    assert parse_changed(b"") == []


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0",
        struct.pack("=HH", 0, 1),
        struct.pack("=HH", 1, 0),
        struct.pack("=HHH", 1, 0, MAX_MASK + 1) + bytes(MAX_MASK + 1),
        struct.pack("=HHH", 1, 0, 9),
        render_changes(CHANGES) + b"\0",
        render_changes(CHANGES)[:-1],
        render_changes([Change(0, 1, 0, 0, frozenset({1}))]),
        render_changes([Change(1, 0, 0, 0, frozenset({1}))]),
        render_changes([Change(-1, 1, 0, 0, frozenset({1}))]),
        struct.pack("=HH", 0, 1) + struct.pack("=iiQQH", 1, 1, 0, 0, 0),
        struct.pack("=HH", 0, MAX_CHANGES + 1) + bytes(26) * (MAX_CHANGES + 1),
    ],
)
def test_nonsense_is_refused(data: bytes) -> None:
    """Thread 0 is the caller itself for the kernel, so it is nonsense too."""
    with pytest.raises((ValueError, struct.error)):
        parse_changes(data)
