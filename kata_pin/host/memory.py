"""Memory of NUMA nodes, and of a process: what is free, what it has mapped where.

Facts: Documentation/ABI/stable/sysfs-devices-node, proc_pid_numa_maps(5), proc_pid_status(5).
"""

from __future__ import annotations

import asyncio
import os
import re
from typing import Final

from kata_pin.broker.pages import probe
from kata_pin.errors import HostError, ParseError
from kata_pin.host.files import read_bytes, read_text
from kata_pin.host.root import HostRoot
from kata_pin.model.cpuset import CpuSet
from kata_pin.model.measured.memory import Extent, FreeMemory, Placed
from kata_pin.wire.kernel.memory import (
    MAX_MAPS,
    parse_extents,
    parse_node_meminfo,
    parse_placed,
)

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
    try:
        for line in read_text(path).splitlines():
            name, _, value = line.partition(":")
            if name == "Mems_allowed_list":
                return CpuSet.parse(value.strip(), source=path)
    except OSError as error:
        raise HostError("read", path, error.errno or 0) from error
    raise ParseError("no Mems_allowed_list", source=path)


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
