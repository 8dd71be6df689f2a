"""A thread's scheduling class, and what the node says of real-time ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

OTHER: Final = 0
FIFO: Final = 1
RR: Final = 2
BATCH: Final = 3
IDLE: Final = 5
"""Policies of sched(7) (linux/sched.h), without those that need more than a priority."""

_WORDS: Final = {OTHER: "other", FIFO: "fifo", RR: "rr", BATCH: "batch", IDLE: "idle"}


class Scheduling(NamedTuple):
    """A policy, its real-time priority (0: none), and when the thread started (stat field 22)."""

    policy: int
    priority: int
    starttime: int = 0

    @property
    def is_realtime(self) -> bool:
        """Whether nothing of the ordinary class runs while this thread wants to."""
        return self.policy in {FIFO, RR}

    @property
    def text(self) -> str:
        """Return it as a setting has it, such as `fifo:1`."""
        word = _WORDS.get(self.policy, f"policy {self.policy}")
        return f"{word}:{self.priority}" if self.is_realtime else word


@dataclass(frozen=True)
class RtNode:
    """What the node says; None: unknown.

    `runtime_us` of every `period_us` are left to real-time threads (-1: all). `fair_server`: the
    kernel has one (Linux 6.12); `unserved` are pCPUs on which it is switched off. `guards` has by
    pCPU the real-time priorities of its kernel threads by name, 0 for those of another class.
    """

    runtime_us: int | None = None
    period_us: int | None = None
    fair_server: bool = False
    unserved: frozenset[int] = frozenset()
    guards: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
