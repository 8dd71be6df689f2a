"""`alloc compare` and `alloc what-if` as lines of text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from rich.text import Text

from kata_pin.cli.render import phrases
from kata_pin.cli.render.layout import CPUS, NAMES, Column, Output, facts, paragraph, styled, table
from kata_pin.cli.reports.alloc import SAME
from kata_pin.model.count_noun import count
from kata_pin.model.reports.compare import ComparedContainer, Comparison
from kata_pin.model.reports.whatif import Candidate, WhatIf


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
        lines += [Text(), *table(columns, [_compared(row) for row in rows], output)]
    differ = sum(row.verdict != SAME for row in rows)
    told = "no differences" if document.same else "only the shared pCPUs differ"
    if differ:
        told = f"{count(differ, 'container')} of {len(rows)} would have other pCPUs"
    style = phrases.GOOD if document.same else phrases.ODD
    return [*lines, Text(), *paragraph(styled(told, style), output)]


def _compared(row: ComparedContainer) -> list[Text]:
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


SHOWN: Final = 6
"""Candidates of a level that are shown beside those that were taken from."""


def what_if(document: WhatIf, output: Output) -> list[Text]:
    """Return the answer, then what was considered."""
    refused = document.refused
    noun = "CPU" if document.millis == 1000 else "CPUs"
    asked = f"policy {document.policy}, {document.millis / 1000:g} {noun}"
    if document.pod:
        asked += f", in pod {document.pod}"
    lines = paragraph(styled(asked, "bold"), output)
    if refused is not None:
        outcome = "would be refused" if refused.strict else "would run in the shared pool"
        lines += paragraph(styled(f"! {outcome}: {refused.message}", phrases.BAD), output)
    lines += facts(_facts(document, output), output)
    for reason in _reasons(document):
        lines += paragraph(styled(f"- {reason}"), output, indent=2)
    for note in phrases.notes(document.notes):
        lines += paragraph(note, output)
    return [*lines, *_considered(document.candidates, output)]


def _facts(document: WhatIf, output: Output) -> Iterator[tuple[str, Text]]:
    grant, vm = document.grant, document.vm
    if grant is not None:
        yield "class", styled(grant.cpu_class)
        yield "exclusive", phrases.cpus(grant.exclusive)
        yield "shared", phrases.cpus(grant.shared)
        yield "memory", styled(grant.mems)
    if vm is not None:
        yield "VM overhead CPUs", phrases.cpus(vm.cpus)
    before, after = document.before, document.after
    change = f"{before.shared} {output.arrow} {after.shared}"
    same = before.shared == after.shared
    if before.taken:
        yield "taken", Text(f"{before.taken}, exclusive to other containers")
    yield "shared pool", styled(f"{after.shared}, unchanged" if same else change)
    others = count(len(document.others), "container or VM", "containers and VMs")
    yield "others", Text(f"{others} would get other pCPUs" if document.others else "unchanged")


def _reasons(document: WhatIf) -> Iterator[str]:
    for granted in (document.grant, document.vm):
        if granted is not None:
            yield from granted.reasons


def _considered(candidates: Sequence[Candidate], output: Output) -> list[Text]:
    """Return the table of candidates: the first ones of each level, and all that were taken."""
    if not candidates:
        return [
            Text(),
            *paragraph(styled("no candidates: too few free pCPUs", phrases.ODD), output),
        ]
    names = [key.name for key in candidates[0].keys]
    columns = [
        Column("LEVEL"),
        *(Column(name.upper(), right=True) for name in names),
        Column("FREE", CPUS),
        Column("TAKEN", CPUS),
    ]
    shown = list(_shown(candidates))
    lines = [
        Text(),
        Text("candidates in order of comparison:"),
        *table(columns, [_candidate(one) for one in shown], output),
    ]
    left_out = len(candidates) - len(shown)
    if left_out:
        told = f"{count(left_out, 'more candidate')}, not taken; --json lists all"
        lines += paragraph(styled(told, phrases.DIM), output)
    return lines


def _shown(candidates: Sequence[Candidate]) -> Iterator[Candidate]:
    seen: dict[str, int] = {}
    for one in candidates:
        seen[one.level] = seen.get(one.level, 0) + 1
        if one.taken or seen[one.level] <= SHOWN:
            yield one


def _candidate(one: Candidate) -> list[Text]:
    return [
        styled(one.level),
        *(Text(str(key.value)) for key in one.keys),
        phrases.cpus(one.cpus),
        styled(one.taken, phrases.GOOD),
    ]
