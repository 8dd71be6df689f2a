"""Sandboxes: their containers as recorded, their VMM and its threads.

The map from vCPU threads to guest CPUs is here too (D12).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from msgspec import Struct, field
from msgspec.structs import replace

from kata_pin.base.cpuset import CpuSet
from kata_pin.base.threads import ThreadKey
from kata_pin.base.values import (
    ContainerKind,
    ContainerState,
    CpusetSource,
    KataRuntime,
    LinkState,
    RoleSource,
    ThreadRole,
)

# Threads: their identity, what they do for the sandbox, and how that is known.

PF_USER_WORKER: Final = 0x0000_4000
"""Task flag of a kernel worker that lives in a user process (vhost since Linux 6.4, sched.h)."""

PF_KTHREAD: Final = 0x0020_0000
"""Task flag of a kernel thread (sched.h)."""


class ProcessKey(NamedTuple):
    """A process that cannot be mistaken for a later one with the same pid.

    `starttime` is field 22 of proc_pid_stat(5), in clock ticks since boot.
    """

    pid: int
    starttime: int


class Process(Struct, frozen=True):
    """A process: who it is, its parent, its name, its task flags, its state (`Z`: a zombie)."""

    key: ProcessKey
    ppid: int
    comm: str
    flags: int
    state: str = ""

    @property
    def pid(self) -> int:
        """The process id."""
        return self.key.pid

    @property
    def kernel(self) -> bool:
        """Whether it is a kernel thread."""
        return bool(self.flags & PF_KTHREAD)


class Task(Struct, frozen=True):
    """One thread as /proc and the scheduler show it, before its role is known.

    `affinity` is what sched_getaffinity returned; `cpuset` what the thread's cgroup allows
    (effective; empty: unknown), `cgroup` its path. `last_cpu` and `cpu_ticks` are stat fields 39
    and 14 + 15. `inode` is that of its folder in /proc, 0 where it proves nothing or the thread is
    young.
    """

    key: ThreadKey
    comm: str
    flags: int
    affinity: CpuSet
    cpuset: CpuSet
    cgroup: str
    last_cpu: int = -1
    cpu_ticks: int = 0
    inode: int = 0

    @property
    def user_worker(self) -> bool:
        """Whether it is a kernel worker inside a user process."""
        return bool(self.flags & PF_USER_WORKER)

    @property
    def kernel(self) -> bool:
        """Whether it is a kernel thread."""
        return bool(self.flags & PF_KTHREAD)

    def moved(self, affinity: CpuSet, cpuset: CpuSet, cgroup: str) -> Task:
        """Return the same thread elsewhere; half the time of `replace`."""
        return Task(
            *(self.key, self.comm, self.flags, affinity, cpuset, cgroup),
            *(self.last_cpu, self.cpu_ticks, self.inode),
        )


class Role(Struct, frozen=True):
    """What a thread is, and how we know.

    `vcpu` is the VMM's cpu-index (None when the index is unknown), `apic_id` KVM's vCPU id on x86.
    `iothread` is the object's id where QMP reported it. `conflict` says what the sources disagreed
    about; such a thread goes to the whole mask (D6).
    """

    role: ThreadRole
    source: RoleSource
    vcpu: int | None = None
    apic_id: int | None = None
    iothread: str = ""
    conflict: str = ""


class Thread(NamedTuple):
    """A thread of a sandbox with its role."""

    task: Task
    role: Role

    @property
    def key(self) -> ThreadKey:
        """The thread's identity."""
        return self.task.key

    @property
    def label(self) -> str:
        """Return a short name such as `vcpu 3` or `emulator`."""
        if self.role.role is ThreadRole.VCPU:
            return f"vcpu {self.role.vcpu}" if self.role.vcpu is not None else "vcpu ?"
        return self.role.role.value


# Containers as recorded, their sandbox, and its VMM.


class ReportedCpuset(Struct, frozen=True):
    """The cpuset that one source last reported for a container, None for no cpuset.

    `recorded_ns` is when it changed to that (CLOCK_BOOTTIME), 0 where every pass reads the source.
    """

    source: CpusetSource
    cpus: CpuSet | None
    recorded_ns: int = 0


