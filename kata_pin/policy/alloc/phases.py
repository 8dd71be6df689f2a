"""Live changes in an order in which nobody runs on another's exclusive CPUs.

First widen, then narrow: a container keeps CPUs at every moment, and its threads can be pinned anew
between the two. What passes from an owner of exclusive CPUs to others follows when the owner has
left it. Pure; a phase is written and its threads re-pinned before the next one begins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from kata_pin.model.alloc import AllocState, Grant
from kata_pin.model.cpuset import EMPTY, CpuSet, union


class PhaseKind(StrEnum):
    """The phases in their order. HAND_OVER is needed only where exclusive CPUs change hands."""

    WIDEN = "widen"
    NARROW = "narrow"
    HAND_OVER = "hand-over"


@dataclass(frozen=True, slots=True)
class Phase:
    """What to write at the same time: container ids and their CPUs. Those not named stay."""

    kind: PhaseKind
    cpus: Mapping[str, CpuSet]


def transition(before: AllocState, after: AllocState) -> tuple[Phase, ...]:
    """Return the phases by which running containers get from one state to the other.

    Containers that are in one of the two only are not named: new ones are given their CPUs when
    they are created, after these phases. Phases with nothing to write are left out; no phases if
    nothing changes.
    """
    moving = {
        name: (before.grants[name].cpus, grant.cpus)
        for name, grant in after.grants.items()
        if name in before.grants and before.grants[name].cpus != grant.cpus
    }
    owned = {
        name: grant.exclusive - _opened(after.grants[name])
        for name, grant in before.grants.items()
        if name in after.grants
    }
    exclusive = union(owned.values())
    now = {name: old for name, (old, _) in moving.items()}
    phases = []
    for kind in PhaseKind:
        step = {}
        for name, (old, new) in moving.items():
            foreign = exclusive - owned.get(name, EMPTY)
            wide = old | (new - foreign)
            target = {
                PhaseKind.WIDEN: wide,
                PhaseKind.NARROW: (wide & new) or wide,
                PhaseKind.HAND_OVER: new,
            }[kind]
            if target != now[name]:
                step[name] = now[name] = target
        if step:
            phases.append(Phase(kind, step))
    return tuple(phases)


def _opened(grant: Grant) -> CpuSet:
    """Return the CPUs on which a container stays and others may be: nobody waits for those."""
    return grant.cpus - grant.exclusive
