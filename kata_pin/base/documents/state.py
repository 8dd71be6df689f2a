"""The state document: the node with its pCPUs and sandboxes.

A sandbox has its containers, VMM, threads and guest. The rows of `doctor` are here too.
"""

from typing import Literal

from msgspec import Struct

from kata_pin.base.cpuset import CpuPlace
from kata_pin.base.documents.document import Cpus, Daemon, Document, Note
from kata_pin.base.documents.pools import Allocation
from kata_pin.base.values import (
    ContainerKind,
    CpusetSource,
    GuestState,
    KataRuntime,
    LinkState,
    Mode,
    Movability,
    Proof,
    Provenance,
    QuietLevel,
    RoleSource,
    RowStatus,
    SandboxState,
    ThreadRole,
    ThreadState,
)

# The guest of a sandbox: which vCPU is which guest CPU, and which of them containers use.


class GuestLink(Struct, frozen=True):
    """How well one link from a thread to its guest CPU is known."""

    state: LinkState  #: `measured`: read in this boot
    source: str  #: the evidence


class GuestLinks(Struct, frozen=True):
    """The links from a vCPU thread to its guest CPU."""

    vcpu: GuestLink  #: from the thread to the cpu-index
    apic_id: GuestLink  #: from the cpu-index to the APIC id
    guest_cpu: GuestLink  #: from the APIC id to the guest CPU


class GuestVcpu(Struct, frozen=True):
    """One vCPU thread and its guest CPU."""

    tid: int  #: thread id
    vcpu: int | None  #: the VMM's cpu-index; null: unknown
    apic_id: int | None  #: its APIC id; null: unknown, or the machine has none
    guest_cpu: int | None  #: the CPU number in the guest's Linux; null: unknown
    state: LinkState  #: that of the weakest link
    source: str  #: the evidence of the weakest link
    links: GuestLinks  #: each link from the thread to the guest CPU
    cpus: Cpus  #: pCPUs that it should run on
    paired: bool  #: whether these are exclusive pCPUs of its container
    container: str  #: id of the container that owns it; empty: none


class GuestContainer(Struct, frozen=True):
    """The guest CPUs of one container."""

    id: str  #: container id
    name: str  #: container name
    cpus: Cpus | None  #: guest CPUs that it should use; null: any
    owned: bool  #: whether its own vCPUs provide them
    reason: str  #: why these, or why any
    applied: Cpus | None  #: the cpuset that was sent to the guest; null: none
    #: `read`: read back; `fits`: used CPU time does not contradict it; `broken`: not in force;
    #: `refused`: by kata-agent; null: nothing was sent
    proof: Proof | None
    detail: str  #: what went wrong


class Guest(Struct, frozen=True):
    """The map from vCPU threads to guest CPUs, and the cpusets in the guest."""

    #: `off`: disabled, or no daemon runs; `idle`: nothing to apply; `denied`: by the guest's
    #: policy; `failed`: a cpuset is not in force
    state: GuestState
    detail: str  #: the reason in words
    answered_s: float | None  #: age of the guest's last answer; null: it never answered
    kernel: str  #: release of the guest's kernel; empty: unknown
    kernel_source: str  #: where the release comes from, or why it is unknown
    hotplugged: bool | None  #: whether a vCPU was added after the VM's start; null: unknown
    vcpus: tuple[GuestVcpu, ...]  #: one object per vCPU thread
    containers: tuple[GuestContainer, ...]  #: the pod's containers without its pod sandbox


# The network interfaces of a sandbox's VMM, and which vhost workers serve them.


class VhostWorker(Struct, frozen=True):
    """A vhost worker that serves an interface."""

    tid: int  #: thread id
    inferred: bool  #: paired by number only


