"""Exclusive pCPUs that are not: claimed by two sandboxes.

Needs all sandboxes of the node at once; what is done about it is the operator's choice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kata_pin.model.cpuset import CpuSet
from kata_pin.model.placement import Placement


@dataclass(frozen=True, slots=True)
class Conflict:
    """pCPUs that several sandboxes claim exclusively; the ids are sorted."""

    cpus: CpuSet
    sandboxes: tuple[str, ...]


def conflicts(placements: Mapping[str, Placement]) -> tuple[Conflict, ...]:
    """Return the pCPUs that more than one sandbox claims exclusively, grouped by claimants."""
    claimants: dict[int, list[str]] = {}
    for sandbox_id, placement in sorted(placements.items()):
        for cpu in placement.mask.exclusive:
            claimants.setdefault(cpu, []).append(sandbox_id)
    together: dict[tuple[str, ...], list[int]] = {}
    for cpu, who in sorted(claimants.items()):
        if len(who) > 1:
            together.setdefault(tuple(who), []).append(cpu)
    return tuple(Conflict(CpuSet(cpus), who) for who, cpus in together.items())
