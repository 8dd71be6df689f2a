"""What keeps a task away: each with a command that an operator can run."""

from __future__ import annotations

import pytest

from kata_pin.base.counters import MeasuredInterrupt, SeenTask
from kata_pin.base.cpuset import CpuSet
from kata_pin.base.values import TaskClass, TracedKind
from kata_pin.placement.remedies import NONE_FREE, NodeConditions, mask, of_interrupt, of_task

V1, V2 = NodeConditions(CpuSet.parse("0-3,8"), False), NodeConditions(CpuSet.parse("0-3,8"), True)
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
        ("/system.slice", V2, "taskset -a -p -c 0-3,8 30"),
        ("/runtime.slice/x", V2, "taskset -a -p -c 0-3,8 30"),
        ("/user.slice", V2, "systemctl set-property user.slice AllowedCPUs=0-3,8"),
    ],
)
def test_user_tasks(cgroup: str, node: NodeConditions, command: str) -> None:
    """By unit where that works, else the process itself."""
    task = SeenTask(31, 30, "sh", affinity=node.free, cgroup=cgroup)
    assert of_task(task, TaskClass.USER, node).command == command


RESTRICTED = "do not restrict it, because shims and VMs inherit that"


@pytest.mark.parametrize(
    ("comm", "cgroup"),
    [
        ("systemd", "/init.scope"),
        ("containerd", "/system.slice/containerd.service"),
        ("containerd", "/"),
        ("containerd-shim", "/system.slice/containerd.service"),
        ("containerd-shim", POD),
        ("crio", "/system.slice/crio.service"),
        ("conmon", "/runtime.slice/crio-1.scope"),
        ("kubelet", "/system.slice/kubelet.service"),
        ("k3s-server", "/system.slice/k3s.service"),
        ("sh", "/system.slice/snap.microk8s.daemon-containerd.service"),
    ],
)
@pytest.mark.parametrize("node", [V1, V2])
def test_what_starts_vms_is_never_restricted(comm: str, cgroup: str, node: NodeConditions) -> None:
    """VMs inherit a restriction of the container runtime: Kata then refuses some."""
    task = SeenTask(31, 30, "worker", 0, node.free, cgroup, by_root=True, process=comm)
    found = of_task(task, TaskClass.USER, node)
    assert RESTRICTED in found.text
    assert not found.command
    ended = SeenTask(31, 31, "runc", parent=f"{comm} (pid 30)")
    if comm != "sh":
        assert RESTRICTED in of_task(ended, TaskClass.USER, node).text


def test_a_users_program_is_restricted_whatever_its_name() -> None:
    """Only root starts the container runtime."""
    task = SeenTask(31, 30, "containerd", 0, V2.free, SESSION, process="containerd")
    assert of_task(task, TaskClass.USER, V2).command.startswith("systemctl set-property session-3")


@pytest.mark.parametrize("node", [V1, V2, NodeConditions(CpuSet(), True)])
@pytest.mark.parametrize(
    "task",
    [
        SeenTask(31, 31, "kata-pin", 0, V2.free, SESSION, process="kata-pin"),
        SeenTask(32, 31, "grpc", 0, V2.free, "/system.slice/kata-pin.service", process="python3"),
        SeenTask(33, 33, "kata-pin-hook", parent="containerd-shim (pid 30)"),
    ],
)
def test_what_is_ours_is_named_as_ours(task: SeenTask, node: NodeConditions) -> None:
    """A command, the daemon, a hook that ended: nothing is to be done, nothing is restricted."""
    found = of_task(task, TaskClass.USER, node)
    assert found.text.startswith("kata-pin's own")
    assert not found.command


def test_what_runs_in_a_pod_is_not_ours_by_its_name() -> None:
    """It is that pod's; a hook runs in the cgroup of a sandbox's shim, where no pod starts any."""
    pod = "/kubepods.slice/kubepods-pod12345678_1234_1234_1234_123456789abc.slice"
    task = SeenTask(31, 31, "kata-pin", 0, V2.free, pod, process="kata-pin")
    assert of_task(task, TaskClass.USER, V2).text.startswith("pod 12345678-")
    assert of_task(task, TaskClass.SAME_POD, V2, "p1").text.startswith("kata-pin's own")
    vms = of_task(task, TaskClass.SAME_POD, V2, "p1", is_vms=True)
    assert vms.command == "kata-pin explain p1", "a VMM may have any name too"


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
    nowhere = NodeConditions(CpuSet(), True)
    assert of_task(SeenTask(1, 1, "x"), TaskClass.USER, nowhere) == NONE_FREE
    assert of_task(SeenTask(1, 1, "x"), TaskClass.UNBOUND_KERNEL, nowhere) == NONE_FREE


def test_sandboxes() -> None:
    """Kata-pin's own commands for threads of sandboxes."""
    vcpu = SeenTask(50, 49, "CPU 1/KVM")
    assert of_task(vcpu, TaskClass.OTHER_SANDBOX, V2, "p2").command == "kata-pin pin p2"
    shared = of_task(vcpu, TaskClass.OTHER_SANDBOX, V2, "p2", is_theirs=True)
    assert shared.text.startswith("the pCPU is that sandbox's too: give one")
    assert shared.command == "kata-pin explain p2", "to apply its affinities again changes nothing"
    shim = of_task(SeenTask(51, 51, "containerd-shim"), TaskClass.OTHER_SANDBOX, V2, "p2")
    assert "overhead_roles" in shim.text  # no pass touches it
    assert not shim.command
    assert of_task(vcpu, TaskClass.SAME_POD, V2, "p1").command == "kata-pin explain p1"


def test_interrupts() -> None:
    """Devices' interrupts can be moved, others can be made rarer or not at all."""
    disk = MeasuredInterrupt(4, "hardware", "nvme0q5", 36, 3, 100, 50)
    assert of_interrupt(disk, V2).command == "echo 0-3,8 > /proc/irq/36/smp_affinity_list"
    assert of_interrupt(disk, NodeConditions(CpuSet(), True)) == NONE_FREE
    found = of_interrupt(disk._replace(managed=True), V2)
    assert "lets nobody move it" in found.text
    assert not found.command, "the kernel would refuse it"
    vectors: tuple[tuple[str, TracedKind, str], ...] = (
        ("local_timer", "hardware", "nohz_full="),
        ("RCU", "softirq", "rcu_nocbs="),
        ("SCHED", "softirq", "softirqs follow"),
        ("reschedule", "ipi", "cannot be kept off"),
    )
    for name, kind, word in vectors:
        found = of_interrupt(MeasuredInterrupt(4, kind, name, -1, 3, 100, 50), V2)
        assert word in found.text
        assert not found.command


@pytest.mark.parametrize(
    ("cpus", "expected"),
    [("", "0"), ("0-3,8", "10f"), ("32", "1,00000000"), ("0,64-65", "3,00000000,00000001")],
)
def test_mask(cpus: str, expected: str) -> None:
    """Groups of 32 bits, as the kernel writes them."""
    assert mask(CpuSet.parse(cpus)) == expected
