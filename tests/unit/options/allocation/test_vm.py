"""The VM of a Kata pod in the accounting: unpaired vCPUs, overhead, housekeeping."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kata_pin.base.allocation import AllocState, ContainerRequest
from kata_pin.base.config.alloc import Alloc
from kata_pin.base.settings import Eligibility
from kata_pin.base.values import CpuClass, GrantKind, RefusalKind
from kata_pin.options.allocation.policies import BUILTIN, create
from kata_pin.options.allocation.pooled import vcpus
from tests.support.machines import Shape, host
from tests.support.podspecs import container, pod
from tests.support.world import cpus

HOST = host(Shape(uppers=2, llcs=2, cores=2).cpus())
"""16 CPUs: 2 packages, each a node with 2 caches of 2 cores; siblings are n and n + 8."""

PLAIN = Alloc(eligibility=Eligibility.RELAXED)
OWN = replace(PLAIN, own_cpus=2)


def after(chosen: Alloc, *requests: ContainerRequest, name: str = "static") -> AllocState:
    """Return the state in which these containers were served one after the other."""
    policy = create(name, HOST, chosen)
    state = policy.start()
    for request in requests:
        state = policy.allocate(state, request).state
    return state


@pytest.mark.parametrize(
    ("limits", "expected"),
    [([2000], 3), ([2000, 500], 4), ([500, 500], 2), ([0], 1), ([1001], 3)],
)
def test_vcpus(limits: list[int], expected: int) -> None:
    """Kata rounds default_vcpus plus the sum of the limits up; no limit counts nothing."""
    state = after(PLAIN, *(container(one, pod(), f"c{n}") for n, one in enumerate(limits)))
    members = [one for one in state.grants.values() if one.kind is GrantKind.CONTAINER]
    assert vcpus(members, 1) == expected


def test_vm_follows_the_shared_pool() -> None:
    """Without housekeeping the VM's overhead runs in the shared pool, never on exclusive CPUs."""
    state = after(PLAIN, container(2000, pod("a")), container(2000, pod("b")))
    assert state.grants["vm-a"].cpus == state.grants["vm-b"].cpus == cpus("2-7,10-15")
    assert state.grants["vm-a"].kind is GrantKind.SANDBOX
    assert "3 vCPUs and 2 exclusive CPUs; the unpaired vCPUs (1)" in state.grants["vm-a"].reasons[0]


def test_vm_runs_on_housekeeping() -> None:
    """With a housekeeping pool the overhead is there, and it does not count in the shared pool."""
    state = after(replace(PLAIN, housekeeping=cpus("7,15")), container(2000, pod("a")))
    assert state.grants["vm-a"].cpus == cpus("7,15")
    assert state.shared == cpus("0-3,5-6,8-11,13-14")


@pytest.mark.parametrize("name", BUILTIN)
def test_no_vm_for_other_pods(name: str) -> None:
    """Only Kata's pods have one."""
    assert set(after(PLAIN, container(2000, pod(kata=False)), name=name).grants) == {"pod-app"}


def test_vm_with_cpus_of_its_own() -> None:
    """With the setting a VM with exclusive CPUs has more for its overhead, near the containers."""
    state = after(OWN, container(2000, pod("a")), container(500, pod("b")), name="topology")
    assert state.grants["a-app"].exclusive == cpus("0,8")
    assert state.grants["vm-a"].exclusive == cpus("1,9")
    assert state.grants["vm-a"].cpu_class is CpuClass.EXCLUSIVE
    assert state.grants["vm-b"].exclusive == cpus("")
    assert "run on 1,9, its own" in state.grants["vm-a"].reasons[0]


def test_own_cpus_come_and_go_with_the_need() -> None:
    """They are the VM's while one of its containers has exclusive CPUs, and are kept meanwhile."""
    policy = create("topology", HOST, OWN)
    owner = pod("a")
    state = after(OWN, container(2000, owner), container(500, owner, "log"), name="topology")
    own = state.grants["vm-a"].exclusive
    state = policy.change(state, container(4000, owner)).state
    assert state.grants["vm-a"].exclusive == own
    state = policy.release(state, "a-app").state
    assert state.shared == cpus("0-15")
    assert state.grants["vm-a"].cpus == cpus("0-3,8-11")
    assert set(policy.release(state, "a-log").state.grants) == set()


def test_own_cpus_are_not_taken_from_the_last() -> None:
    """The container is served, its VM runs in the pool where the pool would become too small."""
    state = after(OWN, container(13000, pod("a")))
    assert len(state.grants["a-app"].exclusive) == 13
    assert state.grants["vm-a"].cpus == state.shared
    assert len(state.shared) == 3


def test_own_cpus_stay_when_the_pool_needs_more() -> None:
    """VMs that come later make the pool's need grow; what was given before stays given."""
    heavy = [container(500, pod(f"p{n}", overhead_millis=2000)) for n in range(7)]
    state = after(OWN, container(2000, pod("a")), *heavy)
    own = state.grants["vm-a"].exclusive
    assert len(own) == 2
    changed = create("static", HOST, OWN).change(state, container(1000, pod("a"))).state
    assert changed.grants["vm-a"].exclusive == own


def test_own_cpus_are_given_up_for_a_container() -> None:
    """Where both do not fit any more, the container is served and its VM runs in the pool."""
    chosen = replace(OWN, shared_minimum=4)
    policy = create("static", HOST, chosen)
    owner = pod("a")
    state = after(chosen, container(6000, owner, "one"))
    assert len(state.grants["vm-a"].exclusive) == 2
    state = policy.allocate(state, container(6000, owner, "two")).state
    assert len(state.grants["a-two"].exclusive) == 6
    assert state.grants["vm-a"].cpus == state.shared
    assert len(state.shared) == 4


def test_overhead_counts_in_the_shared_pool() -> None:
    """VMs in the shared pool need room there: the pod's overhead, else the setting."""
    policy = create("static", HOST, PLAIN)
    heavy = [container(500, pod(f"p{n}", overhead_millis=1000)) for n in range(5)]
    state = after(PLAIN, *heavy)
    refused = policy.allocate(state, container(11000, pod("x"))).refused
    assert refused is not None
    assert refused.kind is RefusalKind.SHARED_MINIMUM
    assert "which needs 6" in refused.message
    assert policy.allocate(state, container(10000, pod("x"))).refused is None
    kept = replace(PLAIN, housekeeping=cpus("0"))
    elsewhere = create("static", HOST, kept)
    assert elsewhere.allocate(after(kept, *heavy), container(11000, pod("x"))).refused is None


def test_vms_with_their_own_cpus_need_none_of_the_pool() -> None:
    """Overhead that has CPUs of its own does not count in the shared pool."""
    policy = create("static", HOST, OWN)
    state = after(OWN, container(2000, pod("a", overhead_millis=12000)))
    assert policy.allocate(state, container(4000, pod("b", kata=False))).refused is None


def test_release_of_a_vm_is_the_whole_pods() -> None:
    """When the pod goes, all of it goes."""
    policy = create("static", HOST, OWN)
    owner = pod("a")
    state = after(OWN, container(2000, owner), container(2000, owner, "two"), container(500))
    decision = policy.release(state, "vm-a")
    assert set(decision.state.grants) == {"pod-app", "vm-pod"}
    assert decision.state.shared == cpus("0-15")
    assert {one.container_id for one in decision.changed} == {"pod-app", "vm-pod"}