class Interface(Struct, frozen=True):
    """A link of the VMM's network namespace."""

    name: str  #: its name
    kind: str  #: `tap`, `tun`, `veth`, `macvtap` or the kernel's name for another; empty: a device
    queues: int  #: queues that the VMM has open, else those of the link
    #: interface that receives its packets in the namespace (tc redirect, or macvtap's lower
    #: device); empty: none
    peer: str = ""
    attached: bool = False  #: whether the VMM has it open
    served_by: tuple[VhostWorker, ...] = ()  #: vhost workers of its queues


class Network(Struct, frozen=True):
    """The interfaces of a sandbox's VMM."""

    interfaces: tuple[Interface, ...] = ()  #: by index
    problem: str = ""  #: why they cannot be read


# The doctor document: this node's prerequisites.


class Row(Struct, frozen=True):
    """One check of a prerequisite."""

    check: str  #: what was checked
    status: RowStatus  #: how bad it is
    text: str  #: what was found
    remedy: str = ""  #: what helps
    sandbox: str = ""  #: pod or id of the sandbox; empty: about the node


class DoctorDocument(Document, frozen=True, kw_only=True):
    """Printed by `doctor`."""

    kind: str = "doctor"  #: kind of the document
    ok: bool  #: false: exit status 1
    rows: tuple[Row, ...]  #: one object per check


# What disturbs exclusive pCPUs beside tasks: a part of the state document.


class QuietInterrupt(Struct, frozen=True):
    """A numbered interrupt on an exclusive pCPU."""

    number: int  #: its number in /proc/irq
    name: str  #: its handler; the chip's name if it has none
    #: `managed`: the kernel places it; `guest`: of a device given to a VM
    kind: Movability
    mask: Cpus  #: pCPUs that it is allowed
    per_s: float  #: how often it fired per second; 0: not at all, but the kernel chose this pCPU


class QuietSibling(Struct, frozen=True):
    """Another hardware thread of the same core."""

    cpu: int  #: the pCPU
    owner: str  #: pod that has it exclusively; empty: none, anything may run there


class QuietCpu(Struct, frozen=True):
    """One exclusive pCPU."""

    cpu: int  #: the pCPU
    owner: str  #: pod that has it exclusively
    container: str  #: container that has it; empty: unknown
    #: numbered interrupts on it, the most frequent first; null: unknown
    interrupts: tuple[QuietInterrupt, ...] | None
    tick_per_s: float | None  #: local timer interrupts per second; null: unknown
    ipi_per_s: float | None  #: interrupts by other pCPUs per second; null: unknown
    softirqs: dict[str, float] | None  #: soft interrupts per second by name; null: unknown
    kernel_threads: int | None  #: kernel threads that can be moved and may run here; null: unknown
    nohz_full: bool | None  #: whether the tick stops while one task runs; null: unknown
    #: pm_qos_resume_latency_us: `0` no limit, `n/a` no idle state; null: unknown
    idle_limit: str | None
    governor: str | None  #: frequency governor; null: unknown, or none
    frequency_with: Cpus  #: pCPUs of the same frequency policy
    siblings: tuple[QuietSibling, ...]  #: other threads of its core


class QuietSpared(Struct, frozen=True):
    """An exclusive pCPU that should be quiet and is not."""

    cpu: int  #: the pCPU
    reason: str  #: why it is not


class KeptQuiet(Struct, frozen=True):
    """What the daemon does to keep exclusive pCPUs quiet, as of its last round."""

    level: QuietLevel  #: the setting `quiet`
    cpus: Cpus  #: pCPUs that interrupts are kept off
    full: Cpus  #: those of them that the kernel's own work is kept off too
    crio: Cpus  #: those whose default mask and ban of irqbalance are left to CRI-O
    spared: tuple[QuietSpared, ...]  #: pCPUs that should be quiet and are not
    #: values that are changed now, by kind: `interrupt`, `default-mask`, `irqbalance`,
    #: `workqueues`, `watchdog`, `kernel-thread`, `rps`, `xps`, `idle-limit`, `governor`
    changed: dict[str, int]
    failed_writes: dict[str, int]  #: writes that failed since the daemon's start, by kind
    managed: int  #: managed interrupts that may fire on quiet pCPUs: the kernel places them
    movable_fired: int  #: times that movable interrupts fired there since the daemon's start
    managed_fired: int  #: times that managed ones did
    irqbalance: tuple[int, ...]  #: pids of irqbalance that are asked to keep clear of them
    left: tuple[str, ...]  #: what is left to another writer for now
    problems: tuple[str, ...]  #: what could not be set, and why


