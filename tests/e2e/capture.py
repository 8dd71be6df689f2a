"""The part of sysfs that a topology is read from, as text: path, tab, content."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_PATTERNS: Final = (
    "devices/system/cpu/online",
    "devices/system/cpu/present",
    "devices/system/cpu/possible",
    "devices/system/cpu/isolated",
    "devices/system/cpu/nohz_full",
    "devices/system/cpu/smt/*",
    "devices/system/cpu/cpu[0-9]*/online",
    "devices/system/cpu/cpu[0-9]*/topology/*_id",
    "devices/system/cpu/cpu[0-9]*/topology/*_list",
    "devices/system/cpu/cpu[0-9]*/cache/index[0-9]*/id",
    "devices/system/cpu/cpu[0-9]*/cache/index[0-9]*/level",
    "devices/system/cpu/cpu[0-9]*/cache/index[0-9]*/type",
    "devices/system/cpu/cpu[0-9]*/cache/index[0-9]*/shared_cpu_list",
    "devices/system/node/online",
    "devices/system/node/node[0-9]*/cpulist",
    "devices/system/node/node[0-9]*/distance",
)


def capture(top: Path) -> list[str]:
    """Return a line for each file of the topology below `top` (/sys), sorted by path."""
    files = (file for pattern in _PATTERNS for file in top.glob(pattern) if file.is_file())
    return sorted(f"sys/{file.relative_to(top)}\t{file.read_text().strip()}\n" for file in files)
