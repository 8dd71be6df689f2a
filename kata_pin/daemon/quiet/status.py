"""What the last round found: which pCPUs are quiet, and what still fires there and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from kata_pin.daemon.quiet.tuner import Outcome
from kata_pin.model.cpuset import EMPTY, CpuSet
from kata_pin.model.quiet.interrupts import Interrupt, InterruptRow, RowCounts
from kata_pin.model.quiet.tunables import QuietClaim, QuietState, TunableKind
from kata_pin.model.settings import QuietLevel


class Fired(NamedTuple):
    """An interrupt that fired on quiet pCPUs since the round before: how often, and on which."""

    interrupt: Interrupt
    cpus: CpuSet
    times: int

    @staticmethod
    def on(cpus: CpuSet, fired: Sequence[tuple[InterruptRow, Interrupt]]) -> tuple[Fired, ...]:
        """Return those that fired on these pCPUs; `fired` has each with its row before."""
        numbers, found = tuple(cpus), []
        for before, one in fired if numbers else ():
            counts = one.row.counts
            grown = counts.since(before.counts, numbers) if isinstance(counts, RowCounts) else {}
            if grown:
                found.append(Fired(one, CpuSet(grown), sum(grown.values())))
        return tuple(found)


@dataclass
class QuietStatus:
    """See the module. `settled` were quiet in the round before this one too.

    `refusals` are by sandbox what it does not get, and why. `held` counts the values that are
    changed now, `failed` the writes that failed; these and the following are since the start.
    `movable_fired` counts what fired on quiet pCPUs although it can be moved.
    """

    level: str = "off"
    state: QuietState = field(default_factory=QuietState)
    claims: Sequence[QuietClaim] = ()
    refusals: Mapping[str, Sequence[str]] = field(default_factory=dict)
    settled: CpuSet = EMPTY
    interrupts: Sequence[Interrupt] = ()
    outcome: Outcome = field(default_factory=Outcome)
    fired: tuple[Fired, ...] = ()
    irqbalance: tuple[int, ...] = ()
    problems: tuple[str, ...] = ()
    held: Counter[TunableKind] = field(default_factory=Counter)
    rounds: int = 0
    failed: Counter[TunableKind] = field(default_factory=Counter)
    written: int = 0
    restored: int = 0
    movable_fired: int = 0
    managed_fired: int = 0

    @property
    def acts(self) -> bool:
        """Return whether pCPUs are kept quiet, or values that were changed for that are left."""
        return QuietLevel(self.level).acts or bool(self.held)

    def managed_on(self, cpus: CpuSet) -> int:
        """Return how many managed interrupts may fire on one of these pCPUs."""
        if not cpus:
            return 0
        return sum(count for mask, count in self._managed.items() if mask & cpus)

    @cached_property
    def _managed(self) -> Counter[CpuSet]:
        """How many managed interrupts have a mask, by the mask: most have one of a few."""
        return Counter(one.mask for one in self.interrupts if one.managed)

    def after(
        self,
        *,
        level: str,
        state: QuietState,
        claims: Sequence[QuietClaim],
        refusals: Mapping[str, Sequence[str]],
        interrupts: Sequence[Interrupt],
        fired: Sequence[tuple[InterruptRow, Interrupt]],
        outcome: Outcome,
        held: Counter[TunableKind],
        irqbalance: tuple[int, ...],
    ) -> QuietStatus:
        """Return the status after another round."""
        found = Fired.on(state.quiet & self.settled, fired)
        managed = sum(one.times for one in found if one.interrupt.managed)
        return QuietStatus(
            level=level,
            state=state,
            claims=claims,
            refusals=refusals,
            settled=state.quiet & self.state.quiet,
            interrupts=interrupts,
            outcome=outcome,
            fired=found,
            irqbalance=irqbalance,
            held=held,
            rounds=self.rounds + 1,
            failed=self.failed + outcome.failed,
            written=self.written + outcome.written,
            restored=self.restored + outcome.given_back,
            managed_fired=self.managed_fired + managed,
            movable_fired=self.movable_fired + sum(one.times for one in found) - managed,
        )