class QuietSandbox(Struct, frozen=True):
    """What is done to keep the exclusive pCPUs of a sandbox quiet."""

    #: `irq`: interrupts are kept off; `full`: the kernel's own work too
    level: Literal["off", "irq", "full"]
    cpus: Cpus  #: pCPUs that are quiet
    not_quiet: Cpus  #: its other exclusive pCPUs
    idle_limit: str  #: limit of idle states that its annotation asks for; empty: none
    governor: str  #: frequency governor that its annotation asks for; empty: none
    managed: int  #: managed interrupts that may fire on its quiet pCPUs: the kernel places them
    problems: tuple[str, ...]  #: what could not be done, and why


class Quiet(Struct, frozen=True):
    """What disturbs exclusive pCPUs; read by `show --cpus` alone."""

    measured_s: float  #: how long interrupts were counted
    cpus: tuple[QuietCpu, ...]  #: one object per exclusive pCPU
    rows: tuple[Row, ...]  #: findings about the node and its sandboxes, as `doctor` has them
    problems: tuple[str, ...]  #: counters that could not be read


# One sandbox in the state document: its containers, VMM, threads, guest and other writers.


class CpusetReport(Struct, frozen=True):
    """The cpuset that one source reports for a container."""

    source: CpusetSource  #: the source; `cgroup`: that of the whole sandbox
    cpus: Cpus | None  #: the cpuset; null: none
    age_s: float  #: since when the source reports it; 0: read in every pass
    used: bool  #: whether this one is the container's `cpus`


class Container(Struct, frozen=True):
    """One recorded container."""

    id: str  #: container id
    name: str  #: container name; `pause` for the pod sandbox, else the start of the id
    kind: ContainerKind  #: whether it is the pod sandbox itself
    #: `deleted`: one of the last eight of a sandbox; `unknown`: its shim has ended, or no start was
    #: reported for a minute (see `note`; its cpuset counts)
    state: Literal["created", "running", "stopped", "deleted", "unknown"]
    cpus: Cpus | None  #: its cpuset; null: none
    mems: Cpus  #: NUMA nodes of its memory; empty: any
    exclusive: Cpus  #: its exclusive pCPUs
    provenance: Provenance  #: how it is known
    reason: str  #: the same in words
    cpusets: tuple[CpusetReport, ...]  #: what each source reports
    cpusets_reason: str  #: why one of them is used
    source: str  #: what recorded the container, such as `hook:createRuntime`
    recorded_s: float | None  #: age of the record
    quota_us: int | None  #: CPU quota
    period_us: int | None  #: CPU period
    shares: int | None  #: CPU shares
    bundle: str  #: its OCI bundle
    note: str  #: a problem with the record


class Vmm(Struct, frozen=True):
    """The accepted VMM process."""

    #: its name: `qemu`, or another one of the table of VMMs in verification.md, in lower case, or
    #: that of a row of another package
    kind: str
    pid: int  #: process id
    starttime: int  #: clock ticks since boot; with the pid the process's identity
    exe: str  #: its executable
    exe_replaced: bool  #: whether the file was replaced since the start
    confirmed_by: str  #: evidence that the process belongs to this sandbox
    kvm: bool  #: false: TCG
    boot_vcpus: int  #: vCPUs at boot; 0: unknown
    max_vcpus: int  #: most vCPUs; 0: unknown
    orphan: bool  #: whether its shim has exited
    guest_cid: int  #: vsock address of the guest; 0: unknown
    runtime: KataRuntime = KataRuntime.GO  #: Kata's runtime that started it


