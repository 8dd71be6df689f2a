"""The documents of prove, the watch, top, who and memory: where threads may run, and do run."""

from typing import Literal

from msgspec import Struct

from kata_pin.base.cpuset import CpuPlace
from kata_pin.base.documents.document import Cpus, Daemon, Document, Note
from kata_pin.base.documents.state import Memory
from kata_pin.base.values import (
    Method,
    SandboxState,
    TaskClass,
    ThreadRole,
    ThreadState,
    TracedKind,
    Verdict,
)

# The top document: what sandboxes' threads and their exclusive pCPUs did between two samples.


class TopThread(Struct, frozen=True):
    """One thread. Percentages are of one pCPU, events are per second."""

    tid: int  #: thread id
    comm: str  #: thread name
    label: str  #: role with the vCPU's index
    cpus: Cpus  #: pCPUs that it may run on (its affinity)
    state: ThreadState  #: `narrowed`: on a part of its CPUs
    cpu_percent: float | None  #: time that it ran; null: unknown
    #: time that it was ready and had to wait for a pCPU; of a vCPU, what the guest sees as steal;
    #: null: unknown
    wait_percent: float | None
    starving: bool  #: whether it was ready all the time and got no pCPU
    preemptions: float | None  #: times that it lost its pCPU although it was ready; null: unknown
    migrations: float | None  #: times that it was moved to another pCPU; null: unknown
    last_cpu: int | None  #: pCPU that it ran on last; null: unknown


class TopRole(Struct, frozen=True):
    """The overhead threads of one role."""

    role: ThreadRole  #: the role
    count: int  #: number of threads
    cpus: Cpus  #: pCPUs that one of them may run on
    drifting: int  #: number of threads that are not on their expected pCPUs
    cpu_percent: float | None  #: time that they ran, in all; null: unknown
    wait_percent: float | None  #: time that they had to wait for a pCPU, in all; null: unknown
    threads: tuple[TopThread, ...]  #: the threads, with `--threads`; else empty


class TopSandbox(Struct, frozen=True):
    """One sandbox."""

    id: str  #: sandbox id
    pod: str  #: `namespace/name`; the id if no pod is known
    state: SandboxState  #: as in the state document
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


class Interrupts(Struct, frozen=True):
    """Interrupts of a pCPU per second, by what they are for."""

    tick: float  #: timer
    reschedule: float  #: another pCPU has work for it
    call: float  #: another pCPU has it run a function, such as a TLB flush
    device: float  #: devices
    guest: float  #: posted to a guest
    other: float  #: everything else, such as machine checks


class TopPcpu(Struct, frozen=True):
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


class Missing(Struct, frozen=True):
    """Figures that are null for all rows, and why."""

    figure: str  #: name of the member that is null
    reason: str  #: why


class TopDocument(Document, frozen=True, kw_only=True):
    """Printed by `top`, one line per sample with `--json`."""

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


# The who document: every thread of the host that may run on some pCPUs.


class Place(CpuPlace, frozen=True):
    """The pCPU's place in the topology."""

    siblings: Cpus  #: all pCPUs of the core
    marks: tuple[str, ...]  #: core type, `isolated`, `nohz_full`


class CpuClaim(Struct, frozen=True):
    """A sandbox whose mask contains the pCPU."""

    sandbox: str  #: sandbox id
    pod: str  #: `namespace/name`; the id if no pod is known
    claim: Literal["exclusive", "shared"]  #: how it has the pCPU
    container: str  #: the container that owns the exclusive pCPU; empty: shared


class ProcessThread(Struct, frozen=True):
    """A thread that may run on one of the pCPUs."""

    tid: int  #: thread id
    comm: str  #: thread name
    affinity: Cpus  #: its CPU affinity
    label: str  #: its role in a sandbox; empty: none


class HostProcess(Struct, frozen=True):
    """A user process with threads that may run on one of the pCPUs."""

    pid: int  #: process id
    comm: str  #: process name
    user: str  #: name or number of its user; empty: unknown
    command: str  #: its command line, at most 200 characters; empty: none, or unknown
    age_s: float | None  #: age; null: unknown
    cpu_s: float | None  #: CPU time that it has used; null: unknown
    sandbox: str  #: id of the sandbox that it works for; empty: none
    pod: str  #: the sandbox's pod; empty: none
    intruder: bool  #: whether it is allowed on another owner's exclusive pCPU
    #: its threads that may run on one of the pCPUs; in `check`, those that may run where others are
    #: alone
    threads: tuple[ProcessThread, ...]


