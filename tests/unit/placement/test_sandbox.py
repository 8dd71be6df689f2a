"""The lines of `explain`."""

from __future__ import annotations

from msgspec.structs import replace

from kata_pin.base.placement import Node
from kata_pin.base.sandbox import GuestTopology, Sandbox, Thread
from kata_pin.base.settings import PlacementSettings
from kata_pin.base.values import ContainerState, KataRuntime
from kata_pin.placement.explain import explain
from tests.support.at_once import place
from tests.support.world import (
    exclusive,
    main_thread,
    node,
    overhead,
    pause,
    sandbox,
    shared,
    vcpus,
)

WHOLE = """
sandbox pod (pod)
VMM
  pid 1000 (/usr/bin/qemu), confirmed by test
containers
  pause (sandbox, running): cpuset 2, from test
  app (container, running): cpuset 4-5, from test
  log (container, running): cpuset 0-1, from test
  init (container, stopped, does not count): cpuset 9, from test
mask
  0-1,4-5: union of the containers' cpusets
  exclusive 4-5, shared 0-1
  overhead threads and unpaired vCPUs also on 2: the pod sandbox's own cpuset
exclusive
  pause: not exclusive: it is the pod sandbox
  app: 4-5 (inferred): CPU quota equals 2 CPUs
  log: not exclusive: no CPU quota, and CPU shares are none, not 2048
VM size
  the VM has 3 vCPUs for 2 exclusive CPUs
threads
  vcpu 0 (tid 1100, source: debugfs): affinity 4, expected 0-2: unpaired vCPU: OVERHEAD
  vcpu 1 (tid 1101, source: debugfs): affinity 4 as expected: PAIRED
  vcpu 2 (tid 1102, source: debugfs): affinity 4, expected 5: PAIRED
  emulator (tid 1000, source: by elimination): affinity 0-2 as expected: OVERHEAD
notes
  none
""".replace("OVERHEAD", "shared CPUs (overhead: auto)").replace(
    "PAIRED", "paired with exclusive CPUs of container app"
)


def told(pod: Sandbox, threads: list[Thread], where: Node | None = None) -> str:
    """Return the lines as one text."""
    at = where or node()
    return "\n".join(explain(pod, threads, place(pod, threads, at), at))


def test_whole_text() -> None:
    """Every section, in order, with what an operator asks for."""
    stopped = replace(shared("init", "9"), state=ContainerState.STOPPED)
    pod = sandbox(pause("2"), exclusive("app", "4-5"), shared("log", "0-1"), stopped)
    threads = [main_thread(on="0-2"), *vcpus(0, 1, 2, on="4", cpuset="0-5")]
    assert told(pod, threads) == WHOLE.strip()


def test_fewer_vcpus_and_remedies() -> None:
    """A VM that is too small is reported with numbers and remedies."""
    text = told(sandbox(exclusive("app", "4-7")), vcpus(0, 1))
    assert "  the VM has 2 vCPUs for 4 exclusive CPUs; remedies: raise default_vcpus by 3" in text
    assert "  warning: fewer-vcpus: the VM has 2 vCPUs" in text


def test_each_remedy_says_what_it_changes() -> None:
    """The file and its content, what it means for other pods, and on what it was tried."""
    pod = sandbox(exclusive("app", "4-7"))
    assert pod.vmm is not None
    vmm = replace(pod.vmm, runtime=KataRuntime.RUST, guest=GuestTopology(boot=1))
    pod = replace(pod, vmm=vmm)
    text = told(pod, vcpus(0))
    assert (
        "  remedy class: config.d/90-kata-pin.toml: '[hypervisor.qemu]\\noverhead_vcpus = 4.2'; "
        "other pods: none: only pods of the class have it"
    ) in text
    assert "tried: runtime-rs 4.1.0, QEMU, containerd" in text
    assert "  remedy quota: the kubelet's configuration: " in text
    assert "remedy default_vcpus" not in text


def test_no_vcpu_for_the_guest_itself() -> None:
    """As many vCPUs as exclusive CPUs is one too few, and reported."""
    text = told(sandbox(exclusive("app", "4-5")), vcpus(0, 1))
    assert "2 vCPUs for 2 exclusive CPUs, none is left for the guest's own work; remedies" in text


def test_step_and_cgroup() -> None:
    """A thread that a cgroup keeps from its CPUs has the cgroup and the fallback in its line."""
    where = node(settings=PlacementSettings(overhead=overhead("0-1")))
    text = told(sandbox(exclusive("app", "4-5")), [main_thread(cpuset="4-5")], where)
    assert "affinity 0-15, expected 0-1, fallback 4-5 (cpuset): " in text
    assert "cgroup /kata_pod allows only 4-5" in text


def test_reserve_left_alone_and_nothing() -> None:
    """Reserved CPUs, threads left alone, no vCPU and no mask each have their words."""
    of = PlacementSettings(overhead=overhead("reserve:1"))
    pod = sandbox(exclusive("app", "4-5"))
    assert "  exclusive CPUs reserved for overhead: 5" in told(pod, vcpus(0), node(settings=of))
    leave = PlacementSettings(overhead=overhead("leave"))
    assert "emulator (tid 1000, source: by elimination): unmanaged, affinity 0-15" in told(
        pod, [main_thread()], node(settings=leave)
    )
    assert "  no vCPU threads found" in told(pod, [])
    assert "  the VM has 1 vCPU; no container has exclusive CPUs" in told(
        sandbox(shared("a", "4")), vcpus(0)
    )
    assert "mask\n  none: no container has a cpuset\n" in told(sandbox(), [])