class Thread(Struct, frozen=True):
    """One thread that works for the sandbox."""

    tid: int  #: thread id
    tgid: int  #: process id
    starttime: int  #: clock ticks since boot; these three are the thread's identity
    comm: str  #: thread name
    role: ThreadRole  #: what it does for the sandbox
    label: str  #: role with the vCPU's index
    #: where the role comes from; `order`: inferred from creation order; `flags`: kernel-thread
    #: flags; `process`: the role of its process; `rest`: no source
    source: RoleSource
    vcpu: int | None  #: index of the vCPU
    apic_id: int | None  #: KVM's id of the vCPU
    iothread: str  #: id of the iothread object; empty: unknown
    conflict: str  #: what sources disagree about
    desired: Cpus | None  #: pCPUs chosen by policy; null: unmanaged
    expected: Cpus | None  #: the desired pCPUs that its cgroup allows and that are online
    fallback: str  #: why the expected pCPUs are not the desired ones
    reason: str  #: why these pCPUs
    paired: bool  #: whether it is a vCPU with exclusive pCPUs
    container: str  #: id of the container whose pCPUs it has
    affinity: Cpus  #: its CPU affinity as of now
    #: pCPU that it ran on last (`cpu_ticks` says when), outside `affinity` if it has not run
    #: since that was set; -1: unknown
    last_cpu: int
    #: used CPU time in 1/100 s: as of now if one sandbox is asked for, else as of a pass, or up to
    #: 60 s before it
    cpu_ticks: int
    cgroup: str  #: its cgroup
    cpuset: Cpus  #: pCPUs that the cgroup allows; empty: unknown
    state: ThreadState  #: `narrowed`: on a part of its CPUs
    #: seconds since its birth that it was ready and waited for a pCPU; read by `show SANDBOX` alone
    run_delay_s: float | None = None
    #: times since its birth that it lost its pCPU although it was ready; as `run_delay_s`
    preemptions: int | None = None
    #: times since its birth that it was moved to another pCPU; as `run_delay_s`
    migrations: int | None = None
    #: seconds for which it was not moved, at least: since the audit that found `migrations` grown,
    #: or read it first; of paired vCPUs with `isolation.watch`, where one sandbox is asked for
    unmoved_s: float | None = None


class Writer(Struct, frozen=True):
    """Another process that sets affinities of the sandbox's threads."""

    #: `kata`: its own vCPU pinning; `other`: something moves threads repeatedly
    name: Literal["kata", "other"]
    active: bool  #: whether kata-pin leaves threads to it now
    evidence: str  #: how that is known
    count: int  #: times that a thread was found moved (`other`)
    since_s: float | None  #: age of the first such move (`other`)
    tids: tuple[int, ...]  #: threads that it moves (`other`)
    last_s: float | None = None  #: age of the last such move (`other`)


class Cache(Struct, frozen=True):
    """The sandbox's group of resctrl, and what its threads use."""

    group: str  #: path of the group below `/sys/fs/resctrl`; empty: none
    class_name: str  #: class of the group, of the setting `resctrl.classes`; empty: the default
    problem: str  #: why threads are not in the group; empty: all are
    #: bytes of the L3 caches that its threads fill; read by `show SANDBOX` alone; null: unknown
    occupancy_bytes: int | None = None
    #: bytes moved between these caches and memory since the group was made; as `occupancy_bytes`
    total_bytes: int | None = None
    #: the part of `total_bytes` from and to memory of the cache's own NUMA node; the same
    local_bytes: int | None = None