class Container(Struct, frozen=True):
    """What was recorded for one container.

    `cpus` is `linux.resources.cpu.cpus`: None when the container has no cpuset. `quota_us`,
    `period_us` and `shares` are those of the OCI runtime spec (config-linux, cpu); None if absent.
    `recorded_ns` is the CLOCK_BOOTTIME stamp of the message that this record is from; `source`
    names it (`hook:createRuntime`, `spool:poststart`, `bundle`, `adopted`). `reported` is what each
    source reported for it; `cpus` is the one that counts.
    """

    id: str
    sandbox_id: str
    kind: ContainerKind = ContainerKind.CONTAINER
    state: ContainerState = ContainerState.CREATED
    cpus: CpuSet | None = None
    mems: str = ""
    quota_us: int | None = None
    period_us: int | None = None
    shares: int | None = None
    cgroups_path: str = ""
    name: str = ""
    pod_name: str = ""
    pod_namespace: str = ""
    pod_uid: str = ""
    handler: str = ""
    bundle: str = ""
    source: str = ""
    recorded_ns: int = 0
    pid_hint: int = 0
    note: str = ""
    reported: tuple[ReportedCpuset, ...] = ()

    @property
    def title(self) -> str:
        """Return the name people know it by."""
        return self.name or ("pause" if self.kind is ContainerKind.SANDBOX else self.id[:12])


class GuestTopology(Struct, frozen=True):
    """QEMU's `-smp` and `-numa`, the only guest topology that is believed (D10).

    `boot` vCPUs exist at start; `maximum` is maxcpus. `numa` maps cpu-index to the guest NUMA
    node, `host_nodes` a guest node to the host nodes its memory is bound to.
    """

    boot: int = 0
    maximum: int = 0
    sockets: int = 1
    dies: int = 1
    cores: int = 1
    threads: int = 1
    numa: Mapping[int, int] = field(default_factory=dict)
    host_nodes: Mapping[int, CpuSet] = field(default_factory=dict)

    def siblings_of(self, index: int) -> int:
        """Return a number that vCPU `index` shares with its guest SMT siblings."""
        return index // max(1, self.threads)


class Vmm(Struct, frozen=True):
    """The process that runs a sandbox's virtual machine, accepted by D5.

    `kind` names its row in vmm/kinds.py. `witness` says which evidence that the VMM itself cannot
    write confirmed it. `kvm` is False for TCG. `apic_ids`: on x86, KVM's vCPU ids are the APIC ids
    of `guest`. `iothreads` are the ids on the command line; `guest_cid` the vsock address (0:
    none), `kernel` the path of the guest's kernel there, `monitor` whether it has a QMP monitor,
    `loads` whether it loads a state instead of booting: a copy of a template.
    `runtime` is taken from it too, so a hostile VMM can lie about it: only advice may depend on it.
    `orphan` is True when its shim is gone.
    `exe_deleted`: the binary was replaced on disk. `strength` is that of the witness
    (vmm/claims.py); `refused` other processes that claim the sandbox, and why they lost.
    """

    kind: str
    process: ProcessKey
    parent: int
    exe: str
    witness: str
    guest: GuestTopology = field(default_factory=GuestTopology)
    kvm: bool = True
    apic_ids: bool = False
    iothreads: tuple[str, ...] = ()
    guest_cid: int = 0
    kernel: str = ""
    monitor: bool = False
    loads: bool = False
    runtime: KataRuntime = KataRuntime.GO
    orphan: bool = False
    exe_deleted: bool = False
    strength: int = 0
    refused: tuple[str, ...] = ()


