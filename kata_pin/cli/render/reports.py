"""`explain`, `doctor`, `history`, `pin`, `unpin` and `bind` as lines of text."""

from __future__ import annotations

from typing import Final

from kata_pin.base.documents.answers import (
    Applied,
    BindDocument,
    Change,
    Explanation,
    HistoryDocument,
)
from kata_pin.base.documents.state import DoctorDocument
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
