"""The allocator's requests, state and decisions (D9, D14).

Frozen values: every change makes a new AllocState, so a refused request leaves no trace, and the
registry stores a state in one transaction with its record. Policies (policy/alloc) make them;
wire/allocator_state.py encodes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

from kata_pin.model.adjustment import NO_LIMITS, NOTHING_MORE, AtCreation, Limits
from kata_pin.model.cpuset import EMPTY, CpuSet, union
from kata_pin.model.placement import Note
from kata_pin.model.settings import CpuClass

POLICY_KEY: Final = "cpu-policy.kata-pin.io"
"""Pod annotation: none, share or exclusive. Wins over Crane's."""

CRANE_KEY: Final = "qos.gocrane.io/cpu-manager"
"""Crane's pod annotation with the same values."""

FAIL_KEY: Final = "cpu-policy-fail.kata-pin.io"
"""Pod annotation: strict or best-effort. A pod can be stricter than its node, never less strict."""

RDT_KEY: Final = "rdt-class.kata-pin.io"
"""Pod annotation: the RDT class of its containers (cache and memory bandwidth)."""

BLOCKIO_KEY: Final = "blockio-class.kata-pin.io"
"""Pod annotation: the block-I/O class of its containers."""

ANNOTATIONS: Final = (POLICY_KEY, CRANE_KEY, FAIL_KEY, RDT_KEY, BLOCKIO_KEY)
"""Every pod annotation that allocation policies read."""

PERIOD_US: Final = 100_000
"""CFS period when config.json names none (sched-bwc.rst of the kernel)."""

SHARES_PER_CPU: Final = 1024
"""CPU shares of one whole CPU (kubelet, cm.MilliCPUToShares)."""


