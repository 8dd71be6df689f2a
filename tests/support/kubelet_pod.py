"""What a pod asks for, as far as CPUs go, and who gets exclusive ones by the kubelet's rule.

Values from a pod's specification (or, with in-place resize, from the allocated resources in its
status). Out of scope: reading either.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class ContainerRole(StrEnum):
    """What a container is in its pod: a sidecar is an init container that keeps running."""

    APP = "app"
    INIT = "init"
    SIDECAR = "sidecar"


@dataclass(frozen=True, slots=True)
class KubeletContainer:
    """CPU request and limit of a container, in thousandths of a CPU; 0 when it has none.

    `memory_equal` says whether it has a memory request and an equal memory limit.
    """

    name: str
    request_m: int = 0
    limit_m: int = 0
    role: ContainerRole = ContainerRole.APP
    memory_equal: bool = True

    @property
    def guaranteed(self) -> bool:
        """Whether requests and limits are equal and there, as QoS class Guaranteed needs."""
        return 0 < self.request_m == self.limit_m and self.memory_equal


@dataclass(frozen=True, slots=True)
class KubeletPod:
    """A pod's containers of all roles, in the order in which they start."""

    uid: str
    containers: tuple[KubeletContainer, ...]

    @property
    def guaranteed(self) -> bool:
        """Whether the pod's QoS class is Guaranteed: each of its containers must be."""
        return bool(self.containers) and all(one.guaranteed for one in self.containers)

    def exclusive_cpus(self, container: KubeletContainer) -> int:
        """Return how many exclusive CPUs the container gets from the kubelet; 0 = shared pool.

        A container of a Guaranteed pod gets its request if that is a whole number of CPUs.
        """
        whole = self.guaranteed and container.request_m % 1000 == 0
        return container.request_m // 1000 if whole else 0

    def exclusive_cpus_of_pod(self) -> int:
        """Return the exclusive CPUs that the pod needs at the same time, over its whole life.

        Init containers run one after the other, beside the sidecars started before them (KEP-753).
        """
        sidecars = starting = running = 0
        for container in self.containers:
            cpus = self.exclusive_cpus(container)
            if container.role is ContainerRole.SIDECAR:
                sidecars += cpus
            elif container.role is ContainerRole.INIT:
                starting = max(starting, sidecars + cpus)
            else:
                running += cpus
        return max(starting, sidecars + running)
