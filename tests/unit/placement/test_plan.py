"""The plan: minimal and ordered."""

from __future__ import annotations

from kata_pin.base.placement import Desired, Placement, SandboxMask
from kata_pin.base.sandbox import Thread
from kata_pin.placement.drift import make_plan
from tests.support.world import after, cpus, vcpu, vcpus


def wanting(applied: dict[int, str]) -> Placement:
    """Return a placement of vCPUs by index."""
    desired = {}
    for index, text in applied.items():
        key = vcpu(index).key
        desired[key] = Desired(cpus(text), cpus(text), f"for {index}")
    return Placement("pod", SandboxMask(cpus("0-15")), desired)


def seen(observed: dict[int, str]) -> list[Thread]:
    """Return vCPU threads by index with these affinities."""
    return [vcpu(index, on=text) for index, text in observed.items()]


def test_widen_then_move_then_narrow() -> None:
    """Threads that get more CPUs first, then those that change, then those that lose."""
    placement = wanting({0: "4", 1: "4-7", 2: "5", 3: "4", 4: "4-7"})
    plan = make_plan(placement, seen({0: "4-7", 1: "4", 2: "4", 3: "0-9", 4: "6"}))
    assert [action.key.tid - 1100 for action in plan] == [1, 4, 2, 0, 3]


def test_only_what_differs() -> None:
    """Threads that stand right, are gone or are left alone get no action."""
    assert make_plan(wanting({0: "4", 9: "5"}), seen({0: "4", 1: "0-3"})) == ()


def test_action_says_from_where_to_where() -> None:
    """An action carries the observed mask, the target and the reason."""
    (action,) = make_plan(wanting({0: "4"}), seen({0: "0-7"}))
    said = (action.key.tid, str(action.before), str(action.target), action.reason)
    assert said == (1100, "0-7", "4", "for 0")


def test_second_plan_is_empty() -> None:
    """What the plan leaves behind needs no plan."""
    placement = wanting({0: "4", 1: "4-7", 2: "5"})
    assert make_plan(placement, after(placement, vcpus(0, 1, 2))) == ()


def test_skipped_threads_are_left() -> None:
    """Another writer's thread is kept out, the rest is still set."""
    plan = make_plan(wanting({0: "4", 1: "5"}), vcpus(0, 1), skip={vcpu(0).key})
    assert [action.key for action in plan] == [vcpu(1).key]


def test_a_doubled_observation_is_one_action() -> None:
    """A thread that was listed twice is set once."""
    assert len(make_plan(wanting({0: "4"}), vcpus(0, 0))) == 1


def test_nothing_is_never_applied() -> None:
    """An empty mask is never asked of the kernel."""
    assert make_plan(wanting({0: ""}), vcpus(0)) == ()
