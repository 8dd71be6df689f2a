"""What is held back while exclusive CPUs change hands, and for how long."""

from __future__ import annotations

from msgspec.structs import replace

from kata_pin.base.allocation import POLICY_KEY, AllocState, ContainerRequest, Grant
from kata_pin.base.config.alloc import Alloc
from kata_pin.base.cpuset import CpuSet
from kata_pin.base.settings import AllowRule, Eligibility
from kata_pin.base.values import CpuClass
from kata_pin.options.allocation.grants import (
    Leaving,
    after_pass,
    held_back,
    in_force,
    still_to_leave,
)
from kata_pin.options.allocation.policies import create
from tests.support.machines import Shape, host
from tests.support.podspecs import container, pod

POLICY = create(
    "annotation",
    host(Shape(cores=4).cpus()),
    Alloc(eligibility=Eligibility.RELAXED, allow=(AllowRule(namespace="shop"),)),
)


def wishing(cpu_class: str, millis: int, uid: str, *, kata: bool = True) -> ContainerRequest:
    return container(millis, pod(uid, annotations={POLICY_KEY: cpu_class}, kata=kata))


def start(*requests: ContainerRequest) -> AllocState:
    state = POLICY.start()
    for request in requests:
        state = POLICY.allocate(state, request).state
    return state


def held(state: AllocState, once: Leaving) -> dict[str, str]:
    return {sandbox: str(cpus) for sandbox, cpus in held_back(state, once).items()}


def sets(state: AllocState) -> dict[str, str]:
    return {name: str(one.cpus) for name, one in state.grants.items() if name.endswith("app")}


def test_nothing_is_left_where_nothing_changes() -> None:
    """The same state is in force as a whole."""
    state = start(wishing("exclusive", 2000, "a"))
    assert still_to_leave(state, state, {}) == {}
    assert in_force(state, {}) is state


def test_shrinking_keeps_the_others_off() -> None:
    """CPUs to leave are in no other grant until then; their former grant is narrow at once."""
    before = start(wishing("exclusive", 4000, "a"), wishing("none", 500, "b"))
    after = POLICY.change(before, wishing("exclusive", 2000, "a")).state
    once = still_to_leave(before, after, {})
    assert held(after, once) == {"vm-a": "1,5"}
    assert sets(in_force(after, once)) == {"a-app": "0,4", "b-app": "2-3,6-7"}
    assert str(in_force(after, once).shared) == "2-3,6-7"
    assert sets(after) == {"a-app": "0,4", "b-app": "1-3,5-7"}
    assert after_pass(after, once, "vm-b") == once
    assert after_pass(after, once, "vm-a") == {}


def test_an_owner_that_goes_on_there_is_not_waited_for() -> None:
    """Exclusive to share, and to none: the others come at once."""
    before = start(wishing("exclusive", 2000, "a"), wishing("none", 500, "b"))
    for cpu_class in ("share", "none"):
        after = POLICY.change(before, wishing(cpu_class, 2000, "a")).state
        assert held(after, still_to_leave(before, after, {})) == {}


def test_two_steps_before_one_pass() -> None:
    """From an owner to the pool, and from there to another owner: that one waits for the first."""
    first = start(wishing("exclusive", 2000, "a"), wishing("none", 500, "b"))
    second = POLICY.change(first, wishing("none", 2000, "a")).state
    once = still_to_leave(first, second, {})
    third = POLICY.allocate(second, wishing("exclusive", 4000, "c", kata=False)).state
    once = still_to_leave(second, third, once)
    assert held(third, once) == {"vm-a": "0,4"}
    assert sets(in_force(third, once))["c-app"] == "1,5"


