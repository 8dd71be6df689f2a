"""CPUs that other pods hold exclusively leave every shared mask at once (D28)."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kata_pin.base.placement import KubeletState, Node
from kata_pin.base.sandbox import Container
from kata_pin.base.settings import PlacementSettings
from kata_pin.base.values import Provenance, ThreadRole
from kata_pin.placement.exclusive import exclusive_claims, held_by_others
from tests.support.at_once import place
from tests.support.world import (
    applied,
    codes,
    cpus,
    exclusive,
    main_thread,
    node,
    overhead,
    pause,
    sandbox,
    shared,
    thread,
    vcpu,
    vcpus,
)

DEFAULT = "0-1,6-15"


def checkpoint(**entries: str) -> KubeletState:
    """Return a static checkpoint: one container `app` for each pod uid, with these CPUs."""
    return KubeletState(
        "static",
        cpus(DEFAULT),
        entries={uid: {"app": cpus(text)} for uid, text in entries.items()},
    )


def at(kubelet: KubeletState | None, settings: PlacementSettings | None = None) -> Node:
    """Return a node with this checkpoint."""
    return replace(node(settings=settings), kubelet=kubelet)


@pytest.mark.parametrize(
    ("containers", "kubelet", "allocated", "expected"),
    [
        pytest.param([shared("a", "0-7")], checkpoint(other="4-5"), "", "4-5", id="another pod's"),
        pytest.param([shared("a", "0-7")], checkpoint(uid="4-5"), "", "", id="its own pod's"),
        pytest.param(
            [shared("a", "0-7")], checkpoint(uid="4", other="4-5"), "", "5", id="given twice"
        ),
        pytest.param([shared("a", "0-7")], None, "6", "6", id="our own allocator's"),
        pytest.param(
            [exclusive("a", "4-5")], checkpoint(other="4"), "5", "", id="what it claims itself"
        ),
        pytest.param(
            [replace(shared("a", "0-7"), pod_uid="")],
            checkpoint(other="4-5"),
            "",
            "",
            id="a pod without a known uid may own any entry",
        ),
        pytest.param(
            [shared("a", "0-7")],
            replace(checkpoint(other="4-5"), policy="none"),
            "",
            "",
            id="a policy that gives nothing",
        ),
        pytest.param(
            [shared("a", "0-7")],
            replace(checkpoint(other="4"), pod_entries={"third": cpus("6-7"), "uid": cpus("0")}),
            "",
            "4,6-7",
            id="pod-level CPUs",
        ),
    ],
)
def test_what_others_hold(
    containers: list[Container], kubelet: KubeletState | None, allocated: str, expected: str
) -> None:
    """Entries of other pods and grants of other sandboxes, without what the sandbox claims."""
    own = exclusive_claims(containers, node(), "")
    assert str(held_by_others(containers, own, at(kubelet), cpus(allocated))) == expected


def test_every_thread_of_a_shared_vm_leaves_at_once() -> None:
    """Its cgroup allows them for up to 10 s more; vCPUs, overhead and helpers go now."""
    threads = [*vcpus(0, 1), main_thread(), thread(ThreadRole.VHOST, 900)]
    found = place(sandbox(shared("a", "0-15")), threads, at(checkpoint(other="2-5")))
    assert set(applied(found, threads).values()) == {DEFAULT}
    assert {str(one.wanted) for one in found.desired.values()} == {DEFAULT}
    assert not any(one.step for one in found.desired.values())
    assert str(found.mask.mask) == DEFAULT
    assert "held-by-others" in codes(found)


def test_surplus_and_configured_overhead_leave_too() -> None:
    """An exclusive pod keeps its pairs; its unpaired vCPU and overhead avoid others' CPUs."""
    kubelet = checkpoint(uid="2-3", other="4-5")
    own = replace(exclusive("a", "2-3"), name="app")
    threads = [*vcpus(0, 1, 2), main_thread()]
    settings = PlacementSettings(overhead=overhead("4-8"))
    found = place(sandbox(own), threads, at(kubelet, settings))
    assert applied(found, threads) == {
        "vcpu 0": "6-8",
        "vcpu 1": "2",
        "vcpu 2": "3",
        "emulator": "6-8",
    }


def test_the_pod_sandboxs_own_cpuset_is_no_exception() -> None:
    """What the pause container's cpuset adds for overhead is cut as well."""
    one = main_thread()
    own = replace(exclusive("a", "2-3"), name="app")
    kubelet = checkpoint(uid="2-3", other="4-5")
    found = place(sandbox(own, pause("4-7")), [one], at(kubelet))
    assert applied(found, [one]) == {"emulator": "6-7"}


