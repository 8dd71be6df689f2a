"""One sandbox in the state document: its containers, VMM, threads, guest and other writers."""

from __future__ import annotations

from dataclasses import dataclass

from kata_pin.model.reports import Cpus, Note
from kata_pin.model.reports.guest import Guest
from kata_pin.model.reports.network import Network
from kata_pin.model.reports.quiet import QuietSandbox


@dataclass(frozen=True, slots=True)
class CpusetReport:
    """The cpuset that one source reports for a container."""

    source: str  #: One of `nri`, `persist.json`, `kubelet`, `cgroup` (whole sandbox), `bundle`
    cpus: Cpus | None  #: the cpuset; null: none
    age_s: float  #: since when the source reports it; 0: read in every pass
    used: bool  #: whether this one is the container's `cpus`


@dataclass(frozen=True, slots=True)
class Container:
    """One recorded container."""

    id: str  #: container id
    name: str  #: container name; `pause` for the pod sandbox, else the start of the id
    kind: str  #: One of `sandbox`, `container`
    #: One of `created`, `running`, `stopped`, `deleted` (the last eight of a sandbox), `unknown`
    #: (its shim has ended, or no start was reported for a minute: see `note`; its cpuset counts)
    state: str
    cpus: Cpus | None  #: its cpuset; null: none
    mems: Cpus  #: NUMA nodes of its memory; empty: any
    exclusive: Cpus  #: its exclusive pCPUs
    #: One of `allocator`, `kubelet`, `claim`, `administrator`, `inferred`, `none`: how it is known
    provenance: str
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


@dataclass(frozen=True, slots=True)
class Vmm:
    """The accepted VMM process."""

    kind: str  #: One of `qemu`, `cloud-hypervisor`, `firecracker`, `dragonball`
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


@dataclass(frozen=True, slots=True)
class Thread:
    """One thread that works for the sandbox."""

    tid: int  #: thread id
    tgid: int  #: process id
    starttime: int  #: clock ticks since boot; these three are the thread's identity
    comm: str  #: thread name
    role: str  #: One of `vcpu`, `iothread`, `emulator`, `vhost`, `virtiofsd`, `kvm`, `shim`
    label: str  #: role with the vCPU's index
    #: One of `debugfs`, `qmp`, `kvm-fd`, `name`, `order` (inferred from creation order), `flags`
    #: (kernel-thread flags), `process` (role of its process), `rest` (no source): where the role
    #: comes from
    source: str
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
    #: pCPU that it ran on last (`cpu_ticks` tells as of when), outside `affinity` if it has not run
    #: since that was set; -1: unknown
    last_cpu: int
    #: used CPU time in 1/100 s: as of now if one sandbox is asked for, else as of a pass, or up to
    #: 60 s before it
    cpu_ticks: int
    cgroup: str  #: its cgroup
    cpuset: Cpus  #: pCPUs that the cgroup allows; empty: unknown
    state: str  #: One of `ok`, `narrowed` (on a part of its CPUs), `drift`, `unmanaged`, `released`
    #: seconds since its birth that it was ready and waited for a pCPU; read by `show SANDBOX` alone
    run_delay_s: float | None = None
    #: times since its birth that it lost its pCPU although it was ready; as `run_delay_s`
    preemptions: int | None = None
    #: times since its birth that it was moved to another pCPU; as `run_delay_s`
    migrations: int | None = None
    #: seconds for which it was not moved, at least: since the audit that found `migrations` grown,
    #: or read it first; of paired vCPUs with `isolation.watch`, where one sandbox is asked for
    unmoved_s: float | None = None


@dataclass(frozen=True, slots=True)
class Writer:
    """Another process that sets affinities of the sandbox's threads."""

    name: str  #: One of `kata` (its own vCPU pinning), `other` (something moves threads repeatedly)
    active: bool  #: whether kata-pin leaves threads to it now
    evidence: str  #: how that is known
    count: int  #: times that a thread was found moved (`other`)
    since_s: float | None  #: age of the first such move (`other`)
    tids: tuple[int, ...]  #: threads that it moves (`other`)


@dataclass(frozen=True, slots=True)
class Cache:
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


@dataclass(frozen=True, slots=True)
class Memory:
    """Moving the sandbox's memory to the NUMA nodes of its vCPUs (`memory: migrate`)."""

    #: One of `waiting` (its vCPUs are not placed yet, or another sandbox is moved first), `moving`,
    #: `near` (no more than a small part is elsewhere), `stopped` (see `problem`)
    state: str
    nodes: Cpus  #: NUMA nodes that memory moves to; empty: none
    remote_bytes: int | None  #: memory elsewhere when it was examined last; null: not examined yet
    moved_bytes: int  #: memory moved since the daemon started
    problem: str  #: why memory stays elsewhere; empty: no reason is known


@dataclass(frozen=True, slots=True)
class Sandbox:
    """One sandbox."""

    id: str  #: sandbox id
    pod: str  #: `namespace/name`; the id if no pod is known
    handler: str  #: runtime handler; empty: unknown
    #: One of `ok`, `drift`, `unpinned` (no mask), `released` (by unpin), `conflict` (an exclusive
    #: pCPU is shared), `no-vmm`
    state: str
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
