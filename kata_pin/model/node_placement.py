"""The NodePlacement object: what the API server shows of one node (docs/cluster.md).

The custom resource's schema is made from these classes (scripts/schema); the comment at a field is
its description there, and names are written in camel case. The object is bounded: a node with any
number of sandboxes, whatever their names, has one of 640 KiB at most.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kata_pin.model.reports import Cpus

MAX_PODS: Final = 256
"""Most sandboxes that an object names."""

MAX_VIOLATIONS: Final = 32
"""Most violations that an object describes."""

MAX_NODES: Final = 64
"""Most NUMA nodes whose free pCPUs are listed."""

MAX_TEXT: Final = 256
"""Longest text, in characters; a cpu list may be longer."""

MAX_CPUS: Final = 1024
"""Longest cpu list, in characters."""

MAX_POD_CPUS: Final = 128
"""Longest cpu list of one sandbox."""


@dataclass(frozen=True, slots=True)
class FreeCpus:
    """Free pCPUs of one NUMA node."""

    node: int  #: NUMA node
    count: int  #: number of free pCPUs
    cpus: Cpus  #: the free pCPUs


@dataclass(frozen=True, slots=True)
class Violation:
    """Something that breaks the isolation of a sandbox, or may."""

    #: One of `conflict` (another sandbox claims the same exclusive pCPU), `foreign-tasks` (others
    #: ran on an exclusive pCPU), `drift` (threads are not where they should be), `no-vmm`
    kind: str
    pod: str  #: `namespace/name`; the sandbox id if no pod is known
    sandbox: str  #: sandbox id
    message: str  #: the same in words


@dataclass(frozen=True, slots=True)
class PodPlacement:
    """One sandbox: its pod and its pCPUs."""

    pod: str  #: `namespace/name`; the sandbox id if no pod is known
    sandbox: str  #: sandbox id
    #: One of `ok`, `drift`, `unpinned`, `released`, `conflict`, `no-vmm`
    state: str
    exclusive: Cpus  #: its exclusive pCPUs
    shared: Cpus  #: its shared pCPUs


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition as Kubernetes' own objects have them."""

    type: str  #: `Ready`: whether the node's daemon answers and has checked every sandbox
    status: str  #: One of `True`, `False`, `Unknown`
    reason: str  #: the reason in one word
    message: str  #: the reason in a sentence
    last_transition_time: str  #: when `status` changed


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """The status of a NodePlacement object."""

    version: str  #: the daemon's version; empty: it did not answer yet
    mode: str  #: One of `act`, `observe`, `` (unknown)
    online: Cpus  #: online pCPUs of the node
    exclusive: Cpus  #: pCPUs that are exclusive to a container, no matter who assigned them
    exclusive_count: int  #: number of these
    free: tuple[FreeCpus, ...]  #: pCPUs that no container has exclusively, by NUMA node
    free_by_node: str  #: the same in one line: `0:12 1:8`
    #: One of `allocator` (kata-pin may grant them), `kubelet` (its default set, which includes the
    #: CPUs that it reserves), `unclaimed` (all others): what the free pCPUs are
    free_source: str
    sandboxes: int  #: number of sandboxes
    sandboxes_ok: int  #: number of sandboxes whose threads are where they should be
    pods: tuple[PodPlacement, ...]  #: the sandboxes, those with a problem first
    pods_omitted: int  #: number of sandboxes that are not listed
    violations: int  #: number of violations
    violation_list: tuple[Violation, ...]  #: the first of them
    #: when every sandbox had been checked; written with other changes, else every five minutes
    last_audit: str | None
    conditions: tuple[Condition, ...]  #: `Ready`
    #: `namespace/name` of the pod with the node's daemon, where `kubectl kata-pin` asks for details
    daemon_pod: str | None = None


@dataclass(frozen=True, slots=True)
class PodEvent:
    """Something that is reported as an Event on a pod."""

    kind: str  #: the Event's reason, such as `ExclusiveCPUConflict`
    sandbox: str  #: sandbox id, or the container's where there is no sandbox
    pod: str  #: `namespace/name`
    pod_uid: str  #: the pod's uid
    note: str  #: what happened
    action: str  #: what kata-pin was doing
