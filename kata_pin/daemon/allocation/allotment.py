"""What our own allocator gave, as a pass over one sandbox needs it (DESIGN D8, D9).

A grant stands above the recorded cpuset: a Kata container without a CPU quota never gets its cpuset
from us (D14), and one that does may have it a moment later than its threads have their affinity.
Pure; an Allotment lives for one pass. Out of scope: deciding (policy/alloc), acting (engine.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kata_pin.daemon.allocation.requests import vm_of
from kata_pin.model.alloc import AllocState
from kata_pin.model.cpuset import EMPTY, CpuSet
from kata_pin.model.sandbox import Container, ContainerKind


@dataclass(frozen=True)
class Allotment:
    """The containers with the CPUs that they were given, which are theirs alone, and the pool.

    `allocated` is by container id, the empty set for one that has shared CPUs only.
    """

    containers: tuple[Container, ...] = ()
    allocated: Mapping[str, CpuSet] = field(default_factory=dict)
    pool: CpuSet = EMPTY


def nothing_allotted(containers: Sequence[Container]) -> Allotment:
    """Return the allotment of a node without an allocator: everything is as recorded."""
    return Allotment(tuple(containers))


def allot(containers: Iterable[Container], state: AllocState) -> Allotment:
    """Return what the state means for one sandbox's containers.

    The pod sandbox itself has the CPUs of its VM's grant: for overhead and surplus vCPUs only.
    """
    given: dict[str, CpuSet] = {}
    every: list[Container] = []
    for container in containers:
        of_vm = container.kind is ContainerKind.SANDBOX
        grant = state.get(vm_of(container.id) if of_vm else container.id)
        if grant is not None:
            container = replace(container, cpus=grant.cpus)  # noqa: PLW2901 - the same, with them
            if not of_vm:
                given[container.id] = grant.exclusive
        every.append(container)
    return Allotment(tuple(every), given, state.shared)