def test_cpus_that_two_have_to_leave_wait_for_both() -> None:
    """Granted to another, which gives them up before the first has left: it is not there yet."""
    state = start(wishing("exclusive", 2000, "a"), wishing("exclusive", 2000, "c"))
    twice = CpuSet.parse("3,7")
    once: Leaving = {"a-app": twice, "c-app": twice}
    now = in_force(state, once)
    assert now.grants["vm-a"].cpus.isdisjoint(twice)
    assert now.grants["vm-c"].cpus.isdisjoint(twice)
    assert twice <= in_force(state, after_pass(state, once, "vm-a")).grants["vm-c"].cpus


def test_what_a_container_of_the_pod_chose_to_share_is_still_left() -> None:
    """Other pods may use it too, so they wait until its former owner has left it."""
    first = start(wishing("exclusive", 2000, "a"), wishing("none", 500, "b"))
    second = POLICY.change(first, wishing("exclusive", 1000, "a")).state
    once = still_to_leave(first, second, {})
    left = CpuSet.parse(held(second, once)["vm-a"])
    side = replace(wishing("share", 1000, "a"), container_id="a-side", name="side")
    chosen = Grant(side, "annotation", CpuClass.SHARE, shared=left)
    third = second.with_grant(chosen)
    assert held(third, once) == {"vm-a": str(left)}
    assert in_force(third, once).grants["b-app"].cpus.isdisjoint(left)


def test_an_owner_of_another_runtime_is_not_waited_for() -> None:
    """No pass is over it: the runtime moves it before it widens others."""
    before = start(wishing("exclusive", 4000, "a", kata=False), wishing("none", 500, "b"))
    after = POLICY.change(before, wishing("exclusive", 2000, "a", kata=False)).state
    assert still_to_leave(before, after, {}) == {}


def test_what_is_still_being_left_stays_so() -> None:
    """A second change before the pass adds to the first; what is taken back is left no more."""
    first = start(wishing("exclusive", 4000, "a"), wishing("none", 500, "b"))
    second = POLICY.change(first, wishing("exclusive", 2000, "a")).state
    once = still_to_leave(first, second, {})
    third = POLICY.allocate(second, wishing("none", 500, "c")).state
    assert still_to_leave(second, third, once) == once
    grown = POLICY.change(third, wishing("exclusive", 4000, "a")).state
    assert held(grown, still_to_leave(third, grown, once)) == {}


def test_who_is_over_has_left() -> None:
    """The end of a container ends the waiting."""
    first = start(wishing("exclusive", 4000, "a"), wishing("none", 500, "b"))
    second = POLICY.change(first, wishing("exclusive", 2000, "a")).state
    gone = POLICY.release(second, "a-app").state
    assert still_to_leave(second, gone, still_to_leave(first, second, {})) == {}


def test_nobody_is_left_without_cpus() -> None:
    """A container that would have none at all does not wait."""
    first = start(wishing("exclusive", 6000, "a"), wishing("none", 500, "b"))
    second = POLICY.change(first, wishing("exclusive", 2000, "a")).state
    once = still_to_leave(first, second, {})
    third = POLICY.allocate(second, wishing("exclusive", 2000, "c")).state
    now = in_force(third, once)
    assert held(third, once) == {"vm-a": "1-2,5-6"}
    assert sets(now) == {"a-app": "0,4", "b-app": "3,7", "c-app": "1,5"}
    assert str(now.exclusive) == "0-1,4-5"
    assert str(now.shared) == "3,7"


def test_the_sandbox_itself_does_not_wait() -> None:
    """Another container of the pod may have at once what its sandbox leaves."""
    pods = start(wishing("exclusive", 4000, "a"), wishing("none", 500, "b"))
    mate = container(500, pod("a"), "mate", limit=0)
    before = POLICY.allocate(pods, mate).state
    after = POLICY.change(before, wishing("exclusive", 2000, "a")).state
    now = in_force(after, still_to_leave(before, after, {}))
    assert str(now.grants["a-mate"].cpus) == "1-3,5-7"
    assert str(now.grants["b-app"].cpus) == "2-3,6-7"
