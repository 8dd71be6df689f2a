"""Short texts for single facts of a state document: ages, pairs, masks, states."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Final

from kata_pin.base.documents.document import Daemon, Note
from kata_pin.base.documents.state import Guest, GuestVcpu, Memory, Row, State, Thread
from kata_pin.base.values import count
from kata_pin.cli.render.layout import NAMES, Column, Output, Text, paragraph, styled, table
from kata_pin.cli.reports.words import GUEST_STATES, NOTHING, age, guest_cost, safe

_UNITS: Final = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))

GOOD, BAD, ODD, DIM, NAME = "green", "bold red", "yellow", "dim", "bold cyan"
STATE_STYLES: Final = {
    "ok": GOOD,
    "narrowed": GOOD,
    "drift": BAD,
    "conflict": BAD,
    "no-vmm": ODD,
    "unpinned": ODD,
    "released": DIM,
    "unmanaged": DIM,
}
"""How the states of sandboxes and threads look; their words are always there too."""

RUN: Final = 3
"""Shortest run of one-to-one pairs that is written as a run."""


KNOWN_STYLES: Final = {
    "measured": GOOD,
    "proven": GOOD,
    "inferred": ODD,
    "unknown": BAD,
}

GUEST_STYLES: Final = {
    "applied": GOOD,
    "pending": ODD,
    "denied": ODD,
    "unreachable": ODD,
    "failed": BAD,
}


def condition(word: str, detail: str = "") -> Text:
    """Return a state, styled."""
    return styled(f"{word} {detail}".strip(), STATE_STYLES.get(word, ""))


def cpus(text: str | None) -> Text:
    """Return a cpu list; a dash where there is none."""
    return styled(text or NOTHING)


def daemon(facts: Daemon) -> Text:
    """Return who made the document, in one line."""
    if not facts.running:
        reason = f" ({facts.reason})" if facts.reason else ""
        found = "daemon hangs" if facts.silent else "daemon not running"
        style = BAD if facts.silent else ODD
        return styled(f"{found}, state read from /proc{reason}", style)
    up = age(facts.uptime_s)
    return styled(f"daemon {facts.version}, pid {facts.pid}, up {up}", DIM)


def node(state: State, output: Output) -> Text:
    """Return the node in one line; defaults are left out."""
    facts = state.node
    parts = [
        f"{safe(facts.hostname)}, Linux {safe(facts.kernel)}",
        f"{count(len(facts.cpus), 'pCPU')} {safe(facts.online)}",
    ]
    if facts.isolated:
        parts.append(f"isolated {safe(facts.isolated)}")
    if facts.nohz_full:
        parts.append(f"nohz_full {safe(facts.nohz_full)}")
    kubelet = facts.kubelet
    if kubelet is not None:
        default = f", default set {safe(kubelet.default)}" if kubelet.default else ""
        parts.append(f"kubelet {safe(kubelet.policy)}{default}")
    if state.kept_quiet is not None and state.kept_quiet.cpus:
        parts.append(f"quiet pCPUs {safe(state.kept_quiet.cpus)}")
    if facts.mode != "act":
        parts.append(f"mode {safe(facts.mode)}")
    if state.daemon.running and not facts.thread_events:
        parts.append("new threads are pinned only at the next audit")
    return Text(output.dot.join(parts))


def head(state: State, output: Output) -> list[Text]:
    """Return the lines about the node and about who made the document."""
    return [
        *paragraph(node(state, output), output),
        *paragraph(daemon(state.daemon), output),
    ]


def notes(found: Iterable[Note], prefix: str = "", *, warnings_only: bool = False) -> list[Text]:
    """Return the notes, warnings first in a warning's style."""
    ordered = sorted(found, key=lambda note: note.level != "warning")
    lines = []
    for note in ordered:
        warning = note.level == "warning"
        if warning or not warnings_only:
            mark, style = ("! ", ODD) if warning else ("- ", "")
            lines.append(styled(f"{mark}{prefix}{note.text}", style))
    return lines


def checks(
    title: str, rows: Iterable[Row], styles: Mapping[str, str], output: Output
) -> list[Text]:
    """Return the rows of checks as a table; `title` is that of their subjects."""
    columns = [Column(title, NAMES, fold=16), Column("STATUS"), Column("FOUND", fold=24)]
    cells = []
    for row in rows:
        name = f"{row.sandbox} {row.check}" if row.sandbox else row.check
        text = f"{row.text}. Remedy: {row.remedy}" if row.remedy else row.text
        cells.append([styled(name), styled(row.status, styles.get(row.status, "")), styled(text)])
    return table(columns, cells, output)


def remedies(
    rows: Iterable[tuple[str, str, str]], output: Output, *, most: int = 12
) -> Iterator[Text]:
    """Yield each remedy once, after the names that it is for; rows are (name, remedy, command).

    At most `most` commands follow, on lines of their own, as they are typed.
    """
    named: dict[str, dict[str, str]] = {}  # remedy -> command or name -> name
    for name, remedy, command in rows:
        named.setdefault(remedy, {}).setdefault(command or name, name)
    for remedy, by_command in named.items():
        names = ", ".join(dict.fromkeys(by_command.values()))
        yield from paragraph(styled(f"{names}: {remedy}"), output, indent=2)
        commands = [command for command, name in by_command.items() if command != name]
        for command in commands[:most]:
            yield from paragraph(Text("    ") + styled(command), output, indent=6)
        if len(commands) > most:
            yield Text(f"    and {len(commands) - most} more; --json lists them")


