"""The kernel's histograms as text, in the form of Linux 6.1 and 6.12."""

from __future__ import annotations

import pytest

from kata_pin.base.errors import ParseError
from kata_pin.linux.tracepoints import Hist, HistogramEntry, parse_hist

SWITCHES = b"""# event histogram
#
# trigger info: hist:keys=common_cpu,next_pid:vals=hitcount:size=8192 if CPU == 2 [active]
#

{ common_cpu:          2, next_pid:         22 } hitcount:          1
{ common_cpu:          2, next_pid:          0 } hitcount:         16

Totals:
    Hits: 17
    Entries: 2
    Dropped: 3
"""
TIMES = b"""# event histogram

{ common_cpu:          2, pid:         34 } hitcount:          4  runtime:      12979696

Totals:
    Hits: 4
    Entries: 1
    Dropped: 0
"""


def test_entries_and_totals() -> None:
    """How often who came to which pCPU, how long who ran, and what had no room."""
    assert parse_hist(SWITCHES) == Hist(
        (HistogramEntry(2, 22, 1, 0), HistogramEntry(2, 0, 16, 0)), 3
    )
    assert parse_hist(TIMES) == Hist((HistogramEntry(2, 34, 4, 12_979_696),), 0)


@pytest.mark.parametrize(
    "data",
    [b"", TIMES.partition(b"Totals")[0], TIMES.replace(b"34", b"x"), b"{\n" + TIMES],
)
def test_what_is_not_whole(data: bytes) -> None:
    """Without its totals a histogram was cut off; an entry of another form is none."""
    with pytest.raises(ParseError):
        parse_hist(data)
