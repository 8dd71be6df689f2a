"""Where memory is, by NUMA node: a cgroup's memory.numa_stat, a process's numa_maps and maps.

Facts: Documentation/admin-guide/cgroup-v1/memory.rst and cgroup-v2.rst, numa(7). Paths in numa_maps
are chosen by users; the kernel escapes blanks and equals signs in them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from kata_pin.errors import ParseError
from kata_pin.model.measured.memory import Extent, NodeBytes, Placed
from kata_pin.wire.kernel.numbers import check_size, clipped

MAX_STAT: Final = 64 * 1024
MAX_MAPS: Final = 4 * 1024 * 1024
"""Most bytes that are read: QEMU's numa_maps has 60 KiB; vm.max_map_count allows 65,530 lines."""

_V1: Final = ("hierarchical_anon", "hierarchical_unevictable")
_V2: Final = ("anon", "shmem")
"""What a guest's memory is counted under. Version 1 counts shared memory as anonymous."""

MAX_FILE: Final = 256
"""Longest start of a path that is kept."""

_NODE: Final = re.compile(rb"N([0-9]{1,4})=([0-9]{1,15})\Z")
_PAGE: Final = re.compile(rb"kernelpagesize_kB=([0-9]{1,9})\Z")
_EXTENT: Final = re.compile(rb"([0-9a-f]{1,16})-([0-9a-f]{1,16}) [r-][w-][x-]([ps]) ")
_MEMINFO: Final = re.compile(rb"Node [0-9]{1,4} ([A-Za-z_()]{1,40}): +([0-9]{1,15}) kB\Z")
_ADDRESS: Final = re.compile(rb"[0-9a-f]{1,16}\Z")


def parse_numa_stat(data: bytes, page_size: int) -> dict[int, NodeBytes]:
    """Return the memory of a cgroup and those below it by node, without the page cache.

    `page_size` in bytes: version 1 counts pages. Raises ParseError.
    """
    check_size(data, MAX_STAT, "memory.numa_stat")
    rows: dict[str, dict[int, int]] = {}
    for line in data.split(b"\n"):
        name, *words = line.split()[:4096] or [b""]
        title = name.partition(b"=")[0].decode("ascii", "replace")
        rows[title] = _nodes(words, "memory.numa_stat")
    names, unit = (_V1, page_size) if _V1[0] in rows else (_V2, 1)
    if names[0] not in rows:
        raise ParseError("no anonymous memory", source="memory.numa_stat", text=clipped(data))
    nodes = {node for name in names for node in rows.get(name, {})}
    huge = rows.get("anon_thp", {}), rows.get("shmem_thp", {})
    return {
        node: NodeBytes(
            total=unit * sum(rows.get(name, {}).get(node, 0) for name in names),
            huge=sum(one.get(node, 0) for one in huge),
        )
        for node in sorted(nodes)
    }


def parse_hugetlb(data: bytes) -> dict[int, int]:
    """Return the bytes by node of a cgroup's hugetlb.<size>.numa_stat, with those below it.

    Version 1 has a line of its own for these. Raises ParseError.
    """
    check_size(data, MAX_STAT, "hugetlb.numa_stat")
    rows = {}
    for line in data.split(b"\n"):
        name, _, nodes = line.partition(b" ")
        rows[name.partition(b"=")[0]] = nodes
    found = rows.get(b"hierarchical_total", rows.get(b"total"))
    if found is None:
        raise ParseError("no total", source="hugetlb.numa_stat", text=clipped(data))
    return _nodes(found.split()[:4096], "hugetlb.numa_stat")


def parse_numa_maps(data: bytes) -> dict[int, NodeBytes]:
    """Return the memory of a process by node; what it maps of files counts too.

    `huge` are pages of hugetlbfs; transparent huge pages do not show there. Raises ParseError.
    """
    total: dict[int, int] = {}
    huge: dict[int, int] = {}
    for one in parse_placed(data):
        for node, pages in one.pages.items():
            size = pages * one.page_size
            total[node] = total.get(node, 0) + size
            if one.huge:
                huge[node] = huge.get(node, 0) + size
    return {node: NodeBytes(total[node], huge.get(node, 0)) for node in sorted(total)}


def parse_placed(data: bytes) -> list[Placed]:
    """Return the mappings of numa_maps that have pages; raises ParseError."""
    check_size(data, MAX_MAPS, "numa_maps")
    found = []
    for line in data.split(b"\n"):
        start, *words = line.split() or [b""]
        if not words:
            continue
        if words[0] in {b"prefer", b"weighted"}:  # `prefer (many):0-1`, `weighted interleave:0`
            words[:2] = [b"".join(words[:2])]
        nodes = _nodes(words[1:], "numa_maps")
        if not nodes:
            continue
        size = _PAGE.match(words[-1])
        if size is None or not _ADDRESS.match(start):
            raise ParseError("no mapping", source="numa_maps", text=clipped(line))
        files = (one[5:] for one in words[1:] if one.startswith(b"file="))
        found.append(
            Placed(
                int(start, 16),
                words[0][:MAX_FILE].decode("ascii", "replace"),
                nodes,
                int(size[1]) * 1024,
                next(files, b"")[:MAX_FILE].decode("utf-8", "replace"),
                b"huge" in words[1:],
            )
        )
    return found


def parse_extents(data: bytes) -> list[Extent]:
    """Return the mappings of a process's maps; raises ParseError."""
    check_size(data, MAX_MAPS, "maps")
    found = []
    for line in data.split(b"\n"):
        if not line:
            continue
        match = _EXTENT.match(line)
        if match is None:
            raise ParseError("no mapping", source="maps", text=clipped(line))
        found.append(Extent(int(match[1], 16), int(match[2], 16), match[3] == b"s"))
    return found


def parse_node_meminfo(data: bytes) -> dict[str, int]:
    """Return the lines of a NUMA node's meminfo that count kB, in bytes; raises ParseError."""
    check_size(data, MAX_STAT, "meminfo")
    lines = (line.strip() for line in data.split(b"\n"))
    found = {
        match[1].decode("ascii"): int(match[2]) * 1024
        for match in map(_MEMINFO.match, lines)
        if match
    }
    if "MemTotal" not in found or "MemFree" not in found:
        raise ParseError("no total", source="meminfo", text=clipped(data))
    return found


def _nodes(words: Iterable[bytes], source: str) -> dict[int, int]:
    """Return the numbers of `N<node>=<number>`; other words are passed over."""
    found = {}
    for word in words:
        match = _NODE.match(word)
        if match:
            found[int(match[1])] = int(match[2])
        elif re.match(rb"N[0-9]", word):
            raise ParseError("not a node's number", source=source, text=clipped(word))
    return found