class Sandbox(Struct, frozen=True):
    """A pod VM: its recorded containers in record order, and its VMM once found."""

    id: str
    containers: tuple[Container, ...] = ()
    vmm: Vmm | None = None

    @property
    def pod(self) -> str:
        """Return `namespace/name` of the pod, or the sandbox id when no record names it."""
        for container in self.containers:
            if container.pod_name:
                return f"{container.pod_namespace or '-'}/{container.pod_name}"
        return self.id

    @property
    def pod_uid(self) -> str:
        """Return the pod's uid, empty when no record has it."""
        return next((c.pod_uid for c in self.containers if c.pod_uid), "")

    @property
    def decisive(self) -> Sandbox:
        """This sandbox as decisions see it: without which message reported a container, and when.

        A hook or event that reports nothing new changes nothing else.
        """
        seen = tuple(replace(one, source="", recorded_ns=0) for one in self.containers)
        return replace(self, containers=seen)

    @property
    def handler(self) -> str:
        """Return the runtime handler of the pod, empty when no record names it."""
        return next((c.handler for c in self.containers if c.handler), "")


# The map from vCPU threads to guest CPUs, and the evidence for each of its links (D12).
#
# Three numbers are kept apart: the thread's tid, the VMM's cpu-index with the APIC id, and the
# number that Linux in the guest uses. A conclusion from one to another is as sure as its weakest
# link.


class Link(Struct, frozen=True):
    """One step of the map: how well it is known, and from which source."""

    state: LinkState
    source: str


class VcpuLink(Struct, frozen=True):
    """One vCPU, from its thread to its guest CPU.

    `thread_link` leads from the thread to the cpu-index, `apic_link` to the APIC id, `guest_link`
    to the guest CPU. `cpus` are the thread's expected pCPUs, `container_id` the container that owns
    them (empty: none), `paired` whether the thread has them now.
    """

    key: ThreadKey
    index: int | None
    apic_id: int | None
    guest_cpu: int | None
    thread_link: Link
    apic_link: Link
    guest_link: Link
    cpus: CpuSet
    paired: bool = False
    container_id: str = ""

    @property
    def weakest(self) -> Link:
        """The weakest link; a measurement of the guest CPU is of the thread itself and decides."""
        if self.guest_link.state is LinkState.MEASURED:
            return self.guest_link
        every = (self.thread_link, self.apic_link, self.guest_link)
        return min(every, key=lambda link: link.state.rank)

    @property
    def state(self) -> LinkState:
        """How well it is known which guest CPU this thread is."""
        return self.weakest.state


class MeasuredGuestCpu(Struct, frozen=True):
    """The guest CPU of a vCPU thread as measured; `source` says how."""

    guest_cpu: int
    source: str


class GuestFacts(Struct, frozen=True):
    """What is known of a guest beside its threads.

    `release` is its kernel's (`6.12.47`; empty: unknown) and `source` where that is from.
    `measured` is by living thread: a thread's guest CPU does not change while it lives.
    """

    release: str = ""
    source: str = ""
    measured: Mapping[ThreadKey, MeasuredGuestCpu] = field(default_factory=dict)


class GuestMap(Struct, frozen=True):
    """The links of a sandbox's vCPU threads by cpu-index, unknown ones first.

    `hotplugged` is whether there is a vCPU that did not exist when the VM started, None where its
    size then is unknown.
    """

    sandbox_id: str
    links: tuple[VcpuLink, ...] = ()
    hotplugged: bool | None = False
    facts: GuestFacts = field(default_factory=GuestFacts)

    def usable(self, *, inferred: bool = False) -> dict[ThreadKey, int]:
        """Return the guest CPUs that are known well enough to act on, inferred ones if allowed."""
        least = LinkState.INFERRED if inferred else LinkState.PROVEN
        return {
            one.key: one.guest_cpu
            for one in self.links
            if one.guest_cpu is not None and one.state.rank >= least.rank
        }

    @property
    def every(self) -> CpuSet | None:
        """All guest CPUs, None while one of them is unknown."""
        known = [one.guest_cpu for one in self.links if one.guest_cpu is not None]
        return CpuSet(known) if len(known) == len(self.links) else None


class GuestCpuset(Struct, frozen=True):
    """The guest CPUs of a container's processes, None for any, and the reason."""

    container_id: str
    cpus: CpuSet | None
    reason: str
    owned: bool = False
    """Whether the CPUs belong to this container alone."""