def test_a_cgroup_without_other_cpus() -> None:
    """Where nothing else is allowed the threads stay, by D7, and the operator is told."""
    one = vcpu(0, cpuset="4-5")
    found = place(sandbox(shared("a", "4-5")), [one], at(checkpoint(other="4-5")))
    desired = found.desired[one.key]
    assert (str(desired.wanted), str(desired.applied), desired.step) == ("4-5", "4-5", "cpuset")
    assert "other pods hold those CPUs exclusively" in desired.reason
    assert {"held-by-others", "fallback", "runs-on-others"} <= codes(found)


def test_part_of_a_cgroup_is_free() -> None:
    """Of a cpuset that has become others' in part, the rest is used, wanted or not."""
    one = vcpu(0, cpuset="4-6")
    found = place(sandbox(shared("a", "4-5")), [one], at(checkpoint(other="4-5")))
    assert str(found.desired[one.key].applied) == "6"
    assert "runs-on-others" not in codes(found)


def test_grants_of_our_own_allocator() -> None:
    """The allocator's grants count as the kubelet's entries do."""
    threads = vcpus(0, 1)
    found = place(sandbox(shared("a", "0-7")), threads, node(), others=cpus("6-7"))
    assert set(applied(found, threads).values()) == {"0-5"}


@pytest.mark.parametrize(
    ("cpuset", "claimed", "taken", "own"),
    [
        pytest.param("0-7", {"x": "4-5"}, "4-5", "", id="stale: the driver narrows it later"),
        pytest.param("4-5", {"x": "4-5", "y": "6"}, "6", "4-5", id="its own claim"),
        pytest.param("4-6", {"x": "4-5", "y": "6", "z": "7"}, "7", "4-6", id="two of its own"),
        pytest.param("0-3", {"x": "4-5"}, "4-5", "", id="already narrowed"),
        pytest.param("0-7", {}, "", "", id="no claims"),
    ],
)
def test_dra_claims(cpuset: str, claimed: dict[str, str], taken: str, own: str) -> None:
    """A claim is whose cpuset is exactly its claims' CPUs; it is everybody else's to avoid."""
    here = replace(node(), claims={uid: cpus(text) for uid, text in claimed.items()})
    containers = [shared("a", cpuset)]
    (claim,) = exclusive_claims(containers, here, "")
    assert str(claim.exclusive) == own
    assert (claim.provenance is Provenance.CLAIM) == bool(own)
    assert str(held_by_others(containers, [claim], here, cpus(""))) == taken


def test_every_thread_leaves_a_claims_cpus_at_once() -> None:
    """Also where the driver has not written its cpuset yet."""
    threads = [*vcpus(0, 1), main_thread(), thread(ThreadRole.VHOST, 900)]
    here = replace(node(), claims={"x": cpus("2-5")})
    found = place(sandbox(shared("a", "0-15")), threads, here)
    assert set(applied(found, threads).values()) == {"0-1,6-15"}
    assert "held-by-others" in codes(found)


@pytest.mark.parametrize(
    ("beside", "allocated", "release_mask", "expected"),
    [
        pytest.param("4-5", "", "", "0-3,6-15", id="inferred of another sandbox"),
        pytest.param("", "6", "", "0-5,7-15", id="our allocator's"),
        pytest.param("4-5", "", "0-7", "0-3,6-7", id="within pid 1's affinity"),
        pytest.param("", "", "0-7", None, id="others have none"),
        pytest.param("0-15", "", "", None, id="others have all"),
    ],
)
def test_a_sandbox_without_a_cpuset(
    beside: str, allocated: str, release_mask: str, expected: str | None
) -> None:
    """It has all CPUs but those of others, whoever reports them, and nothing exclusive."""
    where = node(release_mask=release_mask)
    threads = [*vcpus(0, 1), main_thread()]
    found = place(
        sandbox(shared("a", None)), threads, where, others=cpus(allocated), beside=cpus(beside)
    )
    assert (None if found.mask.mask is None else str(found.mask.mask)) == expected
    assert not found.mask.exclusive
    if expected is not None:
        assert set(applied(found, threads).values()) == {expected}


def test_claims_of_others_are_kept_from_a_sandbox_without_a_cpuset() -> None:
    """DRA claims, where no kubelet's checkpoint gives a default set."""
    where = replace(node(), claims={"claim": cpus("8-11")})
    found = place(sandbox(shared("a", None)), vcpus(0), where)
    assert str(found.mask.mask) == "0-7,12-15"


def test_a_cpuset_that_is_known_counts_more_than_what_others_have() -> None:
    """Two containers that look exclusive on the same CPUs are a conflict, which is shown."""
    found = place(sandbox(exclusive("a", "4-5")), vcpus(0, 1), node(), beside=cpus("4"))
    assert str(found.mask.exclusive) == "4-5"
