"""The map: which guest CPU a vCPU thread is, and how well that is known."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kata_pin.base.sandbox import (
    GuestFacts,
    GuestMap,
    GuestTopology,
    MeasuredGuestCpu,
    Sandbox,
    Thread,
)
from kata_pin.base.values import LinkState, RoleSource
from kata_pin.guest.map import guest_map, measured_by_apic, numberings, release_of
from kata_pin.peers.qemu import apic_id
from tests.support.at_once import place
from tests.support.world import exclusive, main_thread, node, sandbox, vcpu, vcpus

GO = GuestTopology(boot=2, maximum=16, sockets=16)
"""Two vCPUs of sixteen at the start, as Kata's Go runtime writes it: index and APIC id agree."""


def pod(guest: GuestTopology = GO) -> Sandbox:
    """Return a sandbox with an exclusive container."""
    return sandbox(exclusive("app", "4-5"), guest=guest)


def mapped(
    *threads: Thread, release: str = "", guest: GuestTopology = GO, **measured: MeasuredGuestCpu
) -> GuestMap:
    """Return the map of these threads; `measured` names threads by `tid<N>`."""
    of = pod(guest)
    keys = {f"tid{one.key.tid}": one.key for one in threads}
    facts = GuestFacts(release, measured={keys[name]: one for name, one in measured.items()})
    where = place(of, threads, node())
    return guest_map(of, threads, where, facts, apic_of=apic_id)


def numbers(found: GuestMap) -> dict[int | None, tuple[int | None, str]]:
    """Return guest CPU and state by cpu-index."""
    return {one.index: (one.guest_cpu, one.state.value) for one in found.links}


def test_without_hotplug_every_number_is_proven() -> None:
    """Boot vCPUs have the number of their index; the kernel need not be known."""
    found = mapped(main_thread(), *vcpus(0, 1))
    assert numbers(found) == {0: (0, "proven"), 1: (1, "proven")}
    assert not found.hotplugged
    assert str(found.every) == "0-1"
    assert len(found.links) == 2  # the main thread is no vCPU


@pytest.mark.parametrize(
    ("release", "expected"),
    [
        pytest.param(
            "6.1.0-39-amd64",
            {13: (4, "proven"), 14: (3, "proven"), 15: (2, "proven")},
            id="before 6.9: as they first come; the lab saw it",
        ),
        pytest.param(
            "6.18.35-176",
            {13: (13, "inferred"), 14: (14, "inferred"), 15: (15, "inferred")},
            id="6.9 and later: by APIC id",
        ),
        pytest.param(
            "6.12.107+deb13-amd64",
            {13: (13, "proven"), 14: (14, "proven"), 15: (15, "proven")},
            id="6.9 and later, a kernel that the lab saw",
        ),
        pytest.param(
            "6.9",
            {13: (13, "inferred"), 14: (14, "inferred"), 15: (15, "inferred")},
            id="the first that numbers so",
        ),
        pytest.param(
            "5.15.63",
            {13: (4, "inferred"), 14: (3, "inferred"), 15: (2, "inferred")},
            id="long before",
        ),
        pytest.param(
            "",
            {13: (None, "unknown"), 14: (None, "unknown"), 15: (None, "unknown")},
            id="a kernel that is not known",
        ),
        pytest.param(
            "confidential",
            {13: (None, "unknown"), 14: (None, "unknown"), 15: (None, "unknown")},
            id="a release that says nothing",
        ),
    ],
)
def test_hotplugged_vcpus(release: str, expected: dict[int, tuple[int | None, str]]) -> None:
    """Sparse, descending indexes get the number of their kernel's rule; boot vCPUs stay proven."""
    found = mapped(*vcpus(0, 1, 15, 14, 13), release=release)
    assert numbers(found) == {0: (0, "proven"), 1: (1, "proven"), **expected}
    assert found.hotplugged


def test_after_an_unplug_the_old_rule_still_counts_from_the_top() -> None:
    """A number stays with its APIC id: a slot that was left and taken again has its old one."""
    assert numbers(mapped(*vcpus(0, 1, 14), release="6.1"))[14] == (3, "proven")
    assert numbers(mapped(*vcpus(0, 1, 15), release="6.1"))[15] == (2, "proven")


def test_rules_that_agree_need_no_kernel() -> None:
    """One slot beside the boot vCPUs has one number, whatever the kernel."""
    found = mapped(*vcpus(0, 1, 2), guest=GuestTopology(boot=2, maximum=3, sockets=3))
    assert numbers(found)[2] == (2, "inferred")


def test_measured_is_believed_before_any_rule() -> None:
    """What was read in this boot counts, for the thread it was read of."""
    found = mapped(*vcpus(0, 1, 15), release="6.18", tid1115=MeasuredGuestCpu(7, "cpuinfo"))
    assert numbers(found)[15] == (7, "measured")
    assert found.links[2].guest_link.source == "cpuinfo"


def test_a_chain_is_as_good_as_its_weakest_link() -> None:
    """Creation order only infers the cpu-index, so all behind it is inferred."""
    guessed = vcpu(1)._replace(role=replace(vcpu(1).role, source=RoleSource.ORDER))
    found = mapped(vcpu(0), guessed)
    assert numbers(found) == {0: (0, "proven"), 1: (1, "inferred")}
    assert found.links[1].weakest.source == "order"
    assert set(found.usable()) == {found.links[0].key}
    assert set(found.usable(inferred=True)) == {one.key for one in found.links}