def drifting(threads: Iterable[Thread]) -> int:
    """Return how many threads are not where they should be."""
    return sum(1 for thread in threads if thread.state == "drift")


def pairs(threads: Iterable[Thread], output: Output) -> Text:
    """Return where each vCPU thread may run now, such as `0→6-7 1..4→8..11`.

    `a..b→c..d` pairs each with its own pCPU; `a,b→c-d` are vCPUs on one set. A `!` marks drift.
    """
    vcpus = sorted(
        (t for t in threads if t.role == "vcpu"),
        key=lambda t: (t.vcpu is None, t.vcpu or 0, t.tid),
    )
    text = Text(" ").join(
        styled(f"{names}{output.arrow}{place}{'!' if drift else ''}", BAD if drift else "")
        for names, place, drift in _grouped(vcpus)
    )
    return text if text.plain else Text(NOTHING)


def _grouped(vcpus: Sequence[Thread]) -> list[tuple[str, str, bool]]:
    """Return (vCPUs, pCPUs, drift) groups: one-to-one runs first, then vCPUs that share a set."""
    entries = [
        ("?" if t.vcpu is None else str(t.vcpu), t.affinity or "?", t.state == "drift")
        for t in vcpus
    ]
    done: list[tuple[str, str, bool]] = []
    for _, run in groupby(enumerate(entries), key=_diagonal):
        group = [entry for _, entry in run]
        if len(group) >= RUN and group[0][1].isdecimal():
            first, last = group[0], group[-1]
            done.append((f"{first[0]}..{last[0]}", f"{first[1]}..{last[1]}", first[2]))
        else:
            done += group
    merged: dict[tuple[str, bool], list[str]] = {}
    for names, place, drift in done:
        merged.setdefault((place, drift), []).append(names)
    return [(",".join(names), place, drift) for (place, drift), names in merged.items()]


def _diagonal(numbered: tuple[int, tuple[str, str, bool]]) -> tuple[object, ...]:
    """Return what is equal along a run of neighbouring vCPUs on neighbouring pCPUs."""
    position, (name, place, drift) = numbered
    if name.isdecimal() and place.isdecimal():
        return (int(name) - position, int(place) - position, drift)
    return (position, name, place, drift)


def overhead(threads: Iterable[Thread]) -> Text:
    """Return where the threads that are no vCPUs may run now: the commonest set, then others."""
    places: dict[tuple[str, bool], list[str]] = {}
    for thread in threads:
        if thread.role != "vcpu" and thread.state != "unmanaged":
            key = (thread.affinity or "?", thread.state == "drift")
            places.setdefault(key, []).append(thread.role)
    ordered = sorted(places.items(), key=lambda item: (item[0][1], -len(item[1])))
    parts = []
    for n, ((place, drift), roles) in enumerate(ordered):
        who = "" if n == 0 and not drift else "+".join(dict.fromkeys(roles)) + " "
        parts.append(styled(f"{who}{place}{'!' if drift else ''}", BAD if drift else ""))
    return Text("; ").join(parts) if parts else Text(NOTHING)


def roles(threads: Iterable[Thread], output: Output) -> str:
    """Return the threads' labels with counts, vCPUs first."""
    counts: dict[str, int] = {}
    for thread in sorted(threads, key=lambda t: (t.role != "vcpu", t.vcpu or 0)):
        label = thread.label if thread.role == "vcpu" else thread.role
        counts[label] = counts.get(label, 0) + 1
    return ", ".join(
        label if count == 1 else f"{label} {output.times}{count}" for label, count in counts.items()
    )


def guest(known: Guest) -> Text:
    """Return the state of guest pinning in words."""
    text = GUEST_STATES.get(known.state, known.state)
    if known.answered_s is not None:
        text += f", last answer {age(known.answered_s)} ago"
    if known.detail:
        text += f": {known.detail}"
    if cost := guest_cost(known):
        text += f"; {cost}"
    return styled(text, GUEST_STYLES.get(known.state, DIM))


def guest_cpu(one: GuestVcpu) -> Text:
    """Return a vCPU's guest CPU, `?` where it is unknown."""
    known = "?" if one.guest_cpu is None else str(one.guest_cpu)
    return styled(known, KNOWN_STYLES.get(one.state, ""))


def size(number: int) -> str:
    """Return a number of bytes in the unit that leaves at most four digits before the point."""
    for factor, unit in _UNITS:
        if number >= factor:
            return f"{number / factor:.1f} {unit}"
    return f"{number} B" if number else "0"


def memory_move(move: Memory | None) -> Text:
    """Return what `memory: migrate` does for a sandbox; empty while it has no NUMA node."""
    if move is None or not move.nodes:
        return Text()
    left, moved = size(move.remote_bytes or 0), size(move.moved_bytes)
    match move.state:
        case "near":
            far = f", {left} elsewhere" if move.remote_bytes else ""
            return styled(f"on NUMA node {move.nodes}{far}; {moved} moved")
        case "moving":
            return styled(f"moving to NUMA node {move.nodes}: {moved} moved, {left} left")
        case "stopped":
            text = f"{left} not on NUMA node {move.nodes}: {move.problem}; {moved} moved"
            return styled(text, ODD)
        case _:
            return styled(f"not yet examined for moves to NUMA node {move.nodes}", DIM)
