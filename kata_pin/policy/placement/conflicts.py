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
    together: dict[tuple[str, ...], list[int]] = {}
    for cpu, claimants in sorted(_claimants(placements).items()):
        if len(claimants) > 1:
            together.setdefault(tuple(sorted(claimants)), []).append(cpu)
    return tuple(Conflict(CpuSet(cpus), who) for who, cpus in together.items())


def _claimants(placements: Mapping[str, Placement]) -> dict[int, list[str]]:
    claimants: dict[int, list[str]] = {}
    for sandbox_id, placement in placements.items():
        for cpu in placement.mask.exclusive:
            claimants.setdefault(cpu, []).append(sandbox_id)
    return claimants
