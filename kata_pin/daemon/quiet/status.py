"""What the last round found: which pCPUs are quiet, and what still fires there and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kata_pin.daemon.quiet.tuner import Outcome
from kata_pin.model.cpuset import EMPTY, CpuSet
from kata_pin.model.quiet.interrupts import Interrupt
from kata_pin.model.quiet.tunables import QuietState


class Fired(NamedTuple):
    """An interrupt that fired on quiet pCPUs since the round before: how often, and on which."""

    interrupt: Interrupt
    cpus: CpuSet
    times: int

    @staticmethod
    def since(
        before: QuietStatus, state: QuietState, interrupts: Sequence[Interrupt]
    ) -> tuple[Fired, ...]:
        """Return those that did, on pCPUs that were quiet in the round before too."""
        quiet = state.quiet & before.settled
        found = []
        for one in interrupts if quiet else ():
            known = before.counts.get(one.number)
            if known is None or known.row is one.row or known.row.text != one.row.text:
                continue
            grown = {
                cpu: one.row.counts.get(cpu, 0) - known.row.counts.get(cpu, 0) for cpu in quiet
            }
            fired = {cpu: times for cpu, times in grown.items() if times > 0}
            if fired:
                found.append(Fired(one, CpuSet(fired), sum(fired.values())))
        return tuple(found)


@dataclass
class QuietStatus:
    """See the module. `settled` were quiet in the round before this one too.

    `movable_fired` counts what fired there although it can be moved, since the daemon started.
    """

    level: str = "off"
    state: QuietState = field(default_factory=QuietState)
    settled: CpuSet = EMPTY
    counts: Mapping[int, Interrupt] = field(default_factory=dict)
    outcome: Outcome = field(default_factory=Outcome)
    fired: tuple[Fired, ...] = ()
    irqbalance: tuple[int, ...] = ()
    problems: tuple[str, ...] = ()
    rounds: int = 0
    written: int = 0
    restored: int = 0
    movable_fired: int = 0
    managed_fired: int = 0

    def after(
        self,
        *,
        level: str,
        state: QuietState,
        interrupts: Sequence[Interrupt],
        outcome: Outcome,
        irqbalance: tuple[int, ...],
    ) -> QuietStatus:
        """Return the status after another round."""
        fired = Fired.since(self, state, interrupts)
        managed = sum(one.times for one in fired if one.interrupt.managed)
        return QuietStatus(
            level=level,
            state=state,
            settled=state.quiet & self.state.quiet,
            counts={one.number: one for one in interrupts},
            outcome=outcome,
            fired=fired,
            irqbalance=irqbalance,
            rounds=self.rounds + 1,
            written=self.written + outcome.written,
            restored=self.restored + outcome.given_back,
            managed_fired=self.managed_fired + managed,
            movable_fired=self.movable_fired + sum(one.times for one in fired) - managed,
        )
