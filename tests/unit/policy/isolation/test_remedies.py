"""What keeps a task away: each with a command that an operator can run."""

from __future__ import annotations

import pytest

from kata_pin.model.cpuset import CpuSet
from kata_pin.model.measured.windows import Interrupt, SeenTask, TaskClass
from kata_pin.policy.isolation.remedies import NONE_FREE, Node, mask, of_interrupt, of_task

V1, V2 = Node(CpuSet.parse("0-3,8"), False), Node(CpuSet.parse("0-3,8"), True)
SESSION = "/user.slice/user-1000.slice/session-3.scope"
MANAGED = "/user.slice/user-1000.slice/user@1000.service/app.slice/x.service"
POD = "/kubepods/burstable/pod0b7f0e2c-1a2b-4c3d-8e4f-5a6b7c8d9e0f/abc"


@pytest.mark.parametrize(
    ("cgroup", "node", "command"),
    [
        ("/system.slice/a b.service", V2, "systemctl set-property 'a b.service' AllowedCPUs=0-3,8"),
        ("/system.slice/cron.service", V1, "taskset -a -p -c 0-3,8 30"),
        (SESSION, V2, "systemctl set-property session-3.scope AllowedCPUs=0-3,8"),
        (MANAGED, V2, "systemctl set-property user-1000.slice AllowedCPUs=0-3,8"),
        (POD, V2, "taskset -a -p -c 0-3,8 30"),
        ("/", V2, "taskset -a -p -c 0-3,8 30"),
    ],
)
def test_user_tasks(cgroup: str, node: Node, command: str) -> None:
    """By unit where that works, else the process itself."""
    task = SeenTask(31, 30, "sh", affinity=node.free, cgroup=cgroup)
    assert of_task(task, TaskClass.USER, node).command == command


@pytest.mark.parametrize(
    ("comm", "command"),
    [
        ("kworker/u8:2-events", "echo 10f > /sys/devices/virtual/workqueue/cpumask"),
        ("kworker/R-kvfre", "echo 10f > /sys/devices/virtual/workqueue/cpumask"),
        ("irq/36-virtio", "echo 0-3,8 > /proc/irq/36/smp_affinity_list"),
        ("kswapd0", "taskset -p -c 0-3,8 40"),
    ],
)
def test_kernel_threads(comm: str, command: str) -> None:
    """Workers by their mask, threads of interrupts by the interrupt, others by themselves."""
    assert of_task(SeenTask(40, 40, comm), TaskClass.UNBOUND_KERNEL, V2).command == command


def test_what_has_no_command() -> None:
    """Per-CPU kernel threads have a reason, tasks that are gone a hint."""
    found = of_task(SeenTask(20, 20, "ksoftirqd/4"), TaskClass.PER_CPU_KERNEL, V2)
    assert found.text.startswith("unavoidable: it handles softirqs")
    assert not found.command
    assert not of_task(None, TaskClass.UNKNOWN, V2).command
    gone = of_task(SeenTask(9, 9, "cc1", parent="make (pid 8)"), TaskClass.USER, V2)
    assert gone == ("it ended; restrict what started it: make (pid 8)", "")
    nowhere = Node(CpuSet(), True)
    assert of_task(SeenTask(1, 1, "x"), TaskClass.USER, nowhere) == NONE_FREE
    assert of_task(SeenTask(1, 1, "x"), TaskClass.UNBOUND_KERNEL, nowhere) == NONE_FREE


def test_sandboxes() -> None:
    """Kata-pin's own commands for threads of sandboxes."""
    vcpu = SeenTask(50, 49, "CPU 1/KVM")
    assert of_task(vcpu, TaskClass.OTHER_SANDBOX, V2, "p2").command == "kata-pin pin p2"
    shim = of_task(SeenTask(51, 51, "containerd-shim"), TaskClass.OTHER_SANDBOX, V2, "p2")
    assert "overhead_roles" in shim.text  # no pass touches it
    assert not shim.command
    assert of_task(vcpu, TaskClass.SAME_POD, V2, "p1").command == "kata-pin explain p1"


def test_interrupts() -> None:
    """Devices' interrupts can be moved, others can be made rarer or not at all."""
    disk = Interrupt(4, "hardware", "nvme0q5", 36, 3, 100, 50)
    assert of_interrupt(disk, V2).command == "echo 0-3,8 > /proc/irq/36/smp_affinity_list"
    assert of_interrupt(disk, Node(CpuSet(), True)) == NONE_FREE
    for name, kind, word in (
        ("local_timer", "hardware", "nohz_full="),
        ("RCU", "softirq", "rcu_nocbs="),
        ("SCHED", "softirq", "softirqs follow"),
        ("reschedule", "ipi", "cannot be kept off"),
    ):
        found = of_interrupt(Interrupt(4, kind, name, -1, 3, 100, 50), V2)
        assert word in found.text
        assert not found.command


@pytest.mark.parametrize(
    ("cpus", "expected"),
    [("", "0"), ("0-3,8", "10f"), ("32", "1,00000000"), ("0,64-65", "3,00000000,00000001")],
)
def test_mask(cpus: str, expected: str) -> None:
    """Groups of 32 bits, as the kernel writes them."""
    assert mask(CpuSet.parse(cpus)) == expected
