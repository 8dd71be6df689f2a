"""`who`, `explain`, `check`, `doctor`, `history`, `pin` and `unpin` as lines of text."""

from __future__ import annotations

from typing import Final

from rich.text import Text

from kata_pin.cli.render import phrases
from kata_pin.cli.render.layout import CPUS, NAMES, Column, Output, facts, paragraph, styled, table
from kata_pin.cli.reports.words import NOTHING, age
from kata_pin.model.count_noun import count
from kata_pin.model.reports.applied import Applied
from kata_pin.model.reports.check import CheckDocument
from kata_pin.model.reports.doctor import DoctorDocument
from kata_pin.model.reports.explain import Explanation
from kata_pin.model.reports.history import Change, HistoryDocument
from kata_pin.model.reports.who import HostProcess, KernelThreads, WhoDocument

_STATUS_STYLES: Final = {
    "ok": phrases.GOOD,
    "info": phrases.DIM,
    "warn": phrases.ODD,
    "fail": phrases.BAD,
}
_NAMES_SHOWN: Final = 6
_OUTCOMES: Final = {
    "refused": "refused: no pCPU of it is in the thread's cpuset (EINVAL)",
    "denied": "denied: CAP_SYS_NICE is missing (EPERM)",
    "reused": "not set: the tid belongs to another thread now",
    "fixed": "not set: the kernel does not allow it for this thread",
}
_KINDS: Final = {
    "drift": ("drifting thread", "drifting threads"),
    "conflict": ("conflict", "conflicts"),
    "intruder": ("host process on exclusive pCPUs", "host processes on exclusive pCPUs"),
    "no-vmm": ("sandbox without VMM", "sandboxes without VMM"),
    "unpinned": ("unpinned sandbox", "unpinned sandboxes"),
}
"""Kinds of findings, worst first: one and many."""

_ORDINARY_OUTCOMES: Final = {"done", "gone", "clipped"}


def who(document: WhoDocument, output: Output) -> list[Text]:
    """Return every host thread that may run on the pCPU."""
    lines = facts(_place(document, output), output)
    if not document.daemon.running:
        lines += paragraph(phrases.daemon(document.daemon), output)
    lines.append(Text())
    if not document.online:
        return [*lines[:-1], styled("offline: no thread can run here", phrases.ODD)]
    columns = [
        Column("PID", right=True),
        Column("NAME", NAMES, fold=12),
        Column("USER", NAMES, fold=8),
        Column("OWNER", NAMES, fold=12, comfort=20),
        Column("AFFINITY", CPUS),
        Column("THREADS", ", ", fold=16, comfort=20),
        Column("AGE", breaks="", right=True, optional=True),
        Column("CPU-TIME", breaks="", right=True),
        Column("COMMAND", " /", fold=16, comfort=24, optional=True),
    ]
    rows = [_process(process, output) for process in document.processes]
    lines += table(columns, rows, output) if rows else [Text("no user processes")]
    lines += [Text(), *_kernel(document.kernel, output)]
    intruders = sum(1 for process in document.processes if process.intruder)
    if intruders:
        told = f"! {count(intruders, 'intruder')} on this exclusive pCPU"
        lines += [Text(), *paragraph(styled(told, phrases.BAD), output, indent=2)]
    return lines


def _place(document: WhoDocument, output: Output) -> list[tuple[str, Text]]:
    place = document.place
    claims = [
        f"{claim.claim} to {claim.pod}" + (f" ({claim.container})" if claim.container else "")
        for claim in document.claims
    ]
    where, busy = "", document.busy_percent
    if place is not None:
        where = output.dot.join(
            [
                f"NUMA node {place.node}",
                f"package {place.package}",
                f"core {place.core}",
                f"siblings {place.siblings}",
                *place.marks,
            ]
        )
    return [
        ("pCPU", styled(str(document.cpu), phrases.NAME)),
        ("place", styled(where)),
        ("claim", styled("; ".join(claims) or "none")),
        ("busy", Text("" if busy is None else f"{busy:.0f} % of the last 0.2 s")),
    ]


