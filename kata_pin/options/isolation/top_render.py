"""`top`: one sample as lines of text, whole or as a screen of a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kata_pin.base.documents.measured import TopDocument, TopPcpu, TopRole, TopSandbox, TopThread
from kata_pin.base.values import count
from kata_pin.cli.render import phrases
from kata_pin.cli.render.layout import (
    CPUS,
    NAMES,
    Column,
    Output,
    Text,
    facts,
    paragraph,
    styled,
    table,
)
from kata_pin.cli.render.phrases import size as bytes_text
from kata_pin.cli.render.show import IDLE
from kata_pin.cli.reports import words
from kata_pin.cli.reports.pcpus import parse
from kata_pin.options.isolation.top import KEYS, MEANINGS, View

UNKNOWN: Final = "n/a"

_LIMITS: Final = {"wait": (1.0, 10.0), "foreign": (0.1, 1.0), "switches": (1.0, 100.0)}
"""From where on a figure is odd, and bad."""

_FIGURES: Final = {
    "cpu_percent": "CPU%",
    "wait_percent": "WAIT%",
    "preemptions": "PREEMPT/s",
    "migrations": "MIGR/s",
    "foreign_switches": "FSWITCH/s",
    "steal_percent": "STEAL%",
    "interrupts": "interrupts",
    "softirqs": "SOFTIRQ/s",
    "throttled_percent": "THROTTLED%",
}
"""How the members of the document are called in the tables."""

_SANDBOX_COLUMNS: Final = (
    Column("SANDBOX", NAMES, fold=18, comfort=18),
    Column("pCPU", CPUS),
    Column("CPU%", right=True),
    Column("WAIT%", right=True),
    Column("PREEMPT/s", right=True),
    Column("MIGR/s", right=True),
    Column("LAST-CPU", right=True),
)

_CACHE_COLUMNS: Final = (Column("L3", right=True), Column("MEM/s", right=True))
"""Shown where resctrl counts for one sandbox at least."""

_PCPU_COLUMNS: Final = (
    Column("pCPU", right=True),
    Column("OWNER", NAMES, fold=18, comfort=14),
    Column("OWN%", right=True),
    Column("FOREIGN%", right=True),
    Column("FSWITCH/s", right=True),
    Column("TICK/s", right=True, optional=1),
    Column("RESCHED/s", right=True, optional=2),
    Column("CALL/s", right=True, optional=2),
    Column("DEVICE/s", right=True, optional=1),
    Column("OTHER/s", right=True, optional=3),
    Column("SOFTIRQ/s", right=True, optional=2),
    Column("THROTTLED%", right=True, optional=1),
    Column("STEAL%", right=True, optional=3),
)

_Row = list[Text]


def once(document: TopDocument, output: Output) -> list[Text]:
    """Return a whole sample."""
    view = View()
    lines = _head(document, view, output)
    for part in (
        _sandboxes(document, view, 0, None, output),
        _pcpus(document, view, 0, None, output),
    ):
        if part:
            lines += [Text(), *part]
    remarks = _remarks(document, output)
    return [*lines, Text(), *remarks] if remarks else lines


def screen(document: TopDocument, view: View, output: Output, height: int) -> list[Text]:
    """Return exactly `height` lines: the head, as many rows as fit, and what keys do."""
    head = _head(document, view, output)[: height - 2]
    room = max(1, height - len(head) - 2)
    body = _help(output)[view.top :] if view.help else _body(document, view, room, output)
    lines = [*head, Text(), *body[:room]]
    lines += [Text()] * (height - 1 - len(lines))
    return [*lines[: height - 1], _foot(view, output)]


def rows(document: TopDocument, view: View, output: Output) -> int:
    """Return how many rows there are to scroll through."""
    if view.help:
        return len(_help(output))
    return _sandbox_rows(document, view) + len(view.pcpus(document))


def _sandbox_rows(document: TopDocument, view: View) -> int:
    return sum(len(_shown(one)) for one in view.sandboxes(document))


def _body(document: TopDocument, view: View, room: int, output: Output) -> list[Text]:
    """Return the rows from the view's position on, of one table and then of the other."""
    parts = [
        (_sandboxes, _sandbox_rows(document, view)),
        (_pcpus, len(view.pcpus(document))),
    ]
    lines: list[Text] = []
    first = view.top
    for part, size in reversed(parts) if view.cpus_first else parts:
        left = room - len(lines) - (1 if lines else 0)
        if (first < size or not size) and left > 1:
            found = part(document, view, first, left, output)
            lines += [Text(), *found] if lines and found else found
        first = max(0, first - size)
    remarks = _remarks(document, output)
    if remarks and len(lines) + 1 + len(remarks) <= room:
        lines += [Text(), *remarks]
    return lines


