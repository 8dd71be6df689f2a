"""cpu.stat of a cgroup: how long its CPU quota stopped it.

Facts: Documentation/scheduler/sched-bwc.rst (version 1), cgroup-v2.rst.
"""

from __future__ import annotations

from typing import Final

from kata_pin.errors import ParseError
from kata_pin.model.measured.counters import Throttling
from kata_pin.wire.kernel.numbers import check_size, clipped

MAX_STAT: Final = 16 * 1024


def parse_cpu_stat(data: bytes) -> Throttling | None:
    """Return the throttling, None where no quota can be set (no cpu controller there).

    Raises ParseError.
    """
    check_size(data, MAX_STAT, "cpu.stat")
    found: dict[bytes, int] = {}
    for line in data.split(b"\n"):
        name, _, value = line.partition(b" ")
        if name:
            if not value.isdigit() or len(value) > 20:
                raise ParseError("not a name and a number", source="cpu.stat", text=clipped(line))
            found[name] = int(value)
    if b"nr_throttled" not in found:
        return None
    ns = found.get(b"throttled_time", found.get(b"throttled_usec", 0) * 1000)
    return Throttling(found[b"nr_throttled"], ns)
