"""`show --memory`: memory by NUMA node as lines of text. Pure."""

from __future__ import annotations

from typing import Final

from rich.text import Text

from kata_pin.cli.render import phrases
from kata_pin.cli.render.layout import CPUS, NAMES, Column, Output, paragraph, styled, table
from kata_pin.cli.reports import words
from kata_pin.cli.reports.memory import far_from_vcpus, remedy
from kata_pin.cli.reports.pcpus import parse
from kata_pin.model.reports.memory import MemoryDocument, NodeMemory, SandboxMemory
from kata_pin.policy.memory import REMOTE_PERCENT

_MOVED: Final = frozenset({"moving", "stopped"})
"""States of moves that are worth a line."""


def memory(document: MemoryDocument, output: Output) -> list[Text]:
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
        Text(one.source),
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
