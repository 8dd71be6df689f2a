"""Which guest CPUs a container should use, and the order of saying so."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kata_pin.base.cpuset import CpuSet
from kata_pin.base.sandbox import Container, GuestCpuset, GuestFacts, GuestTopology, Thread
from kata_pin.base.settings import PlacementSettings, VcpuMode
from kata_pin.base.values import ContainerState
from kata_pin.guest.cpus import guest_cpusets, guest_steps
from kata_pin.guest.map import guest_map
from kata_pin.peers.qemu import apic_id
from tests.support.at_once import place
from tests.support.world import cpus, exclusive, node, overhead, pause, sandbox, shared, vcpus

SIXTEEN = GuestTopology(boot=16, maximum=16, sockets=16)


def told(
    containers: list[Container],
    threads: list[Thread],
    *,
    release: str = "",
    guest: GuestTopology = SIXTEEN,
    settings: PlacementSettings | None = None,
    inferred: bool = False,
) -> dict[str, str]:
    """Return the set, or why there is none, by container."""
    pod = sandbox(*containers, guest=guest)
    where = node(settings=settings)
    placement = place(pod, threads, where)
    found = guest_map(pod, threads, placement, GuestFacts(release), apic_of=apic_id)
    return {
        one.container_id: one.reason if one.cpus is None else str(one.cpus)
        for one in guest_cpusets(pod, where, placement, found, inferred=inferred)
    }


TWO = [exclusive("a", "4-5"), exclusive("b", "6"), shared("s", "0-1")]


def test_each_has_its_own_and_the_others_share_the_rest() -> None:
    """Two exclusive containers and a shared one: the issue's own example."""
    assert told([pause("0"), *TWO], vcpus(0, 1, 2, 3)) == {"a": "1-2", "b": "3", "s": "0"}


def test_nothing_left_is_unrestricted_and_said() -> None:
    """With as many vCPUs as exclusive CPUs the shared container runs anywhere."""
    assert told(TWO, vcpus(0, 1, 2)) == {
        "a": "0-1",
        "b": "2",
        "s": "all vCPUs belong to other containers",
    }


def test_fewer_vcpus_than_exclusive_cpus() -> None:
    """One vCPU is paired with several pCPUs of its container, one is left for sharing."""
    wide = [exclusive("a", "4-9"), exclusive("b", "10-11"), shared("s", "0")]
    assert told(wide, vcpus(0, 1, 2)) == {"a": "1", "b": "2", "s": "0"}


def test_fewer_vcpus_than_containers() -> None:
    """No pairs, no guest cpusets."""
    why = "no container of this sandbox has its own vCPUs"
    assert told(TWO, vcpus(0)) == {"a": why, "b": why, "s": why}


@pytest.mark.parametrize("mode", [VcpuMode.FLOAT, VcpuMode.LEAVE])
def test_modes_without_pairs(mode: VcpuMode) -> None:
    """A mode that pairs nothing restricts nothing in the guest."""
    found = told(TWO, vcpus(0, 1, 2, 3), settings=PlacementSettings(vcpus=mode))
    assert set(found.values()) == {"no container of this sandbox has its own vCPUs"}


def test_unknown_link_leaves_its_container_unrestricted() -> None:
    """A container is not cut to the part of its vCPUs that is known; the others keep off it."""
    guest = GuestTopology(boot=3, maximum=16, sockets=16)
    found = told(TWO, vcpus(0, 1, 2, 15), guest=guest)
    assert found == {
        "a": "1-2",
        "b": "the guest CPU of 1 of its own vCPUs is not known well enough",
        "s": "0",
    }


def test_inferred_links_by_setting() -> None:
    """Inferred guest CPUs are used where the administrator allows it."""
    guest = GuestTopology(boot=3, maximum=16, sockets=16)
    kept = told(TWO, vcpus(0, 1, 2, 15), guest=guest, release="6.18")
    assert "not known well enough" in kept["b"]
    acted = told(TWO, vcpus(0, 1, 2, 15), guest=guest, release="6.18", inferred=True)
    assert acted == {"a": "1-2", "b": "15", "s": "0"}


