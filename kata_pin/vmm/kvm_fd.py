"""vCPU threads by the system call they wait in: ioctl(KVM_RUN) on a descriptor `kvm-vcpu:N`.

/proc/<pid>/task/<tid>/syscall shows a sleeping thread's system call and its arguments, and
/proc/<pid>/fd what the descriptor is; both come from the kernel and need CAP_SYS_PTRACE. N is KVM's
vCPU id (the APIC id on x86). A busy vCPU reads `running`, so it is tried again shortly. Kernel
workers inside the VMM show the call that created them, so they are never asked. The descriptor of
an unplugged vCPU stays open, so an unused one proves something only for boot vCPUs, which cannot be
unplugged. Under TCG there are no such descriptors.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from kata_pin.errors import ParseError
from kata_pin.model.steps import STEP, Steps, at_once
from kata_pin.model.thread import Task, ThreadKey
from kata_pin.vmm.host_access import HostPaths
from kata_pin.wire.proc import parse_syscall, vcpu_of_link

TRIES: Final = 3
_SYSCALL_BYTES: Final = 512


@dataclass(frozen=True)
class Waiting:
    """KVM's vCPU id by thread, and the threads that were running at each try."""

    ids: Mapping[ThreadKey, int]
    running: frozenset[ThreadKey]


def read_waiting_in_steps(root: HostPaths, tasks: Iterable[Task], machine: str) -> Steps[Waiting]:
    """Return what the threads wait in; `machine` is uname's, for the number of ioctl."""
    ids: dict[ThreadKey, int] = {}
    left = [task.key for task in tasks if not task.user_worker and not task.kernel]
    for _ in range(TRIES):
        running = []
        for count, key in enumerate(left, start=1):
            if count % STEP == 0:
                yield
            fd = _kvm_run_fd(root, key, machine)
            if fd is None:
                running.append(key)
            elif fd >= 0:
                number = _vcpu_of(root, key.tgid, fd)
                if number is not None:
                    ids[key] = number
        left = running
        if not left:
            break
        os.sched_yield()
    return Waiting(ids, frozenset(left))


read_waiting = at_once(read_waiting_in_steps)


def open_vcpus(root: HostPaths, pid: int) -> frozenset[int]:
    """Return the KVM ids of all vCPU descriptors, those of unplugged vCPUs included."""
    found = set()
    try:
        for name in root.calls.listdir(root.proc(pid, "fd")):
            number = _vcpu_of(root, pid, int(name))
            if number is not None:
                found.add(number)
    except OSError:
        pass  # gone, or no right to look: nothing is known
    return frozenset(found)


def _kvm_run_fd(root: HostPaths, key: ThreadKey, machine: str) -> int | None:
    """Return the descriptor it runs a vCPU on, -1 when it does something else, None: running."""
    path = f"{root.proc(key.tgid)}/task/{key.tid}/syscall"
    try:
        call = parse_syscall(root.calls.read(path, _SYSCALL_BYTES))
    except (OSError, ParseError):
        return -1
    if call is None:
        return None
    fd = call.kvm_run_fd(machine)
    return -1 if fd is None else fd


def _vcpu_of(root: HostPaths, pid: int, fd: int) -> int | None:
    try:
        return vcpu_of_link(root.calls.readlink(root.proc(pid, "fd", fd)))
    except OSError:
        return None
