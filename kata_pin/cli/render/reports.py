"""`explain`, `check`, `doctor`, `history`, `pin` and `unpin` as lines of text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.text import Text

from kata_pin.cli.render import phrases
from kata_pin.cli.render.layout import CPUS, NAMES, Column, Output, paragraph, styled, table
from kata_pin.cli.reports.words import NOTHING, age
from kata_pin.model.count_noun import count
from kata_pin.model.cpuset import CpuSet
from kata_pin.model.reports.applied import Applied
from kata_pin.model.reports.check import CheckDocument, Finding
from kata_pin.model.reports.doctor import DoctorDocument
from kata_pin.model.reports.explain import Explanation
from kata_pin.model.reports.history import Change, HistoryDocument

_STATUS_STYLES: Final = {
    "ok": phrases.GOOD,
    "info": phrases.DIM,
    "warn": phrases.ODD,
    "fail": phrases.BAD,
}
_OUTCOMES: Final = {
    "refused": "refused: no pCPU of it is in the thread's cpuset (EINVAL)",
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
_KINDS: Final = {
    "drift": ("drifting thread", "drifting threads"),
    "foreign": ("exclusive pCPU that others ran on", "exclusive pCPUs that others ran on"),
    "conflict": ("conflict", "conflicts"),
    "intruder": ("host process", "host processes"),
    "orphan": ("VMM without its shim", "VMMs without their shims"),
    "no-vmm": ("sandbox without VMM", "sandboxes without VMM"),
    "unpinned": ("unpinned sandbox", "unpinned sandboxes"),
    "warning": ("warning", "warnings"),
}
"""Kinds of findings, worst first: one and many."""

INTRUDERS_SHOWN: Final = 10
"""Groups of host processes that `check` names where they are no failure."""

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


def check(document: CheckDocument, output: Output) -> list[Text]:
    """Return the findings, then one line that sums them up."""
    lines: list[Text] = []
    shown, left_out = _shown(document.findings)
    for finding in shown:
        style = phrases.BAD if finding.fails else phrases.ODD
        head = f"{'FAIL' if finding.fails else 'note'} {finding.kind}: "
        lines += paragraph(styled(head, style) + styled(finding.text), output, indent=2)
    if left_out:
        told = f"note intruder: {count(left_out, 'more unit or cgroup', 'more units or cgroups')}"
        told += " with less CPU time; --json lists all"
        lines += paragraph(styled(told, phrases.ODD), output, indent=2)
    if any(one.group is not None and not one.group.sandbox for one in document.findings):
        lines += paragraph(styled(_keep_all_off(document.free), phrases.ODD), output, indent=2)
    for why in document.unknown:
        lines += paragraph(styled("unknown: ", phrases.ODD) + styled(why), output, indent=2)
    word, style = _VERDICTS[document.verdict]
    return [*lines, *paragraph(styled(_verdict(document, word), style), output)]


def _keep_all_off(free: str) -> str:
    """Return the remedy for all programs of the node at once."""
    if not free:
        return "note: every pCPU is exclusive: leave some to the node (reservedSystemCPUs)"
    return (
        f"note: CPUAffinity={free} in /etc/systemd/system.conf keeps every service off exclusive "
        f"pCPUs (after a reboot); reservedSystemCPUs: {free} in the kubelet's configuration keeps "
        f"pods from owning theirs"
    )


def _shown(findings: Sequence[Finding]) -> tuple[list[Finding], int]:
    """Return the findings that are shown, failures first, and how many are left out.

    Only intruders that are no failure are left out: the last, which used the least CPU time there.
    """
    noted = [one for one in findings if one.group is not None and not one.fails]
    less = {id(one) for one in noted[INTRUDERS_SHOWN:]}
    shown = [one for one in findings if id(one) not in less]
    return sorted(shown, key=lambda one: not one.fails), len(less)


def _verdict(document: CheckDocument, word: str) -> str:
    """Return the counts by kind, the failures first."""
    sandboxes = count(document.sandboxes, "sandbox", "sandboxes")
    checked = f"{sandboxes}, {count(document.threads, 'thread')} checked"
    if document.measured is not None:
        cpus = count(len(CpuSet.parse(document.measured.cpus)), "exclusive pCPU")
        checked += f", {cpus} measured for {document.measured.seconds:g} s"
        checked += f" by {_METHODS[document.measured.method]}"
    parts = []
    for fails, remark in ((True, ""), (False, " (report only)")):
        found = [one for one in document.findings if one.fails is fails]
        kinds = sorted({one.kind for one in found}, key=list(_KINDS).index)
        counts = [_counted(kind, [one for one in found if one.kind == kind]) for kind in kinds]
        if counts:
            parts.append(", ".join(counts) + remark)
    return f"{word}: " + "; ".join([*parts, checked])


def _counted(kind: str, found: Sequence[Finding]) -> str:
    """Return how many there are of one kind."""
    if kind == "foreign" and not found[0].fails:
        pcpus = count(len(found), "exclusive pCPU")
        return f"{pcpus} that kernel threads or unknown tasks ran on"
    groups = [one.group for one in found if one.group is not None]
    if not groups:
        return count(len(found), *_KINDS[kind])
    processes = count(sum(len(one.processes) for one in groups), *_KINDS[kind])
    where = count(len(groups), "unit or cgroup", "units or cgroups")
    return f"{processes} in {where} allowed on exclusive pCPUs"


def doctor(document: DoctorDocument, output: Output) -> list[Text]:
    """Return one row per check, then the counts."""
    columns = [
        Column("CHECK", NAMES, fold=16),
        Column("STATUS"),
        Column("FOUND", fold=24),
    ]
    rows = []
    for row in document.rows:
        name = f"{row.sandbox} {row.check}" if row.sandbox else row.check
        text = f"{row.text}. Remedy: {row.remedy}" if row.remedy else row.text
        status = row.status
        rows.append([styled(name), styled(status, _STATUS_STYLES.get(status, "")), styled(text)])
    counts = [
        f"{sum(1 for row in document.rows if row.status == status)} {word}"
        for status, word in (("fail", "to fix"), ("warn", "to check"), ("ok", "ok"))
    ]
    return [*table(columns, rows, output), Text(), Text(", ".join(counts))]


def applied(document: Applied, output: Output) -> list[Text]:
    """Return what `pin` or `unpin` did: a line per sandbox, and affinities that were not set."""
    verb = "restored" if document.kind == "unpin" else "moved"
    lines: list[Text] = []
    for sandbox in document.sandboxes:
        results = sandbox.results
        done = sum(1 for result in results if result.outcome == "done")
        name = sandbox.id[:12] if sandbox.pod == sandbox.id else sandbox.pod
        counted = f"{done} of {sandbox.threads} threads {verb}, "
        text = styled(f"{name}: ", phrases.NAME) + Text(counted)
        why = f": {sandbox.vmm_problem}" if sandbox.vmm_problem else ""
        lines += paragraph(text + phrases.condition(sandbox.state) + styled(why), output, indent=2)
        for result in results:
            if result.outcome not in _ORDINARY_OUTCOMES:
                why = _OUTCOMES.get(result.outcome, result.outcome)
                bad = f"! tid {result.tid}: affinity {result.target} {why}"
                lines += paragraph(styled(bad, phrases.BAD), output, indent=2)
        for line in phrases.notes(sandbox.notes):
            lines += paragraph(line, output, indent=2)
    return lines or [Text("no sandboxes")]


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
    rows = [[Text(_moment(one.time)), Text(one.kind), styled(one.text)] for one in document.events]
    return [Text(""), *table(columns, rows, output)]


def _moment(time: str) -> str:
    return time.replace("T", " ").removesuffix("Z")


def _change(change: Change, output: Output) -> list[Text]:
    name = change.sandbox[:12] if change.pod == change.sandbox else change.pod
    moved = f"{change.moved} of {change.threads}" if change.threads else NOTHING
    return [
        Text(_moment(change.time)),
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