def test_unknown_surplus_is_not_offered() -> None:
    """A shared container gets the known ones; with none known it is unrestricted."""
    guest = GuestTopology(boot=2, maximum=16, sockets=16)
    one = [exclusive("a", "4"), shared("s", "0-1")]
    assert told(one, vcpus(0, 1), guest=guest) == {"a": "1", "s": "0"}
    hidden = [t._replace(role=replace(t.role, conflict="x")) for t in vcpus(0)]
    why = told(one, [*hidden, *vcpus(1)], guest=guest)["s"]
    assert why.startswith("the guest CPUs of the vCPUs that no container owns")


def test_stopped_containers_and_pause_are_not_told() -> None:
    """Only containers that count are decided about."""
    stopped = replace(shared("old", "0"), state=ContainerState.STOPPED)
    assert set(told([pause("0"), stopped, *TWO], vcpus(0, 1, 2, 3))) == {"a", "b", "s"}


def test_reserve_that_takes_a_container() -> None:
    """An exclusive container without pairs shares the vCPUs that no container owns."""
    settings = PlacementSettings(overhead=overhead("reserve:1"))
    assert told(TWO[:2], vcpus(0, 1, 2), settings=settings) == {"a": "1-2", "b": "0"}


def decided(**sets: str) -> list[GuestCpuset]:
    """Return decisions; `-` is unrestricted."""
    return [
        GuestCpuset(name, None if text == "-" else cpus(text), "") for name, text in sets.items()
    ]


def plan(
    standing: dict[str, str], wanted: dict[str, str], every: str = "0-7"
) -> tuple[dict[str, str], dict[str, str]]:
    """Return both steps as texts."""
    had = {name: cpus(text) for name, text in standing.items()}
    steps = guest_steps(had, decided(**wanted), cpus(every))
    return (
        {name: str(one) for name, one in steps.widen.items()},
        {name: str(one) for name, one in steps.narrow.items()},
    )


@pytest.mark.parametrize(
    ("standing", "wanted", "widen", "narrow"),
    [
        pytest.param({}, {"a": "1"}, {}, {"a": "1"}, id="new: nothing to widen"),
        pytest.param({"a": "1"}, {"a": "1"}, {}, {"a": "1"}, id="the same: said again"),
        pytest.param({"a": "1"}, {"a": "2"}, {"a": "1-2"}, {"a": "2"}, id="moved"),
        pytest.param({"a": "1-2"}, {"a": "2"}, {}, {"a": "2"}, id="narrower"),
        pytest.param({"a": "1"}, {"a": "1-2"}, {"a": "1-2"}, {"a": "1-2"}, id="wider"),
        pytest.param({}, {"a": "-"}, {}, {}, id="never restricted, never told"),
        pytest.param({"a": "1"}, {"a": "-"}, {"a": "0-7"}, {"a": "0-7"}, id="given back"),
        pytest.param({"gone": "1"}, {"a": "1"}, {}, {"a": "1"}, id="a container that left"),
        pytest.param(
            {"a": "1", "b": "2"},
            {"a": "2", "b": "1"},
            {"a": "1-2", "b": "1-2"},
            {"a": "2", "b": "1"},
            id="two swap",
        ),
    ],
)
def test_steps(
    standing: dict[str, str],
    wanted: dict[str, str],
    widen: dict[str, str],
    narrow: dict[str, str],
) -> None:
    """Old and new before, new after; a cpuset once set is given back as the full list."""
    assert plan(standing, wanted) == (widen, narrow)


def test_nothing_is_given_back_while_the_full_list_is_unknown() -> None:
    """Half of a list would be a restriction of its own."""
    had = {"a": CpuSet([1])}
    assert guest_steps(had, decided(a="-"), None).narrow == {}
