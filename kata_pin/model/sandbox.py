"""Containers as recorded, their sandbox, and its VMM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from kata_pin.model.cpuset import CpuSet
from kata_pin.model.thread import ProcessKey


class ContainerKind(StrEnum):
    """Whether a record is the pod sandbox itself (the pause container) or a container in it."""

    SANDBOX = "sandbox"
    CONTAINER = "container"


class ContainerState(StrEnum):
    """Where a container is in its life, as far as the sources report.

    A stopped one can still be listed and deleted; poststop runs when it is deleted.
    """

    CREATED = "created"
    RUNNING = "running"
    STOPPED = "stopped"
    DELETED = "deleted"

    @property
    def counts(self) -> bool:
        """Whether its cpuset counts in the sandbox mask (D8)."""
        return self in (ContainerState.CREATED, ContainerState.RUNNING)


class CpusetSource(StrEnum):
    """What reports a container's cpuset (policy/placement/precedence.py ranks them)."""

    NRI = "nri"
    KATA = "persist.json"
    KUBELET = "kubelet"
    CGROUP = "cgroup"
    BUNDLE = "bundle"


@dataclass(frozen=True, slots=True)
class ReportedCpuset:
    """The cpuset that one source last reported for a container, None for no cpuset.

    `recorded_ns` is when it changed to that (CLOCK_BOOTTIME), 0 where every pass reads the source.
    """

    source: CpusetSource
    cpus: CpuSet | None
    recorded_ns: int = 0


@dataclass(frozen=True, slots=True)
class Container:
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


@dataclass(frozen=True, slots=True)
class GuestTopology:
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
    numa: Mapping[int, int] = field(default_factory=dict, hash=False)
    host_nodes: Mapping[int, CpuSet] = field(default_factory=dict, hash=False)

    def siblings_of(self, index: int) -> int:
        """Return a number that vCPU `index` shares with its guest SMT siblings."""
        return index // max(1, self.threads)


@dataclass(frozen=True, slots=True)
class Vmm:
    """The process that runs a sandbox's virtual machine, accepted by D5.

    `kind` names its row in vmm/kinds.py. `witness` says which evidence that the VMM itself cannot
    write confirmed it. `kvm` is False for TCG. `apic_ids`: on x86, KVM's vCPU ids are the APIC ids
    of `guest`. `iothreads` are the ids on the command line; `guest_cid` the vsock address (0:
    none), `kernel` the path of the guest's kernel there, `monitor` whether it has a QMP monitor.
    `orphan` is True when its shim is gone.
    `exe_deleted`: the binary was replaced on disk. `strength` is that of the witness
    (vmm/witnesses.py); `refused` other processes that claim the sandbox, and why they lost.
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
    orphan: bool = False
    exe_deleted: bool = False
    strength: int = 0
    refused: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Sandbox:
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
    def handler(self) -> str:
        """Return the runtime handler of the pod, empty when no record names it."""
        return next((c.handler for c in self.containers if c.handler), "")
