"""What the kernel's resctrl says: the threads of a group, and what its monitors count.

Facts: Documentation/filesystems/resctrl.rst; kernel/resctrl (arch/x86/kernel/cpu/resctrl before
Linux 6.16): a counter may be a word, `Unavailable`, `Error` or, where counters are assigned to
groups, `Unassigned`.
"""

from __future__ import annotations

import re
from typing import Final

from kata_pin.errors import ParseError
from kata_pin.wire.kernel.numbers import check_size, clipped

MAX_TASKS: Final = 4 * 1024 * 1024
"""Most bytes of a group's `tasks`: the root group has every thread of the node."""

MAX_COUNTER: Final = 64

_NO_NUMBER: Final = frozenset({b"Unavailable", b"Error", b"Unassigned"})
_L3: Final = re.compile(r"mon_L3_([0-9]{1,5})\Z")


def parse_tasks(data: bytes) -> frozenset[int]:
    """Return the tids of a group; raises ParseError."""
    check_size(data, MAX_TASKS, "resctrl tasks")
    found = set()
    for line in data.split():
        if not line.isdigit() or len(line) > 10:
            raise ParseError("not a tid", source="resctrl tasks", text=clipped(line))
        found.add(int(line))
    return frozenset(found)


def parse_counter(data: bytes) -> int | None:
    """Return a counter in bytes, None where the kernel has none now; raises ParseError."""
    check_size(data, MAX_COUNTER, "resctrl counter")
    word = data.strip()
    if word in _NO_NUMBER:
        return None
    if not word.isdigit() or len(word) > 20:
        raise ParseError("not a number", source="resctrl counter", text=clipped(word))
    return int(word)


def l3_domain(name: str) -> int | None:
    """Return the number of the cache that a folder of `mon_data` is about, None for others."""
    match = _L3.match(name)
    return int(match[1]) if match else None
