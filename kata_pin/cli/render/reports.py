"""`explain`, `check`, `doctor`, `history`, `pin`, `unpin` and `bind` as lines of text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kata_pin.base.cpuset import CpuSet
from kata_pin.base.documents.answers import (
    Applied,
    BindDocument,
    Change,
    Explanation,
    HistoryDocument,
)
from kata_pin.base.documents.check import FINDINGS, CheckDocument, Finding
from kata_pin.base.documents.state import DoctorDocument
from kata_pin.base.values import count
from kata_pin.cli.render import phrases
from kata_pin.cli.render.layout import CPUS, NAMES, Column, Output, Text, paragraph, styled, table
from kata_pin.cli.reports.words import NOTHING, age, owner

_STATUS_STYLES: Final = {
    "ok": phrases.GOOD,
    "info": phrases.DIM,
    "warn": phrases.ODD,
    "fail": phrases.BAD,
}
_OUTCOMES: Final = {
    "refused": "refused: the thread's cpuset has none of these pCPUs (EINVAL)",
    "denied": "denied: CAP_SYS_NICE is missing (EPERM)",
    "unverified": "denied: the broker accepts no such executable (EACCES); see hypervisors",
    "reused": "not set: the tid belongs to another thread now",
    "fixed": "not set: the kernel does not allow it for this thread",
}
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

_ORDINARY_OUTCOMES: Final = {"done", "gone", "clipped"}


def explain(document: Explanation, output: Output) -> list[Text]:
    """Return the explanation, its indented lines kept indented."""
    lines: list[Text] = []
    for line in document.lines:
        body = line.lstrip(" ")
        indent = len(line) - len(body)
        text = styled(" " * indent + body, "" if indent else "bold")
        lines += paragraph(text, output, indent=indent + 2)
    return lines


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


def doctor(document: DoctorDocument, output: Output) -> list[Text]:
    """Return one row per check, then the counts."""
    rows = phrases.checks("CHECK", document.rows, _STATUS_STYLES, output)
    counts = [
        f"{sum(1 for row in document.rows if row.status == status)} {word}"
        for status, word in (("fail", "to fix"), ("warn", "to check"), ("ok", "ok"))
    ]
    return [*rows, Text(), Text(", ".join(counts))]


def applied(document: Applied, output: Output) -> list[Text]:
    """Return what `pin` or `unpin` did: a line per sandbox, and affinities that were not set."""
    verb = "restored" if document.kind == "unpin" else "moved"
    lines: list[Text] = []
    for sandbox in document.sandboxes:
        results = sandbox.results
        done = sum(1 for result in results if result.outcome == "done")
        counted = f"{done} of {sandbox.threads} threads {verb}, "
        text = styled(f"{owner(sandbox)}: ", phrases.NAME) + Text(counted)
        why = f": {sandbox.vmm_problem}" if sandbox.vmm_problem else ""
        lines += paragraph(text + phrases.condition(sandbox.state) + styled(why), output, indent=2)
        for result in results:
            if result.outcome not in _ORDINARY_OUTCOMES:
                why = _OUTCOMES.get(result.outcome, result.outcome)
                bad = f"! tid {result.tid}: affinity {result.target} {why}"
                lines += paragraph(styled(bad, phrases.BAD), output, indent=2)
        for line in phrases.notes(sandbox.notes):
            lines += paragraph(line, output, indent=2)
    for failed in document.options_failed:
        lines += paragraph(styled(f"! not restored: {failed}", phrases.BAD), output, indent=2)
    return lines or [Text("no sandboxes")]


def bind(document: BindDocument, output: Output) -> list[Text]:
    """Return what is bound, and where each thread is or would be."""
    lines: list[Text] = []
    for sandbox in document.sandboxes:
        told = "not bound: placed by policy"
        if sandbox.vcpus:
            told = f"vCPUs {sandbox.vcpus} on pCPUs {sandbox.cpus}"
            told += f", overhead on {sandbox.overhead}" if sandbox.overhead else ""
            told += f", until {sandbox.until}" if sandbox.until else ""
            told = f"{'would be bound' if document.dry_run else 'bound'}: {told}"
        name = styled(f"{owner(sandbox)}: ", phrases.NAME)
        lines += paragraph(name + styled(told), output, indent=2)
        columns = [
            Column("TID", right=True),
            Column("ROLE"),
            Column("AFFINITY", CPUS),
            Column("EXPECTED", CPUS),
            Column("WHY", fold=16, comfort=24),
        ]
        rows = [
            [
                Text(str(one.tid)),
                styled(one.label),
                phrases.cpus(one.affinity),
                phrases.cpus(one.expected),
                styled(one.reason),
            ]
            for one in sandbox.threads
        ]
        lines += table(columns, rows, output) if rows else []
    return lines or [Text("no sandbox is bound by hand")]


def history(document: HistoryDocument, output: Output) -> list[Text]:
    """Return one row per change of a sandbox, then one per event of the node."""
    events = _events(document, output)
    if not document.changes:
        return [Text("no changes recorded"), *events]
    columns = [
        Column("TIME"),
        Column("SANDBOX", NAMES, fold=12, comfort=20),
        Column("STATE"),
        Column("MASK", CPUS),
        Column("MOVED", right=True),
        Column("LATENCY", right=True),
        Column("TRIGGER", ", :", fold=16, comfort=20),
    ]
    rows = [_change(change, output) for change in document.changes]
    return [*table(columns, rows, output), *events]


def _events(document: HistoryDocument, output: Output) -> list[Text]:
    if not document.events:
        return []
    columns = [Column("TIME"), Column("EVENT"), Column("DETAIL", " ", fold=24, comfort=60)]
    rows = [[_moment(one.time), styled(one.kind), styled(one.text)] for one in document.events]
    return [Text(""), *table(columns, rows, output)]


def _moment(time: str) -> Text:
    return styled(time.replace("T", " ").removesuffix("Z"))


def _change(change: Change, output: Output) -> list[Text]:
    name = change.sandbox[:12] if change.pod == change.sandbox else change.pod
    moved = f"{change.moved} of {change.threads}" if change.threads else NOTHING
    return [
        _moment(change.time),
        styled(name, phrases.NAME),
        styled(
            _turned(change.previous_state, change.state, output),
            phrases.STATE_STYLES.get(change.state, ""),
        ),
        styled(_turned(change.previous_mask, change.mask, output)),
        Text(moved),
        Text(_milliseconds(change.latency_ms)),
        styled(", ".join(change.triggers) or NOTHING),
    ]


def _turned(before: str | None, after: str | None, output: Output) -> str:
    """Return a value, with the one before where that was another."""
    now = after or NOTHING
    return now if before in {after, "", None} else f"{before}{output.arrow}{now}"


def _milliseconds(taken: float) -> str:
    return f"{taken:.1f} ms" if taken < 1000 else age(taken / 1000)
