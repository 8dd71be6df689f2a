"""The lines of `explain` about a guest."""

from __future__ import annotations

from kata_pin.base.sandbox import GuestFacts, GuestTopology
from kata_pin.guest.cpus import guest_cpusets, guest_lines
from kata_pin.guest.map import guest_map
from kata_pin.peers.qemu import apic_id
from kata_pin.placement.explain import explain
from tests.support.at_once import place
from tests.support.world import exclusive, node, sandbox, shared, vcpus

WHOLE = """
guest
  guest kernel: 6.18.35 (/opt/vmlinux); some vCPUs were hotplugged
  vCPU 0 (no container) is guest CPU 0, proven: tid 1100 (KVM), APIC id 0 (SMP), number (BOOT)
  vCPU 15 (app) is guest CPU 15, inferred: tid 1115 (KVM), APIC id 15 (SMP), number (LATE)
  app: all guest CPUs: the guest CPU of 1 of its own vCPUs is not known well enough
  log: guest CPUs 0: guest CPUs of vCPUs that no container owns
notes
"""
SHORT = {
    "KVM": "measured: debugfs",
    "SMP": "proven: QEMU's -smp",
    "BOOT": "proven: present at boot, so it keeps its number",
    "LATE": "inferred: hotplugged; Linux 6.18.35 numbers by APIC id",
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
    """Unknown facts have their reason."""
    pod = sandbox(shared("log", "0"))
    placement = place(pod, (), node())
    found = guest_map(pod, (), placement, GuestFacts(source="no -kernel"))
    assert list(guest_lines(pod, found, ())) == [
        "guest kernel: unknown (no -kernel); the number of vCPUs at boot is unknown"
    ]
    pod = sandbox(shared("log", "0"), guest=GuestTopology(boot=1, maximum=1))
    (line,) = guest_lines(pod, guest_map(pod, (), placement, GuestFacts()), ())
    assert line == "guest kernel: unknown; no vCPU was hotplugged"
