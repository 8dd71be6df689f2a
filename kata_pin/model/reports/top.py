"""The top document: what sandboxes' threads and their exclusive pCPUs did between two samples."""

from __future__ import annotations

from dataclasses import dataclass

from kata_pin.model.reports import VERSION, Cpus, Note
from kata_pin.model.reports.daemon import Daemon


@dataclass(frozen=True, slots=True)
class TopThread:
    """One thread. Percentages are of one pCPU, events are per second."""

    tid: int  #: thread id
    comm: str  #: thread name
    label: str  #: role with the vCPU's index
    cpus: Cpus  #: pCPUs that it may run on (its affinity)
    state: str  #: One of `ok`, `narrowed` (on a part of its CPUs), `drift`, `unmanaged`, `released`
    cpu_percent: float | None  #: time that it ran; null: unknown
    #: time that it was ready and had to wait for a pCPU; of a vCPU, what the guest sees as steal;
    #: null: unknown
    wait_percent: float | None
    starving: bool  #: whether it was ready all the time and got no pCPU
    preemptions: float | None  #: times that it lost its pCPU although it was ready; null: unknown
    migrations: float | None  #: times that it was moved to another pCPU; null: unknown
    last_cpu: int | None  #: pCPU that it ran on last; null: unknown


@dataclass(frozen=True, slots=True)
class TopRole:
    """The overhead threads of one role."""

    role: str  #: One of `iothread`, `emulator`, `vhost`, `virtiofsd`, `kvm`, `shim`
    count: int  #: number of threads
    cpus: Cpus  #: pCPUs that one of them may run on
    drifting: int  #: number of threads that are not on their expected pCPUs
    cpu_percent: float | None  #: time that they ran, in all; null: unknown
    wait_percent: float | None  #: time that they had to wait for a pCPU, in all; null: unknown
    threads: tuple[TopThread, ...]  #: the threads, with `--threads`; else empty


@dataclass(frozen=True, slots=True)
class TopSandbox:
    """One sandbox."""

    id: str  #: sandbox id
    pod: str  #: `namespace/name`; the id if no pod is known
    state: str  #: as in the state document
    mask: Cpus | None  #: pCPUs of the sandbox; null: not confined
    cpu_percent: float | None  #: time that its threads ran, in all; null: unknown
    #: greatest wait of one of its vCPUs; null: unknown, or no vCPU is known
    wait_percent: float | None
    #: time in which CPU quotas stopped its cgroup or one above it; null: unknown
    throttled_percent: float | None
    vcpus: tuple[TopThread, ...]  #: its vCPU threads
    overhead: tuple[TopRole, ...]  #: its other threads by role
    #: its group below `/sys/fs/resctrl`; empty: its caches are not counted
    cache_group: str = ""
    l3_bytes: int | None = None  #: bytes of the L3 caches that its threads fill; null: unknown
    #: bytes between these caches and memory, per second; null: unknown
    memory_bytes_per_s: float | None = None
    #: the part of that to and from memory of the cache's own NUMA node; null: unknown
    local_bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class Interrupts:
    """Interrupts of a pCPU per second, by what they are for."""

    tick: float  #: timer
    reschedule: float  #: another pCPU has work for it
    call: float  #: another pCPU has it run a function, such as a TLB flush
    device: float  #: devices
    guest: float  #: posted to a guest
    other: float  #: everything else, such as machine checks


@dataclass(frozen=True, slots=True)
class TopPcpu:
    """One exclusive pCPU. Percentages are of its time, events are per second."""

    cpu: int  #: the pCPU
    sandbox: str  #: id of the sandbox that it is exclusive to
    pod: str  #: the sandbox's pod
    online: bool  #: false: nothing ran there
    conflict: bool  #: whether other sandboxes claim it too
    own_percent: float | None  #: threads of the sandbox that may run only there; null: unknown
    foreign_percent: float | None  #: others, at least; null: unknown
    foreign_switches: float | None  #: times that others came onto it, at least; null: unknown
    throttled_percent: float | None  #: as of the sandbox
    #: time that a hypervisor below this node took; null: unknown
    steal_percent: float | None
    interrupts: Interrupts | None  #: interrupts; null: unknown
    softirqs: dict[str, float] | None  #: soft interrupts by the kernel's name; null: unknown


@dataclass(frozen=True, slots=True)
class Missing:
    """Figures that are null for all rows, and why."""

    figure: str  #: name of the member that is null
    reason: str  #: why


@dataclass(frozen=True, slots=True, kw_only=True)
class TopDocument:
    """Printed by `top`, one line per sample with `--json`."""

    version: int = VERSION  #: version of the document
    kind: str = "top"  #: kind of the document
    time: str  #: when the second sample was taken
    daemon: Daemon  #: whether the daemon named the sandboxes
    hostname: str  #: host name
    seconds: float  #: time between the two samples
    threads: int  #: number of threads that were read
    sandboxes: tuple[TopSandbox, ...]  #: one object per sandbox
    pcpus: tuple[TopPcpu, ...]  #: one object per exclusive pCPU
    missing: tuple[Missing, ...]  #: what this node cannot tell
    notes: tuple[Note, ...]  #: what the operator should know
