"""kata-pin's own allocator: the pools of pCPUs and who owns them."""

from __future__ import annotations

from dataclasses import dataclass

from kata_pin.model.reports import VERSION, Cpus, Note
from kata_pin.model.reports.daemon import Daemon


@dataclass(frozen=True, slots=True)
class Pools:
    """The node's pCPUs by use."""

    reserved: Cpus  #: never exclusive to a container
    housekeeping: Cpus  #: for VM overhead
    shared: Cpus  #: for every container without CPUs of its own
    exclusive: Cpus  #: each exclusive to one container
    taken: Cpus  #: exclusive to containers that others gave them: in no other pool


@dataclass(frozen=True, slots=True)
class Holder:
    """A container with exclusive pCPUs that kata-pin did not give it."""

    id: str  #: container id; pod uid and container name where only the kubelet knows it
    pod: str  #: `namespace/name`, or an id
    name: str  #: container name; empty: the pod's CPUs
    cpus: Cpus  #: its exclusive pCPUs
    #: One of `kubelet`, `claim` (DRA), `administrator`, `inferred`, `plugin` (another NRI plugin)
    source: str
    reason: str  #: why they count as exclusive


@dataclass(frozen=True, slots=True)
class Hugepages:
    """A container's limit for one page size."""

    size: str  #: page size, such as `2MB`
    limit: int  #: bytes


@dataclass(frozen=True, slots=True)
class Mount:
    """A read-only mount in a container."""

    destination: str  #: path in the container
    source: str  #: path on the node


@dataclass(frozen=True, slots=True)
class Variable:
    """An environment variable."""

    name: str  #: its name
    value: str  #: its value


@dataclass(frozen=True, slots=True)
class Adjustment:
    """What a container gets beside pCPUs and memory nodes. Null or empty: the pod's own."""

    shares: int | None  #: CFS shares
    quota_us: int | None  #: CFS quota in microseconds; -1: none
    period_us: int | None  #: CFS period in microseconds
    memory: int | None  #: memory limit in bytes
    hugepages: tuple[Hugepages, ...]  #: hugepage limits, set at creation
    rdt_class: str  #: RDT class, set at creation
    blockio_class: str  #: block-I/O class, set at creation
    env: tuple[Variable, ...]  #: environment, set at creation
    mounts: tuple[Mount, ...]  #: mounts, made at creation


@dataclass(frozen=True, slots=True)
class Grant:
    """The pCPUs of one container, or of a sandbox's VM."""

    id: str  #: container id; `vm:` and the sandbox id for a VM
    kind: str  #: One of `container`, `sandbox` (a VM's overhead threads and unpaired vCPUs)
    name: str  #: container name; empty for a VM
    pod: str  #: `namespace/name`, or the pod's uid
    pod_uid: str  #: the pod's uid
    sandbox: str  #: sandbox id; empty: not a Kata pod
    kata: bool  #: whether the pod runs in a VM
    cpu_class: str  #: One of `none`, `share`, `exclusive`
    policy: str  #: the policy that decided
    cpus: Cpus  #: all pCPUs that it may use
    exclusive: Cpus  #: its exclusive pCPUs
    shared: Cpus | None  #: its pCPUs of the shared pool; null: none
    mems: Cpus  #: NUMA nodes of its memory; empty: any
    millis: int  #: CPU request in thousandths of a CPU
    ended: bool  #: whether the container has ended; its pCPUs wait for its next instance
    override: str | None  #: the class set by `policy set`; null: none
    cpuset: Cpus  #: cpuset sent to the runtime; empty: none, only threads are pinned
    pending: Cpus | None  #: cpuset not sent yet; null: none
    adjustment: Adjustment | None  #: what it gets beside pCPUs; null: nothing
    reasons: tuple[str, ...]  #: why it has these pCPUs


@dataclass(frozen=True, slots=True)
class RefusedRequest:
    """A container that did not get what it requested."""

    time: str  #: when it was refused
    id: str  #: container id
    container: str  #: pod and container name
    #: One of `kubelet-static`, `foreign-plugin`, `not-enough-cpus`, `shared-minimum`, `alignment`
    kind: str
    message: str  #: the reason in words
    strict: bool  #: whether its creation failed; false: it runs in the shared pool
    pod: str = ""  #: `namespace/name`, or the pod's uid
    pod_uid: str = ""  #: the pod's uid


@dataclass(frozen=True, slots=True)
class PushFailure:
    """A container whose cpuset could not be changed at the last attempt."""

    id: str  #: container id
    message: str  #: the runtime's error


@dataclass(frozen=True, slots=True)
class Push:
    """How changed cpusets reach running containers."""

    channel: str  #: One of `nri`, `cri`, `` (at the runtime's next NRI call)
    reason: str  #: why not by a better channel; empty: there is none
    problem: str  #: why nothing can be sent now; kata-pin retries
    failures: tuple[PushFailure, ...]  #: containers whose last update failed


@dataclass(frozen=True, slots=True)
class KeptCpuset:
    """A container that keeps a cpuset of the allocator after `uninstall`."""

    id: str  #: container id
    pod: str  #: `namespace/name`, or the pod's uid
    name: str  #: container name
    cpus: Cpus  #: the cpuset


@dataclass(frozen=True, slots=True)
class Allocation:
    """kata-pin's own allocator."""

    policy: str  #: the setting `alloc.policy`
    suspended: str  #: why no grant is in force now; empty: the allocator decides
    guarantee: str  #: One of `every container of the node`, `sandboxes only` (without NRI)
    pools: Pools  #: the pCPUs by use
    held_back: Cpus  #: pCPUs withheld until threads of their new owner have moved there
    grants: tuple[Grant, ...]  #: one object per container, and one per VM
    holders: tuple[Holder, ...]  #: containers that have the `taken` pCPUs
    push: Push | None  #: how changed cpusets reach containers; null: no daemon runs
    refusals: int  #: number of requests refused since the start
    refused: tuple[RefusedRequest, ...]  #: the latest of them
    problems: tuple[str, ...]  #: overrides or annotations that could not be read
    notes: tuple[Note, ...]  #: what the operator should know


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolsDocument:
    """Printed by `pools`."""

    version: int = VERSION  #: version of the document
    time: str  #: when it was made
    daemon: Daemon  #: whether the daemon made it
    allocation: Allocation | None  #: kata-pin's allocator; null: `alloc.policy` is `none`
    kind: str = "pools"


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocExplainDocument:
    """Printed by `alloc explain`."""

    version: int = VERSION  #: version of the document
    kind: str = "alloc-explain"  #: kind of the document
    grant: Grant  #: the container's grant
