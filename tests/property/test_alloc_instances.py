"""Containers that fail to start, end and come back under other ids, beside a model by their names.

Each container has the same size all the time, so whoever has CPUs of its own keeps exactly these
until its pod ends, whatever happens to its instances and to the daemon meanwhile.
"""

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
from msgspec.structs import replace

from kata_pin.base.allocation import ContainerRequest, Grant, RunningContainer
from kata_pin.base.config.alloc import Alloc
from kata_pin.base.cpuset import CpuSet, union
from kata_pin.base.settings import Eligibility
from kata_pin.base.values import CpuClass, GrantKind
from kata_pin.options.allocation.policies import BUILTIN, create
from kata_pin.options.allocation.policy import ended, formers, inherited, keeps, resumed
from kata_pin.options.allocation.requests import dump_state, parse_state
from tests.support.machines import Shape, host
from tests.support.podspecs import container, pod

HOST = host(Shape(uppers=2, cores=4).cpus())
"""16 CPUs."""

SIZES = {"app": 2, "side": 1, "big": 5}
UIDS = st.sampled_from(["k1", "k2", "k3", "r1", "r2"])
NAMES = st.sampled_from(sorted(SIZES))
CLASSES = {"k1": CpuClass.EXCLUSIVE, "k3": CpuClass.SHARE, "r1": CpuClass.EXCLUSIVE}


def _request(uid: str, name: str, number: int) -> ContainerRequest:
    of = pod(uid, kata=uid.startswith("k"), ordered=CLASSES.get(uid, CpuClass.EXCLUSIVE))
    one = container(SIZES[name] * 1000, of, name)
    return replace(one, container_id=f"{uid}-{name}-{number}")


class Node(RuleBasedStateMachine):
    """A node whose pods' containers come, fail, end and come back."""

    policy_name = "static"

    @initialize()
    def start(self) -> None:
        """Begin with an empty node."""
        self.policy = create(self.policy_name, HOST, Alloc(eligibility=Eligibility.RELAXED))
        self.state = self.policy.start()
        self.born = 0
        self.runs: dict[tuple[str, str], ContainerRequest] = {}
        self.owned: dict[tuple[str, str], CpuSet] = {}

    @rule(uid=UIDS, name=NAMES)
    def create(self, uid: str, name: str) -> None:
        """A container is created; the end of its former instance may not have been reported."""
        self.born += 1
        request = _request(uid, name, self.born)
        state = inherited(self.state, request)
        ask = self.policy.allocate if state is self.state else self.policy.change
        self.state = ask(state, request).state
        self.runs[uid, name] = request
        assert not formers(self.state, request)

    @rule(uid=UIDS, name=NAMES)
    def end(self, uid: str, name: str) -> None:
        """A container that ran has ended, its pod has not."""
        request = self.runs.pop((uid, name), None)
        if request is None:
            return
        grant = self.state.grants[request.container_id]
        if keeps(grant):
            self.state = ended(self.state, request.container_id, f"s-{uid}")
        else:
            self.state = self.policy.release(self.state, request.container_id).state

    @rule(uid=UIDS)
    def pod_ends(self, uid: str) -> None:
        """A pod ends: nothing of it is kept."""
        for grant in self.state.of_pod(uid):
            self.state = self.policy.release(self.state, grant.container_id).state
        self.runs = {key: one for key, one in self.runs.items() if key[0] != uid}
        self.owned = {key: cpus for key, cpus in self.owned.items() if key[0] != uid}
        assert self.state.of_pod(uid) == ()

    @rule(came=st.sets(st.tuples(UIDS, NAMES), max_size=2))
    def restart(self, came: set[tuple[str, str]]) -> None:
        """A restart of the daemon, during which some containers came back unseen."""
        before = parse_state(dump_state(self.state))
        for key in came & {(one.pod_uid, one.request.name) for one in self._containers()}:
            self.born += 1
            self.runs[key] = _request(*key, self.born)
        running = [RunningContainer(one) for one in self.runs.values()]
        running += [
            RunningContainer(one.request, one.cpus)
            for one in self._containers()
            if (one.pod_uid, one.request.name) not in self.runs
        ]
        self.state = self.policy.reconcile(resumed(before, running), running).state

    def _containers(self) -> list[Grant]:
        return [one for one in self.state.grants.values() if one.kind is GrantKind.CONTAINER]

    @invariant()
    def one_grant_for_a_name(self) -> None:
        """A container has one grant, however many instances it had."""
        names = [(one.pod_uid, one.request.name) for one in self._containers()]
        assert len(names) == len(set(names))
        assert {one.container_id for one in self.runs.values()} <= self.state.grants.keys()

    @invariant()
    def nobody_loses_or_gains(self) -> None:
        """Own CPUs stay the same until the pod's end, and are as many as one instance needs."""
        for grant in self._containers():
            key = grant.pod_uid, grant.request.name
            if key in self.owned:
                assert grant.own == self.owned[key]
            if grant.own:
                assert len(grant.own) == SIZES[grant.request.name]
                self.owned[key] = grant.own
        assert self.owned.keys() <= {(one.pod_uid, one.request.name) for one in self._containers()}

    @invariant()
    def kept_is_exclusive(self) -> None:
        """Between two instances the CPUs are nobody else's."""
        for grant in self._containers():
            others = union(one.cpus for one in self.state.grants.values() if one is not grant)
            assert grant.exclusive.isdisjoint(others)
            assert grant.request.ended_in == "" or grant.own


@pytest.mark.parametrize("name", BUILTIN)
def test_instances_come_and_go(name: str) -> None:
    """For each policy."""
    machine = type("Node", (Node,), {"policy_name": name})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=60, stateful_step_count=30, deadline=None)
    )
