"""Whether a container runs outside its guest CPUs, from the CPU time that it used.

The agent's success proves nothing, because it only logs what the kernel refused. CPU time can show
that a container ran elsewhere; it can never prove that it did not, and an idle container shows
nothing. Out of scope: the exact way, by a program in the container (guest/agent.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kata_pin.model.cpuset import CpuSet

LEAST_S: Final = 0.1  # least CPU time that shows anything
SLACK_S: Final = 0.1
SLACK_SHARE: Final = 0.1
"""How much a container's CPU time may exceed the ready time of its vCPU threads, because of ticks
and readings at different moments."""


@dataclass(frozen=True, slots=True)
class Used:
    """A container's CPU time between two readings, in seconds.

    `per_cpu` is by guest CPU, empty with cgroup v2. `own_ready` is how long the vCPU threads of its
    guest CPUs ran or waited for a CPU, because a guest may count both; None if one is unknown.
    """

    total: float
    per_cpu: Sequence[float] = ()
    own_ready: float | None = None


def runs_elsewhere(used: Used, cpus: CpuSet) -> bool | None:
    """Return whether the container ran outside `cpus`; None where its time does not show it."""
    if used.per_cpu:
        outside = sum(s for cpu, s in enumerate(used.per_cpu) if cpu not in cpus)
        if outside > LEAST_S:
            return True
        return False if sum(used.per_cpu) > LEAST_S else None
    if used.total <= LEAST_S or used.own_ready is None:
        return None
    return used.total > used.own_ready * (1 + SLACK_SHARE) + SLACK_S
