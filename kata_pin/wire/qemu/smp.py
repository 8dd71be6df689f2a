"""QEMU's -smp and -numa as a GuestTopology.

The arithmetic is QEMU's (hw/core/machine-smp.c, machine_parse_smp_config): what is left out is
computed from what is there, cores before sockets since machine version 6.2, sockets before cores in
older ones. The newest rule is assumed unless -machine names an older version. dies, clusters,
modules, drawers and books: dies are kept, the others multiply the cores (or sockets) they hold.
Kata's Go runtime spells everything out; runtime-rs gives only cpus and maxcpus.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from kata_pin.errors import ParseError
from kata_pin.model.cpuset import CpuSet, union
from kata_pin.model.sandbox import GuestTopology
from kata_pin.wire.qemu.apic import index_of, place_of
from kata_pin.wire.qemu.options import Properties, last, number, properties

MAX_VCPUS: Final = 4096
"""More than any KVM guest can have (KVM_MAX_VCPUS); cpu-index stays below it (D5)."""

MAX_PLACED: Final = 2 * MAX_VCPUS
"""vCPUs that all -numa arguments may place: QEMU places each once."""

MAX_NODES: Final = 128  # QEMU's own limit (MAX_NODES of include/sysemu/numa.h)

_VERSIONED: Final = re.compile(r"-([0-9]{1,2})\.([0-9]{1,2})\Z")


def parse_smp(values: Iterable[str], machine: str = "") -> GuestTopology:
    """Return the topology of all -smp arguments of a command line (QEMU merges them).

    No argument at all is one vCPU. ParseError for numbers above MAX_VCPUS, for more boot vCPUs than
    maxcpus, and for a product that is not maxcpus (QEMU refuses to start with it).
    """
    given: dict[str, int] = {}
    for value in values:
        for key, texts in properties(value, first="cpus").items():
            given[key] = number(texts[-1], source=f"-smp {key}", high=MAX_VCPUS)
    shape = _shape(given, prefer_sockets=_prefers_sockets(machine))
    total = shape.sockets * shape.dies * shape.cores * shape.threads
    maximum = given.get("maxcpus") or given.get("cpus") or total
    boot = given.get("cpus") or maximum
    if not 0 < boot <= maximum <= MAX_VCPUS or total != maximum:
        raise ParseError(
            f"{boot} of {maximum} vCPUs in {total} places do not fit together", source="-smp"
        )
    return replace(shape, boot=boot, maximum=maximum)


def _shape(given: Mapping[str, int], *, prefer_sockets: bool) -> GuestTopology:
    sockets = given.get("sockets", 0)
    cores = given.get("cores", 0)
    threads = given.get("threads", 0)
    dies = given.get("dies") or 1
    above = (given.get("drawers") or 1) * (given.get("books") or 1)
    within = (given.get("clusters") or 1) * (given.get("modules") or 1)
    wanted = given.get("maxcpus") or given.get("cpus") or 0
    fixed = dies * above * within
    if not wanted:
        sockets, cores, threads = sockets or 1, cores or 1, threads or 1
    elif prefer_sockets and not sockets:
        cores, threads = cores or 1, threads or 1
        sockets = wanted // (fixed * cores * threads)
    elif not cores:
        sockets, threads = sockets or 1, threads or 1
        cores = wanted // (fixed * sockets * threads)
    elif not sockets:
        threads = threads or 1
        sockets = wanted // (fixed * cores * threads)
    if not threads:
        threads = wanted // (fixed * sockets * cores)
    return GuestTopology(sockets=sockets * above, dies=dies, cores=cores * within, threads=threads)


def _prefers_sockets(machine: str) -> bool:
    match = _VERSIONED.search(machine)
    return match is not None and (int(match[1]), int(match[2])) < (6, 2)


def parse_numa(
    guest: GuestTopology,
    values: Iterable[str],
    memory: Mapping[str, CpuSet],
    *,
    work: int = MAX_PLACED,
) -> GuestTopology:
    """Return `guest` with the guest nodes of its vCPUs and the host nodes of their memory.

    `values` are the -numa arguments, `memory` the host nodes of each memory backend by id. One node
    means nothing and leaves `numa` empty. Nodes without any `cpus=` get whole sockets in turn, as
    QEMU does on x86 (hw/i386/x86.c, x86_get_default_cpu_node_id). ParseError where the arguments
    place more vCPUs than `work` in all: each may name every vCPU again.
    """
    numa: dict[int, int] = {}
    host_nodes: dict[int, CpuSet] = {}
    count = 0
    for value in values:
        found = properties(value, first="type")
        kind = last(found, "type")
        if kind == "node":
            node = _node(found, "nodeid", count)
            count += 1
            if count > MAX_NODES:
                raise ParseError(f"more than {MAX_NODES} nodes", source="-numa")
            indexes = _indexes(found, guest)
            work = _less(work, len(indexes))
            numa |= dict.fromkeys(indexes, node)
            bound = memory.get(last(found, "memdev"))
            if bound:
                host_nodes[node] = bound
        elif kind == "cpu":
            ranges = _ranges(found, guest)
            work = _less(work, math.prod(len(one) for one in ranges))
            numa |= dict.fromkeys(_matching(ranges, guest), _node(found, "node-id", 0))
    if count <= 1:
        numa = {}
    elif not numa:
        numa = {index: place_of(guest, index).socket % count for index in range(guest.maximum)}
    return replace(guest, numa=numa, host_nodes=host_nodes)


def _node(found: Properties, key: str, default: int) -> int:
    text = last(found, key)
    return number(text, source=f"-numa {key}", high=MAX_NODES - 1) if text else default


def _less(work: int, done: int) -> int:
    """Return what is left of the work; raises ParseError when nothing is."""
    if done > work:
        raise ParseError("the arguments place more vCPUs than are read", source="-numa")
    return work - done


def _indexes(found: Properties, guest: GuestTopology) -> CpuSet:
    """Return the cpu-indexes of `cpus=0-3`, which may be repeated."""
    named = union(CpuSet.parse(text, source="-numa cpus") for text in found.get("cpus", []))
    return named & CpuSet.from_bits((1 << guest.maximum) - 1)


def _ranges(found: Properties, guest: GuestTopology) -> list[range]:
    """Return the sockets, dies, cores and threads of `cpu,socket-id=1`: one left out means all."""
    ranges = []
    for key, count in (
        ("socket-id", guest.sockets),
        ("die-id", guest.dies),
        ("core-id", guest.cores),
        ("thread-id", guest.threads),
    ):
        text = last(found, key)
        only = number(text, source=f"-numa {key}", high=MAX_VCPUS) if text else None
        ranges.append(range(count) if only is None else range(only, min(only + 1, count)))
    return ranges


def _matching(ranges: Sequence[range], guest: GuestTopology) -> Iterator[int]:
    """Yield the cpu-indexes of these sockets, dies, cores and threads."""
    for socket, die, core, thread in itertools.product(*ranges):
        yield index_of(guest, socket, die, core, thread)
