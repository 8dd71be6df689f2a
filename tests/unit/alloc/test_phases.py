"""Live changes step by step."""

from __future__ import annotations

from kata_pin.model.alloc import (
    POLICY_KEY,
    AllocSettings,
    AllocState,
    AllowRule,
    ContainerRequest,
    CpuClass,
    Eligibility,
    Grant,
)
from kata_pin.model.cpuset import CpuSet
from kata_pin.policy.alloc.phases import Phase, PhaseKind, transition
from kata_pin.policy.alloc.policies import create
from tests.support.machines import Shape, host
from tests.support.podspecs import container, pod

POLICY = create(
    "annotation",
    host(Shape(cores=4).cpus()),
    AllocSettings(eligibility=Eligibility.RELAXED, allow=(AllowRule(namespace="shop"),)),
)


def cpus(text: str) -> CpuSet:
    return CpuSet.parse(text)


def wishing(cpu_class: str, millis: int, uid: str) -> ContainerRequest:
    return container(millis, pod(uid, annotations={POLICY_KEY: cpu_class}, kata=False))


def start(*requests: ContainerRequest) -> AllocState:
    state = POLICY.start()
    for request in requests:
        state = POLICY.allocate(state, request).state
    return state


def steps(before: AllocState, after: AllocState) -> list[tuple[str, dict[str, str]]]:
    return [
        (phase.kind.value, {name: str(cpus) for name, cpus in phase.cpus.items()})
        for phase in transition(before, after)
    ]


def test_no_change_no_phase() -> None:
    """Nothing to do, nothing to write."""
    state = start(wishing("exclusive", 2000, "a"))
    assert transition(state, state) == ()


def test_none_to_exclusive_narrows_at_once() -> None:
    """The container and the others leave each other in one step; nobody is wider before."""
    before = start(wishing("none", 2000, "a"), wishing("none", 500, "b"))
    after = POLICY.change(before, wishing("exclusive", 2000, "a")).state
    assert steps(before, after) == [("narrow", {"a-app": "0,4", "b-app": "1-3,5-7"})]


def test_exclusive_to_share_opens_at_once() -> None:
    """The owner stays where it is, so that the others need not wait."""
    before = start(wishing("exclusive", 2000, "a"), wishing("none", 500, "b"))
    after = POLICY.change(before, wishing("share", 2000, "a")).state
    assert steps(before, after) == [("widen", {"b-app": "0-7"})]


def test_exclusive_to_none_hands_over_last() -> None:
    """The owner is widened first; the others get its CPUs when it is no longer alone there."""
    before = start(wishing("exclusive", 2000, "a"), wishing("none", 500, "b"))
    after = POLICY.change(before, wishing("none", 2000, "a")).state
    assert steps(before, after) == [("widen", {"a-app": "0-7", "b-app": "0-7"})]


def test_growing_widens_then_the_others_narrow() -> None:
    """A container that grows has its new CPUs when the others have left them."""
    before = start(wishing("exclusive", 2000, "a"), wishing("none", 500, "b"))
    after = POLICY.change(before, wishing("exclusive", 4000, "a")).state
    assert steps(before, after) == [
        ("widen", {"a-app": "0-1,4-5"}),
        ("narrow", {"b-app": "2-3,6-7"}),
    ]


def test_shrinking_hands_over_when_the_owner_has_left() -> None:
    """Exclusive CPUs that are given up go to others only after their owner was re-pinned."""
    before = start(wishing("exclusive", 4000, "a"), wishing("none", 500, "b"))
    after = POLICY.change(before, wishing("exclusive", 2000, "a")).state
    assert steps(before, after) == [
        ("narrow", {"a-app": "0,4"}),
        ("hand-over", {"b-app": "1-3,5-7"}),
    ]


def test_moving_is_widen_then_narrow() -> None:
    """A container that moves to other CPUs has both sets in between."""

    def at(text: str) -> AllocState:
        grant = Grant(wishing("share", 2000, "a"), "annotation", CpuClass.SHARE, shared=cpus(text))
        return POLICY.start().with_grant(grant)

    assert transition(at("0,4"), at("1,5")) == (
        Phase(PhaseKind.WIDEN, {"a-app": cpus("0-1,4-5")}),
        Phase(PhaseKind.NARROW, {"a-app": cpus("1,5")}),
    )


def test_containers_that_come_or_go_are_not_named() -> None:
    """What is created gets its CPUs in the answer to its creation; what is gone needs none."""
    before = start(wishing("exclusive", 2000, "a"), wishing("none", 500, "b"))
    gone = POLICY.release(before, "a-app").state
    assert steps(before, gone) == [("widen", {"b-app": "0-7"})]
    assert steps(gone, before) == [("narrow", {"b-app": "1-3,5-7"})]
