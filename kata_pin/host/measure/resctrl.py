"""Reading resctrl: whether it is there, who is in a group, what the group uses."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

from kata_pin.broker.resctrl import PREFIX
from kata_pin.errors import HostError, ParseError
from kata_pin.host.files import read_bytes
from kata_pin.host.root import HostRoot
from kata_pin.model.measured.cache import CacheUse
from kata_pin.wire.kernel.resctrl import (
    MAX_COUNTER,
    MAX_TASKS,
    l3_domain,
    parse_counter,
    parse_tasks,
)

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
    try:
        return parse_tasks(read_bytes(path, MAX_TASKS))
    except OSError as error:
        raise HostError("read", path, error.errno or 0) from error


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
