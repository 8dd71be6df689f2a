"""Where memory is, by NUMA node: a cgroup's memory.numa_stat, a process's numa_maps.

Facts: Documentation/admin-guide/cgroup-v1/memory.rst and cgroup-v2.rst, numa(7). Paths in numa_maps
are chosen by users; the kernel escapes blanks and equals signs in them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from kata_pin.errors import ParseError
from kata_pin.model.measured.memory import NodeBytes
from kata_pin.wire.kernel.numbers import check_size, clipped

MAX_STAT: Final = 64 * 1024
MAX_MAPS: Final = 4 * 1024 * 1024
"""Most bytes that are read: QEMU's numa_maps has 60 KiB; vm.max_map_count allows 65,530 lines."""

_V1: Final = ("hierarchical_anon", "hierarchical_unevictable")
_V2: Final = ("anon", "shmem")
"""What a guest's memory is counted under. Version 1 counts shared memory as anonymous."""

_NODE: Final = re.compile(rb"N([0-9]{1,4})=([0-9]{1,15})\Z")
_PAGE: Final = re.compile(rb"kernelpagesize_kB=([0-9]{1,9})\Z")


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
    check_size(data, MAX_MAPS, "numa_maps")
    total: dict[int, int] = {}
    huge: dict[int, int] = {}
    for line in data.split(b"\n"):
        if not line:
            continue
        words = line.split()
        nodes = _nodes(words[2:], "numa_maps")
        if not nodes:
            continue
        sizes = [int(match[1]) for match in map(_PAGE.match, words[-1:]) if match]
        if not sizes:
            raise ParseError("no page size", source="numa_maps", text=clipped(line))
        for node, pages in nodes.items():
            size = pages * sizes[0] * 1024
            total[node] = total.get(node, 0) + size
            if b"huge" in words[2:]:
                huge[node] = huge.get(node, 0) + size
    return {node: NodeBytes(total[node], huge.get(node, 0)) for node in sorted(total)}


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
