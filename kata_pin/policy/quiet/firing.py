"""Which interrupts disturb exclusive pCPUs, from two readings of the counters. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from kata_pin.model.cpuset import CpuSet
from kata_pin.model.measured.counters import InterruptKind
from kata_pin.model.quiet.interrupts import Interrupt
from kata_pin.model.quiet.node import Reading

MOVABLE, MANAGED, GUEST = "movable", "managed", "guest"

_KINDS: Final = {
    "tick": frozenset({InterruptKind.TICK}),
    "ipi": frozenset({InterruptKind.RESCHEDULE, InterruptKind.CALL}),
}


@dataclass(frozen=True, slots=True)
class Firing:
    """An interrupt on a pCPU: how often per second it fired, 0 for one that would fire there."""

    cpu: int
    interrupt: Interrupt
    per_s: float

    @property
    def kind(self) -> str:
        """Return whether it can be moved: `movable`, `managed`, or `guest` (of VFIO)."""
        return kind_of(self.interrupt)


def kind_of(one: Interrupt) -> str:
    """Return whether an interrupt can be moved."""
    return GUEST if one.row.vfio else MANAGED if one.managed else MOVABLE


def firing(
    interrupts: tuple[Interrupt, ...], first: Reading, last: Reading, cpus: CpuSet
) -> list[Firing]:
    """Return the interrupts that fired on these pCPUs, or that the kernel would have fire there.

    By pCPU, those that fired most first.
    """
    found = [one for cpu in cpus for one in _on(cpu, interrupts, first, last)]
    return sorted(found, key=lambda one: (one.cpu, -one.per_s, one.interrupt.number))


def _on(
    cpu: int, interrupts: tuple[Interrupt, ...], first: Reading, last: Reading
) -> Iterator[Firing]:
    seconds = max(last.time_s - first.time_s, 1e-9)
    for one in interrupts:
        before, after = first.interrupts.get(one.number), last.interrupts.get(one.number)
        count = 0
        # An interrupt of another text is another device's: its counts start again.
        if before is not None and after is not None and before[0] == after[0]:
            count = max(0, after[1].get(cpu, 0) - before[1].get(cpu, 0))
        if count or cpu in one.effective:
            yield Firing(cpu, one, round(count / seconds, 1))


def rate_of(kind: str, cpu: int, first: Reading, last: Reading) -> float | None:
    """Return the ticks or interrupts by other pCPUs (`tick`, `ipi`) per second; None: unknown."""
    one, two = first.cpus.get(cpu), last.cpus.get(cpu)
    if one is None or two is None or one.interrupts is None or two.interrupts is None:
        return None
    grown = sum(two.interrupts[each] - one.interrupts[each] for each in _KINDS[kind])
    return _per_s(grown, first, last)


def softirq_rates(cpu: int, first: Reading, last: Reading) -> dict[str, float] | None:
    """Return soft interrupts per second by name, those that ran; None: unknown."""
    one, two = first.cpus.get(cpu), last.cpus.get(cpu)
    if one is None or two is None or one.softirqs is None or two.softirqs is None:
        return None
    grown = {name: count - one.softirqs.get(name, 0) for name, count in two.softirqs.items()}
    return {name: _per_s(count, first, last) for name, count in grown.items() if count > 0}


def _per_s(count: int, first: Reading, last: Reading) -> float:
    return round(max(0, count) / max(last.time_s - first.time_s, 1e-9), 1)
