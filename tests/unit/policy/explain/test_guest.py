"""What `explain` tells of a guest."""

from __future__ import annotations

from kata_pin.model.guestmap import GuestFacts
from kata_pin.model.sandbox import GuestTopology
from kata_pin.policy.explain.guest import guest_lines
from kata_pin.policy.explain.sandbox import explain
from kata_pin.policy.guest.cpus import guest_cpusets
from kata_pin.policy.guest.map import guest_map
from kata_pin.policy.placement.place import place
from kata_pin.wire.qemu.apic import apic_id
from tests.support.world import exclusive, node, sandbox, shared, vcpus

WHOLE = """
guest
  vCPUs were hotplugged; the guest's kernel is Linux 6.18.35 (/opt/vmlinux)
  tid 1100 is vCPU 0 (KVM), APIC id 0 (SMP), guest CPU 0 (BOOT): proven, nobody's own
  tid 1115 is vCPU 15 (KVM), APIC id 15 (SMP), guest CPU 15 (LATE): inferred, app
  app: unrestricted: 1 of its own vCPUs has no guest CPU that may be acted on
  log: guest CPUs 0: guest CPUs of vCPUs that are no container's own
notes
"""
SHORT = {
    "KVM": "measured: debugfs",
    "SMP": "proven: QEMU's -smp",
    "BOOT": "proven: a vCPU of the start keeps its number",
    "LATE": "inferred: hotplugged: Linux 6.18.35 numbers them by APIC id",
}


def test_whole_section() -> None:
    """The kernel, every link of every vCPU, and what each container should use and why."""
    pod = sandbox(
        exclusive("app", "4"),
        shared("log", "0-1"),
        guest=GuestTopology(boot=1, maximum=16, sockets=16),
    )
    threads, where = vcpus(0, 15), node()
    placement = place(pod, threads, where)
    found = guest_map(
        pod, threads, placement, GuestFacts("6.18.35", "/opt/vmlinux"), apic_of=apic_id
    )
    told = list(guest_lines(pod, found, guest_cpusets(pod, where, placement, found)))
    text = "\n".join(explain(pod, threads, placement, where, guest=told))
    for short, long in SHORT.items():
        text = text.replace(f"({long})", f"({short})")
    assert WHOLE.strip() in text


def test_unknown_kernel_and_vcpus() -> None:
    """What is not known is said with its reason."""
    pod = sandbox(shared("log", "0"))
    placement = place(pod, (), node())
    found = guest_map(pod, (), placement, GuestFacts(source="no -kernel"))
    assert list(guest_lines(pod, found, ())) == [
        "no hotplugged vCPU is there; the guest's kernel is not known (no -kernel)"
    ]
