"""Closed values: what a role, a state, a verdict or a method can be.

Words for numbers and for remedies are here too. Decisions and documents share these enums: a
document's schema lists the values from here. Nothing of the package is imported, so that reading a
document needs no more.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from enum import StrEnum
from typing import Final, Literal, NamedTuple

ThreadState = Literal["ok", "narrowed", "drift", "unmanaged", "released"]
"""Whether a thread is where it should be."""

SandboxState = Literal["ok", "drift", "unpinned", "released", "conflict", "no-vmm"]
"""Whether a sandbox's threads are where they should be, and its exclusive CPUs its alone."""

ChangeState = Literal[SandboxState, "gone"]
"""The same in the history, where a sandbox may have ended."""

CheckVerdict = Literal["ok", "findings", "unknown"]
"""What `check` found."""

RowStatus = Literal["ok", "info", "warn", "fail"]
"""How a prerequisite is met (`doctor`)."""

TracedKind = Literal["hardware", "softirq", "ipi"]
"""What an interrupt of a pCPU is: a device's or a vector, a soft one, another pCPU's."""

Movability = Literal["movable", "managed", "guest"]
"""Whether an interrupt can be moved; `guest`: of a device given to a VM."""


class ThreadRole(StrEnum):
    """What a thread does for its sandbox (design.md, "Words")."""

    VCPU = "vcpu"
    IOTHREAD = "iothread"
    EMULATOR = "emulator"  # main loop, RCU, workers: every other thread of the VMM
    VHOST = "vhost"
    VIRTIOFSD = "virtiofsd"  # virtiofsd or nydusd
    KVM = "kvm"  # kernel helpers such as kvm-pit and kvm-nx-lpage-recovery
    SHIM = "shim"


class RoleSource(StrEnum):
    """Where a thread's role came from, best first (D6)."""

    DEBUGFS = "debugfs"  # kvm/<pid>-<fd>/vcpuN/pid
    QMP = "qmp"
    KVM_FD = "kvm-fd"  # ioctl(KVM_RUN) on a descriptor that is kvm-vcpu:N
    NAME = "name"
    ORDER = "order"  # threads are created in index order: inferred, not known
    FLAGS = "flags"  # task flags of the kernel (vhost, KVM helpers)
    PROCESS = "process"  # the role of the whole process (virtiofsd, shim)
    REST = "rest"  # what no source named: an emulator thread

    @property
    def text(self) -> str:
        """The source as people read it."""
        return _SOURCE_TEXTS.get(self, self.value)


_SOURCE_TEXTS: Final = {
    RoleSource.QMP: "QMP",
    RoleSource.KVM_FD: "KVM descriptor",
    RoleSource.NAME: "thread name",
    RoleSource.ORDER: "creation order",
    RoleSource.FLAGS: "kernel-thread flags",
    RoleSource.PROCESS: "process tree",
    RoleSource.REST: "by elimination",
}


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
    """What reports a container's cpuset (placement/masks.py ranks them)."""

    NRI = "nri"
    KATA = "persist.json"
    KUBELET = "kubelet"
    CGROUP = "cgroup"
    BUNDLE = "bundle"


class KataRuntime(StrEnum):
    """Which of Kata's two runtimes started a VM: they size VMs by different rules."""

    GO = "go"
    RUST = "runtime-rs"


class Provenance(StrEnum):
    """How it is known that a container's CPUs are exclusive, or are not (D9)."""

    ALLOCATOR = "allocator"
    KUBELET = "kubelet"
    CLAIM = "claim"
    ADMINISTRATOR = "administrator"
    INFERRED = "inferred"
    NONE = "none"


class NoteLevel(StrEnum):
    """How much a note matters."""

    INFO = "info"
    WARNING = "warning"


class Outcome(StrEnum):
    """What came of an action, read back from the kernel."""

    DONE = "done"
    GONE = "gone"  # the thread exited
    REUSED = "reused"  # the tid belongs to another thread now; nothing was undone
    REFUSED = "refused"  # EINVAL: no CPU of the target is in the thread's cpuset
    DENIED = "denied"  # EPERM: CAP_SYS_NICE is missing
    UNVERIFIED = "unverified"  # EACCES: the broker does not accept the process as a VMM's
    CLIPPED = "clipped"  # set, but the kernel applies fewer CPUs than asked
    FIXED = "fixed"  # a kernel thread whose affinity cannot be changed


class LinkState(StrEnum):
    """How well a link is known."""

    MEASURED = "measured"  # read since this guest started
    PROVEN = "proven"  # follows from what never changes, or from a rule proved in the lab
    INFERRED = "inferred"  # follows from a rule that this guest may not follow
    UNKNOWN = "unknown"

    @property
    def rank(self) -> int:
        """A number, higher for a state that is better known."""
        return _RANK[self]


