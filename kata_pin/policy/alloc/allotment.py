"""What a grant means for a pass over one sandbox, and what a sandbox's VM is called in grants (D9).

A grant takes precedence over the recorded cpuset: a Kata container without a CPU quota never gets
its cpuset from us (D14), and one that does may have it a moment later than its threads have their
affinity. Pure; an Allotment lives for one pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from kata_pin.model.alloc import AllocState, PodRequest
from kata_pin.model.cpuset import EMPTY, CpuSet, union
from kata_pin.model.sandbox import Container, ContainerKind

_VM: Final = "vm:"  # no id has a colon


def vm_of(sandbox_id: str) -> str:
    """Return the name of a sandbox's VM in requests and grants.

    Not the sandbox's id: where there is no pod, that is the container's own.
    """
    return f"{_VM}{sandbox_id}"


def sandbox_of(pod: PodRequest) -> str:
    """Return the id of a pod's sandbox, empty for one that is not Kata's."""
    return pod.sandbox_id.removeprefix(_VM)


@dataclass(frozen=True, slots=True)
class Allotment:
    """A sandbox's containers with the CPUs of their grants.

    `allocated` has the exclusive CPUs by container id, the empty set for a container with shared
    CPUs only; `pool` is the shared pool, `others` what other sandboxes have exclusively.
    """

    containers: tuple[Container, ...] = ()
    allocated: Mapping[str, CpuSet] = field(default_factory=dict)
    pool: CpuSet = EMPTY
    others: CpuSet = EMPTY


def nothing_allotted(containers: Sequence[Container]) -> Allotment:
    """Return the allotment of a node without an allocator: everything is as recorded."""
    return Allotment(tuple(containers))


def allot(containers: Iterable[Container], state: AllocState) -> Allotment:
    """Return what the state means for one sandbox's containers.

    The pod sandbox itself gets the CPUs of its VM's grant: for overhead and unpaired vCPUs only.
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
    others = union(grant.exclusive for owner, grant in state.grants.items() if owner not in given)
    return Allotment(tuple(every), given, state.shared, others)