class KernelThread(Struct, frozen=True):
    """A kernel thread."""

    tid: int  #: thread id
    comm: str  #: thread name


class KernelThreads(Struct, frozen=True):
    """Kernel threads that may run on one of the pCPUs."""

    bound: tuple[KernelThread, ...]  #: those that may run on these pCPUs only
    roaming: tuple[KernelThread, ...]  #: those that may run on other pCPUs too


class WhoPcpu(Struct, frozen=True):
    """One of the pCPUs asked for."""

    cpu: int  #: the pCPU
    online: bool  #: whether it is online
    place: Place | None  #: its place in the topology; null: offline
    claims: tuple[CpuClaim, ...]  #: sandboxes whose mask contains it
    busy_percent: float | None = None  #: share of 0.2 s in which it was busy; null: offline


class WhoDocument(Document, frozen=True, kw_only=True):
    """Printed by `who`."""

    kind: str = "who"  #: kind of the document
    time: str  #: when it was made
    daemon: Daemon  #: whether the daemon made it
    cpus: Cpus  #: the pCPUs asked for
    pcpus: tuple[WhoPcpu, ...]  #: one object for each of them
    processes: tuple[HostProcess, ...]  #: user processes allowed on one of them, intruders first
    kernel: KernelThreads  #: kernel threads allowed on one of them


# The memory document: on which NUMA nodes the memory of sandboxes is, beside their vCPUs.

MemorySource = Literal["cgroup", "process", "none"]
"""What was read."""


class NodeMemory(Struct, frozen=True):
    """Memory on one NUMA node."""

    node: int  #: the NUMA node
    bytes: int  #: memory there, in bytes
    huge_bytes: int  #: the part that is in huge pages, if the source reports it


class SandboxMemory(Struct, frozen=True):
    """The memory of one sandbox."""

    id: str  #: sandbox id
    pod: str  #: `namespace/name`; the id if no pod is known
    pid: int | None  #: its VMM; null: none was accepted
    vcpu_nodes: Cpus  #: NUMA nodes that its vCPUs may run on, as a list; empty: no vCPU is known
    #: `cgroup`: memory.numa_stat and hugetlb's, all in it but page cache; `process`: numa_maps of
    #: the VMM, what it has mapped
    source: MemorySource
    cgroup: str  #: the folder that was read; empty: none
    nodes: tuple[NodeMemory, ...]  #: one object per NUMA node that has any
    total_bytes: int | None  #: the sum; null: unknown
    remote_bytes: int | None  #: on nodes that no vCPU may run on; null: unknown
    remote_percent: float | None  #: the same of the sum; null: unknown
    problem: str  #: what could not be read; empty: nothing
    move: Memory | None = None  #: moves to the vCPUs' nodes; null: the setting `memory` is report


class MemoryDocument(Document, frozen=True, kw_only=True):
    """Printed by `show --memory`."""

    kind: str = "memory"  #: kind of the document
    time: str  #: when it was made
    daemon: Daemon  #: whether the daemon named the sandboxes
    node_count: int  #: number of NUMA nodes with online pCPUs
    sandboxes: tuple[SandboxMemory, ...]  #: one object per sandbox


# The prove document: what ran on exclusive pCPUs in a window, and what that proves.


class Refused(Struct, frozen=True):
    """A method that was not used."""

    method: Method  #: the method
    reason: str  #: why not


class TimelinePart(Struct, frozen=True):
    """One of the equal parts that the window is divided into."""

    part: int  #: its number, from 0
    ran_ms: float  #: how long the task ran on the pCPU in it


class OwnThread(Struct, frozen=True):
    """A thread that is placed on the pCPU."""

    tid: int  #: thread id
    label: str  #: role with the vCPU's index
    here_ms: float | None  #: time on this pCPU; null: not measured
    slices: int | None  #: how often it had this pCPU; null: not measured
    ran_ms: float | None  #: time on any pCPU (schedstat); null: it ended
    waited_ms: float | None  #: time that it was ready and waited for a pCPU, the guest's steal time
    timeline: tuple[TimelinePart, ...]  #: when; parts in which it did not run are left out


