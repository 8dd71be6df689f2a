"""Exclusive CPUs that change hands, with passes over sandboxes in any order."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from kata_pin.base.allocation import AllocState, ContainerRequest, Grant
from kata_pin.base.config.alloc import Alloc
from kata_pin.base.cpuset import CpuSet, union
from kata_pin.base.settings import Eligibility
from kata_pin.base.values import CpuClass
from kata_pin.options.allocation.grants import (
    Leaving,
    after_pass,
    held_back,
    in_force,
    still_to_leave,
)
from kata_pin.options.allocation.policies import BUILTIN, create
from tests.support.machines import Shape, host
from tests.support.podspecs import container, pod

HOST = host(Shape(uppers=2, cores=4).cpus())
UIDS = ("k1", "k2", "k3", "r1", "r2")
"""Pods with a VM, and without."""


def request(uid: str, millis: int, cpu_class: CpuClass, name: str) -> ContainerRequest:
    return container(millis, pod(uid, kata=uid.startswith("k"), ordered=cpu_class), name)


class Node(RuleBasedStateMachine):
    """A node whose containers are resized and reclassed while passes come when they come."""

    policy_name = "static"

    @initialize(own_cpus=st.sampled_from([0, 1]))
    def start(self, own_cpus: int) -> None:
        """Begin with an empty node of 16 CPUs."""
        chosen = Alloc(eligibility=Eligibility.RELAXED, own_cpus=own_cpus)
        self.policy = create(self.policy_name, HOST, chosen)
        self.state = self.policy.start()
        self.leaving: Leaving = {}
        self.alone: dict[str, CpuSet] = {}
        """The exclusive CPUs on which each Kata container's threads were put by the last pass."""

    @rule(
        uid=st.sampled_from(UIDS),
        name=st.sampled_from(["app", "app", "side"]),
        cpus=st.integers(1, 6),
        cpu_class=st.sampled_from([*CpuClass, CpuClass.EXCLUSIVE, CpuClass.EXCLUSIVE]),
    )
    def ask(self, uid: str, name: str, cpus: int, cpu_class: CpuClass) -> None:
        """A container is created, or resized, or has another class from now on."""
        one = request(uid, cpus * 1000, cpu_class, name)
        known = self.state.get(one.container_id) is not None
        ask = self.policy.change if known else self.policy.allocate
        self.take(ask(self.state, one).state)

    @rule(uid=st.sampled_from(UIDS), name=st.sampled_from(["app", "side"]))
    def end(self, uid: str, name: str) -> None:
        """A container ends, if it is there."""
        self.take(self.policy.release(self.state, f"{uid}-{name}").state)

    @rule(order=st.permutations([uid for uid in UIDS if uid.startswith("k")]))
    def passes(self, order: list[str]) -> None:
        """Each sandbox has a pass, in some order."""
        for uid in order:
            self.pass_over(uid)

    @rule(uid=st.sampled_from([uid for uid in UIDS if uid.startswith("k")]))
    def pass_over(self, uid: str) -> None:
        """A pass puts a sandbox's threads where they may be now, and ends its leaving."""
        vm = f"vm-{uid}"
        for name, grant in in_force(self.state, self.leaving).grants.items():
            if grant.request.pod.sandbox_id == vm:
                self.come(name, grant)
                self.alone[name] = grant.exclusive
        self.leaving = after_pass(self.state, self.leaving, vm)
        self.tell()

    def take(self, after: AllocState) -> None:
        """A decision is in force, but for what is being left."""
        self.leaving = still_to_leave(self.state, after, self.leaving)
        self.state = after
        self.alone = {name: cpus for name, cpus in self.alone.items() if name in after.grants}
        self.tell()

    def tell(self) -> None:
        """Containers of other runtimes move at once."""
        for name, grant in in_force(self.state, self.leaving).grants.items():
            if not grant.request.pod.kata:
                self.come(name, grant)

    def come(self, name: str, grant: Grant) -> None:
        """Assert that no other sandbox's threads are still where they were promised to be alone."""
        mover = grant.request.pod.sandbox_id or name
        owed = union(
            self.alone[other] - one.cpus
            for other, one in self.state.grants.items()
            if other in self.alone and one.request.pod.sandbox_id != mover
        )
        if not self.state.grants[name].cpus <= union(held_back(self.state, self.leaving).values()):
            assert grant.cpus.isdisjoint(owed)

    @invariant()
    def what_is_in_force_is_sound(self) -> None:
        """While CPUs are left each container has some, none of another's, no more than granted."""
        now = in_force(self.state, self.leaving)
        assert now.shared.isdisjoint(now.exclusive)
        for grant in now.grants.values():
            assert grant.cpus
            assert grant.cpus <= self.state.grants[grant.container_id].cpus
            others = union(one.cpus for one in now.grants.values() if one is not grant)
            assert grant.exclusive.isdisjoint(others)

    @invariant()
    def nothing_is_held_back_for_ever(self) -> None:
        """When all have had their pass, everything is in force."""
        once = self.leaving
        for uid in UIDS:
            once = after_pass(self.state, once, f"vm-{uid}")
        assert once == {}


@pytest.mark.parametrize("name", BUILTIN)
def test_any_order(name: str) -> None:
    """The promise to an owner holds until it has left, with each policy."""
    machine = type("Node", (Node,), {"policy_name": name})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=120, stateful_step_count=30, deadline=None)
    )
