"""`alloc compare` as lines of text."""

from __future__ import annotations

from rich.text import Text

from kata_pin.cli.render import phrases
from kata_pin.cli.render.layout import CPUS, NAMES, Column, Output, facts, paragraph, table
from kata_pin.cli.render.safe_text import styled
from kata_pin.cli.reports.comparison import SAME
from kata_pin.model.count_noun import count
from kata_pin.model.reports.compare import ComparedContainer, Comparison


def compare(document: Comparison, output: Output) -> list[Text]:
    """Return what is compared, one row per container, and a summary."""
    ours = f"policy {document.policy}"
    ours += ", hypothetical" if document.hypothetical else ", in force"
    pairs = [
        ("kubelet", styled(f"policy {document.kubelet_policy}, {document.checkpoint}")),
        ("kata-pin", styled(ours)),
        ("shared", _pair(document.kubelet_shared, document.kata_pin_shared, output)),
    ]
    lines = facts(pairs, output)
    rows = document.containers
    if rows:
        columns = [
            Column("POD UID", NAMES, fold=20),
            Column("CONTAINER", NAMES, fold=16),
            Column("KUBELET", CPUS),
            Column("KATA-PIN", CPUS),
            Column(""),
        ]
        lines += [Text(), *table(columns, [_row(row) for row in rows], output)]
    differ = sum(row.verdict != SAME for row in rows)
    told = "no differences" if document.same else "only the shared pCPUs differ"
    if differ:
        told = f"{count(differ, 'container')} of {len(rows)} would have other pCPUs"
    style = phrases.GOOD if document.same else phrases.ODD
    return [*lines, Text(), *paragraph(styled(told, style), output)]


def _row(row: ComparedContainer) -> list[Text]:
    same = row.verdict == SAME
    return [
        styled(row.pod_uid),
        styled(row.name),
        phrases.cpus(row.kubelet),
        phrases.cpus(row.kata_pin),
        styled("" if same else row.verdict, phrases.ODD),
    ]


def _pair(kubelet: str, ours: str, output: Output) -> Text:
    return phrases.cpus(kubelet if kubelet == ours else f"{kubelet} {output.arrow} {ours}")