class RanTask(Struct, frozen=True):
    """Another task that ran on the pCPU."""

    #: `same-pod`: of the owner's pod; `user`: any other process; `unbound-kernel`: a kernel thread
    #: that may run elsewhere; `per-cpu-kernel`: unavoidable, no violation; `unknown`: gone before
    #: it was looked at
    task_class: TaskClass
    tid: int  #: thread id; -1: a row of several tasks, as there are too many
    pid: int  #: process id; 0: unknown
    comm: str  #: thread name; empty: unknown
    parent: str  #: the process that made it, where it is gone; else empty
    sandbox: str  #: id of its sandbox; empty: none
    pod: str  #: pod that it belongs to; empty: none
    unit: str  #: systemd unit that it belongs to; empty: none
    cgroup: str  #: its cgroup
    affinity: Cpus  #: pCPUs that it may use; empty: unknown
    slices: int  #: how often it came onto the pCPU
    total_ms: float | None  #: how long in all; null: not measured
    longest_ms: float | None  #: its longest slice; null: not measured
    timeline: tuple[TimelinePart, ...]  #: when; parts in which it did not run are left out
    remedy: str  #: what would keep it off the pCPU
    command: str  #: a command that does; empty: there is none
    tasks: int = 1  #: how many tasks the row is of


class RanInterrupt(Struct, frozen=True):
    """An interrupt that the pCPU handled."""

    interrupt: TracedKind  #: its kind
    name: str  #: name, such as `local_timer`, `RCU` or a device
    irq: int  #: number of a device's interrupt; -1: none
    times: int  #: how often
    total_ms: float  #: how long in all
    longest_ms: float  #: the longest
    remedy: str  #: what would keep it off the pCPU
    command: str  #: a command that does; empty: there is none


class HistogramBar(Struct, frozen=True):
    """Foreign slices of similar length."""

    up_to_us: float  #: longest slice that is counted here; the shorter ones are in the bar before
    slices: int  #: how many


class ProvedPcpu(Struct, frozen=True):
    """One exclusive pCPU."""

    cpu: int  #: the pCPU
    sandbox: str  #: id of the sandbox that owns it
    pod: str  #: pod of that sandbox
    container: str  #: name of the container that owns it; empty: unknown
    verdict: Verdict  #: whether it was its owner's alone
    reason: str  #: why
    window_s: float  #: how long it was measured
    records: int  #: records that were read
    lost: int  #: records that were lost
    own_ms: float | None  #: time of the threads placed here; this and the next six: null: unknown
    pod_ms: float | None  #: time of other tasks of the same pod
    #: time of everybody else's tasks, but for the next; by `schedstat` and `wait` at most so long,
    #: the next included
    foreign_ms: float | None
    unavoidable_ms: float | None  #: time of kernel threads that belong to this pCPU
    idle_ms: float | None  #: time without a task
    foreign_percent: float | None  #: `foreign_ms` as a share of the window
    foreign_slices: int | None  #: how often foreign tasks came onto it
    interrupt_ms: float | None  #: time in interrupts, which is part of the others; null: not asked
    own: tuple[OwnThread, ...]  #: the threads placed here
    tasks: tuple[RanTask, ...]  #: other tasks that ran there, worst class first, longest first
    tasks_left_out: int  #: so many tasks are summed up in rows of their classes, whose tid is -1
    interrupts: tuple[RanInterrupt, ...]  #: interrupts, longest first
    histogram: tuple[HistogramBar, ...]  #: foreign slices by length
    idle_timeline: tuple[TimelinePart, ...]  #: when no task ran there


class ExitReason(Struct, frozen=True):
    """Why a vCPU left its guest; halts are not among them."""

    reason: str  #: KVM's name of the reason, or its number
    times: int  #: how often
    total_ms: float  #: time outside the guest in all
    longest_ms: float  #: the longest
    long: int  #: how often for 0.1 ms or more


class HostCause(Struct, frozen=True):
    """What else ran on the vCPU's pCPU."""

    who: str  #: a process with its pid, a thread of the same VM, or `interrupts`
    ran_ms: float  #: how long in all


