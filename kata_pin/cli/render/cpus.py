"""`show --cpus`: every pCPU by NUMA node, core and sibling, with its owner and its threads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.text import Text

from kata_pin.cli.render import phrases
from kata_pin.cli.render.layout import CPUS, NAMES, Column, Output, paragraph, styled, table
from kata_pin.cli.render.quiet import quiet
from kata_pin.cli.reports import pcpus, words
from kata_pin.cli.reports.pcpus import Pcpu
from kata_pin.model.cpuset import CpuSet
from kata_pin.model.reports.sandbox import Sandbox, Thread
from kata_pin.model.reports.state import State


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
        rows = [row if marked else row[:-1] for row in _rows(of_node, output)]
        lines += table(columns, rows, output)
    offline = pcpus.offline(state)
    if offline:
        lines += [Text(), *paragraph(styled(f"offline: {offline}", phrases.ODD), output)]
    return lines + (quiet(state.quiet, output) if state.quiet else [])


def _rows(of_node: Sequence[Pcpu], output: Output) -> Iterator[list[Text]]:
    for shape, cores in groupby(pcpus.by_core(of_node), key=_shape):
        group = list(cores)
        if shape is not None and len(group) > 1:
            yield _fold(group)
            continue
        for core in group:
            for pcpu in core:
                yield _row(pcpu, output, first=pcpu is core[0])


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


def _row(pcpu: Pcpu, output: Output, *, first: bool) -> list[Text]:
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
