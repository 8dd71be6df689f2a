"""Laws of the map and of guest cpusets, over the worlds that placement is tested with."""

from __future__ import annotations

import dataclasses

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kata_pin.base.cpuset import EMPTY, CpuSet, union
from kata_pin.base.placement import Placement
from kata_pin.base.sandbox import GuestCpuset, GuestFacts, GuestMap, GuestTopology, MeasuredGuestCpu
from kata_pin.base.values import ContainerKind, LinkState
from kata_pin.guest.cpus import guest_cpusets, guest_steps
from kata_pin.guest.map import guest_map, match
from kata_pin.peers.qemu import apic_id
from kata_pin.placement.masks import counted
from tests.property.test_policy import World, worlds
from tests.support.world import vcpus

many = settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.too_slow])

guests = st.builds(
    lambda boot, more, cores: GuestTopology(
        boot=boot, maximum=boot + more, sockets=(boot + more + cores - 1) // cores, cores=cores
    ),
    st.integers(0, 16),
    st.integers(0, 16),
    st.integers(1, 3),
)
releases = st.sampled_from(["", "5.15.9", "6.1.0", "6.8.99", "6.9", "6.12.47", "6.18.35", "junk"])


@st.composite
def mapped(draw: st.DrawFn) -> tuple[World, Placement, GuestMap]:
    """Draw a world, its placement, and its map with some measurements, right or wrong."""
    world = draw(worlds)
    assert world.pod.vmm is not None
    guest = replace(draw(guests), threads=1)
    pod = replace(world.pod, vmm=replace(world.pod.vmm, guest=guest))
    world = dataclasses.replace(world, pod=pod)
    keys = [one.key for one in world.threads]
    measured = draw(
        st.dictionaries(
            st.sampled_from(keys), st.integers(0, 15).map(lambda cpu: MeasuredGuestCpu(cpu, "test"))
        )
        if keys
        else st.just({})
    )
    placement = world.place()
    facts = GuestFacts(draw(releases), measured=measured)
    return world, placement, guest_map(world.pod, world.threads, placement, facts, apic_of=apic_id)


def decide(drawn: tuple[World, Placement, GuestMap], *, inferred: bool) -> tuple[GuestCpuset, ...]:
    """Return the decisions about a drawn world."""
    world, placement, found = drawn
    return guest_cpusets(world.pod, world.node, placement, found, inferred=inferred)


@many
@given(mapped(), st.booleans())
def test_own_guest_cpus_are_in_no_other_set(
    drawn: tuple[World, Placement, GuestMap], inferred: bool
) -> None:
    """No guest CPU of a container's own vCPU is in another container's set."""
    _, _, found = drawn
    every = decide(drawn, inferred=inferred)
    for link in found.links:
        if link.container_id and link.guest_cpu is not None:
            for one in every:
                if one.container_id != link.container_id:
                    assert link.guest_cpu not in (one.cpus or EMPTY)
    owned = [one.cpus for one in every if one.owned and one.cpus]
    assert len(union(owned)) == sum(len(cpus) for cpus in owned)


@many
@given(mapped(), st.booleans())
def test_every_container_is_decided_about(
    drawn: tuple[World, Placement, GuestMap], inferred: bool
) -> None:
    """Each counting container, and no pause container, has a non-empty set or a reason."""
    world, _, _ = drawn
    every = decide(drawn, inferred=inferred)
    assert [one.container_id for one in every] == [
        one.id for one in counted(world.pod, world.node) if one.kind is ContainerKind.CONTAINER
    ]
    for one in every:
        assert one.reason
        assert one.cpus is None or one.cpus


@many
@given(mapped(), st.booleans())
def test_unknown_links_never_appear(
    drawn: tuple[World, Placement, GuestMap], inferred: bool
) -> None:
    """Only guest CPUs of links that may be acted on are sent."""
    _, _, found = drawn
    least = LinkState.INFERRED if inferred else LinkState.PROVEN
    known = CpuSet(
        one.guest_cpu
        for one in found.links
        if one.guest_cpu is not None and one.state.rank >= least.rank
    )
    for one in decide(drawn, inferred=inferred):
        assert (one.cpus or EMPTY) <= known


@many
@given(mapped())
def test_guest_cpus_are_told_once(drawn: tuple[World, Placement, GuestMap]) -> None:
    """No two threads are one guest CPU, and a link without a number is unknown."""
    _, _, found = drawn
    known = [one.guest_cpu for one in found.links if one.guest_cpu is not None]
    assert len(known) == len(set(known))
    for one in found.links:
        assert (one.guest_cpu is not None) or one.state is LinkState.UNKNOWN


@many
@given(mapped(), st.randoms(use_true_random=False))
def test_order_of_threads_does_not_matter(
    drawn: tuple[World, Placement, GuestMap], random: object
) -> None:
    """The same threads in any order give the same map and the same decisions."""
    world, placement, found = drawn
    shuffled = list(world.threads)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    again = guest_map(world.pod, shuffled, placement, found.facts, apic_of=apic_id)
    assert sorted(again.links, key=str) == sorted(found.links, key=str)
    assert decide((world, placement, again), inferred=True) == decide(drawn, inferred=True)


some = st.frozensets(st.integers(0, 9), min_size=1).map(CpuSet)
standings = st.dictionaries(st.sampled_from("abc"), some)
decisions = st.lists(
    st.builds(GuestCpuset, st.sampled_from("abcd"), st.one_of(st.none(), some), st.just("")),
    unique_by=lambda one: one.container_id,
)


@many
@given(standings, decisions)
def test_steps_never_take_away_before_they_give(
    standing: dict[str, CpuSet], wanted: list[GuestCpuset]
) -> None:
    """Widening holds the old and the new set; afterwards each has what was decided."""
    every = CpuSet(range(10))
    steps = guest_steps(standing, wanted, every)
    for name, cpus in steps.widen.items():
        assert standing[name] <= cpus
        assert steps.narrow[name] <= cpus
    for one in wanted:
        before = steps.widen.get(one.container_id, standing.get(one.container_id, every))
        after = steps.narrow.get(one.container_id, every)
        assert after <= before or one.container_id not in standing
        assert after == (one.cpus or every)
    assert guest_steps({**standing, **steps.narrow}, wanted, every).widen == {}


@many
@given(
    st.lists(st.floats(0, 10), max_size=6),
    st.lists(st.floats(0, 10), max_size=6),
)
def test_busy_times_name_each_thread_and_guest_cpu_once(
    ran: list[float], busy: list[float]
) -> None:
    """Whatever the times, no guest CPU is given to two threads."""
    keys = [one.key for one in vcpus(*range(len(ran)))]
    found = match(dict(zip(keys, ran, strict=True)), dict(enumerate(busy)))
    assert len(set(found.values())) == len(found)