def _head(document: TopDocument, view: View, output: Output) -> list[Text]:
    parts = [
        f"kata-pin top{output.dot}{words.safe(document.hostname)}",
        f"{document.time[11:19]} UTC",
        f"{document.seconds:.1f} s",
        count(len(document.sandboxes), "sandbox", "sandboxes"),
        count(document.threads, "thread"),
    ]
    lines = paragraph(Text(output.dot.join(parts)), output)
    if not document.daemon.running:
        lines += paragraph(phrases.daemon(document.daemon), output)
    return [
        *lines,
        *(part for one in _verdict(document) for part in paragraph(one, output, indent=2)),
    ]


def _verdict(document: TopDocument) -> list[Text]:
    """Return the worst wait and the worst intrusion, one line each: what to look at first."""
    waits = [
        (one.wait_percent, sandbox, one)
        for sandbox in document.sandboxes
        for one in sandbox.vcpus
        if one.wait_percent is not None
    ]
    foreign = [
        (one.foreign_percent, one) for one in document.pcpus if one.foreign_percent is not None
    ]
    lines = []
    if waits:
        percent, sandbox, vcpu = max(waits, key=lambda found: found[0])
        starves = ", without any pCPU" if vcpu.starving else ""
        text = f"{words.owner(sandbox)} {vcpu.label} waits {percent:.1f} % of the time{starves}"
        calm = percent < _LIMITS["wait"][0]
        lines.append(styled("no vCPU waits 1 % or more", phrases.GOOD) if calm else _bad(text))
    if foreign:
        percent, pcpu = max(foreign, key=lambda found: found[0])
        text = f"exclusive pCPU {pcpu.cpu} ({_owner(pcpu)}): others use at least {percent:.1f} %"
        calm = percent < _LIMITS["foreign"][0]
        if not calm:
            lines.append(_bad(text))
        else:
            lines.append(_brief(document.pcpus))
    return lines


def _brief(pcpus: Sequence[TopPcpu]) -> Text:
    """Return the line for exclusive pCPUs on which no other task was seen for long."""
    switches = [one.foreign_switches for one in pcpus if one.foreign_switches is not None]
    if len(switches) < len(pcpus):  # only ticks and waits are known, or not even those
        return Text("no long use of exclusive pCPUs by others seen; kata-pin prove sees all")
    if most := max(switches):
        often = f"up to {count(max(1, round(most)), 'time')} per second"
        return Text(f"others come to exclusive pCPUs, {often}; kata-pin prove names them")
    return styled("no other tasks seen on exclusive pCPUs", phrases.GOOD)


def _bad(text: str) -> Text:
    return styled(f"! {text}", phrases.BAD)


def _sandboxes(
    document: TopDocument, view: View, first: int, most: int | None, output: Output
) -> list[Text]:
    """Return the table of sandboxes from a row on, in at most so many lines."""
    found: list[tuple[TopSandbox, int]] = []
    for sandbox in view.sandboxes(document):
        found += [(sandbox, place) for place in range(len(_shown(sandbox)))]
    chosen = found[first:] if most is None else found[first : first + most]
    if not chosen:
        return [
            Text("no sandboxes" if not document.sandboxes else f"no sandbox has {view.wanted!r}")
        ]
    rows = [_sandbox_row(sandbox, place, output) for sandbox, place in chosen]
    if not any(one.cache_group for one in document.sandboxes):
        return table(_SANDBOX_COLUMNS, rows, output)[:most]
    rows = [
        [*row, *_caches(sandbox if place == 0 else None)]
        for row, (sandbox, place) in zip(rows, chosen, strict=True)
    ]
    return table((*_SANDBOX_COLUMNS, *_CACHE_COLUMNS), rows, output)[:most]


def _caches(one: TopSandbox | None) -> _Row:
    """Return what a sandbox uses of caches and memory bandwidth; nothing for its threads."""
    figures = () if one is None else (one.l3_bytes, one.memory_bytes_per_s)
    texts = [UNKNOWN if n is None else bytes_text(round(n)) for n in figures]
    return [Text(text) for text in texts] or [Text()] * len(_CACHE_COLUMNS)


def _shown(sandbox: TopSandbox) -> Sequence[TopSandbox | TopThread | TopRole]:
    """Return the rows of a sandbox: itself, its vCPUs, its roles with their threads."""
    found: list[TopSandbox | TopThread | TopRole] = [sandbox, *sandbox.vcpus]
    for role in sandbox.overhead:
        found += [role, *role.threads]
    return found


