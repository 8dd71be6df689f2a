"""Histograms that the kernel makes of its tracepoints (Documentation/trace/histogram.rst).

One line per entry, such as `{ common_cpu: 2, next_pid: 34 } hitcount: 4  runtime: 12345`, then
totals. Keys are numbers only: a task's name is its own to choose, and may hold newlines.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from kata_pin.errors import ParseError
from kata_pin.wire.kernel.numbers import check_size, clipped

MAX_HIST: Final = 8 * 1024 * 1024
"""Most bytes that are read: 64,000 entries."""

_ENTRY: Final = re.compile(
    rb"\{ (?:common_)?cpu: *([0-9]{1,6}), (?:next_)?pid: *([0-9]{1,10}) *\}"
    rb" hitcount: *([0-9]{1,20})(?: *runtime: *([0-9]{1,20}))?\s*\Z"
)
_DROPPED: Final = re.compile(rb"    Dropped: ([0-9]{1,20})\Z")


class Entry(NamedTuple):
    """A task on a CPU: how often the event hit, and the sum of run times where that is a value."""

    cpu: int
    tid: int
    hits: int
    ran_ns: int


class Hist(NamedTuple):
    """A histogram; `dropped` counts events for which the table had no room."""

    entries: tuple[Entry, ...]
    dropped: int


def parse_hist(data: bytes) -> Hist:
    """Read a `hist` file; raises ParseError, also where the totals are missing."""
    check_size(data, MAX_HIST, "hist")
    entries = []
    for line in data.split(b"\n"):
        if line.startswith(b"{"):
            found = _ENTRY.match(line)
            if found is None:
                raise ParseError("not an entry", source="hist", text=clipped(line))
            entries.append(Entry(*(int(one or 0) for one in found.groups())))
        elif dropped := _DROPPED.match(line):
            return Hist(tuple(entries), int(dropped[1]))
    raise ParseError("no totals", source="hist")
