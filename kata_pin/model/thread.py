"""Threads: their identity, what they do for the sandbox, and how that is known."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

from kata_pin.model.cpuset import CpuSet

PF_USER_WORKER: Final = 0x0000_4000
"""Task flag of a kernel worker that lives in a user process (vhost since Linux 6.4, sched.h)."""

PF_KTHREAD: Final = 0x0020_0000
"""Task flag of a kernel thread (sched.h)."""


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


class ProcessKey(NamedTuple):
    """A process that cannot be mistaken for a later one with the same pid.

    `starttime` is field 22 of proc_pid_stat(5), in clock ticks since boot.
    """

    pid: int
    starttime: int


@dataclass(frozen=True, slots=True)
class Process:
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


class ThreadKey(NamedTuple):
    """A thread's identity (D5): a bare tid may name another thread a moment later.

    A tuple, because a pass hashes hundreds of them.
    """

    tgid: int
    tid: int
    starttime: int


@dataclass(frozen=True, slots=True)
class Task:
    """One thread as /proc and the scheduler show it, before its role is known.

    `affinity` is what sched_getaffinity returned; `cpuset` what the thread's cgroup allows
    (effective; empty: unknown), `cgroup` its path. `last_cpu` and `cpu_ticks` are stat fields 39
    and 14 + 15.
    """

    key: ThreadKey
    comm: str
    flags: int
    affinity: CpuSet
    cpuset: CpuSet
    cgroup: str
    last_cpu: int = -1
    cpu_ticks: int = 0

    @property
    def user_worker(self) -> bool:
        """Whether it is a kernel worker inside a user process."""
        return bool(self.flags & PF_USER_WORKER)

    @property
    def kernel(self) -> bool:
        """Whether it is a kernel thread."""
        return bool(self.flags & PF_KTHREAD)

    def moved(self, affinity: CpuSet, cpuset: CpuSet, cgroup: str) -> Task:
        """Return the same thread elsewhere; half the time of dataclasses.replace."""
        return Task(
            self.key, self.comm, self.flags, affinity, cpuset, cgroup, self.last_cpu, self.cpu_ticks
        )


@dataclass(frozen=True, slots=True)
class Role:
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
