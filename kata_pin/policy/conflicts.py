"""Exclusive pCPUs that are not: claimed by two sandboxes, or open to threads of others.

Needs all sandboxes of the node at once; what is done about it is the operator's choice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from kata_pin.model.cpuset import CpuSet, union
from kata_pin.model.placement import Placement
from kata_pin.model.thread import Task, ThreadKey

PF_NO_SETAFFINITY: Final = 0x0400_0000
"""Task flag of a kernel thread whose affinity nobody may change (sched.h), such as ksoftirqd/3."""


@dataclass(frozen=True, slots=True)
class Conflict:
    """pCPUs that several sandboxes claim exclusively; the ids are sorted."""

    cpus: CpuSet
    sandboxes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Intruder:
    """A thread that may run on exclusive pCPUs of a sandbox it does not belong to.

    `owner` is the sandbox it belongs to, empty for a thread of the host.
    """

    task: Task
    cpus: CpuSet
    sandbox_id: str
    owner: str = ""


def conflicts(placements: Mapping[str, Placement]) -> tuple[Conflict, ...]:
    """Return the pCPUs that more than one sandbox claims exclusively, by who claims them."""
    together: dict[tuple[str, ...], list[int]] = {}
    for cpu, claimants in sorted(_claimants(placements).items()):
        if len(claimants) > 1:
            together.setdefault(tuple(sorted(claimants)), []).append(cpu)
    return tuple(Conflict(CpuSet(cpus), who) for who, cpus in together.items())


def intruders(
    placements: Mapping[str, Placement],
    tasks: Iterable[Task],
    owner_of: Mapping[ThreadKey, str],
) -> tuple[Intruder, ...]:
    """Return the threads allowed on exclusive pCPUs of a sandbox that is not theirs.

    `tasks` may be all threads of the host; `owner_of` names the sandbox of those that work for
    one. Kernel threads whose affinity is fixed are no intruders: nobody can move them.
    """
    exclusive = union(one.mask.exclusive for one in placements.values())
    claimants = _claimants(placements)
    found: list[Intruder] = []
    for task in tasks:
        if task.affinity.isdisjoint(exclusive) or task.flags & PF_NO_SETAFFINITY:
            continue
        owner = owner_of.get(task.key, "")
        victims: dict[str, list[int]] = {}
        for cpu in task.affinity & exclusive:
            for sandbox_id in claimants[cpu]:
                if sandbox_id != owner:
                    victims.setdefault(sandbox_id, []).append(cpu)
        found += [Intruder(task, CpuSet(cpus), who, owner) for who, cpus in victims.items()]
    return tuple(sorted(found, key=lambda one: (one.task.key, one.sandbox_id)))


def _claimants(placements: Mapping[str, Placement]) -> dict[int, list[str]]:
    claimants: dict[int, list[str]] = {}
    for sandbox_id, placement in placements.items():
        for cpu in placement.mask.exclusive:
            claimants.setdefault(cpu, []).append(sandbox_id)
    return claimants
