"""What keeps a task or an interrupt off exclusive pCPUs: a sentence, and a command where one does.

Facts: systemd.resource-control(5) (AllowedCPUs= needs cgroup v2), systemd.exec(5) (CPUAffinity=),
core-api/workqueue.rst (cpumask of unbound workers), core-api/irq/irq-affinity.rst, admin-
guide/kernel-parameters.txt (irqaffinity, nohz_full, rcu_nocbs), kubernetes.io on
reservedSystemCPUs.
"""

from __future__ import annotations

import re
import shlex
from typing import Final, NamedTuple

from kata_pin.base.counters import MeasuredInterrupt, SeenTask
from kata_pin.base.cpuset import CpuSet
from kata_pin.base.values import TaskClass
from kata_pin.placement.owners import place_of

WORKQUEUES: Final = "/sys/devices/virtual/workqueue/cpumask"


class IntruderRemedy(NamedTuple):
    """What to do; `command` is empty where no single command does it."""

    text: str
    command: str = ""


OURS: Final = IntruderRemedy(
    "kata-pin's own: its commands and hooks leave exclusive pCPUs as soon as they start, its "
    "daemon once a pod has them"
)
RUNTIME: Final = IntruderRemedy(
    "part of systemd, the container runtime or the kubelet: do not restrict it, because shims and "
    "VMs inherit that, and Kata then refuses VMs with more vCPUs"
)
"""Seen with Kata 3.32: containerd's AllowedCPUs= and systemd's CPUAffinity= reach the shims."""

_UNBOUND_WORKER: Final = re.compile(r"kworker/(?:R-|u[0-9]+:)")
_SHIM: Final = re.compile(r"containerd-shi|kata-shim")
_OUR_UNIT: Final = "kata-pin.service"
_OURS: Final = frozenset({"kata-pin", "kata-pin-hook"})
_RUNTIME: Final = re.compile(
    r"(containerd(-shim.*)?|dockerd?|crio|cri-o|conmon|podman|runc|crun|kubelet|systemd"
    r"|(k3s|k0s|rke2|microk8s)([.-].*)?|snap\.microk8s\..*|kata-(shim|runtime).*)\Z"
)
"""Programs and services that start VMs, or start what does."""
_IRQ_THREAD: Final = re.compile(r"irq/([0-9]{1,6})-")


class NodeConditions(NamedTuple):
    """What remedies depend on: the pCPUs that are nobody's alone, and whether cgroups are v2."""

    free: CpuSet
    cgroup_v2: bool


NONE_FREE: Final = IntruderRemedy(
    "every pCPU is exclusive: leave one to the node (reservedSystemCPUs)"
)


def of_task(
    task: SeenTask | None,
    kind: TaskClass,
    node: NodeConditions,
    sandbox: str = "",
    *,
    is_theirs: bool = False,
    is_vms: bool = False,
) -> IntruderRemedy:
    """Return the remedy for a task that ran on an exclusive pCPU; `sandbox` is its sandbox's id.

    `is_theirs`: the pCPU is in that sandbox's mask too. `is_vms`: the task is known as one of the
    sandbox's VM, not by its cgroup alone.
    """
    in_pod = is_vms or (not sandbox and bool(task and place_of(task.cgroup).pod_uid))
    if task is not None and is_ours(task) and not in_pod:
        return OURS  # what runs in a pod has any name; hooks run in a VM's cgroup, beside the VM
    if task is None or kind is TaskClass.UNKNOWN:
        return IntruderRemedy(
            "ended before it could be identified: look for programs that are started there"
        )
    if kind is TaskClass.SAME_POD:
        return IntruderRemedy(
            "keep the pod's own threads off its exclusive pCPUs: set overhead: housekeeping, or "
            "overhead: reserve:1 if the VM's cgroup allows no other pCPUs (see kata-pin doctor)",
            f"kata-pin explain {sandbox}",
        )
    if kind is TaskClass.OTHER_SANDBOX:
        if _SHIM.match(task.process or task.comm):  # no pass touches it: `pin` would not help
            return IntruderRemedy(
                "shims are not pinned by default: set overhead_roles: {shim: housekeeping}"
            )
        if is_theirs:  # where its affinities put it
            text = "the pCPU is that sandbox's too: give one of the two pods other CPUs"
            return IntruderRemedy(text, f"kata-pin explain {sandbox}")
        return IntruderRemedy(
            "apply the affinities of that sandbox again", f"kata-pin pin {sandbox}"
        )
    if kind is TaskClass.PER_CPU_KERNEL:
        return _per_cpu(task.comm)
    if kind is TaskClass.USER and _starts_vms(task):
        return RUNTIME
    if not node.free:
        return NONE_FREE
    if kind is TaskClass.UNBOUND_KERNEL:
        return _kernel(task, node.free)
    return _user(task, node)


