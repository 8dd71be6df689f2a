"""CPUs near the memory of a VM that runs: only `annotation` and `topology`, only with a choice."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kata_pin.base.allocation import POLICY_KEY, AllocState, ContainerRequest, Grant
from kata_pin.base.config.alloc import Alloc
from kata_pin.base.cpuset import EMPTY, CpuSet
from kata_pin.base.settings import AllowRule, Eligibility
from kata_pin.options.allocation.policies import create
from tests.support.machines import Shape, host
from tests.support.podspecs import container, pod

HOST = host(Shape(uppers=2, llcs=2, cores=2).cpus())
"""16 CPUs: node 0 has 0-3,8-11 in two caches, node 1 has 4-7,12-15."""

ONE = CpuSet.parse("4-7,12-15")
OPEN = Alloc(eligibility=Eligibility.RELAXED, allow=(AllowRule(namespace="shop"),))
REASON = "on the NUMA node of its VM's memory"


def wishing(
    cpu_class: str, millis: int = 2000, uid: str = "a", name: str = "app"
) -> ContainerRequest:
    return container(millis, pod(uid, annotations={POLICY_KEY: cpu_class}), name)


def changed(
    name: str,
    *others: ContainerRequest,
    settings: Alloc = OPEN,
    wish: str = "exclusive",
    millis: int = 2000,
    memory: CpuSet = ONE,
) -> Grant:
    """Return the grant of a container that ran in the pool and chooses CPUs now."""
    policy = create(name, HOST, settings)
    state = policy.start()
    for request in (wishing("none", millis), *others):
        state = policy.allocate(state, request).state
    state = replace(state, memory={"vm-a": memory})
    grant = policy.change(state, wishing(wish, millis)).state.get("a-app")
    assert grant is not None
    return grant


@pytest.mark.parametrize("name", ["annotation", "topology"])
@pytest.mark.parametrize("wish", ["exclusive", "share"])
def test_a_running_container_moves_to_its_memory(name: str, wish: str) -> None:
    """Without that it would get 0,8; the reason is in its grant."""
    grant = changed(name, wish=wish)
    assert grant.own == CpuSet.parse("4,12")
    assert grant.reasons[-1] == REASON
    without = changed(name, wish=wish, memory=EMPTY)
    assert without.own == CpuSet.parse("0,8")
    assert REASON not in without.reasons


def test_the_kubelet_does_not_look_at_memory() -> None:
    """`static` gives what the kubelet would."""
    policy = create("static", HOST, OPEN)
    with_memory = replace(policy.start(), memory={"vm-a": ONE})
    request = container(2000, pod("a"))
    for state in (policy.start(), with_memory):
        grant = policy.allocate(state, request).state.get("a-app")
        assert grant is not None
        assert (grant.own, REASON in grant.reasons) == (CpuSet.parse("0,8"), False)


@pytest.mark.parametrize("name", ["annotation", "topology"])
def test_a_full_node_is_no_reason_to_wait(name: str) -> None:
    """Too few free CPUs there: elsewhere, as ever."""
    other, full = wishing("exclusive", 4000, "b"), CpuSet.parse("0-3,8-11")
    grant = changed(name, other, millis=6000, memory=full)
    assert not grant.own <= full
    assert grant.own == changed(name, other, millis=6000, memory=EMPTY).own
    assert REASON not in grant.reasons


@pytest.mark.parametrize("name", ["annotation", "topology"])
def test_cpus_that_the_pod_has_come_first(name: str) -> None:
    """Its VM runs there; what it has stays, and grows by the nearest."""
    grant = changed(name, wishing("exclusive", 2000, "a", "db"))
    assert REASON not in grant.reasons
    assert grant.own <= CpuSet.parse("0-3,8-11")
    policy = create(name, HOST, OPEN)
    state = policy.allocate(policy.start(), wishing("exclusive")).state
    state = replace(state, memory={"vm-a": ONE})
    grown = policy.change(state, wishing("exclusive", 4000)).state.get("a-app")
    assert grown is not None
    assert grown.own == CpuSet.parse("0-1,8-9")


def test_whole_cores() -> None:
    """With full-pcpus-only an odd rest of the node is left, and whole cores are taken elsewhere."""
    settings = replace(OPEN, options={"full-pcpus-only": "true"}, reserved=CpuSet.parse("4-7"))
    grant = changed("annotation", settings=settings)
    assert grant.own == CpuSet.parse("0,8")
    assert changed("annotation", settings=replace(settings, reserved=CpuSet([4]))).own == (
        CpuSet.parse("5,13")
    )


def test_who_waits_gets_cpus_near_its_memory() -> None:
    """The state remembers where that was when its change was refused."""
    policy = create("annotation", HOST, OPEN)
    state = policy.start()
    for request in (wishing("exclusive", 14000, "b"), wishing("none", 2000)):
        state = policy.allocate(state, request).state
    state = replace(state, memory={"vm-a": ONE})
    refused = policy.change(state, wishing("exclusive"))
    assert refused.refused is not None
    state = policy.release(refused.state, "b-app").state
    assert state.memory == {"vm-a": ONE}
    grant = policy.change(state, wishing("exclusive")).state.get("a-app")
    assert grant is not None
    assert grant.own == CpuSet.parse("4,12")


@pytest.mark.parametrize("name", ["annotation", "topology"])
def test_candidates_are_those_considered(name: str) -> None:
    """`alloc explain` names the node's zones alone."""
    policy = create(name, HOST, OPEN)
    state = replace(policy.start(), memory={"vm-a": ONE})
    found = policy.candidates(state, wishing("exclusive"))
    assert found
    assert all(one.cpus <= ONE for one in found)


def test_memory_is_no_part_of_a_state() -> None:
    """It is neither stored nor compared: it is looked at again."""
    assert AllocState() == AllocState(memory={"vm-a": ONE})
