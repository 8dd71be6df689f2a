"""How the kernel's own work must be kept off pCPUs that are quiet in full. Pure.

Network queues only lose pCPUs, so no packet goes where it did not go before. Idle states and
frequency: power.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kata_pin.model.quiet.tunables import (
    Goal,
    KeepOff,
    Observed,
    QuietState,
    TakeOut,
    TunableKey,
    TunableKind,
)
from kata_pin.model.topology import HostTopology

_LISTS: Final = frozenset({TunableKind.WORKQUEUES, TunableKind.WATCHDOG, TunableKind.KERNEL_THREAD})
_QUEUES: Final = frozenset({TunableKind.RPS, TunableKind.XPS})


def full_goals(
    topology: HostTopology, state: QuietState, seen: Iterable[Observed]
) -> dict[TunableKey, Goal]:
    """Return how each tunable must be, none for those that may be as they are."""
    if not state.full:
        return {}
    keep_off = KeepOff(state.full, topology.online, (state.housekeeping,))
    take_out = TakeOut(state.full)
    goals: dict[TunableKey, Goal] = {}
    for one in seen:
        if one.key.kind in _LISTS:
            goals[one.key] = keep_off
        elif one.key.kind in _QUEUES:
            goals[one.key] = take_out
    return goals
