"""`show --memory` and `doctor`: on which NUMA nodes memory and vCPUs of sandboxes are."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from kata_pin.base.config.tree import Config
from kata_pin.base.counters import NodeBytes
from kata_pin.base.cpuset import CpuSet, union
from kata_pin.base.documents.measured import MemoryDocument, MemorySource, NodeMemory, SandboxMemory
from kata_pin.base.documents.state import Row, Sandbox, State
from kata_pin.base.errors import ParseError, reason_of
from kata_pin.base.settings import REMOTE_PERCENT, MemoryMode
from kata_pin.cli.render import phrases
from kata_pin.cli.render.layout import CPUS, NAMES, Column, Output, Text, paragraph, styled, table
from kata_pin.cli.reports import words
from kata_pin.cli.reports.pcpus import parse
from kata_pin.linux.cgroups import CgroupFiles
from kata_pin.linux.files import HOST, HostRoot
from kata_pin.linux.memory import MAX_MAPS, nodes_with_memory, parse_numa_maps, probe_moves

if TYPE_CHECKING:
    from kata_pin.cli.doctor.node import Examined

# A cgroup's counters cost nothing. numa_maps of the VMM is more exact and takes the lock of the
# process's memory map, about 12 ms per GiB of small pages: only for one sandbox that is asked for,
# by the reads that may hang (Calls.read_slow).

MAPS_S: Final = 10.0
"""Longest wait for numa_maps: some 500 GiB of small pages."""

_Memory = Mapping[int, NodeBytes]


def memory(state: State, *, exact: bool) -> MemoryDocument:
    """Return the document; `exact`: read what the VMM of the only sandbox has mapped."""
    found = list(_by_cgroup(state, HOST))
    if exact:
        found = [_by_process(one) for one in found]
    return MemoryDocument(
        time=state.time,
        daemon=state.daemon,
        node_count=len({one.node for one in state.node.cpus}),
        sandboxes=tuple(found),
    )


def _far(found: SandboxMemory) -> CpuSet:
    return CpuSet(one.node for one in found.nodes) - parse(found.vcpu_nodes)


def far_from_vcpus(found: SandboxMemory) -> str:
    """Return how much memory is where, and where the vCPUs are."""
    share = f"{found.remote_percent or 0:.0f} % of its memory is on NUMA node {_far(found)}"
    return f"{share}, its vCPUs run on node {found.vcpu_nodes}"


def remedy(found: SandboxMemory) -> str:
    """Return what to do about remote memory."""
    now = (
        f"memory: migrate in kata-pin's settings moves it, and so does migratepages {found.pid} "
        f"{_far(found)} {found.vcpu_nodes} (package numactl)"
    )
    new = (
        "for new pods: the kubelet's memoryManagerPolicy Static and topologyManagerPolicy "
        "single-numa-node, and Kata's sandbox_cgroup_only = true"
    )
    return new if found.move is not None else f"{now}; {new}"


def vcpu_nodes(sandbox: Sandbox, state: State) -> CpuSet:
    """Return the NUMA nodes that a sandbox's vCPUs may run on, empty if no vCPU is known."""
    node_of = {place.cpu: place.node for place in state.node.cpus}
    affinities = {one.affinity for one in sandbox.threads if one.role == "vcpu"}
    cpus = union(map(parse, affinities))
    return CpuSet(node_of[cpu] for cpu in cpus if cpu in node_of)


def _by_cgroup(state: State, root: HostRoot) -> Iterable[SandboxMemory]:
    files, huge = CgroupFiles(root, "memory"), CgroupFiles(root, "hugetlb")
    folders = {
        one.id: files.folders(one.vmm.pid, one.vmm.pid) or []
        for one in state.sandboxes
        if one.vmm is not None
    }
    users: dict[str, int] = {}
    for own in folders.values():
        for folder in own:
            users[folder] = users.get(folder, 0) + 1
    for sandbox in state.sandboxes:
        own = [one for one in folders.get(sandbox.id, []) if users[one] == 1]
        found = SandboxMemory(
            id=sandbox.id,
            pod=sandbox.pod,
            pid=None,
            vcpu_nodes=str(vcpu_nodes(sandbox, state)),
            source="none",
            cgroup="",
            nodes=(),
            total_bytes=None,
            remote_bytes=None,
            remote_percent=None,
            problem=sandbox.vmm_problem or "no VMM was found",
            move=sandbox.memory,
        )
        if sandbox.vmm is not None:
            pid = sandbox.vmm.pid
            folder, counted, problem = _of_cgroup(files, own)
            mapped = huge.huge_pages(huge.folders(pid, pid) or [], folder)
            found = replace(found, pid=pid, cgroup=folder, problem=problem)
            found = _counted(found, "cgroup", _sum(counted, mapped))
        yield found


