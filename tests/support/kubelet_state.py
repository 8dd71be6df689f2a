"""The state of an allocator: the shared pool, who has which CPUs, what a pod may reuse.

A frozen value: every change makes a new one, so that a failed request leaves no trace and a caller
can store old and new in one transaction. Out of scope: deciding anything; `kubelet` does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

from kata_pin.base.cpuset import EMPTY, CpuSet, union

Assignments = Mapping[str, Mapping[str, CpuSet]]
"""Pod uid to container name to its exclusive CPUs."""


@dataclass(frozen=True, slots=True)
class Reusable:
    """CPUs of one pod's init containers that its later containers may take as well."""

    pod: str = ""
    cpus: CpuSet = EMPTY

    def of(self, pod: str) -> CpuSet:
        """Return what this pod may reuse."""
        return self.cpus if pod == self.pod else EMPTY


@dataclass(frozen=True, slots=True)
class StaticState:
    """`shared` is the pool of all who have no exclusive CPUs (the kubelet's default set)."""

    shared: CpuSet = EMPTY
    assignments: Assignments = field(default_factory=dict, hash=False)
    reusable: Reusable = Reusable()

    @property
    def exclusive(self) -> CpuSet:
        """All CPUs that some container has for itself."""
        return union(cpus for pod in self.assignments.values() for cpus in pod.values())

    def get(self, pod: str, container: str) -> CpuSet | None:
        """Return the container's exclusive CPUs, None if it has none."""
        return self.assignments.get(pod, {}).get(container)

    def others(self, pod: str, container: str) -> CpuSet:
        """Return what the other containers of the pod have."""
        return union(
            cpus for name, cpus in self.assignments.get(pod, {}).items() if name != container
        )

    def assigned(self, pod: str, container: str, cpus: CpuSet) -> StaticState:
        """Return the state in which the container has these CPUs and the shared pool lacks them."""
        containers = {**self.assignments.get(pod, {}), container: cpus}
        return dataclasses.replace(
            self,
            shared=self.shared - cpus,
            assignments={**self.assignments, pod: containers},
        )

    def removed(self, pod: str, container: str) -> StaticState:
        """Return the state without the container.

        Its CPUs go to the shared pool, but those that another container of its pod still has.
        """
        cpus = self.get(pod, container)
        if cpus is None:
            return self
        rest = {name: of for name, of in self.assignments[pod].items() if name != container}
        assignments = {uid: of for uid, of in self.assignments.items() if uid != pod}
        if rest:
            assignments[pod] = rest
        shared = self.shared | (cpus - self.others(pod, container))
        return dataclasses.replace(self, shared=shared, assignments=assignments)
