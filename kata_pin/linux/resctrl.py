"""Reading resctrl: whether it is there, who is in a group, what the group uses."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

from kata_pin.base.counters import CacheUse
from kata_pin.base.errors import ParseError
from kata_pin.linux.files import HostRoot, host_errors, read_bytes
from kata_pin.linux.kernel_text import check_size, clipped
from kata_pin.rights.broker.tunables import PREFIX

# Facts are in Documentation/filesystems/resctrl.rst; kernel/resctrl (arch/x86/kernel/cpu/resctrl
# before Linux 6.16): a counter may be a word, `Unavailable`, `Error` or, where counters are
# assigned to groups, `Unassigned`.

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


_FOLDER: Final = "fs/resctrl"
_COUNTERS: Final = {
    "occupancy": "llc_occupancy",
    "total": "mbm_total_bytes",
    "local": "mbm_local_bytes",
}


def missing(root: HostRoot) -> str:
    """Return why sandboxes cannot be monitored, empty if they can be."""
    if not os.path.exists(root.sys(_FOLDER, "schemata")):
        there = os.path.isdir(root.sys(_FOLDER))
        return (
            "resctrl is not mounted: mount -t resctrl resctrl /sys/fs/resctrl"
            if there
            else "this kernel or this CPU has no resctrl"
        )
    if not os.path.isdir(root.sys(_FOLDER, "info/L3_MON")):
        return "this CPU does not monitor its caches"
    return ""


def group_of(class_name: str, name: str) -> str:
    """Return the path of a sandbox's group below /sys/fs/resctrl."""
    control = f"{PREFIX}{class_name}/" if class_name else ""
    return f"{control}mon_groups/{PREFIX}{name}"


def tids_in(root: HostRoot, group: str) -> frozenset[int]:
    """Return the threads of a group; raises HostError or ParseError."""
    path = root.sys(_FOLDER, group, "tasks")
    with host_errors("read", path):
        return parse_tasks(read_bytes(path, MAX_TASKS))


def why_refused(root: HostRoot) -> str:
    """Return what resctrl says of the last request that it refused, empty without a reason."""
    with suppress(OSError):
        text = read_bytes(root.sys(_FOLDER, "info/last_cmd_status"), 4096).decode(
            "ascii", "replace"
        )
        return "" if text.strip() == "ok" else " ".join(text.split())
    return ""


def cache_use(root: HostRoot, group: str) -> CacheUse | None:
    """Return what a group uses now, None for one that is not there."""
    folder = root.sys(_FOLDER, group, "mon_data")
    try:
        domains = [name for name in os.listdir(folder) if l3_domain(name) is not None]
    except OSError:
        return None
    at_ns = time.monotonic_ns()
    sums: Mapping[str, int | None] = {
        member: _sum(folder, domains, file) for member, file in _COUNTERS.items()
    }
    return CacheUse(at_ns, **sums)


def _sum(folder: str, domains: list[str], file: str) -> int | None:
    """Return the sum over all caches, None if one of them has no number."""
    found = []
    for domain in domains:
        try:
            found.append(parse_counter(read_bytes(f"{folder}/{domain}/{file}", MAX_COUNTER)))
        except (OSError, ParseError):
            return None
    known = [one for one in found if one is not None]
    return sum(known) if known and len(known) == len(found) else None