def _of_cgroup(files: CgroupFiles, folders: Sequence[str]) -> tuple[str, _Memory, str]:
    """Return the folder of the sandbox alone that has counters, what it counts, and a problem.

    The innermost has all; on version 2 a folder for threads has none.
    """
    problem = (
        "its VMM is in no memory cgroup of its own; name the sandbox to read what it has mapped"
    )
    for folder in folders:
        try:
            return folder, files.memory(folder, os.sysconf("SC_PAGE_SIZE")), ""
        except FileNotFoundError:
            problem = f"{folder} has no memory.numa_stat"
        except OSError as error:
            problem = f"cannot read {folder}/memory.numa_stat: {error.strerror}"
        except ParseError as error:
            problem = error.message
    return "", {}, problem


def _by_process(found: SandboxMemory) -> SandboxMemory:
    """Return the same from numa_maps of the VMM; the cgroup's if that cannot be read."""
    if found.pid is None:
        return found
    file = "numa_maps"
    answers = asyncio.run(HOST.calls.read_slow([(found.pid, file, MAX_MAPS)], MAPS_S))
    data = answers[found.pid, file]
    problem = found.problem
    if isinstance(data, TimeoutError):
        problem = f"numa_maps of process {found.pid} was not read within {MAPS_S:g} s"
    elif isinstance(data, OSError):
        hint = "; run as root" if isinstance(data, PermissionError) else ""
        problem = f"cannot read numa_maps of process {found.pid}: {reason_of(data)}{hint}"
    else:
        try:
            mapped = parse_numa_maps(data[: data.rfind(b"\n") + 1])
        except ParseError as error:
            problem = error.message
        else:
            cut = len(data) >= MAX_MAPS
            problem = f"only the first {MAX_MAPS} bytes of numa_maps were read" if cut else ""
            return _counted(replace(found, cgroup="", problem=problem), "process", mapped)
    return replace(found, problem=problem)


def _counted(found: SandboxMemory, source: MemorySource, counted: _Memory) -> SandboxMemory:
    """Return the same with what was counted, if that is anything."""
    if not counted:
        return replace(found, source="none", cgroup="", nodes=(), total_bytes=None,
                       remote_bytes=None, remote_percent=None)  # fmt: skip
    near = parse(found.vcpu_nodes)
    total = sum(one.total for one in counted.values())
    remote = sum(one.total for node, one in counted.items() if node not in near)
    return replace(
        found,
        source=source,
        nodes=tuple(
            NodeMemory(node, one.total, one.huge)
            for node, one in sorted(counted.items())
            if one.total
        ),
        total_bytes=total,
        remote_bytes=remote if near else None,
        remote_percent=round(100 * remote / max(total, 1), 2) if near else None,
    )


def _sum(first: _Memory, second: _Memory) -> _Memory:
    nothing = NodeBytes(0, 0)
    return {
        node: NodeBytes(
            *map(sum, zip(first.get(node, nothing), second.get(node, nothing), strict=True))
        )
        for node in sorted({*first, *second})
    }


# `show --memory`: memory by NUMA node as lines of text.

_MOVED: Final = frozenset({"moving", "stopped"})
"""States of moves that are worth a line."""