class VcpuLatency(Struct, frozen=True):
    """What the guest feels on one of its CPUs, measured on the host."""

    vcpu: str  #: the thread's role with the vCPU's index
    tid: int  #: thread id
    guest_cpu: int | None  #: the CPU number in the guest's Linux; null: unknown
    cpus: Cpus  #: pCPUs that the thread should run on
    container: str  #: name of the container that owns it; empty: none
    ran_ms: float | None  #: how long it ran; null: it ended
    #: how long it was ready and waited for a pCPU: the guest's steal time; null: it ended
    steal_ms: float | None
    #: how often it lost its pCPU although it was ready; this and the next: null: it does not have
    #: one pCPU for itself, or another method than `perf`
    preempted: int | None
    longest_wait_ms: float | None  #: the longest time until it had the pCPU again
    halts: int | None  #: how often the guest's CPU was idle; this and the next two: null: unknown
    exits: int | None  #: how often it left the guest for other reasons
    outside_ms: float | None  #: how long it was outside for other reasons
    reasons: tuple[ExitReason, ...]  #: the five reasons with the longest exit
    causes: tuple[HostCause, ...]  #: the five that ran longest on its pCPU


class HaltPolling(Struct, frozen=True):
    """How KVM waits for a vCPU that halts, summed over the VM's vCPUs."""

    halts: int  #: times that a vCPU halted
    polled_ms: float  #: time that KVM polled until there was work, which keeps the pCPU busy
    wasted_ms: float  #: time that it polled in vain
    slept_ms: float  #: time that it slept


class GuestCommand(Struct, frozen=True):
    """How to measure latency inside the guest; needs the program in the container's image."""

    container: str  #: name of the container
    program: str  #: what it measures with
    command: str  #: the command line


class GuestLatency(Struct, frozen=True):
    """What the guest of one sandbox feels, beside what the host did."""

    sandbox: str  #: sandbox id
    pod: str  #: pod of that sandbox
    vcpus: tuple[VcpuLatency, ...]  #: one object per vCPU thread
    halt_polling: HaltPolling | None  #: null: see `problems`
    problems: tuple[str, ...]  #: what could not be measured, and why
    commands: tuple[GuestCommand, ...]  #: how to measure inside the guest


class ProveDocument(Document, frozen=True, kw_only=True):
    """Printed by `prove`."""

    kind: str = "prove"  #: kind of the document
    time: str  #: when the window ended
    daemon: Daemon  #: whether the daemon said who owns the pCPUs
    hostname: str  #: host name
    kernel: str  #: kernel release
    verdict: Verdict  #: `violated`: exit status 3; `unproved`: exit status 4
    reason: str  #: the verdict in words
    method: Method  #: how it was measured, best first
    refused: tuple[Refused, ...]  #: better methods that were not used
    asked_s: float  #: length of the window that was asked for
    max_foreign_percent: float  #: foreign share that is accepted
    parts: int  #: parts of every timeline; 0: none were made
    reader_ms: float  #: CPU time that measuring took
    pcpus: tuple[ProvedPcpu, ...]  #: one object per exclusive pCPU
    guests: tuple[GuestLatency, ...] = ()  #: with `--guest`: one object per sandbox


# The watch document: what the daemon saw of exclusive pCPUs lately, without being asked.


class WatchedPcpu(Struct, frozen=True):
    """One exclusive pCPU with a vCPU of its own."""

    cpu: int  #: the pCPU
    sandbox: str  #: id of the sandbox that owns it
    pod: str  #: pod of that sandbox
    age_s: float  #: age of the last look at its counters
    over_s: float | None  #: time between the last two looks; null: there was only one
    waited_percent: float | None  #: share of that time in which its threads waited for it
    #: greatest possible share of others in that time, kernel threads that belong there included
    others_percent: float | None
    #: how often others came onto it; null: not known (the kernel has no /proc/schedstat)
    others_slices: int | None
    episode_s: float | None  #: age of the episode of foreign tasks that lasts; null: none
    window_age_s: float | None  #: age of the last recording of who ran there; null: none
    window: ProvedPcpu | None  #: what was recorded; null: nothing


class WatchDocument(Document, frozen=True, kw_only=True):
    """What the daemon answers to `watch`."""

    kind: str = "watch"  #: kind of the document
    time: str  #: when it was made
    max_foreign_percent: float  #: the setting `isolation.max_foreign`
    #: why the tasks that ran cannot be named; empty: recording works, or no pCPU is watched yet
    problem: str
    pcpus: tuple[WatchedPcpu, ...]  #: one object per watched pCPU
