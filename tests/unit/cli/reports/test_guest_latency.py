"""What guests feel, beside what the host did: `prove --guest`."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kata_pin.base.counters import Measured
from kata_pin.base.documents.measured import (
    ExitReason,
    GuestLatency,
    HaltPolling,
    HostCause,
    ProveDocument,
    VcpuLatency,
)
from kata_pin.base.values import Method
from kata_pin.cli.reports import prove
from kata_pin.cli.reports.prove import ProofRequest
from kata_pin.linux.files import HostRoot
from kata_pin.linux.recording import Asked, Progress
from kata_pin.options.pictures import page
from tests.unit.cli import documents as docs
from tests.unit.cli.proved import V2, felt, measured, owned, proved


def of(document: ProveDocument, pod: str) -> GuestLatency:
    return next(one for one in document.guests if one.pod == pod)


def test_a_disturbed_vcpu_has_its_steal_and_its_causes() -> None:
    """Its waits, its exits with the longest first, and who had its pCPU meanwhile."""
    first, second = of(proved(guest=True), "shop/database").vcpus
    assert (first.guest_cpu, first.cpus, first.ran_ms, first.steal_ms) == (0, "4", 7000, 1546)
    assert (first.preempted, first.longest_wait_ms) == (3, 1500)
    assert (first.halts, first.exits, first.outside_ms) == (12, 3400, 1550)
    assert first.reasons == (
        ExitReason("external_interrupt", 2500, 1520, 1500, 3),
        ExitReason("io_instruction", 900, 30, 2, 4),
    )
    assert first.causes == (
        HostCause("sh \x1b[31m (pid 900)", 1506),
        HostCause("qemu (pid 4100)", 40),
        HostCause("interrupts", 5.05),
        HostCause("cc1 (pid 901)", 0.3),
        HostCause("kworker/u32:3-events (pid 41)", 0.25),
    )
    assert (second.guest_cpu, second.preempted, second.exits, second.causes) == (1, 0, 0, ())


def test_halt_polling_is_the_difference_of_kvms_counters() -> None:
    """Of the VM whose counters were read; of the other one the reason is said."""
    document = proved(guest=True)
    first = of(document, "shop/database")
    assert (first.halt_polling, first.problems) == (HaltPolling(12, 20, 60, 1400), ())
    other = of(document, "shop/cache")
    assert other.halt_polling is None
    assert other.problems == (
        "halt polling unknown: cannot find a VM of process 4200 in /sys/kernel/debug/kvm",
    )


def test_commands_have_the_containers_guest_cpus() -> None:
    """They run in the container that has the exclusive pCPUs, on the guest's numbers."""
    commands = of(proved(guest=True), "shop/database").commands
    run = "kubectl exec -n shop database -c postgres --"
    assert [(one.container, one.command) for one in commands] == [
        ("postgres", f"{run} cyclictest -q -m -p 95 -i 200 -h 1000 -t 2 -a 0-1 -D 10"),
        ("postgres", f"{run} oslat -f 95 -c 0-1 -D 10"),
    ]
    assert of(proved(guest=True), "shop/cache").commands == (), "its guest CPUs are not known"


def test_a_vcpu_without_a_pcpu_for_itself_is_told_apart() -> None:
    """Its steal is exact; waits and exits are those of pCPUs that were recorded alone."""
    state = owned()
    roaming = docs.thread(4103, "vcpu", "0-3", vcpu=2, label="vcpu 2")
    first, second = state.sandboxes
    first = replace(first, threads=(*first.threads, roaming))
    found = felt()
    found = replace(found, times={**found.times, 4103: found.times[4101]})
    shown = replace(state, sandboxes=(first, second))
    (row, *_) = prove.latencies(shown, found, proved().pcpus, 10.0)
    assert row.vcpus[2] == VcpuLatency(
        *("vcpu 2", 4103, None, "0-3", "", 7000, 1546), *(None,) * 5, (), ()
    )


def test_what_was_not_measured_has_a_reason() -> None:
    """Without perf, and of an emulated VM."""
    found = replace(measured(), method=Method.HIST, no_exits="the method does not have them")
    (row, *_) = prove.latencies(owned(), found, proved().pcpus, 10.0)
    assert row.problems == (
        "exits unknown: the method does not have them",
        "halt polling unknown: the VM is gone",
    )
    assert (row.vcpus[0].preempted, row.vcpus[0].exits, row.vcpus[0].steal_ms) == (None, None, 1546)
    state = owned()
    emulated = replace(state.sandboxes[0], vmm=docs.vmm(kvm=False))
    state = replace(state, sandboxes=(emulated, *state.sandboxes[1:]))
    assert prove.vms(state, {emulated.id}) == ()
    (row, *_) = prove.latencies(state, found, proved().pcpus, 10.0)
    assert row.problems == ("exits and halt polling unknown: the VM is emulated, without KVM",)


@pytest.mark.parametrize("felt_too", [True, False])
def test_it_is_asked_for(*, felt_too: bool) -> None:
    """Also of vCPUs without a pCPU for themselves; without --guest nothing of it is measured."""
    state, asked = owned(), list[Asked]()
    first, second = state.sandboxes
    roaming = docs.thread(4103, "vcpu", "0-3", vcpu=2, label="vcpu 2")
    first = replace(first, threads=(*first.threads, roaming), vmm=docs.vmm(pid=4100))
    state = replace(state, sandboxes=(first, second))

    def meter(_: HostRoot, wanted: Asked, __: Progress) -> Measured:
        asked.append(wanted)
        return felt()

    document = prove.prove(lambda: state, ProofRequest(guest=felt_too), root=V2, meter=meter)
    (wanted,) = asked
    assert ((4100, 4103) in wanted.threads, 4100 in wanted.vms) == (felt_too, felt_too)
    assert bool(document.guests) is felt_too


def test_the_page_has_it_beside_the_causes() -> None:
    """Names of tasks are no markup there either."""
    document = proved(guest=True)
    text = page.proof_document(document, owned())
    assert "What the guest of shop/database feels" in text
    assert "external_interrupt up to 1500.000 ms (3 of 2500 exits)" in text
    assert "sh \\x1b[31m (pid 900) 1506.000 ms" in text
    assert "cyclictest -q -m" in text
    vcpu = document.guests[0].vcpus[0]
    hostile = replace(vcpu, causes=(HostCause("<script>alert(1)</script>", 5.0),))
    row = replace(document.guests[0], pod="<b>", vcpus=(hostile,))
    text = page.proof_document(replace(document, guests=(row,)), owned())
    assert "<script" not in text
    assert "<b>" not in text