_RANK: Final = {state: rank for rank, state in enumerate(reversed(LinkState))}


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


class RefusalKind(StrEnum):
    """Why a container did not get the CPUs it requested."""

    KUBELET_STATIC = "kubelet-static"
    FOREIGN_PLUGIN = "foreign-plugin"
    NOT_ENOUGH_CPUS = "not-enough-cpus"
    SHARED_MINIMUM = "shared-minimum"
    ALIGNMENT = "alignment"


class QuietLevel(StrEnum):
    """What is kept off exclusive pCPUs beside other tasks; each level does what the former does.

    OFF: nothing, not even looked at. REPORT: shown. IRQ: interrupts. FULL: the kernel's own work.
    """

    OFF = "off"
    REPORT = "report"
    IRQ = "irq"
    FULL = "full"

    @property
    def rank(self) -> int:
        """Return its place in this order."""
        return list(QuietLevel).index(self)

    @property
    def acts(self) -> bool:
        """Whether anything is written."""
        return self in {QuietLevel.IRQ, QuietLevel.FULL}


class CpuClass(StrEnum):
    """How a container has its CPUs.

    NONE: those of the shared pool, whatever they are at the moment. SHARE: CPUs of its own choice
    that stay in the shared pool, so that others may run there too. EXCLUSIVE: nobody else's.
    """

    NONE = "none"
    SHARE = "share"
    EXCLUSIVE = "exclusive"


class Method(StrEnum):
    """How a window was measured, best first."""

    PERF = "perf"  # records of every switch
    HIST = "hist"  # histograms that the kernel made of its tracepoints
    SCHEDSTAT = "schedstat"  # the difference of a CPU's slices and its own threads'
    WAIT = "wait"  # how long its own threads waited for it


class Verdict(StrEnum):
    """Whether a pCPU was its owner's alone."""

    PROVED = "proved"
    VIOLATED = "violated"
    UNPROVED = "unproved"


class TaskClass(StrEnum):
    """Whose task ran on an exclusive pCPU."""

    OWN = "own"  # placed there
    SAME_POD = "same-pod"
    OTHER_SANDBOX = "other-sandbox"
    USER = "user"
    UNBOUND_KERNEL = "unbound-kernel"
    PER_CPU_KERNEL = "per-cpu-kernel"  # unavoidable
    UNKNOWN = "unknown"


class GuestState(StrEnum):
    """The state of guest pinning in a sandbox."""

    OFF = "off"  # by setting, or because nothing is set at all
    IDLE = "idle"  # nothing to send
    PENDING = "pending"  # to be sent, perhaps again
    APPLIED = "applied"
    DENIED = "denied"  # not permitted by the guest's policy
    UNREACHABLE = "unreachable"
    FAILED = "failed"  # some container is not on its assigned guest CPUs


class Proof(StrEnum):
    """What is known of a cpuset that a guest reported as set."""

    NONE = "none"  # a success is no proof
    READ = "read"  # read back
    FITS = "fits"  # the CPU time used does not speak against it
    BROKEN = "broken"  # read back, or measured, as another one
    REFUSED = "refused"  # the agent refused


class Mode(StrEnum):
    """Whether affinities are set or only compared."""

    ACT = "act"
    OBSERVE = "observe"


# A number with its noun, for texts that people read.


def count(number: int, noun: str, plural: str = "") -> str:
    """Return `1 thread` or `2 threads`; `plural` where it is not the noun with an s."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def listed(names: Sequence[object], most: int) -> str:
    """Return the first names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more


# What helps where kata-pin runs: a command on a node, another one or a chart's value in a pod.
#
# `here` alone decides which. The kubelet sets KUBERNETES_SERVICE_HOST in every container that it
# starts, and systemd, podman and shells of a node do not have it.

_IN_POD: Final = "KUBERNETES_SERVICE_HOST"


class Remedy(NamedTuple):
    """One remedy: what helps on a node, and in a pod if that is something else.

    `value` is the chart's value that `pod` names, empty where it names none.
    """

    node: str
    pod: str = ""
    value: str = ""


def in_pod() -> bool:
    """Return whether this program runs in a container of Kubernetes."""
    return _IN_POD in os.environ


def here(remedy: Remedy, **names: object) -> str:
    """Return the remedy that fits; `names` are what its braces stand for."""
    text = remedy.pod if in_pod() and remedy.pod else remedy.node
    return text.format(**names)
