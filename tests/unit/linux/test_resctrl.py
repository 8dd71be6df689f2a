"""resctrl's text: threads of a group, counters that may have no number, folders of caches."""

from __future__ import annotations

import pytest

from kata_pin.base.errors import ParseError
from kata_pin.linux.resctrl import MAX_COUNTER, l3_domain, parse_counter, parse_tasks


def test_tasks() -> None:
    """Tids one a line; an empty group has none."""
    assert parse_tasks(b"1000\n1101\n") == {1000, 1101}
    assert parse_tasks(b"") == frozenset()


@pytest.mark.parametrize("data", [b"-1\n", b"x\n", b"99999999999\n", b"1\n0x2\n"])
def test_no_tids(data: bytes) -> None:
    """Anything else is refused."""
    with pytest.raises(ParseError):
        parse_tasks(data)


def test_counters() -> None:
    """A number, or a word where there is none."""
    assert parse_counter(b"18446744073709551615\n") == 2**64 - 1
    for word in (b"Unavailable\n", b"Error\n", b"Unassigned\n"):
        assert parse_counter(word) is None
    for wrong in (b"", b"-1", b"unavailable", b"1" * 21, b"1" * (MAX_COUNTER + 1)):
        with pytest.raises(ParseError):
            parse_counter(wrong)


def test_domains() -> None:
    """L3 caches only: other resources and parts of a cache are counted elsewhere."""
    assert l3_domain("mon_L3_00") == 0
    assert l3_domain("mon_L3_12") == 12
    for other in ("mon_sub_L3_00", "mon_PERF_PKG_00", "mon_L3_", "mon_L3_00\n", "x"):
        assert l3_domain(other) is None
