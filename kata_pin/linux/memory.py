"""Where memory is by NUMA node: of the node, of a cgroup, of a process."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Iterable
from typing import Final

from kata_pin.base.counters import Extent, FreeMemory, NodeBytes, Placed
from kata_pin.base.cpuset import CpuSet
from kata_pin.base.errors import HostError, ParseError
from kata_pin.linux.files import HostRoot, host_errors, read_bytes, read_text
from kata_pin.linux.kernel_text import check_size, clipped
from kata_pin.linux.proc import status_field
from kata_pin.rights.broker.pages import probe

# A cgroup's memory.numa_stat, a process's numa_maps and maps.
#
# Facts are in Documentation/admin-guide/cgroup-v1/memory.rst and cgroup-v2.rst, numa(7). Paths in
# numa_maps are chosen by users; the kernel escapes blanks and equals signs in them.

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


# Memory of NUMA nodes, and of a process: what is free, what it has mapped where.
#
# Facts are in Documentation/ABI/stable/sysfs-devices-node, proc_pid_numa_maps(5),
# proc_pid_status(5).

probe_moves: Final = probe
"""Raises OSError where this process may not move pages of others."""

_NODES: Final = "devices/system/node"
_HUGE: Final = re.compile(r"hugepages-([0-9]{1,9})kB\Z")


def nodes_with_memory(root: HostRoot) -> CpuSet:
    """Return the NUMA nodes that have memory; node 0 where the kernel knows none."""
    try:
        return CpuSet.parse(read_text(root.sys(_NODES, "has_memory")))
    except FileNotFoundError:
        return CpuSet([0])
    except OSError as error:
        raise HostError("read", root.sys(_NODES, "has_memory"), error.errno or 0) from error


def free_memory(root: HostRoot, node: int) -> FreeMemory:
    """Return what a node has free; raises HostError or ParseError."""
    folder = root.sys(_NODES, f"node{node}")
    try:
        found = parse_node_meminfo(read_bytes(f"{folder}/meminfo"))
        huge = {}
        names = os.listdir(f"{folder}/hugepages") if os.path.isdir(f"{folder}/hugepages") else ()
        for name in names:
            match = _HUGE.match(name)
            if match is not None:
                free = read_text(f"{folder}/hugepages/{name}/free_hugepages")
                huge[int(match[1]) * 1024] = int(free)
    except (OSError, ValueError) as error:
        number = getattr(error, "errno", 0) or 0
        raise HostError("read", folder, number) from error
    available = found["MemFree"] + found.get("Inactive(file)", 0)
    return FreeMemory(found["MemTotal"], available, huge)


def allowed_nodes(root: HostRoot, pid: int) -> CpuSet:
    """Return the NUMA nodes that a process's cpuset allows; raises HostError or ParseError."""
    path = root.proc(pid, "status")
    with host_errors("read", path):
        listed = status_field(read_bytes(path), "Mems_allowed_list")
    if listed is None:
        raise ParseError("no Mems_allowed_list", source=path)
    return CpuSet.parse(listed, source=path)


async def mappings(
    root: HostRoot, pid: int, deadline_s: float
) -> tuple[list[Placed], list[Extent]]:
    """Return what a process has mapped, and where its pages are.

    It takes the lock of its memory map, 12 ms per GiB of small pages. Raises OSError, TimeoutError
    where that takes too long, or ParseError.
    """
    requests = [(pid, file, MAX_MAPS) for file in ("numa_maps", "maps")]
    answers = await root.calls.read_slow(requests, deadline_s)
    found = []
    for _, file, _ in requests:
        data = answers.get((pid, file), TimeoutError())
        if isinstance(data, OSError):
            raise data
        found.append(data[: data.rfind(b"\n") + 1] if len(data) >= MAX_MAPS else data)
    # 65,530 mappings take 0.4 s
    return await asyncio.to_thread(lambda: (parse_placed(found[0]), parse_extents(found[1])))