class Memory(Struct, frozen=True):
    """Moving the sandbox's memory to the NUMA nodes of its vCPUs (`memory: migrate`)."""

    #: `waiting`: its vCPUs are not placed yet, or another sandbox is moved first; `near`: no more
    #: than a small part is elsewhere; `stopped`: see `problem`
    state: Literal["waiting", "moving", "near", "stopped"]
    nodes: Cpus  #: NUMA nodes that memory moves to; empty: none
    remote_bytes: int | None  #: memory elsewhere when it was examined last; null: not examined yet
    moved_bytes: int  #: memory moved since the daemon started
    problem: str  #: why memory stays elsewhere; empty: no reason is known


class Sandbox(Struct, frozen=True):
    """One sandbox."""

    id: str  #: sandbox id
    pod: str  #: `namespace/name`; the id if no pod is known
    handler: str  #: runtime handler; empty: unknown
    #: `unpinned`: no mask; `released`: by unpin; `conflict`: an exclusive pCPU is shared
    state: SandboxState
    mask: Cpus | None  #: pCPUs of the sandbox; null: not confined
    mask_origin: str  #: how the mask was made
    exclusive: Cpus  #: exclusive part of the mask
    shared: Cpus  #: shared part of the mask
    checked_s: float | None  #: age of the last pass or audit
    duration_ms: float | None  #: duration of the last pass
    containers: tuple[Container, ...]  #: recorded containers in record order
    vmm: Vmm | None  #: the VMM; null: none was accepted
    vmm_problem: str  #: why there is no VMM
    guest: Guest | None  #: the map to guest CPUs; null: no VMM
    threads: tuple[Thread, ...]  #: every thread that works for the sandbox
    writers: tuple[Writer, ...]  #: other processes that set affinities of these threads
    notes: tuple[Note, ...]  #: what the operator should know
    #: read by `show SANDBOX` alone; null: not read, or neither a tap nor a vhost worker
    network: Network | None = None
    cache: Cache | None = None  #: its caches; null: `resctrl.enabled` is off
    pod_uid: str = ""  #: the pod's uid; empty: unknown
    #: its quiet pCPUs; null: no exclusive pCPU, no daemon, or `quiet` is `off` or `report`
    quiet: QuietSandbox | None = None
    memory: Memory | None = None  #: moves of its memory; null: the setting `memory` is report


# The state document: the node with its pCPUs, its sandboxes and the allocator.


class Kubelet(Struct, frozen=True):
    """The kubelet's CPU manager checkpoint."""

    policy: str  #: CPU manager policy
    default: Cpus  #: the default (shared) set


class Node(Struct, frozen=True):
    """The node."""

    hostname: str  #: host name
    kernel: str  #: kernel release
    online: Cpus  #: online pCPUs
    present: Cpus  #: present pCPUs; those not online are offline
    isolated: Cpus  #: pCPUs excluded from load balancing
    nohz_full: Cpus  #: pCPUs without a scheduler tick
    cpus: tuple[CpuPlace, ...]  #: one object per online pCPU
    kubelet: Kubelet | None  #: the kubelet's checkpoint; null: there is none
    thread_events: bool  #: whether new threads are reported at once; false: audits find them
    mode: Mode  #: whether affinities are set or only compared
    assigned: Cpus = ""  #: pCPUs that the kubelet and DRA claims gave, also to pods without a VM


class State(Document, frozen=True, kw_only=True):
    """Printed by `show`; with a sandbox named, `sandboxes` holds only that one."""

    kind: str = "state"  #: kind of the document
    time: str  #: when it was made
    daemon: Daemon  #: whether the daemon made it
    node: Node  #: the node
    sandboxes: tuple[Sandbox, ...]  #: one object per sandbox
    allocation: Allocation | None  #: kata-pin's allocator; null: `alloc.policy` is `none`
    notes: tuple[Note, ...]  #: what the operator should know about the node
    #: what disturbs exclusive pCPUs; read by `show --cpus` alone; null: not read
    quiet: Quiet | None = None
    #: what the daemon does to keep them quiet; null: no daemon, or `quiet` is `off` or `report`
    kept_quiet: KeptQuiet | None = None
