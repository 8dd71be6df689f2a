"""Which guest CPU a vCPU thread is, from busy times in the guest and run times on the host (D12).

Between two readings a guest CPU is busy for as long as its vCPU thread runs on the host, give or
take exits and ticks. So if a thread ran clearly longer than all others, and one guest CPU was busy
for as long, they are the same. Nothing runs in the guest for this. There is no answer, rather than
a guess, for a thread that ran little, two that ran alike, a guest CPU that fits two threads, a
guest that polls while idle, or one that counts stolen time as busy.

The agent's metrics name guest CPUs by their rank among the online ones; `by_rank` finds the guest
CPUs that all possible numberings agree about. Out of scope: reading the times.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from kata_pin.model.guest_map import Measured
from kata_pin.model.thread import ThreadKey

LEAST_S: Final = 0.2  # shortest run time that stands out from noise: 20 ticks of the guest's clock
SLACK_S: Final = 0.03
SLACK_SHARE: Final = 0.05
"""How far busy and run time of one vCPU may differ: ticks of 10 ms at both ends, and exits."""

APART: Final = 3.0  # a time must differ from every other by this many times its slack
SOURCE: Final = "busy times in the guest and on the host"


def match(ran: Mapping[ThreadKey, float], busy: Mapping[int, float]) -> dict[ThreadKey, int]:
    """Return the guest CPU of each thread that fits exactly one.

    `ran` and `busy` are seconds over the same interval, of all vCPU threads and all guest CPUs.
    """
    found: dict[ThreadKey, int] = {}
    for key, seconds in ran.items():
        if seconds < LEAST_S or _near(seconds, (s for other, s in ran.items() if other != key)):
            continue
        fitting = [cpu for cpu, s in busy.items() if abs(s - seconds) <= _slack(seconds)]
        if len(fitting) == 1:
            others = (s for cpu, s in busy.items() if cpu != fitting[0])
            if not _near(seconds, others):
                found[key] = fitting[0]
    return found


def _slack(seconds: float) -> float:
    return SLACK_S + seconds * SLACK_SHARE


def _near(seconds: float, others: Iterable[float]) -> bool:
    """Return whether another time is too near to this one to tell them apart."""
    return any(abs(other - seconds) < APART * _slack(seconds) for other in others)


def by_rank(
    ranks: Mapping[ThreadKey, int], numberings: Sequence[Mapping[ThreadKey, int]]
) -> dict[ThreadKey, int]:
    """Return the guest CPUs of threads whose rank among the online guest CPUs is known.

    `numberings` are the ways in which this guest may number its vCPUs. Those with another order are
    excluded; a thread is in the result if all the others agree about it.
    """
    fitting = [one for one in numberings if _ordered(ranks, one)]
    return {
        key: numbers.pop()
        for key in ranks
        if len(numbers := {one[key] for one in fitting if key in one}) == 1
    }


def _ordered(ranks: Mapping[ThreadKey, int], numbering: Mapping[ThreadKey, int]) -> bool:
    line = sorted(numbering.values())
    return all(key in numbering and line.index(numbering[key]) == r for key, r in ranks.items())


@dataclass
class Votes:
    """Collects the answers of several intervals; one contradiction disqualifies a thread."""

    needed: int = 2
    _answers: dict[ThreadKey, tuple[int, int]] = field(default_factory=dict)
    _doubted: set[ThreadKey] = field(default_factory=set)

    def add(self, found: Mapping[ThreadKey, int]) -> None:
        """Add the answer of one interval."""
        for key, cpu in found.items():
            answer, times = self._answers.get(key, (cpu, 0))
            if answer != cpu:
                self._doubted.add(key)
            self._answers[key] = (answer, times + 1)

    def keep_only(self, alive: Iterable[ThreadKey]) -> None:
        """Drop threads that have ended."""
        living = set(alive)
        self._answers = {key: one for key, one in self._answers.items() if key in living}
        self._doubted &= living

    @property
    def measured(self) -> dict[ThreadKey, Measured]:
        """The threads with enough intervals that agree."""
        return {
            key: Measured(cpu, SOURCE)
            for key, (cpu, times) in self._answers.items()
            if times >= self.needed and key not in self._doubted
        }
