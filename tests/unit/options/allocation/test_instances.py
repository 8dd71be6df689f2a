"""The grant of a container's next instance."""

from __future__ import annotations

from msgspec.structs import replace

from kata_pin.base.allocation import AllocState, Grant, RunningContainer
from kata_pin.base.values import CpuClass, GrantKind
from kata_pin.options.allocation.policy import ended, formers, inherited, keeps, resumed
from tests.support.podspecs import container, pod
from tests.support.world import cpus

FIRST = container(2000)
SECOND = replace(FIRST, container_id="pod-app-2")
OWN = Grant(FIRST, "static", CpuClass.EXCLUSIVE, exclusive=cpus("2-3"))
STATE = AllocState(cpus("0-7")).with_grant(OWN)


def test_the_next_instance_has_the_same_place_and_cpus() -> None:
    """The order of grants stays: it is the order in which containers are served."""
    other = Grant(container(1000, pod("other")), "static", exclusive=cpus("4"))
    state = ended(STATE.with_grant(other), FIRST.container_id, "s1")
    assert state.grants[FIRST.container_id].request.ended_in == "s1"
    after = inherited(state, SECOND)
    assert list(after.grants) == ["pod-app-2", "other-app"]
    assert after.grants["pod-app-2"] == replace(OWN, request=SECOND)


def test_who_is_no_former_instance() -> None:
    """Another name, another pod, its VM, a container without a name, and the container itself."""
    vm = replace(OWN, request=replace(FIRST, container_id="vm-pod"), kind=GrantKind.SANDBOX)
    state = STATE.with_grant(vm)
    assert formers(state, FIRST) == ()
    assert formers(state, container(2000, name="side")) == ()
    assert formers(state, container(2000, pod("other"))) == ()
    assert formers(state, replace(SECOND, name="")) == ()
    assert formers(state, SECOND) == (OWN,)


def test_several_former_instances_leave_one_grant() -> None:
    """The last one's: others may be left from a state of an earlier version."""
    later = replace(OWN, request=replace(FIRST, container_id="b"), exclusive=cpus("5-6"))
    (grant,) = inherited(STATE.with_grant(later), SECOND).grants.values()
    assert grant == replace(later, request=SECOND)


def test_only_own_cpus_are_kept() -> None:
    """Of a container with a name, once."""
    assert keeps(OWN)
    assert not keeps(replace(OWN, exclusive=cpus("")))
    assert not keeps(replace(OWN, request=replace(FIRST, name="")))
    assert not keeps(replace(OWN, request=replace(FIRST, ended_in="s1")))


def test_two_instances_that_run_share_nothing() -> None:
    """Neither takes the other's grant when a state is reconciled with both."""
    both = [RunningContainer(FIRST), RunningContainer(SECOND)]
    assert resumed(STATE, both) is STATE
    assert list(resumed(STATE, both[1:]).grants) == ["pod-app-2"]
