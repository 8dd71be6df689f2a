"""Replay of what a real kubelet did to pods that came and went, decision by decision.

A trace (format in tests/data/oracles/README.md, kubelet_live.json) has the kubelet's answer to each
pod and its checkpoint after each step. `replay` gives the same pods to KubeletStatic and to
kata-pin's policy `static`. KubeletStatic keeps its own state through the whole trace; `static` is
asked for each container with the kubelet's state before it, so that one difference does not cause
the next ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from msgspec.structs import replace

from kata_pin.base.allocation import AllocState, ContainerRequest, Grant, PodRequest, Qos
from kata_pin.base.config.alloc import Alloc, Fail
from kata_pin.base.cpuset import EMPTY, CpuPlace, CpuSet, HostTopology
from kata_pin.base.settings import ManagerPolicy
from kata_pin.base.values import CpuClass, RefusalKind
from kata_pin.options.allocation.accumulator import Machine
from kata_pin.options.allocation.choice import choose
from kata_pin.options.allocation.demand import StaticOptions
from kata_pin.options.allocation.policies import create
from kata_pin.options.allocation.policy import AllocError, AllocFailure, Policy
from tests.support.kubelet_pod import ContainerRole, KubeletContainer, KubeletPod
from tests.support.kubelet_state import StaticState
from tests.support.kubelet_static import KubeletStatic

Row = Mapping[str, Any]

MANAGERS_REASONS: Final = (
    "Allocate failed due to",
    "SMT Alignment Error",
    "Resources cannot be allocated with Topology locality",
)
"""What the CPU manager and the topology manager say; other reasons come before they are asked."""


class MismatchError(Exception):
    """Something differs from what was expected."""


def expect(what: str, expected: object, got: object) -> None:
    """Raise MismatchError unless both are equal."""
    if expected != got:
        raise MismatchError(f"{what}\n    expected {expected}\n    got      {got}")


def host_topology(cpus: Iterable[Mapping[str, int]]) -> HostTopology:
    """Make the project's topology of an oracle's list of CPUs."""
    threads: dict[int, int] = {}
    known: list[CpuPlace] = []
    for cpu in sorted(cpus, key=lambda one: one["cpu"]):
        thread = threads.get(cpu["core"], 0)
        threads[cpu["core"]] = thread + 1
        known.append(
            CpuPlace(cpu["cpu"], cpu["numa"], cpu["socket"], cpu["uncore"], cpu["core"], thread, "")
        )
    everything = CpuSet(one.cpu for one in known)
    return HostTopology(cpus=tuple(known), online=everything, present=everything)


@dataclass
class Counted:
    """How much was compared: all by the replica, `by_static` also by `static`.

    `not_static` were not given to `static`: containers after an init container, whose CPUs it
    prefers, those of pods that the topology manager places as a whole, and those that get the
    kubelet's last shared CPU.
    """

    steps: int = 0
    containers: int = 0
    by_static: int = 0
    refused: int = 0
    not_static: int = 0


def replay(topology: HostTopology, trace: Row) -> Counted:
    """Replay a trace; raise MismatchError at the first answer that is not the kubelet's.

    The kubelet frees CPUs in two writes: the entry goes first, the shared pool grows after it. A
    checkpoint that was read between them lacks CPUs of the removed pod, and no others.
    """
    kubelet = _Replica(topology, trace)
    ours = _Static(topology, trace)
    counted = Counted()
    before = StaticState(shared=kubelet.policy.pool)
    alive: set[str] = set()
    for number, step in enumerate(trace["ops"]):
        after = _state(step)
        where = " ".join((f"step {number},", step["op"], step.get("pod", "")))
        try:
            gone = step["pod"] if step["op"] == "del" else step.get("old", "")
            kubelet.remove(gone)
            alive.discard(gone)
            if "containers" in step and _asked(step):
                pod = read_pod(step)
                admitted = step["result"] == "ok"
                _compare_pod(kubelet, pod, after if admitted else None, counted)
                ours.compare(_living(before, alive), pod, after if admitted else None, counted)
                if admitted:
                    alive.add(pod.uid)
            living = _living(after, alive)
            expect("entries", living.assignments, kubelet.state.assignments)
            if living.assignments == after.assignments:  # else CPUs wait for the next decision
                freed = before.exclusive - after.exclusive
                between = freed & (kubelet.policy.pool - after.shared)
                expect("shared pool", after.shared | between, kubelet.state.shared)
        except MismatchError as error:
            raise MismatchError(f"{where}: {error}") from None
        before = after
        counted.steps += 1
    return counted


def read_pod(step: Row) -> KubeletPod:
    """Return the pod of an `add` or `change` step."""
    return KubeletPod(
        step["pod"],
        tuple(
            KubeletContainer(
                one["name"],
                one["request_m"],
                one["limit_m"],
                ContainerRole(one["role"]),
                one["memory_equal"],
            )
            for one in step["containers"]
        ),
    )


def _asked(step: Row) -> bool:
    """Return whether the CPU manager decided, not if the pod was refused for another reason."""
    return step["result"] == "ok" or any(one in step["reason"] for one in MANAGERS_REASONS)


def _state(step: Row) -> StaticState:
    return StaticState(
        shared=CpuSet.parse(step["default"]),
        assignments={
            pod: {name: CpuSet.parse(cpus) for name, cpus in containers.items()}
            for pod, containers in step["entries"].items()
        },
    )


def _living(state: StaticState, alive: set[str]) -> StaticState:
    """Return the state without pods that were refused after some of their CPUs were chosen."""
    for pod, containers in state.assignments.items():
        if pod not in alive:
            for container in containers:
                state = state.removed(pod, container)
    return state


def _compare_pod(
    kubelet: _Replica, pod: KubeletPod, after: StaticState | None, counted: Counted
) -> None:
    """Raise MismatchError unless the replica admits or refuses this pod as the kubelet did."""
    counted.containers += len(pod.containers) if after else 0
    counted.refused += after is None
    try:
        kubelet.add(pod)
    except AllocError as error:
        expect(f"admitted ({error})", after is not None, False)
        return
    expect("admitted", after is not None, True)


class _Replica:
    """KubeletStatic and the topology manager, with a state of their own."""

    def __init__(self, topology: HostTopology, trace: Row) -> None:
        machine = Machine.of(topology)
        self._manager = ManagerPolicy(trace["topology_manager"])
        self._pod_scope = trace["scope"] == "pod"
        self._nodes = CpuSet(machine.nodes)
        reserved = CpuSet.parse(trace["reserved"])
        options = StaticOptions.parse(trace["options"])
        self.policy = KubeletStatic.create(machine, options, len(reserved), reserved)
        self.state = self.policy.start(StaticState())

    def add(self, pod: KubeletPod) -> None:
        """Admit a pod; AllocError, with nothing changed, if that is not possible."""
        state = self.state
        hints = self.policy.pod_hints(state, pod) if self._pod_scope else None
        for container in pod.containers:
            if not self._pod_scope:
                hints = self.policy.hints(state, pod, container)
            affinity = choose(hints, self._manager, self._nodes)
            if not affinity.admit:
                raise AllocError(AllocFailure.TOPOLOGY_AFFINITY, "no NUMA alignment")
            state = self.policy.allocate(state, pod, container, affinity.nodes)
        self.state = state

    def remove(self, pod: str) -> None:
        """Take a pod away."""
        for container in self.state.assignments.get(pod, {}):
            self.state = self.policy.remove(self.state, pod, container)


class _Static:
    """kata-pin's policy `static` with the settings that the kubelet had.

    Its shared pool may shrink to one CPU, and it refuses what does not fit.
    The topology manager's scope `pod` and CPUs kept by ended init containers are not ours
    (docs/allocation.md): containers that these rule out are not asked for.
    """

    def __init__(self, topology: HostTopology, trace: Row) -> None:
        self._settings = Alloc(
            reserved=CpuSet.parse(trace["reserved"]),
            shared_minimum=1,
            options=trace["options"],
            topology_manager=ManagerPolicy(trace["topology_manager"]),
            fail=Fail.STRICT,
        )
        self._policy: Policy = create("static", topology, self._settings)
        self._pod_scope = trace["scope"] == "pod" and trace["topology_manager"] != "none"

    def compare(
        self, before: StaticState, pod: KubeletPod, after: StaticState | None, counted: Counted
    ) -> None:
        """Raise MismatchError unless `static` gives the pod's containers what the kubelet gave."""
        state = self._taken(before)
        asked = _pod_request(pod)
        if self._pod_scope and len(pod.containers) > 1:
            counted.not_static += len(pod.containers) if after else 0
            return
        for container in pod.containers:
            decision = self._policy.allocate(state, _request(asked, container))
            if decision.refused is not None:
                if after is not None and not after.shared:  # its pool keeps one CPU
                    expect(container.name, RefusalKind.SHARED_MINIMUM, decision.refused.kind)
                    counted.not_static += len(pod.containers) - pod.containers.index(container)
                    return
                expect(f"{container.name}: static refuses", after is None, True)
                return
            state = decision.state
            if after is not None:
                grant = state.grants[_request(asked, container).container_id]
                given = after.get(pod.uid, container.name) or EMPTY
                expect(f"{container.name}: static's CPUs", given, grant.exclusive)
                counted.by_static += 1
            if container.role is ContainerRole.INIT:
                rest = pod.containers[pod.containers.index(container) + 1 :]
                counted.not_static += len(rest) if after else 0
                return
        expect("static admits", after is not None, True)

    def _taken(self, before: StaticState) -> AllocState:
        """Return the state of `static` in which the kubelet's containers have their CPUs."""
        state = self._policy.start()
        for pod, containers in before.assignments.items():
            for name, cpus in containers.items():
                request = ContainerRequest(f"{pod}/{name}", PodRequest(pod, qos=Qos.GUARANTEED))
                state = state.with_grant(
                    Grant(request, "static", CpuClass.EXCLUSIVE, exclusive=cpus)
                )
        return state


def _pod_request(pod: KubeletPod) -> PodRequest:
    return PodRequest(pod.uid, qos=Qos.GUARANTEED if pod.guaranteed else Qos.BURSTABLE)


def _request(pod: PodRequest, container: KubeletContainer) -> ContainerRequest:
    name = f"{pod.pod_uid}/{container.name}"
    quota = container.limit_m * 100 or None
    request = ContainerRequest(name, pod, container.name, container.request_m, quota)
    return replace(request, init=container.role is ContainerRole.INIT)
