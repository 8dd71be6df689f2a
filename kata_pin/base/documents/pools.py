"""The allocator's documents.

They show its pools and owners, what a policy would give, and a kubelet checkpoint beside the
grants.
"""

from typing import Literal

from msgspec import Struct

from kata_pin.base.documents.document import Cpus, Daemon, Document, Note
from kata_pin.base.values import CpuClass, GrantKind, Guarantee, HolderSource, RefusalKind

# kata-pin's own allocator: the pools of pCPUs and who owns them.


class Pools(Struct, frozen=True):
    """The node's pCPUs by use."""

    reserved: Cpus  #: never exclusive to a container
    housekeeping: Cpus  #: for VM overhead
    shared: Cpus  #: for every container without CPUs of its own
    exclusive: Cpus  #: each exclusive to one container
    taken: Cpus  #: exclusive to containers that others gave them: in no other pool


class Holder(Struct, frozen=True):
    """A container with exclusive pCPUs that kata-pin did not give it."""

    id: str  #: container id; pod uid and container name where only the kubelet knows it
    pod: str  #: `namespace/name`, or an id
    name: str  #: container name; empty: the pod's CPUs
    cpus: Cpus  #: its exclusive pCPUs
    source: HolderSource  #: `claim`: DRA; `plugin`: another NRI plugin
    reason: str  #: why they count as exclusive


class Hugepages(Struct, frozen=True):
    """A container's limit for one page size."""

    size: str  #: page size, such as `2MB`
    limit: int  #: bytes


class Mount(Struct, frozen=True):
    """A read-only mount in a container."""

    destination: str  #: path in the container
    source: str  #: path on the node


class Variable(Struct, frozen=True):
    """An environment variable."""

    name: str  #: its name
    value: str  #: its value


class AddedDevice(Struct, frozen=True):
    """A device that a policy added."""

    path: str  #: its path, on the node and in the container
    type: str  #: `c`: character; `b`: block
    major: int  #: its major number
    minor: int  #: its minor number
    mode: str  #: permission bits of its file, octal
    access: str  #: rule of the device cgroup: some of `r`, `w`, `m`


class Adjustment(Struct, frozen=True):
    """What a container gets in addition to pCPUs and memory nodes. Null or empty: the pod's own."""

    shares: int | None  #: CFS shares
    quota_us: int | None  #: CFS quota in microseconds; -1: none
    period_us: int | None  #: CFS period in microseconds
    memory: int | None  #: memory limit in bytes
    hugepages: tuple[Hugepages, ...]  #: hugepage limits, set at creation
    rdt_class: str  #: RDT class, set at creation
    blockio_class: str  #: block-I/O class, set at creation
    env: tuple[Variable, ...]  #: environment, set at creation
    mounts: tuple[Mount, ...]  #: mounts, made at creation
    devices: tuple[AddedDevice, ...] = ()  #: devices, added at creation
    annotations: tuple[Variable, ...] = ()  #: annotations of the container, set at creation


class Grant(Struct, frozen=True):
    """The pCPUs of one container, or of a sandbox's VM."""

    id: str  #: container id; `vm:` and the sandbox id for a VM
    kind: GrantKind  #: `sandbox`: a VM's overhead threads and unpaired vCPUs
    name: str  #: container name; empty for a VM
    pod: str  #: `namespace/name`, or the pod's uid
    pod_uid: str  #: the pod's uid
    sandbox: str  #: sandbox id; empty: not a Kata pod
    kata: bool  #: whether the pod runs in a VM
    cpu_class: CpuClass  #: how it has its pCPUs
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
    adjustment: Adjustment | None  #: what it gets in addition to pCPUs; null: nothing
    reasons: tuple[str, ...]  #: why it has these pCPUs


class RefusedRequest(Struct, frozen=True):
    """A container that did not get what it requested."""

    time: str  #: when it was refused
    id: str  #: container id
    container: str  #: pod and container name
    kind: RefusalKind  #: the kind of reason
    message: str  #: the reason in words
    strict: bool  #: whether its creation failed; false: it runs in the shared pool
    pod: str = ""  #: `namespace/name`, or the pod's uid
    pod_uid: str = ""  #: the pod's uid


class PushFailure(Struct, frozen=True):
    """A container whose cpuset could not be changed at the last attempt."""

    id: str  #: container id
    message: str  #: the runtime's error


class Push(Struct, frozen=True):
    """How changed cpusets reach running containers."""

    channel: Literal["nri", "cri", ""]  #: empty: at the runtime's next NRI call
    reason: str  #: why no better channel is used; empty: there is none
    problem: str  #: why nothing can be sent now; kata-pin retries
    failures: tuple[PushFailure, ...]  #: containers whose last update failed


class KeptCpuset(Struct, frozen=True):
    """A container that keeps a cpuset of the allocator after `uninstall`."""

    id: str  #: container id
    pod: str  #: `namespace/name`, or the pod's uid
    name: str  #: container name
    cpus: Cpus  #: the cpuset


