"""What keeps a task or an interrupt off exclusive pCPUs: a sentence, and a command where one does.

Facts: systemd.resource-control(5) (AllowedCPUs= needs cgroup v2), systemd.exec(5) (CPUAffinity=),
core-api/workqueue.rst (cpumask of unbound workers), core-api/irq/irq-affinity.rst,
admin-guide/kernel-parameters.txt (irqaffinity, nohz_full, rcu_nocbs), kubernetes.io on
reservedSystemCPUs. Pure.
"""

from __future__ import annotations

import re
import shlex
from typing import Final, NamedTuple

from kata_pin.model.cpuset import CpuSet
from kata_pin.model.measured.windows import Interrupt, SeenTask, TaskClass
from kata_pin.policy.isolation.places import place_of

WORKQUEUES: Final = "/sys/devices/virtual/workqueue/cpumask"

_UNBOUND_WORKER: Final = re.compile(r"kworker/(?:R-|u[0-9]+:)")
_SHIM: Final = re.compile(r"containerd-shi|kata-shim")
_IRQ_THREAD: Final = re.compile(r"irq/([0-9]{1,6})-")


class Remedy(NamedTuple):
    """What to do; `command` is empty where no single command does it."""

    text: str
    command: str = ""


class Node(NamedTuple):
    """What remedies depend on: the pCPUs that are nobody's alone, and whether cgroups are v2."""

    free: CpuSet
    cgroup_v2: bool


NONE_FREE: Final = Remedy("every pCPU is exclusive: leave one to the node (reservedSystemCPUs)")


def of_task(task: SeenTask | None, kind: TaskClass, node: Node, sandbox: str = "") -> Remedy:
    """Return the remedy for a task that ran on an exclusive pCPU; `sandbox` is its sandbox's id."""
    if task is None or kind is TaskClass.UNKNOWN:
        return Remedy(
            "ended before it could be identified: look for programs that are started there"
        )
    if kind is TaskClass.SAME_POD:
        return Remedy(
            "set `overhead` to housekeeping to keep a pod's own threads off its exclusive pCPUs",
            f"kata-pin explain {sandbox}",
        )
    if kind is TaskClass.OTHER_SANDBOX:
        if _SHIM.match(task.comm):  # no pass touches it: `pin` would not help
            return Remedy(
                "shims are not touched by default: set overhead_roles to {shim: housekeeping}"
            )
        return Remedy("apply the affinities of that sandbox again", f"kata-pin pin {sandbox}")
    if kind is TaskClass.PER_CPU_KERNEL:
        return _per_cpu(task.comm)
    if not node.free:
        return NONE_FREE
    if kind is TaskClass.UNBOUND_KERNEL:
        return _kernel(task, node.free)
    return _user(task, node)


def of_interrupt(interrupt: Interrupt, node: Node) -> Remedy:
    """Return the remedy for an interrupt on an exclusive pCPU."""
    if interrupt.irq >= 0:
        if not node.free:
            return NONE_FREE
        path = f"/proc/irq/{interrupt.irq}/smp_affinity_list"
        text = "move the interrupt; for good: irqaffinity= at boot, and no irqbalance there"
        return Remedy(text, f"echo {node.free} > {path}")
    if interrupt.name == "local_timer":
        return Remedy("nohz_full= at boot stops the tick while one task runs")
    if interrupt.name == "RCU":
        return Remedy("rcu_nocbs= at boot moves RCU callbacks to other pCPUs")
    if interrupt.kind == "softirq":
        return Remedy("softirqs follow the interrupts and timers of this pCPU")
    return Remedy("other pCPUs ask for it; it cannot be kept off")


def _per_cpu(comm: str) -> Remedy:
    name = comm.partition("/")[0]
    known = {
        "ksoftirqd": "it handles softirqs raised here: move device interrupts (irqaffinity=)",
        "kworker": "work queued on this pCPU; for vmstat raise vm.stat_interval",
        "migration": "the kernel moves tasks off this pCPU with it",
        "rcuc": "rcu_nocbs= at boot moves RCU callbacks to other pCPUs",
        "rcuop": "rcu_nocbs= at boot moves RCU callbacks to other pCPUs",
        "cpuhp": "a CPU went on- or offline",
    }
    return Remedy(f"unavoidable: {known.get(name, 'the kernel needs it on this pCPU')}")


def _kernel(task: SeenTask, free: CpuSet) -> Remedy:
    irq = _IRQ_THREAD.match(task.comm)
    if irq is not None:
        path = f"/proc/irq/{irq[1]}/smp_affinity_list"
        return Remedy("it follows its interrupt: move that", f"echo {free} > {path}")
    if _UNBOUND_WORKER.match(task.comm):
        text = "keep unbound workqueues off; for good: isolcpus= or workqueue.unbound_cpus= at boot"
        return Remedy(text, f"echo {mask(free)} > {WORKQUEUES}")
    text = "move the kernel thread; for good: kthread_cpus= or isolcpus= at boot"
    return Remedy(text, f"taskset -p -c {free} {task.tid}")


def _user(task: SeenTask, node: Node) -> Remedy:
    if task.affinity is None:
        return Remedy(f"it ended; restrict what started it: {task.parent or 'unknown'}")
    place = place_of(task.cgroup)
    if place.pod_uid:
        return Remedy(
            f"pod {place.pod_uid} is not kept off: the kubelet needs cpuManagerPolicy: static",
            f"taskset -a -p -c {node.free} {task.pid}",
        )
    if place.unit and node.cgroup_v2:
        unit = shlex.quote(_settable(task.cgroup, place.unit))
        return Remedy(
            "restrict the unit; for the whole system also system.slice and user.slice",
            f"systemctl set-property {unit} AllowedCPUs={node.free}",
        )
    if place.unit.endswith(".service"):
        text = f"set CPUAffinity={node.free} in a drop-in of {place.unit} to keep it so"
        return Remedy(text, f"taskset -a -p -c {node.free} {task.pid}")
    text = "restrict the process; for all programs: CPUAffinity= in /etc/systemd/system.conf"
    return Remedy(text, f"taskset -a -p -c {node.free} {task.pid}")


def _settable(cgroup: str, unit: str) -> str:
    """Return the unit to restrict: of users' own units the user's slice, which root manages."""
    parts = cgroup.split("/")
    users = [one for one in parts if re.match(r"user-[0-9]+\.slice\Z", one)]
    return users[0] if users and f"user@{users[0][5:-6]}.service" in parts else unit


def mask(cpus: CpuSet) -> str:
    """Return a set as the kernel's hexadecimal mask, in groups of 32 bits."""
    bits = cpus.bits
    groups: list[int] = []
    while bits or not groups:
        groups.append(bits & 0xFFFFFFFF)
        bits >>= 32
    first, *others = reversed(groups)
    return ",".join([f"{first:x}", *(f"{one:08x}" for one in others)])
