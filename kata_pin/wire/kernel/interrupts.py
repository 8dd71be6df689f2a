"""/proc/interrupts and /proc/softirqs: counts by CPU, of interrupts by what they are for.

Facts: proc_interrupts(5); arch/x86/kernel/irq.c, arch/arm64/kernel/smp.c, kernel/softirq.c. Both
have a line of CPUs that are online, and rows that begin with a label.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from kata_pin.errors import ParseError
from kata_pin.model.measured.counters import Counts, InterruptKind
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


def parse_interrupts(data: bytes, cpus: Collection[int]) -> dict[int, Counts]:
    """Return the interrupts of these CPUs by kind; an offline one is left out.

    Raises ParseError.
    """
    columns, rows = _table(data, "/proc/interrupts")
    wanted = [(place, cpu) for place, cpu in enumerate(columns) if cpu in cpus]
    found = {cpu: dict.fromkeys(InterruptKind, 0) for _, cpu in wanted}
    for label, words in rows:
        if label in _NO_KIND or len(words) < len(columns):
            continue
        kind = _kind(label, b" ".join(words[len(columns) :]))
        for place, cpu in wanted:
            found[cpu][kind] += _number(words[place], "/proc/interrupts")
    return dict(found)


def parse_softirqs(data: bytes, cpus: Collection[int]) -> dict[int, dict[str, int]]:
    """Return the soft interrupts of these CPUs by name, such as `NET_RX`; raises ParseError."""
    columns, rows = _table(data, "/proc/softirqs")
    wanted = [(place, cpu) for place, cpu in enumerate(columns) if cpu in cpus]
    found: dict[int, dict[str, int]] = {cpu: {} for _, cpu in wanted}
    for label, words in rows:
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


def _table(data: bytes, source: str) -> tuple[list[int], list[tuple[bytes, list[bytes]]]]:
    """Return the CPUs of the columns, and the rows by label, split into words."""
    check_size(data, MAX_TEXT, source)
    head, *lines = data.split(b"\n")
    names = head.split()
    if not names or not all(n.startswith(b"CPU") and n[3:].isdigit() and len(n) < 9 for n in names):
        raise ParseError("no line of CPUs", source=source, text=clipped(head))
    rows = []
    for line in lines:
        label, colon, rest = line.partition(b":")
        if colon:
            rows.append((label.strip(), rest.split()))
    return [int(name[3:]) for name in names], rows


def _number(word: bytes, source: str) -> int:
    if not word.isdigit() or len(word) > 20:
        raise ParseError("not a number", source=source, text=clipped(word))
    return int(word)
