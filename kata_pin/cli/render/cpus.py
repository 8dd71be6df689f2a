"""`show --cpus`: every pCPU with its owner, its threads, and what disturbs it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Final

from kata_pin.base.cpuset import CpuSet
from kata_pin.base.documents.state import (
    Quiet,
    QuietCpu,
    QuietInterrupt,
    Sandbox,
    State,
    Thread,
)
from kata_pin.cli.render import phrases
from kata_pin.cli.render.layout import CPUS, NAMES, Column, Output, Text, paragraph, styled, table
from kata_pin.cli.reports import pcpus, words
from kata_pin.cli.reports.pcpus import Pcpu
from kata_pin.cli.reports.words import IDLE_LIMITS, NOTHING

_STYLES: Final = {"warn": phrases.ODD, "fail": phrases.BAD}

NAMED: Final = 6
"""Interrupts per pCPU that are named."""


def quiet(found: Quiet, output: Output) -> list[Text]:
    """Return one row per exclusive pCPU, its interrupts, and what concerns the whole node."""
    if not found.cpus:
        return []
    title = (
        f"Work of the kernel on exclusive pCPUs, per second (counted for {found.measured_s:g} s)"
    )
    lines = [Text(), *paragraph(Text(title, style="bold underline"), output)]
    columns = [
        Column("pCPU", right=True),
        Column("MOVABLE", right=True),
        Column("MANAGED", right=True),
        Column("TICK", right=True),
        Column("IPI", right=True),
        Column("SOFTIRQ", right=True),
        Column("KTHREADS", right=True, optional=1),
        Column("IDLE-LIMIT", optional=2),
        Column("GOVERNOR", NAMES, optional=3),
        Column("SIBLING", NAMES, fold=14),
    ]
    lines += table(columns, [_row(one) for one in found.cpus], output)
    for one in found.cpus:
        if one.interrupts:
            named = styled(f"pCPU {one.cpu}: {'; '.join(_named(one.interrupts))}")
            lines += paragraph(named, output, indent=2)
    for problem in found.problems:
        lines += paragraph(styled(f"! not readable: {problem}", phrases.ODD), output, indent=2)
    return [*lines, Text(), *phrases.checks("SUBJECT", found.rows, _STYLES, output)]


def _row(one: QuietCpu) -> list[Text]:
    by_kind = {kind: _sum(one.interrupts, kind) for kind in ("movable", "managed")}
    softirqs = None if one.softirqs is None else sum(one.softirqs.values())
    idle = one.idle_limit
    siblings = [f"{each.cpu} ({each.owner or 'not exclusive'})" for each in one.siblings]
    return [
        Text(str(one.cpu)),
        styled(_rate(by_kind["movable"]), phrases.ODD if by_kind["movable"] else ""),
        Text(_rate(by_kind["managed"])),
        Text(_rate(one.tick_per_s)),
        Text(_rate(one.ipi_per_s)),
        Text(_rate(softirqs)),
        Text("n/a" if one.kernel_threads is None else str(one.kernel_threads)),
        Text("n/a" if idle is None else IDLE_LIMITS.get(idle, f"{idle} us")),
        styled(one.governor or NOTHING),
        styled(", ".join(siblings) or NOTHING),
    ]


def _sum(found: Sequence[QuietInterrupt] | None, kind: str) -> float | None:
    if found is None:
        return None
    return sum(one.per_s for one in found if one.kind == kind)


def _rate(per_s: float | None) -> str:
    return (
        "n/a" if per_s is None else f"{per_s:.0f}" if per_s >= 10 or not per_s else f"{per_s:.1f}"
    )


def _named(found: Sequence[QuietInterrupt]) -> Iterator[str]:
    active = [one for one in found if one.per_s]
    for one in active[:NAMED]:
        yield f"{one.name} (interrupt {one.number}, {one.kind}) {_rate(one.per_s)}/s"
    if len(active) > NAMED:
        yield f"{len(active) - NAMED} more"
    for kind in ("movable", "managed", "guest"):
        if silent := sum(1 for one in found if one.kind == kind and not one.per_s):
            yield f"{silent} {kind} silent"


def cpus(state: State, output: Output) -> list[Text]:
    """Return one row per pCPU; neighbouring cores that no sandbox uses share a row."""
    lines = phrases.head(state, output)
    view = pcpus.view(state)
    marked = any(pcpu.marks for pcpu in view)
    columns = [
        Column("CORE", CPUS, right=True),
        Column("pCPU", CPUS, right=True),
        Column("CLAIM", fold=12),
        Column("OWNER", NAMES, fold=20),
        Column("THREADS", NAMES + ",:", fold=16),
        *([Column("MARKS", fold=12)] if marked else []),
    ]
    for node, members in groupby(view, key=lambda pcpu: pcpu.place.node):
        of_node = list(members)
        title = f"NUMA node {node}: pCPUs {pcpus.numbers(of_node)}"
        lines += [Text(), *paragraph(Text(title, style="bold underline"), output)]
        rows = [row if marked else row[:-1] for row in _pcpu_rows(of_node, output)]
        lines += table(columns, rows, output)
    offline = pcpus.offline(state)
    if offline:
        lines += [Text(), *paragraph(styled(f"offline: {offline}", phrases.ODD), output)]
    return lines + (quiet(state.quiet, output) if state.quiet else [])


def _pcpu_rows(of_node: Sequence[Pcpu], output: Output) -> Iterator[list[Text]]:
    for shape, cores in groupby(pcpus.by_core(of_node), key=_shape):
        group = list(cores)
        if shape is not None and len(group) > 1:
            yield _fold(group)
            continue
        for core in group:
            for pcpu in core:
                yield _pcpu_row(pcpu, output, first=pcpu is core[0])


def _shape(core: list[Pcpu]) -> tuple[object, ...] | None:
    """Return what cores that may share a row have in common, None for one that may not."""
    if not all(pcpu.idle for pcpu in core):
        return None
    return tuple((pcpu.marks, pcpu.in_default) for pcpu in core)


def _fold(cores: Sequence[Sequence[Pcpu]]) -> list[Text]:
    members = [pcpu for core in cores for pcpu in core]
    firsts = [core[0].place.core for core in cores]
    return [
        styled(str(CpuSet(firsts))),
        styled(pcpus.numbers(members)),
        styled(_free(members[0]), phrases.DIM),
        Text(),
        Text(),
        _marks(members[0]),
    ]


def _free(pcpu: Pcpu) -> str:
    return "default set" if pcpu.in_default else "free"


def _marks(pcpu: Pcpu) -> Text:
    return styled(", ".join(pcpu.marks), phrases.ODD)


def _pcpu_row(pcpu: Pcpu, output: Output, *, first: bool) -> list[Text]:
    return [
        Text(str(pcpu.place.core) if first else ""),
        Text(str(pcpu.number)),
        claim(pcpu),
        styled(", ".join(_owners(pcpu)), phrases.NAME),
        threads(pcpu, output),
        _marks(pcpu),
    ]


def claim(pcpu: Pcpu) -> Text:
    """Return how the pCPU is claimed."""
    if len(pcpu.exclusive) > 1:
        return Text("CONFLICT", style=phrases.BAD)
    if pcpu.exclusive and pcpu.shared:
        return Text("exclusive, also shared", style=phrases.BAD)
    if pcpu.exclusive:
        return Text("exclusive", style=phrases.GOOD)
    if pcpu.shared:
        return Text("shared")
    return Text(_free(pcpu), style=phrases.DIM)


def _owners(pcpu: Pcpu) -> Iterator[str]:
    for sandbox in pcpu.exclusive:
        container = pcpus.owning_container(sandbox, pcpu.number)
        yield f"{words.owner(sandbox)} ({container})" if container else words.owner(sandbox)
    for sandbox in pcpu.shared:
        yield words.owner(sandbox)


def threads(pcpu: Pcpu, output: Output) -> Text:
    """Return the threads by sandbox, the owner's first; others' are named and stand out."""
    claimed = {sandbox.id for sandbox in (*pcpu.exclusive, *pcpu.shared)}
    owners = {sandbox.id for sandbox in pcpu.exclusive}
    groups: dict[str, tuple[Sandbox, list[Thread]]] = {}
    for sandbox, thread in pcpu.threads:
        groups.setdefault(sandbox.id, (sandbox, []))[1].append(thread)
    parts = []
    for name, (sandbox, threads) in sorted(groups.items(), key=lambda g: g[0] not in claimed):
        prefix = "" if claimed == {name} else f"{words.owner(sandbox)}: "
        foreign = bool(owners) and name not in owners
        style = phrases.BAD if foreign or phrases.drifting(threads) else ""
        parts.append(styled(prefix + phrases.roles(threads, output), style))
    return Text("; ").join(parts)