def of_interrupt(interrupt: MeasuredInterrupt, node: NodeConditions) -> IntruderRemedy:
    """Return the remedy for an interrupt on an exclusive pCPU."""
    if interrupt.managed:
        return IntruderRemedy(
            "the kernel placed it and lets nobody move it: it is silent while nothing on this pCPU "
            "submits I/O; if other pCPUs share it, booting with isolcpus=managed_irq moves it"
        )
    if interrupt.irq >= 0:
        if not node.free:
            return NONE_FREE
        path = f"/proc/irq/{interrupt.irq}/smp_affinity_list"
        text = (
            "move the interrupt; permanently: boot with irqaffinity=, and without irqbalance there"
        )
        return IntruderRemedy(text, f"echo {node.free} > {path}")
    if interrupt.name == "local_timer":
        return IntruderRemedy("nohz_full= at boot stops the tick while one task runs")
    if interrupt.name == "RCU":
        return IntruderRemedy("rcu_nocbs= at boot moves RCU callbacks to other pCPUs")
    if interrupt.kind == "softirq":
        return IntruderRemedy("softirqs follow the interrupts and timers of this pCPU")
    return IntruderRemedy("other pCPUs send it; it cannot be kept off")


def _per_cpu(comm: str) -> IntruderRemedy:
    name = comm.partition("/")[0]
    known = {
        "ksoftirqd": "it handles softirqs raised here: move device interrupts (irqaffinity=)",
        "kworker": "work queued on this pCPU; for vmstat raise vm.stat_interval",
        "migration": "the kernel moves tasks off this pCPU with it",
        "rcuc": "rcu_nocbs= at boot moves RCU callbacks to other pCPUs",
        "rcuop": "rcu_nocbs= at boot moves RCU callbacks to other pCPUs",
        "cpuhp": "a CPU went on- or offline",
    }
    return IntruderRemedy(f"unavoidable: {known.get(name, 'the kernel needs it on this pCPU')}")


def _kernel(task: SeenTask, free: CpuSet) -> IntruderRemedy:
    irq = _IRQ_THREAD.match(task.comm)
    if irq is not None:
        path = f"/proc/irq/{irq[1]}/smp_affinity_list"
        return IntruderRemedy("it follows its interrupt: move that", f"echo {free} > {path}")
    if _UNBOUND_WORKER.match(task.comm):
        text = (
            "keep unbound workqueues off; permanently: boot with isolcpus= or "
            "workqueue.unbound_cpus="
        )
        return IntruderRemedy(text, f"echo {mask(free)} > {WORKQUEUES}")
    text = "move the kernel thread; permanently: boot with kthread_cpus= or isolcpus="
    return IntruderRemedy(text, f"taskset -p -c {free} {task.tid}")


def is_ours(task: SeenTask) -> bool:
    """Whether a task is a command, a hook or the daemon of kata-pin, by its name or its unit."""
    return bool(_OURS & {task.comm, task.process}) or place_of(task.cgroup).unit == _OUR_UNIT


def _starts_vms(task: SeenTask) -> bool:
    """Whether VMs inherit a restriction of the task; of one that ended, of the task's parent."""
    if task.affinity is None:
        return bool(_RUNTIME.match(task.parent.partition(" ")[0]))
    unit = place_of(task.cgroup).unit
    name = (task.process or task.comm) if task.by_root else ""
    service = unit.removesuffix(".service") if unit.endswith(".service") else ""
    return unit == "init.scope" or any(_RUNTIME.match(one) for one in (name, service))


def _user(task: SeenTask, node: NodeConditions) -> IntruderRemedy:
    if task.affinity is None:
        return IntruderRemedy(f"it ended; restrict what started it: {task.parent or 'unknown'}")
    place = place_of(task.cgroup)
    if place.pod_uid:
        return IntruderRemedy(
            f"pod {place.pod_uid} is not kept off: the kubelet needs cpuManagerPolicy: static",
            f"taskset -a -p -c {node.free} {task.pid}",
        )
    unit = _settable(task.cgroup, place.unit)
    if unit and node.cgroup_v2:
        return IntruderRemedy(
            "restrict the unit, but never system.slice, which contains the container runtime",
            f"systemctl set-property {shlex.quote(unit)} AllowedCPUs={node.free}",
        )
    command = f"taskset -a -p -c {node.free} {task.pid}"
    if place.unit.endswith(".service"):
        text = f"set CPUAffinity={node.free} in a drop-in of {place.unit} to make it permanent"
        return IntruderRemedy(text, command)
    return IntruderRemedy("restrict the process", command)


def _settable(cgroup: str, unit: str) -> str:
    """Return the unit to restrict: of users' own units the user's slice, which root manages.

    Empty for other slices: the container runtime may be in them.
    """
    parts = cgroup.split("/")
    users = [one for one in parts if re.match(r"user-[0-9]+\.slice\Z", one)]
    if users and f"user@{users[0][5:-6]}.service" in parts:
        return users[0]
    return "" if unit.endswith(".slice") and not unit.startswith("user") else unit


def mask(cpus: CpuSet) -> str:
    """Return a set as the kernel's hexadecimal mask, in groups of 32 bits."""
    bits = cpus.bits
    groups: list[int] = []
    while bits or not groups:
        groups.append(bits & 0xFFFFFFFF)
        bits >>= 32
    first, *others = reversed(groups)
    return ",".join([f"{first:x}", *(f"{one:08x}" for one in others)])
