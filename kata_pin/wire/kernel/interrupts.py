"""/proc/interrupts and /proc/softirqs: counts by CPU, of interrupts by what they are for.

Facts: proc_interrupts(5); arch/x86/kernel/irq.c, arch/arm64/kernel/smp.c, kernel/softirq.c. Both
have a line of CPUs that are online, and rows that begin with a label.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Final

from kata_pin.errors import ParseError
from kata_pin.model.measured.counters import Counts, InterruptKind
from kata_pin.model.quiet.interrupts import InterruptRow, RowCounts
from kata_pin.wire.kernel.numbers import check_size, clipped

MAX_TEXT: Final = 16 * 1024 * 1024
"""Most bytes that are read: 1,024 CPUs and 1,000 interrupts have 11 MiB."""

_LABELS: Final = {
    b"LOC": InterruptKind.TICK,
    b"RES": InterruptKind.RESCHEDULE,
    b"CAL": InterruptKind.CALL,
    b"PIN": InterruptKind.GUEST,
    b"NPI": InterruptKind.GUEST,
    b"PIW": InterruptKind.GUEST,
}
_WORDS: Final = (
    (b"Rescheduling interrupts", InterruptKind.RESCHEDULE),
    (b"Function call interrupts", InterruptKind.CALL),
    (b"arch_timer", InterruptKind.TICK),
    (b"Timer broadcast", InterruptKind.TICK),
)
"""How machines other than x86 describe theirs."""

_NO_KIND: Final = frozenset({b"TLB", b"ERR", b"MIS"})
"""Rows that are left out: TLB is part of CAL, the others do not count by CPU."""

_GAP: Final = re.compile(r" {2,}")
_LINE: Final = re.compile(r"[0-9]+(?:[ -][A-Za-z]+)*\Z")
"""What stands before the handlers: the line's number and its trigger, such as `1-edge`."""


def parse_interrupts(data: bytes, cpus: Collection[int]) -> dict[int, Counts]:
    """Return the interrupts of these CPUs by kind; an offline one is left out.

    Raises ParseError.
    """
    columns, rows = _table(data, "/proc/interrupts")
    wanted = [(place, cpu) for place, cpu in enumerate(columns) if cpu in cpus]
    found = {cpu: dict.fromkeys(InterruptKind, 0) for _, cpu in wanted}
    for label, rest in rows:
        words = rest.split()
        if label in _NO_KIND or len(words) < len(columns):
            continue
        kind = _kind(label, b" ".join(words[len(columns) :]))
        for place, cpu in wanted:
            found[cpu][kind] += _number(words[place], "/proc/interrupts")
    return dict(found)


def parse_rows(data: bytes) -> tuple[InterruptRow, ...]:
    """Return the numbered interrupts in the file's order; raises ParseError."""
    check_size(data, MAX_TEXT, "/proc/interrupts")
    head, *lines = data.split(b"\n")
    places = parse_columns(head)
    return tuple(parse_row(line, places) for line in lines if is_numbered(line))


def parse_columns(head: bytes) -> dict[int, int]:
    """Return the column of each pCPU that has one: those online; raises ParseError."""
    return {cpu: place for place, cpu in enumerate(_columns(head, "/proc/interrupts"))}


def is_numbered(line: bytes) -> bool:
    """Return whether a line is that of an interrupt with a number, which can have files."""
    label = line.partition(b":")[0].strip()
    return label.isdigit() and len(label) < 10


def parse_row(line: bytes, columns: Mapping[int, int]) -> InterruptRow:
    """Return a numbered row; raises ParseError.

    Handlers follow chip, number of the line and trigger after two spaces (kernel/irq/proc.c,
    show_interrupts); an interrupt without any has an empty tuple.
    """
    label, _, rest = line.partition(b":")
    *words, text = rest.split(None, len(columns)) if rest.strip() else (b"",)
    if len(words) < len(columns):
        raise ParseError("not one number per CPU", source="/proc/interrupts", text=clipped(label))
    if not b"".join(words).isdigit() or max(map(len, words), default=0) > 20:
        raise ParseError("not a number", source="/proc/interrupts", text=clipped(line))
    counts = RowCounts(columns, line[: len(line) - len(text)])
    parts = _GAP.split(text.decode("utf-8", "backslashreplace").strip())
    last = parts[-1] if len(parts) > 1 and not _LINE.match(parts[-1]) else ""
    handlers = tuple(last.split(", ")) if last else ()
    return InterruptRow(int(label), " ".join(" ".join(parts).split()), handlers, counts)


def recounted(row: InterruptRow, before: bytes, line: bytes) -> InterruptRow | None:
    """Return a row with the counts of a newer line; None if the line differs in more than these.

    `row` was parsed from `before` with the same columns. The kernel pads counts, so lines of one
    interrupt have one length.
    """
    known = row.counts
    if not isinstance(known, RowCounts) or len(line) != len(before):
        return None
    end = len(known.text)
    if line[end:] != before[end:]:
        return None
    return InterruptRow(row.number, row.text, row.handlers, known.of(line[:end]))


def parse_softirqs(data: bytes, cpus: Collection[int]) -> dict[int, dict[str, int]]:
    """Return the soft interrupts of these CPUs by name, such as `NET_RX`; raises ParseError."""
    columns, rows = _table(data, "/proc/softirqs")
    wanted = [(place, cpu) for place, cpu in enumerate(columns) if cpu in cpus]
    found: dict[int, dict[str, int]] = {cpu: {} for _, cpu in wanted}
    for label, rest in rows:
        words = rest.split()
        if len(words) != len(columns) or not label.replace(b"_", b"").isalpha():
            raise ParseError("not one number a CPU", source="/proc/softirqs", text=clipped(label))
        for place, cpu in wanted:
            found[cpu][label.decode("ascii")] = _number(words[place], "/proc/softirqs")
    return found


def _kind(label: bytes, description: bytes) -> InterruptKind:
    known = _LABELS.get(label)
    if known is None:
        known = next((kind for word, kind in _WORDS if word in description), None)
    if known is None:
        known = InterruptKind.DEVICE if label.isdigit() else InterruptKind.OTHER
    return known


def _table(data: bytes, source: str) -> tuple[list[int], list[tuple[bytes, bytes]]]:
    """Return the CPUs of the columns, and the rows by label."""
    check_size(data, MAX_TEXT, source)
    head, *lines = data.split(b"\n")
    columns = _columns(head, source)
    rows = []
    for line in lines:
        label, colon, rest = line.partition(b":")
        if colon:
            rows.append((label.strip(), rest))
    return columns, rows


def _columns(head: bytes, source: str) -> list[int]:
    names = head.split()
    if not names or not all(n.startswith(b"CPU") and n[3:].isdigit() and len(n) < 9 for n in names):
        raise ParseError("no line of CPUs", source=source, text=clipped(head))
    return [int(name[3:]) for name in names]


def _number(word: bytes, source: str) -> int:
    if not word.isdigit() or len(word) > 20:
        raise ParseError("not a number", source=source, text=clipped(word))
    return int(word)
