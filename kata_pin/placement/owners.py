"""Whose task runs on an exclusive pCPU, by its thread and by the path of its cgroup."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

from msgspec import Struct, field

from kata_pin.base.counters import SeenTask
from kata_pin.base.cpuset import EMPTY, CpuSet
from kata_pin.base.values import TaskClass

# What a cgroup's path says of a task: its systemd unit, its pod, its container.

_POD: Final = re.compile(
    r"(?:^|[-/])pod([0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12}"
    r"|[0-9a-f]{32})(?:\.slice(?::[^:]*:[^:]*)?)?\Z"
)
_UNIT: Final = re.compile(r"[^/]+\.(?:service|scope|slice)\Z")
_USER_MANAGER: Final = re.compile(r"user@[0-9]+\.service\Z")
"""The one unit of the system below which there are others, of the user's own."""


class TaskPlace(NamedTuple):
    """Where a task belongs; each is empty where the path does not say.

    `unit` is the innermost systemd unit whose CPUs can be set, `pod_uid` a Kubernetes pod's.
    """

    unit: str = ""
    pod_uid: str = ""


def place_of(cgroup: str) -> TaskPlace:
    """Return what the path of a cgroup says."""
    parts = [part for part in cgroup.split("/") if part]
    pods = [found[1].replace("_", "-") for part in parts if (found := _POD.search(part))]
    return TaskPlace(_unit(parts), pods[-1] if pods else "")


def _unit(parts: list[str]) -> str:
    """Return the innermost unit of the node's systemd: one in a container has units of its own."""
    unit = ""
    for part in parts:
        if not _UNIT.match(part):
            break
        unit = part
        if not part.endswith(".slice") and not _USER_MANAGER.match(part):
            break
    return unit


def container_of(part: str) -> str:
    """Return the id in the last part of a path: `cri-containerd-ID.scope`, `kata_ID`, `a:b:ID`."""
    name = part.removesuffix(".scope")
    if name != part:
        name = name.rpartition("-")[2]
    return name.rpartition(":")[2].removeprefix("kata_")


# Whose task ran on an exclusive pCPU.

KTHREADD: Final = "kthreadd (pid 2)"

FOREIGN: Final = frozenset(
    {TaskClass.OTHER_SANDBOX, TaskClass.USER, TaskClass.UNBOUND_KERNEL, TaskClass.UNKNOWN}
)
"""The classes that violate isolation."""


class Owner(Struct, frozen=True):
    """Who owns an exclusive pCPU; `own` are the threads placed on it, with their labels.

    `alone` are those of them that may run on no other pCPU.
    """

    cpu: int
    sandbox: str
    pod: str
    container: str = ""
    own: Mapping[int, str] = field(default_factory=dict)
    alone: frozenset[int] = frozenset()


class Known(Struct, frozen=True):
    """What is known of all sandboxes: whose each thread, process and cgroup is.

    Threads by tid, processes by pid; containers and sandboxes by id, each with the sandbox's id.
    `pods` are the sandboxes' names, `masks` the pCPUs that their containers may use.
    """

    threads: Mapping[int, str] = field(default_factory=dict)
    processes: Mapping[int, str] = field(default_factory=dict)
    containers: Mapping[str, str] = field(default_factory=dict)
    pods: Mapping[str, str] = field(default_factory=dict)
    masks: Mapping[str, CpuSet] = field(default_factory=dict)

    def sandbox_of(self, task: SeenTask) -> str:
        """Return the id of the sandbox that a task works for, empty if it is none's.

        A cgroup counts for tasks of root alone: others may have made it themselves, with any name
        (D24).
        """
        found = self.vm_of(task)
        if found or task.kernel or not task.by_root:
            return found
        parts = (container_of(part) for part in task.cgroup.split("/") if part)
        return next((self.containers[one] for one in parts if one in self.containers), "")

    def vm_of(self, task: SeenTask) -> str:
        """Return the id of the sandbox whose VM, or helper, a task belongs to; empty for none."""
        return self.threads.get(task.tid) or self.processes.get(task.pid) or ""

    def may_use(self, sandbox: str, cpu: int) -> bool:
        """Whether a pCPU is in a sandbox's mask."""
        return cpu in self.masks.get(sandbox, EMPTY)


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