def memory_memory(document: MemoryDocument, output: Output) -> list[Text]:
    """Return one row per sandbox with a column per node, and what to do about remote memory."""
    lines = paragraph(phrases.daemon(document.daemon), output)
    if not document.sandboxes:
        return [*lines, Text(), Text("no sandboxes")]
    nodes = sorted({node.node for one in document.sandboxes for node in one.nodes})
    columns = [
        Column("SANDBOX", NAMES, fold=18),
        Column("vCPU-NODES", CPUS),
        *(Column(f"NODE-{node}", breaks="", right=True) for node in nodes),
        Column("HUGE", breaks="", right=True, optional=1),
        Column("REMOTE", breaks="", right=True),
        Column("SOURCE", optional=2),
    ]
    lines += [Text(), *table(columns, [_row(one, nodes) for one in document.sandboxes], output)]
    remarks = []
    if document.node_count == 1:
        remarks.append(Text("- this node has one NUMA node: no memory is remote"))
    for one in document.sandboxes:
        if one.problem:
            remarks.append(styled(f"! {words.owner(one)}: {one.problem}", phrases.ODD))
        if one.move is not None and one.move.state in _MOVED:
            remarks.append(styled(f"- {words.owner(one)}: ") + phrases.memory_move(one.move))
        elif (one.remote_percent or 0) >= REMOTE_PERCENT:
            text = f"! {words.owner(one)}: {far_from_vcpus(one)}; {remedy(one)}"
            remarks.append(styled(text, phrases.ODD))
    if remarks:
        lines += [Text(), *(part for one in remarks for part in paragraph(one, output, indent=2))]
    return lines


def _row(one: SandboxMemory, nodes: list[int]) -> list[Text]:
    by_node = {found.node: found for found in one.nodes}
    near = parse(one.vcpu_nodes)
    known = one.total_bytes is not None
    huge = sum(found.huge_bytes for found in one.nodes)
    return [
        styled(words.owner(one), phrases.NAME),
        styled(one.vcpu_nodes or words.NOTHING),
        *(
            _on_node(by_node.get(node), near=node in near or not near, known=known)
            for node in nodes
        ),
        Text(phrases.size(huge) if known else "n/a"),
        _remote(one),
        styled(one.source),
    ]


def _on_node(found: NodeMemory | None, *, near: bool, known: bool) -> Text:
    if found is None:
        return Text("0" if known else "n/a")
    return Text(phrases.size(found.bytes), style="" if near else phrases.ODD)


def _remote(one: SandboxMemory) -> Text:
    if one.remote_percent is None:
        return Text("n/a")
    style = phrases.BAD if one.remote_percent >= REMOTE_PERCENT else ""
    return Text(f"{one.remote_percent:.1f} %", style=style)


# `doctor`: whether memory can be moved, and whose memory is far from its vCPUs.

_MOVES_NEED: Final = (
    "a kernel with CONFIG_NUMA and CONFIG_MIGRATION; CAP_SYS_NICE; in a container a seccomp "
    "profile that allows the call (the chart's seccompProfile)"
)


def prerequisites(examined: Examined) -> Iterator[Row]:
    """Yield the rows of the node, unless only sandboxes are asked for, and of sandboxes."""
    if examined.node:
        yield from memory_moves(examined.config, examined.root)
    for found in _by_cgroup(examined.state, examined.root) if examined.state else ():
        yield from remote_memory(found, words.owner(found))


def memory_moves(
    config: Config, root: HostRoot, probe: Callable[[], None] = probe_moves
) -> Iterator[Row]:
    """Yield whether `memory: migrate` can work here, nothing without that setting."""
    if config.memory is not MemoryMode.MIGRATE:
        return
    nodes = nodes_with_memory(root)
    if len(nodes) < 2:
        text = "memory: migrate has no effect: this node has memory on one NUMA node only"
        yield Row("memory moves", "info", text)
    elif not config.acts:
        yield Row("memory moves", "info", "memory: migrate has no effect with mode: observe")
    else:
        try:
            probe()
        except OSError as error:
            text = f"memory: migrate cannot work: move_pages is refused: {error.strerror}"
            yield Row("memory moves", "warn", text, _MOVES_NEED)
        else:
            text = f"NUMA nodes {nodes}, at most {config.memory_rate_mib} MiB per second"
            yield Row("memory moves", "ok", text)


def remote_memory(found: SandboxMemory, name: str) -> Iterator[Row]:
    """Yield a warning where much of a sandbox's memory is far from its vCPUs.

    Why the daemon cannot move it is a note of the sandbox.
    """
    moving = found.move is not None and found.move.state in {"moving", "stopped"}
    if (found.remote_percent or 0) >= REMOTE_PERCENT and not moving:
        yield Row("memory", "warn", far_from_vcpus(found), remedy(found), name)
