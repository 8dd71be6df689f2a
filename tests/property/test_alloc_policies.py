"""Our policies over any sequence of events, beside a model that only counts CPUs."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from msgspec.structs import replace

from kata_pin.base.allocation import (
    POLICY_KEY,
    AllocState,
    ContainerRequest,
    Decision,
    Grant,
    PodRequest,
    Qos,
    RunningContainer,
)
from kata_pin.base.config.alloc import Alloc, Fail
from kata_pin.base.cpuset import EMPTY, CpuSet, HostTopology, union
from kata_pin.base.settings import AllowRule, Eligibility
from kata_pin.base.values import CpuClass, GrantKind, RefusalKind
from kata_pin.options.allocation.checked_policy import CheckedPolicy
from kata_pin.options.allocation.policies import BUILTIN, create
from kata_pin.options.allocation.policy import Policy
from kata_pin.options.allocation.requests import dump_state, parse_state
from kata_pin.options.allocation.shared_pool import bound
from tests.support.machines import Shape, host
from tests.support.podspecs import NAMESPACE, container, pod

HOST = host(Shape(uppers=2, llcs=2, cores=2).cpus())
"""16 CPUs: 2 packages, each a node with 2 caches of 2 cores with 2 threads."""

ALL = CpuSet(range(16))
ALLOW = (AllowRule(namespace=NAMESPACE),)

SETTINGS = st.builds(
    Alloc,
    reserved=st.sampled_from([EMPTY, CpuSet([0]), CpuSet([0, 8])]),
    strict_reserved=st.booleans(),
    housekeeping=st.sampled_from([EMPTY, CpuSet([1, 9])]),
    shared_minimum=st.sampled_from([0, 1, 5]),
    eligibility=st.sampled_from(Eligibility),
    options=st.sampled_from([{}, {"full-pcpus-only": "true"}]),
    allow=st.just(ALLOW),
    fail=st.sampled_from(Fail),
    own_cpus=st.sampled_from([0, 0, 1, 2]),
    pin_memory=st.booleans(),
    max_sharers=st.sampled_from([1, 2]),
)
CLASSES = st.sampled_from([*CpuClass, "shared", None])
SIZES = st.sampled_from([0, 500, 1000, 2000, 2000, 2500, 4000, 6000, 12000])
PODS = st.sampled_from([f"p{n}" for n in range(5)])


def without(cpus: CpuSet) -> HostTopology:
    """Return the host with these CPUs offline."""
    rest = host([cpu for cpu in HOST.cpus if cpu.cpu not in cpus])
    return replace(rest, present=ALL)


class Checked(CheckedPolicy):
    """A policy of ours behind the check of every answer, as the daemon asks it."""

    def __init__(self, name: str, topology: HostTopology, chosen: Alloc) -> None:
        policy = create(name, topology, chosen)
        super().__init__(name, policy, topology, chosen, lambda _new: "")
        self.name = name
        self.start = policy.start
        self.candidates = policy.candidates


class Node(RuleBasedStateMachine):
    """A node on which containers come, go and change while the daemon and CPUs come and go."""

    policy_name = "static"

    @initialize(chosen=SETTINGS)
    def start(self, chosen: Alloc) -> None:
        """Begin with an empty node."""
        self.settings = chosen
        self.topology = HOST
        self.policy: Policy = Checked(self.policy_name, HOST, chosen)
        self.state = self.policy.start()
        self.born = 0
        self.requests: dict[str, ContainerRequest] = {}
        self.starved = False
        """Whether CPUs went offline, which may take the shared pool below its minimum."""

    @rule(
        uid=PODS,
        chosen=CLASSES,
        millis=SIZES,
        kata=st.booleans(),
        qos=st.sampled_from(Qos),
        init=st.booleans(),
    )
    def create(
        self, *, uid: str, chosen: str | None, millis: int, kata: bool, qos: Qos, init: bool
    ) -> None:
        """A container is created, in a pod that may have some already."""
        self.born += 1
        known = [one.pod for one in self.requests.values() if one.pod.pod_uid == uid]
        notes = {POLICY_KEY: str(chosen)} if chosen else {}
        owner = known[0] if known else pod(uid, annotations=notes, kata=kata, qos=qos)
        request = container(millis, owner, f"c{self.born}", init=init)
        ended = [name for name, one in self.requests.items() if one.pod.pod_uid == uid and one.init]
        before = self.state
        decision = self.policy.allocate(before, request)
        assert decision == self.policy.allocate(before, request)
        if decision.refused and decision.refused.strict:
            assert decision.state is before
            assert decision.changed == ()
            return
        for name in ended:
            del self.requests[name]
        self.requests[request.container_id] = request
        self.take(decision)
        grant = self.state.grants[request.container_id]
        assert grant.request == request
        if decision.refused:
            assert grant.cpu_class is CpuClass.NONE
        assert self.policy.allocate(self.state, request).state is self.state

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """A container ends: what it had is free again, and its VM's with the last one."""
        name = data.draw(st.sampled_from(sorted(self.requests)))
        before = self.state
        had = before.grants[name].exclusive
        del self.requests[name]
        self.take(self.policy.release(before, name))
        assert had <= self.state.shared | self.state.exclusive | self.state.taken
        assert self.state.get(name) is None
        assert self.policy.release(self.state, name).changed == ()

    @precondition(lambda self: any(one.pod.kata for one in self.requests.values()))
    @rule(data=st.data())
    def end_vm(self, data: st.DataObject) -> None:
        """A whole pod ends."""
        vms = {one.pod.sandbox_id for one in self.requests.values() if one.pod.kata}
        vm = data.draw(st.sampled_from(sorted(vms)))
        self.requests = {
            name: one for name, one in self.requests.items() if one.pod.sandbox_id != vm
        }
        self.take(self.policy.release(self.state, vm))

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), chosen=CLASSES, millis=SIZES, ordered=st.booleans())
    def change(self, data: st.DataObject, chosen: str | None, millis: int, ordered: bool) -> None:
        """A running container gets another class or size, by annotation or by order."""
        name = data.draw(st.sampled_from(sorted(self.requests)))
        old = self.requests[name]
        owner: PodRequest = replace(old.pod, annotations={POLICY_KEY: str(chosen)})
        if ordered and chosen in list(CpuClass):
            owner = replace(old.pod, ordered=CpuClass(str(chosen)))
        request = replace(old, pod=owner, cpu_millis=millis, quota_us=millis * 100)
        before, held = self.state, self.state.grants[name]
        decision = self.policy.change(before, request)
        assert decision == self.policy.change(before, request)
        if decision.refused:
            assert decision.state is before
            assert not decision.refused.strict
            return
        self.requests[name] = request
        self.take(decision)
        now = self.state.grants[name]
        assert self.policy.change(self.state, request).changed == ()
        kept, wanted = len(now.own & held.own), min(len(now.own), len(held.own))
        if "full-pcpus-only" not in self.settings.options and now.own and not self.starved:
            assert kept >= wanted - len(bound(before.without(name)) & held.own)

    @rule(offline=st.sampled_from(["", "3", "2,10", "4-7,12-15", "1-15"]))
    def hotplug(self, offline: str) -> None:
        """CPUs go or come back; the daemon may have been away: everything goes on."""
        cpus = CpuSet.parse(offline)
        self.topology = without(cpus)
        self.policy = Checked(self.policy_name, self.topology, self.settings)
        self.starved = self.starved or bool(cpus)
        self.reconcile(self.state)

    @rule(taken=st.sampled_from(["", "5", "4,12", "0-3", "2-15", "0-15"]))
    def others(self, taken: str) -> None:
        """Others give CPUs out exclusively, or have them back: nobody gets one of them newly."""
        self.starved = self.starved or bool(taken)
        before = self.state
        self.reconcile(replace(before, taken=CpuSet.parse(taken)))
        for name, grant in self.state.grants.items():
            had = before.grants[name].own if name in before.grants else EMPTY
            assert (grant.own - had).isdisjoint(self.state.taken)
            assert grant.own >= had & self.state.taken & self.topology.online

    @rule()
    def restart(self) -> None:
        """A restart finds the same state, and nothing is to be written."""
        self.state = replace(parse_state(dump_state(self.state)), taken=self.state.taken)
        before = self.state
        self.reconcile(before)
        if not self.starved:
            for name, grant in before.grants.items():
                assert self.state.grants[name].exclusive >= grant.exclusive

    @rule()
    def lose(self) -> None:
        """The state is lost: containers that run on own CPUs keep them."""
        before = self.state
        self.reconcile(AllocState(taken=self.state.taken))
        if self.starved or self.settings.own_cpus:
            return
        for name, grant in before.grants.items():
            if grant.cpu_class is CpuClass.EXCLUSIVE and grant.shared is None:
                assert self.state.grants[name].exclusive == grant.exclusive

    def reconcile(self, found: AllocState) -> None:
        """Bring a state in line with what runs: containers are seen on the CPUs they have."""
        running = [
            RunningContainer(request, self.state.grants[name].cpus)
            for name, request in self.requests.items()
        ]
        decision = self.policy.reconcile(found, running)
        seen = {one.request.container_id: one.cpus for one in running}
        self.state = decision.state
        assert "alloc-policy" not in {note.code for note in decision.notes}, decision.notes
        assert decision.refused is None
        for grant in self.state.grants.values():
            if grant.kind is GrantKind.CONTAINER:
                differs = seen[grant.container_id] != grant.cpus
                assert (grant in decision.changed) == differs
        again = self.policy.reconcile(
            self.state,
            [
                replace(one, cpus=self.state.grants[one.request.container_id].cpus)
                for one in running
            ],
        )
        assert again.changed == ()

    def take(self, decision: Decision) -> None:
        """Take a decision: `changed` is what differs."""
        assert "alloc-policy" not in {note.code for note in decision.notes}, decision.notes
        before, after = self.state, decision.state
        differing = {
            name
            for name, grant in after.grants.items()
            if name not in before.grants
            or before.grants[name].cpus != grant.cpus
            or before.grants[name].mems != grant.mems
        }
        assert {grant.container_id for grant in decision.changed} == differing
        if not decision.changed:
            assert {n: g.cpus for n, g in before.grants.items() if n in after.grants} == {
                n: g.cpus for n, g in after.grants.items()
            }
        self.state = after

    @invariant()
    def everybody_runs(self) -> None:
        """Each container has a grant and CPUs that are online; each Kata pod's VM has one."""
        vms = {one.pod.sandbox_id for one in self.requests.values() if one.pod.kata}
        assert set(self.state.grants) == set(self.requests) | vms
        for grant in self.state.grants.values():
            assert grant.cpus
            assert grant.cpus <= self.topology.online

    @invariant()
    def nothing_is_lost(self) -> None:
        """Shared and exclusive CPUs are disjoint and all there are; reserved ones are not given."""
        state = self.state
        assert state.shared | state.exclusive | (state.taken & state.cpus) == state.cpus
        assert state.shared.isdisjoint(state.taken) or state.cpus - state.exclusive <= state.taken
        assert state.shared.isdisjoint(state.exclusive)
        assert state.shared
        assert len(state.exclusive) == sum(len(one.exclusive) for one in state.grants.values())
        owned = state.exclusive | bound(state)
        assert owned.isdisjoint(state.reserved | state.housekeeping)
        if state.housekeeping:
            assert state.housekeeping.isdisjoint(state.cpus)

    @invariant()
    def exclusive_means_exclusive(self) -> None:
        """Exclusive CPUs have one container; chosen shared CPUs are in the shared pool."""
        for grant in self.state.grants.values():
            others = union(one.cpus for one in self.state.grants.values() if one is not grant)
            assert grant.exclusive.isdisjoint(others)
            assert grant.bound <= self.state.shared | self.state.taken
            if grant.cpu_class is CpuClass.NONE and grant.kind is GrantKind.CONTAINER:
                assert grant.cpus <= self.state.shared
        assert not bound(self.state, self.settings.max_sharers + 1)

    @invariant()
    def sizes_are_right(self) -> None:
        """A container has as many CPUs of its own as it asked for, or none."""
        for grant in self.state.grants.values():
            self.check_size(grant)

    def check_size(self, grant: Grant) -> None:
        if grant.kind is GrantKind.SANDBOX:
            assert len(grant.own) in {0, self.settings.own_cpus}
        elif grant.own:
            assert len(grant.own) == grant.request.cpu_millis // 1000
            fraction = grant.request.cpu_millis % 1000
            assert bool(fraction) == (grant.cpu_class is CpuClass.EXCLUSIVE and bool(grant.shared))
        if self.settings.options and grant.own:
            assert union(self.topology.siblings(cpu) for cpu in grant.own) == grant.own

    @invariant()
    def pool_has_its_minimum(self) -> None:
        """The shared pool never falls below the setting, by default one core."""
        least = self.settings.shared_minimum or 2
        if not self.starved and self.state.exclusive:
            assert len(self.state.shared) >= least


