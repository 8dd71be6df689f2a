"""`check` as lines of text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kata_pin.base.cpuset import CpuSet
from kata_pin.base.documents.check import FINDINGS, CheckDocument, Finding
from kata_pin.base.values import count
from kata_pin.cli.render import phrases
from kata_pin.cli.render.layout import CPUS, NAMES, Column, Output, Text, paragraph, styled, table
from kata_pin.cli.reports.words import NOTHING, age

_VERDICTS: Final = {
    "ok": ("ok", phrases.GOOD),
    "findings": ("FAIL", phrases.BAD),
    "unknown": ("COULD NOT TELL", phrases.ODD),
}
_METHODS: Final = {
    "perf": "perf records",
    "hist": "kernel histograms",
    "schedstat": "/proc/schedstat",
    "wait": "the vCPUs' waiting",
    "watch": "the daemon's watch",
}
_ROWS: Final = {row.kind: row for row in FINDINGS}

COMMANDS: Final = 5
"""Commands of one remedy that `check` prints."""


def check(document: CheckDocument, output: Output, *, everything: bool = False) -> list[Text]:
    """Return the verdict, the findings that fail, and what helps; `everything`: also the others."""
    word, style = _VERDICTS[document.verdict]
    failing = [one for one in document.findings if one.fails]
    others = [one for one in document.findings if not one.fails]
    verdict = f"{word}: " + "; ".join([*_counts(failing), _checked(document)])
    lines = paragraph(styled(verdict, style), output)
    for why in document.unknown:
        lines += paragraph(styled("unknown: ", phrases.ODD) + styled(why), output, indent=2)
    lines += _findings(document, failing, output)
    for counts in _counts(others):
        told = f"report only: {counts}" + ("" if everything else "; --all lists them")
        lines += [Text(), *paragraph(styled(told, phrases.ODD), output, indent=2)]
    return lines + (_findings(document, others, output) if everything else [])


def _findings(document: CheckDocument, findings: Sequence[Finding], output: Output) -> list[Text]:
    """Return a table of findings, worst kind first, and each remedy once."""
    if not findings:
        return []
    findings = sorted(findings, key=lambda one: _place(one.kind))
    columns = [
        Column("pCPU", CPUS),
        Column("OWNER", NAMES + ",", fold=16, comfort=16),
        Column("FINDING", breaks=""),
        Column("WHO", NAMES, fold=16, comfort=24),
        Column("SHARE", breaks="", right=True),
        Column("SINCE", breaks="", right=True),
    ]
    rows = [_finding(one, document) for one in findings]
    remedies = [(one.kind, one.remedy, one.command) for one in findings if one.remedy]
    if any(one.group is not None and not one.group.sandbox for one in findings):
        remedies.append(("intruder", _keep_all_off(document.free), ""))
    return [
        *(Text(), *table(columns, rows, output)),
        *(Text(), *phrases.remedies(remedies, output, most=COMMANDS)),
    ][: None if remedies else -1]


def _finding(finding: Finding, document: CheckDocument) -> list[Text]:
    share = None
    if finding.foreign is not None:
        share = finding.foreign.percent
    elif finding.group is not None and finding.group.measured_ms and document.measured is not None:
        share = finding.group.measured_ms / 10 / document.measured.seconds
    return [
        phrases.cpus(finding.cpus),
        styled(finding.owner or NOTHING, phrases.NAME),
        styled(finding.kind, phrases.BAD if finding.fails else phrases.ODD),
        styled(finding.who or NOTHING),
        Text(NOTHING if share is None else f"{share:.3g} %"),
        Text(age(finding.since_s)),
    ]


def _keep_all_off(free: str) -> str:
    """Return the remedy for all programs of the node at once."""
    if not free:
        return "every pCPU is exclusive: leave some to the node (reservedSystemCPUs)"
    return (
        f"reservedSystemCPUs: {free} in the kubelet's configuration leaves these to the host; "
        "do not set CPUAffinity= in /etc/systemd/system.conf, because VMs inherit it"
    )


def _checked(document: CheckDocument) -> str:
    """Return what was checked and measured."""
    sandboxes = count(document.sandboxes, "sandbox", "sandboxes")
    checked = f"{sandboxes}, {count(document.threads, 'thread')} checked"
    if document.measured is not None:
        cpus = count(len(CpuSet.parse(document.measured.cpus)), "exclusive pCPU")
        checked += f", {cpus} measured for {document.measured.seconds:g} s"
        checked += f" by {_METHODS[document.measured.method]}"
    return checked


def _counts(findings: Sequence[Finding]) -> list[str]:
    """Return one text with the counts by kind, worst first; none without findings."""
    kinds = sorted({one.kind for one in findings}, key=_place)
    counts = [_counted(kind, [one for one in findings if one.kind == kind]) for kind in kinds]
    return [", ".join(counts)] if counts else []


def _place(kind: str) -> tuple[int, str]:
    """Return what sorts kinds, worst first; those of other packages are the last."""
    return [*_ROWS, kind].index(kind), kind


def _counted(kind: str, found: Sequence[Finding]) -> str:
    """Return how many there are of one kind."""
    if kind == "foreign" and not found[0].fails:
        pcpus = count(len(found), "exclusive pCPU")
        return f"{pcpus} that kernel threads or unknown tasks ran on"
    nouns = _ROWS[kind].nouns if kind in _ROWS else (kind, kind)
    groups = [one.group for one in found if one.group is not None]
    if not groups:
        return count(len(found), *nouns)
    processes = count(sum(len(one.processes) for one in groups), *nouns)
    where = count(len(groups), "unit or cgroup", "units or cgroups")
    return f"{processes} in {where} allowed on exclusive pCPUs"
