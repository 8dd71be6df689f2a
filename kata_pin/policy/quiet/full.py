"""How the kernel's own work must be kept off pCPUs that are quiet in full. Pure.

Network queues only lose pCPUs, so no packet goes where it did not go before. A frequency governor
is set only where every pCPU of its policy is quiet in full.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from kata_pin.model.cpuset import CpuSet
from kata_pin.model.quiet.tunables import (
    Exactly,
    Goal,
    KeepOff,
    Observed,
    QuietState,
    TakeOut,
    TunableKey,
    TunableKind,
)
from kata_pin.model.topology import HostTopology

LEAVE: Final = "leave"

_LISTS: Final = frozenset({TunableKind.WORKQUEUES, TunableKind.WATCHDOG, TunableKind.KERNEL_THREAD})


@dataclass(frozen=True, slots=True)
class PowerGoals:
    """`idle` is what pm_qos_resume_latency_us takes, `governor` one that cpufreq has.

    Each may be LEAVE. `policies` has by number the pCPUs of the frequency policies that have this
    governor.
    """

    idle: str
    governor: str
    policies: Mapping[str, CpuSet]


def idle_value(limit_us: int) -> str:
    """Return what pm_qos_resume_latency_us takes for a setting."""
    return str(limit_us) if limit_us else LEAVE


def full_goals(
    topology: HostTopology, state: QuietState, seen: Iterable[Observed], power: PowerGoals
) -> dict[TunableKey, Goal]:
    """Return how each tunable must be, none for those that may be as they are."""
    if not state.full:
        return {}
    keep_off = KeepOff(state.full, topology.online, (state.housekeeping,))
    goals: dict[TunableKey, Goal] = {}
    for one in seen:
        kind, name = one.key
        if kind in _LISTS:
            goals[one.key] = keep_off
        elif kind in {TunableKind.RPS, TunableKind.XPS}:
            goals[one.key] = TakeOut(state.full)
        elif kind is TunableKind.IDLE_LIMIT and power.idle != LEAVE and int(name) in state.full:
            goals[one.key] = Exactly(power.idle)
        elif kind is TunableKind.GOVERNOR and power.governor != LEAVE:
            members = power.policies.get(name)
            if members and members <= state.full:
                goals[one.key] = Exactly(power.governor)
    return goals
