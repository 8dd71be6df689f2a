"""The allocator's requests, state and decisions.

A decision also has what CPUs and memory nodes do not cover (D9, D14).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from kata_pin.base.cpuset import EMPTY, CpuSet, union
from kata_pin.base.placement import Note
from kata_pin.base.values import CpuClass, GrantKind, HolderSource, RefusalKind

# What a decision may carry beside CPUs and memory nodes (NRI resource policies, containerd/nri#3).
#
# Limits can be changed while a container runs; the rest only when it is created, because runtimes
# apply nothing else later. Frozen values. What is permitted: options/allocation/checked_policy.py.

_DEFAULT_SHARES: Final = 1024
_DEFAULT_PERIOD_US: Final = 100_000
"""What a cgroup has that nobody set (sched-bwc.rst)."""


class Limits(Struct, frozen=True):
    """CFS values and the memory limit; None leaves a value as it is.

    `shares`, `quota_us` and `period_us` are those of the OCI runtime spec; a quota of -1 is none.
    `memory` is in bytes.
    """

    shares: int | None = None
    quota_us: int | None = None
    period_us: int | None = None
    memory: int | None = None

    def __bool__(self) -> bool:
        return self != NO_LIMITS

    def over(self, before: Limits) -> Limits:
        """Return the limits of a container after these were set: what is None stays."""
        return Limits(
            before.shares if self.shares is None else self.shares,
            before.quota_us if self.quota_us is None else self.quota_us,
            before.period_us if self.period_us is None else self.period_us,
            before.memory if self.memory is None else self.memory,
        )

    def where_set(self, ours: Limits) -> Limits:
        """Return these limits where others are set; a limit that a container lacks is lifted."""
        return Limits(
            None if ours.shares is None else self.shares or _DEFAULT_SHARES,
            None if ours.quota_us is None else self.quota_us or -1,
            None if ours.period_us is None else self.period_us or _DEFAULT_PERIOD_US,
            None if ours.memory is None else self.memory or -1,
        )

    def but(self, ours: Limits, before: Limits) -> Limits:
        """Return these limits, but those of `before` where they are the same as ours."""

        def one(now: int | None, set_by_us: int | None, first: int | None) -> int | None:
            return first if set_by_us is not None and now == set_by_us else now

        return Limits(
            one(self.shares, ours.shares, before.shares),
            one(self.quota_us, ours.quota_us, before.quota_us),
            one(self.period_us, ours.period_us, before.period_us),
            one(self.memory, ours.memory, before.memory),
        )


class Mount(Struct, frozen=True):
    """A read-only bind mount; both paths are absolute."""

    destination: str
    source: str


class DeviceNode(Struct, frozen=True):
    """A device: its path, `c` (character) or `b` (block), and the numbers that the kernel uses."""

    path: str
    kind: str
    major: int
    minor: int


class Device(DeviceNode, frozen=True):
    """A device of the host, which a container gets with the same path.

    `mode` has the permission bits of its file; `access` is the rule of the device cgroup: read,
    write, mknod (`r`, `w`, `m`).
    """

    mode: int = 0o660
    access: str = "rw"


class AtCreation(Struct, frozen=True):
    """What only a container that is being created can get.

    `hugepages` are limits in bytes by page size (`2MB`). An empty class leaves the runtime's own.
    `env` and `annotations` hold names and values, which replace those of the container.
    """

    hugepages: tuple[tuple[str, int], ...] = ()
    rdt_class: str = ""
    blockio_class: str = ""
    env: tuple[tuple[str, str], ...] = ()
    mounts: tuple[Mount, ...] = ()
    devices: tuple[Device, ...] = ()
    annotations: tuple[tuple[str, str], ...] = ()

    def __bool__(self) -> bool:
        return self != NOTHING_MORE


NO_LIMITS: Final = Limits()
NOTHING_MORE: Final = AtCreation()


# Frozen values: every change makes a new AllocState, so a refused request leaves no trace, and the
# registry stores a state in one transaction with its record. Policies (options/allocation) make
# them; options/allocation/requests.py encodes them.

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


class PodRequest(Struct, frozen=True):
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
    annotations: Mapping[str, str] = field(default_factory=dict)
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


class PodSpec(Struct, frozen=True):
    """What the kubelet lists of a pod: annotations about CPUs, and what runtimes do not report.

    `inits` are the names of its init containers without restartPolicy Always: with it they are
    sidecars. `pod_level` as in PodRequest.
    """

    annotations: Mapping[str, str] = field(default_factory=dict)
    inits: frozenset[str] = frozenset()
    pod_level: bool = False


class AttachedDevice(Struct, frozen=True):
    """A device of a container's spec and where it is: its PCI address, empty if it has none.

    `node` is its NUMA node, negative if the kernel knows none.
    """

    path: str
    address: str = ""
    node: int = -1

    @property
    def title(self) -> str:
        """Return what it is called in explanations."""
        return self.address or self.path


class ContainerRequest(Struct, frozen=True):
    """A container. `cpu_millis` is its CPU request in thousandths of a CPU (`1` is 1000).

    `quota_us` and `period_us` are those of the OCI runtime spec; no quota, or none above 0: no CPU
    limit. `init`: an init container that has ended, so that the pod's next container gets its CPUs;
    never a sidecar. `ended_in` is the id of its pod's sandbox once it has ended, if its CPUs are
    kept for its next instance. `limits` are those of its own, without what a policy set. `devices`
    are those of its spec.
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
    devices: tuple[AttachedDevice, ...] = ()

    @property
    def limit_millis(self) -> int:
        """Return the CPU limit in thousandths of a CPU, rounded; 0 for none."""
        if not self.quota_us or self.quota_us < 0 or self.period_us <= 0:
            return 0
        return (self.quota_us * 1000 + self.period_us // 2) // self.period_us


class Grant(Struct, frozen=True):
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


class Holder(Struct, frozen=True):
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


class AllocState(Struct, frozen=True, eq=False):
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
    grants: Mapping[str, Grant] = field(default_factory=dict)
    taken: CpuSet = EMPTY
    memory: Mapping[str, CpuSet] = field(default_factory=dict)

    def __eq__(self, other: object) -> bool:
        """Compare what is stored and `taken`: `memory` is looked at anew for each request."""
        return isinstance(other, AllocState) and self._decided() == other._decided()

    def __hash__(self) -> int:
        return hash((self.cpus, tuple(self.grants)))

    def _decided(self) -> tuple[object, ...]:
        return self.cpus, self.reserved, self.housekeeping, self.grants, self.taken

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


class Refusal(Struct, frozen=True):
    """A container did not get what it requested.

    `strict`: its creation is refused; else it runs in the shared pool, and the refusal is reported.
    """

    kind: RefusalKind
    message: str
    strict: bool = False


class Decision(Struct, frozen=True):
    """A policy's answer to one event.

    `changed` holds the grants whose CPUs, memory nodes or limits differ from before, those of
    containers that are new included; empty if nothing changes. After a strict refusal `state` is
    the one before. `waiting` has the ids of running containers without the CPUs that they request.
    """

    state: AllocState
    changed: tuple[Grant, ...] = ()
    refused: Refusal | None = None
    notes: tuple[Note, ...] = ()
    waiting: tuple[tuple[str, Refusal], ...] = ()


class RunningContainer(Struct, frozen=True):
    """A running container, with the CPUs it is observed to have; None: it is not confined."""

    request: ContainerRequest
    cpus: CpuSet | None = None


class Candidate(Struct, frozen=True):
    """One choice that was considered, and the keys by which it was compared, in their order."""

    level: str
    unit: int
    cpus: CpuSet
    keys: tuple[tuple[str, int], ...] = ()
    taken: CpuSet = EMPTY