class Allocation(Struct, frozen=True):
    """kata-pin's own allocator."""

    policy: str  #: the setting `alloc.policy`
    suspended: str  #: why no grant is in force now; empty: the allocator decides
    guarantee: Guarantee  #: `sandboxes only`: without NRI
    pools: Pools  #: the pCPUs by use
    held_back: Cpus  #: pCPUs withheld until threads of their new owner have moved there
    grants: tuple[Grant, ...]  #: one object per container, and one per VM
    holders: tuple[Holder, ...]  #: containers that have the `taken` pCPUs
    push: Push | None  #: how changed cpusets reach containers; null: no daemon runs
    refusals: int  #: number of requests refused since the start
    refused: tuple[RefusedRequest, ...]  #: the latest of them
    problems: tuple[str, ...]  #: overrides or annotations that could not be read
    notes: tuple[Note, ...]  #: what the operator should know


class PoolsDocument(Document, frozen=True, kw_only=True):
    """Printed by `pools`."""

    time: str  #: when it was made
    daemon: Daemon  #: whether the daemon made it
    allocation: Allocation | None  #: kata-pin's allocator; null: `alloc.policy` is `none`
    kind: str = "pools"


class AllocExplainDocument(Document, frozen=True, kw_only=True):
    """Printed by `alloc explain`."""

    kind: str = "alloc-explain"  #: kind of the document
    grant: Grant  #: the container's grant


# The what-if document: what a policy would give a container.


class Granted(Struct, frozen=True):
    """The pCPUs that a container or its VM would get."""

    cpu_class: CpuClass  #: how it has its pCPUs
    cpus: Cpus  #: all pCPUs that it could use
    exclusive: Cpus  #: its exclusive pCPUs
    shared: Cpus | None  #: its pCPUs of the shared pool; null: none
    mems: Cpus  #: NUMA nodes of its memory; empty: any
    reasons: tuple[str, ...]  #: why these pCPUs


class Refusal(Struct, frozen=True):
    """Why the container would not get what it requests."""

    kind: RefusalKind  #: the kind of reason
    message: str  #: the reason in words
    strict: bool  #: whether its creation would fail; false: it would run in the shared pool


class SortKey(Struct, frozen=True):
    """One value that candidates are compared by."""

    name: str  #: its name; docs/allocation.md explains them
    value: int  #: smaller comes first


class Candidate(Struct, frozen=True):
    """A part of the node that the policy considered."""

    #: `llc`, `node`, `package`, `host`, `core`, `cpu`, `pool` (the shared pool), or a word of
    #: another package's policy
    level: str
    unit: int  #: lowest pCPU of a cache or core, else the number of the unit
    cpus: Cpus  #: its free pCPUs
    taken: Cpus  #: pCPUs taken from it
    keys: tuple[SortKey, ...]  #: what it was compared by, most important first


class WhatIf(Document, frozen=True, kw_only=True):
    """Printed by `alloc what-if`."""

    kind: str = "what-if"  #: kind of the document
    policy: str  #: the policy that was asked
    pod: str  #: the pod of this node that the container would join; empty: a new pod
    millis: int  #: CPU request and limit in thousandths of a CPU
    grant: Granted | None  #: what the container would get; null: its creation would fail
    vm: Granted | None  #: what its VM would get; null: no VM
    refused: Refusal | None  #: why it would not get what it requests; null: it would
    others: tuple[str, ...]  #: ids of the containers and VMs whose pCPUs would change
    before: Pools  #: the pools without the container
    after: Pools  #: the pools with it
    candidates: tuple[Candidate, ...]  #: what was considered, in this order
    notes: tuple[Note, ...]  #: what the operator should know
    near: tuple[str, ...] = ()  #: PCI addresses of the container's devices


# The alloc-compare document: a kubelet checkpoint beside kata-pin's grants.

ComparedVerdict = Literal["same", "other pCPUs", "kubelet only", "kata-pin only"]
"""Who gives a container which pCPUs."""


class ComparedContainer(Struct, frozen=True):
    """One container with exclusive pCPUs from the kubelet or from kata-pin."""

    pod_uid: str  #: the pod's uid
    name: str  #: container name; its id if it has none
    kubelet: Cpus  #: exclusive pCPUs given by the kubelet
    kata_pin: Cpus  #: exclusive pCPUs given by kata-pin
    verdict: ComparedVerdict  #: who gives it which


class Comparison(Document, frozen=True, kw_only=True):
    """Printed by `alloc compare`."""

    kind: str = "alloc-compare"  #: kind of the document
    checkpoint: str  #: the checkpoint file
    kubelet_policy: str  #: the policy that it names
    policy: str  #: kata-pin's policy
    hypothetical: bool  #: whether kata-pin would take over; false: it has decided already
    same: bool  #: whether no container would get other pCPUs
    kubelet_shared: Cpus  #: the kubelet's default set
    kata_pin_shared: Cpus  #: pCPUs that no container owns, housekeeping included
    containers: tuple[ComparedContainer, ...]  #: containers with exclusive pCPUs
