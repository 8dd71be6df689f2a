"""Whether a container runs where its guest said it would: told by the CPU time it used.

A success of the agent proves nothing: it only logs what the kernel refused. Passive and one-sided:
a container that ran elsewhere is found where its time shows it, and one that did not is never more
than not contradicted. An idle container tells nothing.

Pure. Out of scope: reading back by a program in the container, which is exact (guest/agent.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kata_pin.model.cpuset import CpuSet

LEAST_S: Final = 0.1
"""Least CPU time that tells anything."""

SLACK_S: Final = 0.1
SLACK_SHARE: Final = 0.1
"""How much more a container may seem to have used than its vCPU threads were ready to run: ticks,
and readings that are not of one moment."""


@dataclass(frozen=True, slots=True)
class Used:
    """What a container used between two looks, in seconds.

    `per_cpu` is by guest CPU, empty where the guest does not tell (cgroup v2). `own_ready` is how
    long the vCPU threads of its guest CPUs ran or waited for a CPU meanwhile, for a guest may count
    both; None if one of them is not known.
    """

    total: float
    per_cpu: Sequence[float] = ()
    own_ready: float | None = None


def runs_elsewhere(used: Used, cpus: CpuSet) -> bool | None:
    """Return whether the container ran outside `cpus`; None where its time does not tell."""
    if used.per_cpu:
        outside = sum(s for cpu, s in enumerate(used.per_cpu) if cpu not in cpus)
        if outside > LEAST_S:
            return True
        return False if sum(used.per_cpu) > LEAST_S else None
    if used.total <= LEAST_S or used.own_ready is None:
        return None
    return used.total > used.own_ready * (1 + SLACK_SHARE) + SLACK_S
