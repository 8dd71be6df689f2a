"""Whose task ran on an exclusive pCPU. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from kata_pin.model.measured.windows import SeenTask, TaskClass
from kata_pin.policy.isolation.places import container_of

KTHREADD: Final = "kthreadd (pid 2)"

FOREIGN: Final = frozenset(
    {TaskClass.OTHER_SANDBOX, TaskClass.USER, TaskClass.UNBOUND_KERNEL, TaskClass.UNKNOWN}
)
"""The classes that violate isolation."""


@dataclass(frozen=True, slots=True)
class Owner:
    """Who owns an exclusive pCPU; `own` are the threads placed on it, with their labels.

    `alone` are those of them that may run on no other pCPU.
    """

    cpu: int
    sandbox: str
    pod: str
    container: str = ""
    own: Mapping[int, str] = field(default_factory=dict)
    alone: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of all sandboxes: whose each thread, process and cgroup is.

    Threads by tid, processes by pid; containers and sandboxes by id, each with the sandbox's id.
    `pods` are the sandboxes' names.
    """

    threads: Mapping[int, str] = field(default_factory=dict)
    processes: Mapping[int, str] = field(default_factory=dict)
    containers: Mapping[str, str] = field(default_factory=dict)
    pods: Mapping[str, str] = field(default_factory=dict)

    def sandbox_of(self, task: SeenTask) -> str:
        """Return the id of the sandbox that a task works for, empty if it is none's.

        A cgroup counts for tasks of root alone: others may have made it themselves, with any name
        (D24).
        """
        found = self.threads.get(task.tid) or self.processes.get(task.pid)
        if found or task.kernel or not task.by_root:
            return found or ""
        parts = (container_of(part) for part in task.cgroup.split("/") if part)
        return next((self.containers[one] for one in parts if one in self.containers), "")


def class_of(task: SeenTask | None, owner: Owner, known: Known) -> TaskClass:
    """Return the class of a task that ran on the owner's pCPU."""
    if task is None:
        return TaskClass.UNKNOWN
    if task.tid in owner.own:
        return TaskClass.OWN
    sandbox = known.sandbox_of(task)
    if sandbox:
        return TaskClass.SAME_POD if sandbox == owner.sandbox else TaskClass.OTHER_SANDBOX
    if task.bound:
        return TaskClass.PER_CPU_KERNEL
    if task.kernel or task.parent == KTHREADD:
        return TaskClass.UNBOUND_KERNEL
    return TaskClass.USER if task.affinity is not None or task.parent else TaskClass.UNKNOWN