def millis_of_shares(shares: int) -> int:
    """Return the CPU request, in thousandths of a CPU, that the kubelet wrote as CFS shares.

    Inverse of its MilliCPUToShares, which rounds down: exact from 2 shares to its ceiling, that of
    256 CPUs.
    """
    return -(-shares * 1000 // SHARES_PER_CPU)


class Qos(StrEnum):
    """Quality-of-service class of a pod, as Kubernetes has it."""

    GUARANTEED = "guaranteed"
    BURSTABLE = "burstable"
    BEST_EFFORT = "best-effort"


class GrantKind(StrEnum):
    """What a grant is for: a container, or a pod's VM (overhead threads and unpaired vCPUs)."""

    CONTAINER = "container"
    SANDBOX = "sandbox"


class Guarantee(StrEnum):
    """Against which containers `exclusive` holds.

    NODE: every container of the node is in the pools, which needs NRI. SANDBOXES: only the threads
    of Kata sandboxes are confined; other containers may run on exclusive CPUs.
    """

    NODE = "every container of the node"
    SANDBOXES = "sandboxes only"


@dataclass(frozen=True, slots=True)
class PodRequest:
    """A pod. `sandbox_id` names its VM, empty for pods that are not Kata's.

    `ordered` is the administrator's override (`kata-pin policy set`): it takes precedence over
    annotations and needs no allow rule. `overhead_millis` is the CPU of the pod's overhead
    (RuntimeClass), 0 if it has none. `pod_level`: the pod itself has requests or limits, which its
    containers share (PodSpec.resources).
    """

    pod_uid: str
    namespace: str = ""
    name: str = ""
    handler: str = ""
    annotations: Mapping[str, str] = field(default_factory=dict, hash=False)
    qos: Qos = Qos.BURSTABLE
    kata: bool = False
    sandbox_id: str = ""
    overhead_millis: int = 0
    ordered: CpuClass | None = None
    pod_level: bool = False

    @property
    def title(self) -> str:
        """Return `namespace/name`, or the uid of a pod without a name."""
        return f"{self.namespace}/{self.name}" if self.name else self.pod_uid


@dataclass(frozen=True, slots=True)
class PodSpec:
    """What the kubelet lists of a pod: annotations about CPUs, and what runtimes do not report.

    `inits` are the names of its init containers without restartPolicy Always: with it they are
    sidecars. `pod_level` as in PodRequest.
    """

    annotations: Mapping[str, str] = field(default_factory=dict, hash=False)
    inits: frozenset[str] = frozenset()
    pod_level: bool = False


@dataclass(frozen=True, slots=True)
class ContainerRequest:
    """A container. `cpu_millis` is its CPU request in thousandths of a CPU (`1` is 1000).

    `quota_us` and `period_us` are those of the OCI runtime spec; no quota, or none above 0: no CPU
    limit. `init`: an init container that has ended, so that the pod's next container gets its CPUs;
    never a sidecar. `ended_in` is the id of its pod's sandbox once it has ended, if its CPUs are
    kept for its next instance. `limits` are those of its own, without what a policy set.
    """

    container_id: str
    pod: PodRequest
    name: str = ""
    cpu_millis: int = 0
    quota_us: int | None = None
    period_us: int = PERIOD_US
    init: bool = False
    ended_in: str = ""
    limits: Limits = NO_LIMITS

    @property
    def limit_millis(self) -> int:
        """Return the CPU limit in thousandths of a CPU, rounded; 0 for none."""
        if not self.quota_us or self.quota_us < 0 or self.period_us <= 0:
            return 0
        return (self.quota_us * 1000 + self.period_us // 2) // self.period_us


@dataclass(frozen=True, slots=True)
class Grant:
    """The CPUs of one container (or VM).

    `exclusive` CPUs are in no other grant. `shared` is what it may use of the shared pool: its own
    choice for SHARE, the current pool (its part within `zone`, where that is not empty) for NONE
    and for the fraction of a mixed grant; None if it has exclusive CPUs only. `mems` are the NUMA
    nodes for its memory, empty: not decided. `limits` are in force while it runs; `creation` is
    what it got when it was created, so a policy cannot change it later.
    """

    request: ContainerRequest
    policy: str
    cpu_class: CpuClass = CpuClass.NONE
    exclusive: CpuSet = EMPTY
    shared: CpuSet | None = None
    zone: CpuSet = EMPTY
    mems: CpuSet = EMPTY
    kind: GrantKind = GrantKind.CONTAINER
    reasons: tuple[str, ...] = ()
    limits: Limits = NO_LIMITS
    creation: AtCreation = NOTHING_MORE

    @property
    def container_id(self) -> str:
        """The container's id, the sandbox's for a VM."""
        return self.request.container_id

    @property
    def pod_uid(self) -> str:
        """The uid of its pod."""
        return self.request.pod.pod_uid

    @property
    def bound(self) -> CpuSet:
        """CPUs that it chose and shares: they stay in the shared pool, never become exclusive."""
        return self.shared or EMPTY if self.cpu_class is CpuClass.SHARE else EMPTY

    @property
    def own(self) -> CpuSet:
        """CPUs chosen for it, exclusive or bound."""
        return self.exclusive | self.bound

    @property
    def cpus(self) -> CpuSet:
        """Its cpuset."""
        return self.exclusive | (self.shared or EMPTY)


class HolderSource(StrEnum):
    """How it is known that a container's CPUs are exclusive without our allocator (D9, D28)."""

    KUBELET = "kubelet"
    CLAIM = "claim"
    ADMINISTRATOR = "administrator"
    INFERRED = "inferred"
    PLUGIN = "plugin"

    @property
    def text(self) -> str:
        """The source as people read it."""
        names = {HolderSource.PLUGIN: "NRI plugin", HolderSource.CLAIM: "DRA claim"}
        return names.get(self, self.value)


@dataclass(frozen=True, slots=True)
class Holder:
    """A container with exclusive CPUs that our allocator did not give it.

    `pod` is `namespace/name`, or an id; `reason` says why the CPUs count as exclusive.
    """

    container_id: str
    pod: str
    name: str
    cpus: CpuSet
    source: HolderSource
    reason: str = ""

    @property
    def title(self) -> str:
        """Return the pod and the container as people know them."""
        return f"{self.pod} {self.name}" if self.name else self.pod


@dataclass(frozen=True, slots=True)
class AllocState:
    """All grants. `cpus` is the union of the shared pool, all exclusive CPUs and those `taken`.

    `reserved` CPUs are never in a container's own, but in the shared pool unless the reservation is
    strict; `housekeeping` carries the overhead of VMs and is in no other pool. `taken` CPUs are
    exclusive to containers that others gave them (D28): no grant gets one. A grant that has one
    already keeps it, which is a conflict for the operator. They are not stored.

    `grants` are by container id, in the order in which they were made. `memory` has, by
    `PodRequest.sandbox_id`, the CPUs of the NUMA node that holds most of a running VM's memory, as
    far as it was looked at; it is not stored.
    """

    cpus: CpuSet = EMPTY
    reserved: CpuSet = EMPTY
    housekeeping: CpuSet = EMPTY
    grants: Mapping[str, Grant] = field(default_factory=dict, hash=False)
    taken: CpuSet = EMPTY
    memory: Mapping[str, CpuSet] = field(default_factory=dict, hash=False, compare=False)

    @property
    def exclusive(self) -> CpuSet:
        """All exclusive CPUs."""
        return union(grant.exclusive for grant in self.grants.values())

    @property
    def shared(self) -> CpuSet:
        """The shared pool; where others took all of it, it is shared with them."""
        pool = self.cpus - self.exclusive
        return pool - self.taken or pool

    def get(self, container_id: str) -> Grant | None:
        """Return a container's grant, None if it has none."""
        return self.grants.get(container_id)

    def of_pod(self, pod_uid: str) -> tuple[Grant, ...]:
        """Return the grants of a pod, its VM's included."""
        return tuple(grant for grant in self.grants.values() if grant.pod_uid == pod_uid)

    def with_grant(self, grant: Grant) -> AllocState:
        """Return the state with this grant; one that is there already keeps its place."""
        return replace(self, grants={**self.grants, grant.container_id: grant})

    def without(self, *container_ids: str) -> AllocState:
        """Return the state without these containers' grants; the same if they have none."""
        rest = {one: grant for one, grant in self.grants.items() if one not in container_ids}
        return self if len(rest) == len(self.grants) else replace(self, grants=rest)


class RefusalKind(StrEnum):
    """Why a container did not get the CPUs it requested."""

    KUBELET_STATIC = "kubelet-static"
    FOREIGN_PLUGIN = "foreign-plugin"
    NOT_ENOUGH_CPUS = "not-enough-cpus"
    SHARED_MINIMUM = "shared-minimum"
    ALIGNMENT = "alignment"


@dataclass(frozen=True, slots=True)
class Refusal:
    """A container did not get what it requested.

    `strict`: its creation is refused; else it runs in the shared pool, and the refusal is reported.
    """

    kind: RefusalKind
    message: str
    strict: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """A policy's answer to one event.

    `changed` holds the grants whose CPUs, memory nodes or limits differ from before, those of
    containers that are new included; empty if nothing changes. After a strict refusal `state` is
    the one before.
    """

    state: AllocState
    changed: tuple[Grant, ...] = ()
    refused: Refusal | None = None
    notes: tuple[Note, ...] = ()


@dataclass(frozen=True, slots=True)
class Running:
    """A running container, with the CPUs it is observed to have; None: it is not confined."""

    request: ContainerRequest
    cpus: CpuSet | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """One choice that was considered, and the keys by which it was compared, in their order."""

    level: str
    unit: int
    cpus: CpuSet
    keys: tuple[tuple[str, int], ...] = ()
    taken: CpuSet = EMPTY