@pytest.mark.parametrize("name", BUILTIN)
def test_any_events(name: str) -> None:
    """The invariants hold for each policy."""
    machine = type("Node", (Node,), {"policy_name": name})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=80, stateful_step_count=20, deadline=None)
    )


def test_refusal_names_the_reason() -> None:
    """A container that would take the shared pool below its minimum is refused with the reason."""
    policy = create("static", HOST, Alloc(shared_minimum=14))
    refused = policy.allocate(policy.start(), container(3000, pod(kata=False))).refused
    assert refused is not None
    assert refused.kind is RefusalKind.SHARED_MINIMUM


def reconciled(policy: Policy, state: AllocState, requests: list[ContainerRequest]) -> Decision:
    """Reconcile with containers that run where the state says."""
    running = [RunningContainer(one, state.grants[one.container_id].cpus) for one in requests]
    return policy.reconcile(state, running)


def test_the_pool_is_divided_after_all_own_cpus() -> None:
    """Who waits, and a VM that gets its own CPUs late, leave the next reconcile nothing to do."""
    chosen = Alloc(reserved=CpuSet([0, 8]), strict_reserved=True, shared_minimum=5, allow=ALLOW)
    chosen = replace(chosen, housekeeping=CpuSet([1, 9]))
    policy = create("topology", without(CpuSet([2, 10])), chosen)
    state = replace(policy.start(), taken=CpuSet(range(2, 16)))
    owner = pod("p0", annotations={POLICY_KEY: "exclusive"}, kata=False)
    requests = [container(millis, owner, f"c{millis}") for millis in (6000, 2500)]
    for one in requests:
        state = policy.allocate(state, one).state
    settled = reconciled(policy, replace(state, taken=EMPTY), requests).state
    assert reconciled(policy, settled, requests).changed == ()


def test_a_lost_state_has_the_pool_divided_after_vms() -> None:
    """A VM's own CPUs are out of the pool before zones of the pool are chosen."""
    policy = create("topology", HOST, Alloc(allow=ALLOW, own_cpus=2))
    kata = pod("p0", annotations={POLICY_KEY: "exclusive"}, kata=True)
    other, third = (pod(uid, annotations={POLICY_KEY: "none"}, kata=False) for uid in ("p1", "p2"))
    sizes = ((0, other), (0, kata), (1000, kata), (2000, third), (6000, other))
    requests = [container(millis, owner, f"c{n}") for n, (millis, owner) in enumerate(sizes)]
    state = policy.start()
    for one in requests:
        state = policy.allocate(state, one).state
    running = [RunningContainer(one, state.grants[one.container_id].cpus) for one in requests]
    found = policy.reconcile(AllocState(), running).state
    assert reconciled(policy, found, requests).changed == ()
