"""CPUs that concern a container although they are not its own: its pod's, and its VM's memory's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kata_pin.model.alloc import AllocState, ContainerRequest, Grant, GrantKind
from kata_pin.model.cpuset import EMPTY, CpuSet, union


@dataclass(frozen=True, slots=True)
class Use:
    """Which CPUs a container is to keep, and which are another's.

    `prefer`: keep these, the VM as well; `home`: its zone of the pool so far; `avoid`: claimed by
    others; `own_cpus`: of its VM, None for as many as the setting says.
    """

    prefer: CpuSet = EMPTY
    home: CpuSet = EMPTY
    avoid: CpuSet = EMPTY
    own_cpus: int | None = None


def cpus_beside(state: AllocState, request: ContainerRequest) -> CpuSet:
    """Return the own CPUs of the pod's other containers, else their zones."""
    pod = _containers(state, request)
    return own_cpus(pod) or union(one.zone for one in pod)


def memory_home(state: AllocState, request: ContainerRequest) -> CpuSet:
    """Return the CPUs of the node that has most of the VM's memory, as far as that is known.

    Empty where the pod has CPUs of its own: these say where the VM runs.
    """
    home = state.memory.get(request.pod.sandbox_id, EMPTY)
    return EMPTY if home and own_cpus(_containers(state, request)) else home


def at_home(state: AllocState, request: ContainerRequest, free: CpuSet, wanted: int) -> CpuSet:
    """Return the free CPUs of the node of a VM's memory, empty if they are not enough."""
    home = memory_home(state, request) & free
    return home if len(home) >= wanted else EMPTY


def own_cpus(grants: Sequence[Grant]) -> CpuSet:
    """Return all CPUs that are these containers' own."""
    return union(one.own for one in grants)


def _containers(state: AllocState, request: ContainerRequest) -> list[Grant]:
    return [one for one in state.of_pod(request.pod.pod_uid) if one.kind is GrantKind.CONTAINER]
