"""The static policy over any sequence of pods that come and go."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kata_pin.base.cpuset import EMPTY, CpuSet, union
from kata_pin.base.settings import ManagerPolicy
from kata_pin.options.allocation.accumulator import Machine
from kata_pin.options.allocation.choice import KubeletChoice, choose
from kata_pin.options.allocation.demand import StaticOptions
from kata_pin.options.allocation.policy import AllocError
from tests.support.kubelet_pod import ContainerRole, KubeletContainer, KubeletPod
from tests.support.kubelet_state import StaticState
from tests.support.kubelet_static import KubeletStatic
from tests.support.machines import Shape, host

MACHINE = Machine.of(host(Shape(uppers=2, lowers=2, llcs=2, cores=2, threads=2).cpus()))
NODES = CpuSet(MACHINE.nodes)

OPTIONS = st.sampled_from(
    [
        StaticOptions(),
        StaticOptions(full_pcpus_only=True),
        StaticOptions(strict_cpu_reservation=True),
        StaticOptions(distribute_cpus_across_numa=True, full_pcpus_only=True),
        StaticOptions(prefer_align_cpus_by_uncorecache=True),
        StaticOptions(align_by_socket=True),
    ]
)
CONTAINERS = st.lists(
    st.tuples(st.sampled_from(list(ContainerRole)), st.sampled_from([1, 2, 2, 4, 6])),
    min_size=1,
    max_size=4,
)


class Pods(RuleBasedStateMachine):
    """Pods come, their containers end one by one, the state is restored from a copy."""

    @initialize(options=OPTIONS, reserve=st.integers(0, 5), strange=st.booleans())
    def start(self, options: StaticOptions, reserve: int, strange: bool) -> None:
        """Begin with an empty state; reserved CPUs may leave their siblings alone."""
        reserved = CpuSet(range(reserve)) if strange else EMPTY
        self.policy = KubeletStatic.create(MACHINE, options, reserve, reserved)
        self.state = self.policy.start(StaticState())
        self.pods: dict[str, KubeletPod] = {}
        self.born = 0

    @rule(containers=CONTAINERS, manager=st.sampled_from(list(ManagerPolicy)))
    def come(self, containers: list[tuple[ContainerRole, int]], manager: ManagerPolicy) -> None:
        """A pod's containers are allocated in turn until one is refused."""
        self.born += 1
        pod = KubeletPod(
            f"pod{self.born}",
            tuple(
                KubeletContainer(f"c{number}", cpus * 1000, cpus * 1000, role)
                for number, (role, cpus) in enumerate(containers)
            ),
        )
        self.pods[pod.uid] = pod
        for container in pod.containers:
            hint = choose(self.policy.hints(self.state, pod, container), manager, NODES)
            before = self.state
            chosen = self.chosen(pod, container, manager)
            try:
                self.state = self.policy.allocate(before, pod, container, hint.nodes)
            except AllocError:
                assert self.state is before
                assert not chosen
                return
            cpus = self.state.get(pod.uid, container.name) or EMPTY
            if chosen is not None:
                assert chosen == (cpus if hint.admit else EMPTY)
            assert len(cpus) == pod.exclusive_cpus(container)
            assert cpus <= self.policy.available(before) | before.reusable.of(pod.uid)

    def chosen(
        self, pod: KubeletPod, container: KubeletContainer, manager: ManagerPolicy
    ) -> CpuSet | None:
        """Return what our policies would choose, EMPTY if they refuse; None where it may differ.

        They count whole cores only for full-pcpus-only, and know no reuse between running ones.
        """
        options, wanted = self.policy.options, pod.exclusive_cpus(container)
        if options.full_pcpus_only or self.state.reusable.of(pod.uid) or not wanted:
            return None
        choice = KubeletChoice(MACHINE, options, manager)
        try:
            cpus = choice.choose(self.policy.available(self.state), wanted, EMPTY)
        except AllocError:
            return EMPTY
        told = choice.candidates(self.policy.available(self.state), wanted, EMPTY)
        assert union(one.taken for one in told) == cpus
        return cpus

    @precondition(lambda self: self.state.assignments)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """A container is removed."""
        pod = data.draw(st.sampled_from(sorted(self.state.assignments)))
        name = data.draw(st.sampled_from(sorted(self.state.assignments[pod])))
        self.state = self.policy.remove(self.state, pod, name)
        assert self.state.get(pod, name) is None

    @rule()
    def restart(self) -> None:
        """After a restart the state is accepted, and allocating all again changes nothing.

        What may be reused is forgotten, as in the kubelet.
        """
        if self.state.shared:
            found = StaticState(self.state.shared, self.state.assignments)
            self.state = self.policy.start(found)
            for uid, held in found.assignments.items():
                for container in self.pods[uid].containers:
                    if container.name in held and not self.policy.options.full_pcpus_only:
                        self.state = self.policy.allocate(self.state, self.pods[uid], container)
            assert self.state.assignments == found.assignments

    @invariant()
    def nothing_is_lost(self) -> None:
        """The shared pool and the exclusive CPUs are the whole pool, and do not overlap."""
        assert self.state.shared | self.state.exclusive == self.policy.pool
        assert self.state.shared.isdisjoint(self.state.exclusive)
        assert self.policy.reserved.isdisjoint(self.state.exclusive)

    @invariant()
    def nobody_shares(self) -> None:
        """No CPU is exclusive to two pods, nor to two containers that run at the same time."""
        taken = EMPTY
        for uid, held in self.state.assignments.items():
            of_pod = EMPTY
            running = EMPTY
            for container in self.pods[uid].containers:
                cpus = held.get(container.name, EMPTY)
                of_pod |= cpus
                if container.role is not ContainerRole.INIT:
                    assert cpus.isdisjoint(running)
                    running |= cpus
            assert of_pod.isdisjoint(taken)
            taken |= of_pod


Pods.TestCase.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)
TestPods = Pods.TestCase
