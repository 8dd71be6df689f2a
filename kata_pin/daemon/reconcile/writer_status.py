"""Who else sets affinities of a sandbox's threads, as documents tell it (DESIGN D13).

Kata itself where its vCPU pinning is on, with what says so; and whoever else keeps moving threads.
Nothing is kept. Out of scope: noticing (other_writers.py, kata_pinning.py), and yielding
(writers.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kata_pin.daemon.reconcile.other_writers import ForeignWatch
from kata_pin.model.placement import Report
from kata_pin.policy.placement.notes import NoteCode
from kata_pin.policy.placement.writers import KataPinning, KataPinningMode


@dataclass(frozen=True)
class Writer:
    """One other writer. `who` is `kata` or `other`; `acts`: threads are left to it now.

    `seen` counts the moves that were noticed, `since_s` is the age of the first one.
    """

    who: str
    acts: bool
    evidence: str = ""
    seen: int = 0
    since_s: float | None = None
    tids: tuple[int, ...] = ()

    @property
    def document(self) -> dict[str, object]:
        """The writer as plain values."""
        return {
            "who": self.who,
            "acts": self.acts,
            "evidence": self.evidence,
            "seen": self.seen,
            "since_s": None if self.since_s is None else round(max(0.0, self.since_s), 3),
            "tids": list(self.tids),
        }


class Watched(Protocol):
    """What is held of a sandbox (daemon.engine.SandboxCache)."""

    report: Report | None
    kata: KataPinning
    foreign: ForeignWatch


def writers_of(cache: Watched, now: float) -> tuple[Writer, ...]:
    """Return the other writers of a sandbox; `now` is of CLOCK_MONOTONIC."""
    found: list[Writer] = []
    if cache.kata.pinning is not KataPinningMode.OFF:
        placement = cache.report.placement if cache.report is not None else None
        codes = {note.code for note in placement.notes} if placement is not None else set()
        how = " by NUMA node" if cache.kata.pinning is KataPinningMode.NUMA else ""
        evidence = f"enable_vcpus_pinning{how}, says {cache.kata.evidence}"
        found.append(Writer("kata", NoteCode.KATA_PINS_VCPUS in codes, evidence))
    other = cache.foreign.writer()
    if other is not None:
        found.append(
            Writer(
                "other",
                bool(cache.foreign.left_alone(now)),
                "drift that returns",
                other.seen,
                now - other.since,
                tuple(sorted(key.tid for key in other.keys)),
            )
        )
    return tuple(found)