def test_disputed_and_unnumbered_threads_are_unknown() -> None:
    """Neither a conflict nor a missing index leaves a guest CPU to act on."""
    found = mapped(vcpu(0), vcpu(1, conflict="QMP says 3"), vcpu(None, tid=1150))
    assert [(one.guest_cpu, one.state) for one in found.links] == [
        (None, LinkState.UNKNOWN),
        (0, LinkState.PROVEN),
        (None, LinkState.UNKNOWN),
    ]
    assert found.every is None
    assert "QMP says 3" in found.links[2].weakest.source


def test_two_threads_are_never_one_guest_cpu() -> None:
    """Where a measurement gives a number that another has, neither is believed."""
    found = mapped(*vcpus(0, 1), tid1101=MeasuredGuestCpu(0, "cpuinfo"))
    assert {one.state for one in found.links} == {LinkState.UNKNOWN}


def test_index_beyond_maxcpus_is_unknown() -> None:
    """No rule covers a vCPU that -smp does not have."""
    assert numbers(mapped(*vcpus(0, 16), release="6.12"))[16] == (None, "unknown")


def test_without_smp_nothing_is_proven() -> None:
    """Where the command line does not have the boot vCPUs, the number is only inferred."""
    found = mapped(*vcpus(0, 1), guest=GuestTopology())
    assert numbers(found) == {0: (0, "inferred"), 1: (1, "inferred")}


def test_vmms_whose_topology_is_not_shown() -> None:
    """The APIC id is KVM's own where KVM shows it; without it the number is only inferred.

    On x86 there always is one. With KVM's the guest can be asked which of its CPUs has it.
    """
    of = pod(GuestTopology())
    assert of.vmm is not None
    of = replace(of, vmm=replace(of.vmm, apic_ids=False))
    threads = vcpus(0, 1)
    shown = threads[1]._replace(role=replace(threads[1].role, apic_id=4))
    both = [threads[0], shown]
    found = guest_map(of, both, place(of, both, node()), apic_of=apic_id)
    assert [(one.apic_id, one.state) for one in found.links] == [
        (None, LinkState.INFERRED),
        (4, LinkState.INFERRED),
    ]
    assert not any("machine has none" in one.apic_link.source for one in found.links)
    assert measured_by_apic(found, {0: 0, 3: 4}) == {
        shown.key: MeasuredGuestCpu(3, "the guest's /proc/cpuinfo")
    }


def test_hotplug_is_unknown_where_the_start_is() -> None:
    """Other VMMs than QEMU do not show how many vCPUs they started with."""
    assert mapped(*vcpus(0, 1), guest=GuestTopology()).hotplugged is None
    assert mapped(*vcpus(0, 1)).hotplugged is False


def test_without_a_vmm_there_is_nothing() -> None:
    """A sandbox whose VMM is gone has an empty map."""
    of = replace(pod(), vmm=None)
    assert guest_map(of, (), place(of, (), node())).links == ()


def test_cpuinfo_is_read_by_apic_id() -> None:
    """The guest names its CPUs by APIC id; a topology with gaps is no different."""
    gaps = GuestTopology(boot=4, maximum=6, sockets=2, cores=3)  # APIC ids 0-2 and 4-6
    found = mapped(*vcpus(0, 1, 2, 3, 5), guest=gaps)
    assert [one.apic_id for one in found.links] == [0, 1, 2, 4, 6]
    told = measured_by_apic(found, {0: 0, 1: 1, 2: 2, 3: 4, 9: 6})
    assert {key.tid: one.guest_cpu for key, one in told.items()} == {
        1100: 0,
        1101: 1,
        1102: 2,
        1103: 3,
        1105: 9,
    }


def test_cpuinfo_tells_nothing_of_guessed_threads() -> None:
    """The APIC id of a thread that creation order named is no better than that."""
    guessed = vcpu(1)._replace(role=replace(vcpu(1).role, source=RoleSource.ORDER))
    told = measured_by_apic(mapped(vcpu(0), guessed), {0: 0, 1: 1})
    assert {key.tid for key in told} == {1100}


def test_map_says_whose_pcpus() -> None:
    """A paired vCPU has its pCPU and its container, the unpaired one has no container."""
    found = mapped(*vcpus(0, 1, 15), release="6.12")
    assert [(one.index, str(one.cpus), one.paired, one.container_id) for one in found.links] == [
        (0, "4-5", False, ""),
        (1, "4", True, "app"),
        (15, "5", True, "app"),
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("6.12.107+deb13-amd64", (6, 12)),
        ("6.9", (6, 9)),
        ("6.9-rc1", (6, 9)),
        ("5.19.2-nvidia-gpu", (5, 19)),
        ("", None),
        ("six", None),
        ("6", None),
        ("1234567.1", None),
    ],
)
def test_release(text: str, expected: tuple[int, int] | None) -> None:
    """Major and minor are read as numbers, other texts are none."""
    assert release_of(text) == expected


def test_numberings() -> None:
    """Both ways to number hotplugged vCPUs, none where an index or the start is not known."""
    found = mapped(*vcpus(0, 1, 15, 14))
    by_index, late = numberings(found, GO)
    assert sorted(by_index.values()) == [0, 1, 14, 15]
    assert {key.tid: number for key, number in late.items()} == {1100: 0, 1101: 1, 1114: 3, 1115: 2}
    assert numberings(mapped(vcpu(0), vcpu(None, tid=1150)), GO) == []
    assert numberings(found, GuestTopology()) == []