def _process(process: HostProcess, output: Output) -> list[Text]:
    counts: dict[str, int] = {}
    for thread in process.threads:
        name = thread.label or thread.comm
        counts[name] = counts.get(name, 0) + 1
    threads = ", ".join(n if c == 1 else f"{n} {output.times}{c}" for n, c in counts.items())
    affinities = dict.fromkeys(thread.affinity for thread in process.threads)
    owner = process.pod or "the host"
    style = phrases.BAD if process.intruder else ""
    return [
        Text(str(process.pid)),
        styled(process.comm, style),
        styled(process.user or NOTHING),
        styled(f"{owner}, intruder" if process.intruder else owner, style),
        styled("; ".join(affinities)),
        styled(threads),
        Text(age(process.age_s)),
        Text(NOTHING if process.cpu_s is None else f"{process.cpu_s:.1f} s"),
        styled(process.command or NOTHING, phrases.DIM),
    ]


def _kernel(kernel: KernelThreads, output: Output) -> list[Text]:
    lines: list[Text] = []
    for threads, words in (
        (kernel.bound, "bound to this pCPU"),
        (kernel.roaming, "that may also run here"),
    ):
        names = list(dict.fromkeys(thread.comm for thread in threads))
        if names:
            more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
            listed = ", ".join(names[:_NAMES_SHOWN])
            text = f"{count(len(threads), 'kernel thread')} {words}: {listed}{more}"
            lines += paragraph(styled(text, phrases.DIM), output, indent=2)
    return lines


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
    if not document.daemon.running:
        lines += paragraph(phrases.daemon(document.daemon), output)
    for finding in sorted(document.findings, key=lambda f: not f.fails):
        style = phrases.BAD if finding.fails else phrases.ODD
        head = f"{'FAIL' if finding.fails else 'note'} {finding.kind}: "
        lines += paragraph(styled(head, style) + styled(finding.text), output, indent=2)
    style = phrases.GOOD if document.ok else phrases.BAD
    return [*lines, *paragraph(styled(_verdict(document), style), output)]


def _verdict(document: CheckDocument) -> str:
    """Return the counts by kind, the failures first."""
    sandboxes = count(document.sandboxes, "sandbox", "sandboxes")
    checked = f"{sandboxes}, {count(document.threads, 'thread')} checked"
    parts = []
    for fails, remark in ((True, ""), (False, " (report only)")):
        kinds = [one.kind for one in document.findings if one.fails is fails]
        counts = [
            count(kinds.count(kind), *_KINDS.get(kind, (kind, kind)))
            for kind in dict.fromkeys(sorted(kinds, key=list(_KINDS).index))
        ]
        if counts:
            parts.append(", ".join(counts) + remark)
    return "; ".join(["ok" if document.ok else "FAIL", *parts, checked]).replace("; ", ": ", 1)


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
        for status, word in (("fail", "failed"), ("warn", "to check"), ("ok", "ok"))
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
    """Return one row per change."""
    if not document.changes:
        return [Text("no changes recorded")]
    columns = [
        Column("TIME"),
        Column("SANDBOX", NAMES, fold=12, comfort=20),
        Column("STATE"),
        Column("MASK", CPUS),
        Column("MOVED", right=True),
        Column("LATENCY", right=True),
        Column("TRIGGER", ", :", fold=16, comfort=20),
    ]
    return table(columns, [_change(change, output) for change in document.changes], output)


def _change(change: Change, output: Output) -> list[Text]:
    name = change.sandbox[:12] if change.pod == change.sandbox else change.pod
    moved = f"{change.moved} of {change.threads}" if change.threads else NOTHING
    return [
        Text(change.time.replace("T", " ").removesuffix("Z")),
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