def _sandbox_row(sandbox: TopSandbox, place: int, output: Output) -> _Row:
    one = _shown(sandbox)[place]
    if isinstance(one, TopSandbox):
        return [
            _named(one),
            phrases.cpus(one.mask),
            _figure(one.cpu_percent),
            *[Text()] * 4,
        ]
    if isinstance(one, TopRole):
        name = one.role if one.count == 1 else f"{one.role} {output.times}{one.count}"
        return [
            styled(f"  {name}"),
            _place(one.cpus, drift=bool(one.drifting)),
            _figure(one.cpu_percent),
            _figure(one.wait_percent),
            *[Text()] * 3,
        ]
    vcpu = one.label.startswith("vcpu")
    last = UNKNOWN if one.last_cpu is None else str(one.last_cpu)
    if one.last_cpu is not None and one.last_cpu not in parse(one.cpus):
        last = f"{IDLE}{last}"
    name = f"  {one.label}" if vcpu else f"    {one.comm} {one.tid}"
    return [
        styled(name),
        _place(one.cpus, drift=one.state == "drift"),
        _figure(one.cpu_percent),
        _figure(one.wait_percent, "wait" if vcpu else ""),
        _figure(one.preemptions),
        _figure(one.migrations),
        Text(last),
    ]


def _named(one: TopSandbox) -> Text:
    """Return a sandbox's name, and its state unless all is well."""
    name = styled(words.owner(one), phrases.NAME)
    return name if one.state == "ok" else name + Text(" ") + phrases.condition(one.state)


def _place(cpus: str, *, drift: bool) -> Text:
    return styled(f"{cpus or '?'}{'!' if drift else ''}", phrases.BAD if drift else "")


def _pcpus(
    document: TopDocument, view: View, first: int, most: int | None, output: Output
) -> list[Text]:
    """Return the table of exclusive pCPUs from a row on, in at most so many lines."""
    found = view.pcpus(document)
    chosen = found[first:] if most is None else found[first : first + most]
    if not chosen:
        return []
    return table(_PCPU_COLUMNS, [_pcpu_row(one) for one in chosen], output)[:most]


def _pcpu_row(one: TopPcpu) -> _Row:
    counts = one.interrupts
    softirqs = None if one.softirqs is None else sum(one.softirqs.values())
    if not one.online:
        return [Text(str(one.cpu)), _owner_of(one), Text("offline"), *[Text()] * 10]
    by_kind: list[float | None] = [None] * 5
    if counts is not None:
        by_kind = [counts.tick, counts.reschedule, counts.call, counts.device]
        by_kind.append(counts.guest + counts.other)
    return [
        Text(str(one.cpu)),
        _owner_of(one),
        _figure(one.own_percent),
        _figure(one.foreign_percent, "foreign"),
        _figure(one.foreign_switches, "switches"),
        *map(_figure, by_kind),
        _figure(softirqs),
        _figure(one.throttled_percent, "wait"),
        _figure(one.steal_percent),
    ]


def _owner_of(one: TopPcpu) -> Text:
    if one.conflict:
        return styled(f"{_owner(one)} and others", phrases.BAD)
    return styled(_owner(one), phrases.NAME)


def _owner(one: TopPcpu) -> str:
    return one.sandbox[:12] if one.pod == one.sandbox else one.pod


def _figure(value: float | None, limit: str = "") -> Text:
    """Return a number with one digit behind the point; large ones without."""
    if value is None:
        return Text(UNKNOWN, style=phrases.DIM)
    odd, bad = _LIMITS.get(limit, (float("inf"), float("inf")))
    style = phrases.BAD if value >= bad else phrases.ODD if value >= odd else ""
    return Text(f"{value:.1f}" if value < 1000 else f"{value:.0f}", style=style)


def _remarks(document: TopDocument, output: Output) -> list[Text]:
    """Return why figures are missing, one line per reason, and the notes."""
    reasons: dict[str, list[str]] = {}
    for one in document.missing:
        if one.figure in _FIGURES:
            reasons.setdefault(one.reason, []).append(_FIGURES[one.figure])
    lines = []
    for reason, figures in reasons.items():
        text = styled(f"{UNKNOWN}: {', '.join(figures)}: {reason}", phrases.DIM)
        lines += paragraph(text, output, indent=2)
    for note in phrases.notes(document.notes):
        lines += paragraph(note, output, indent=2)
    return lines


def _foot(view: View, output: Output) -> Text:
    """Return the last line: what is set, and as many keys as fit."""
    if view.typing is not None:
        text = f"show pods and ids with: {view.typing}_  (Enter keeps it, Esc drops it)"
        return styled(text, "reverse")[: output.width]
    parts = ["PAUSED"] if view.paused else []
    parts.append(f"sorted by {view.order}{' (reversed)' if view.reverse else ''}")
    if view.filter:
        parts.append(f"filter {view.filter!r}")
    text = output.dot.join(parts)
    for key in ("h help", "q quit", "p pause", "s sort", "/ filter", "e threads", "c pCPUs first"):
        longer = f"{text}{'  ' if ' help' in text else output.dot}{key}"
        text = longer if len(longer) <= output.width else text
    return styled(text, "reverse")[: output.width]


def _help(output: Output) -> list[Text]:
    pairs = [(name, Text(text)) for name, text in (*KEYS, *MEANINGS)]
    return facts(pairs, output)
