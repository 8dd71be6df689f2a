"""A thousand pods that come and go on a simulated node, by any allocator, and how it looks then.

The trace is made from a fixed seed, so that every allocator answers the same questions in the same
order. A pod that is refused one container is taken back as a whole, as the kubelet does. After each
pod that came the node is looked at; figures are means over the trace. Nothing here is a process.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final, Protocol

from kata_pin.base.allocation import (
    POLICY_KEY,
    AllocState,
    AttachedDevice,
    ContainerRequest,
    PodRequest,
    Qos,
)
from kata_pin.base.config.alloc import Alloc, Fail
from kata_pin.base.cpuset import EMPTY, CpuSet, HostTopology, union
from kata_pin.base.settings import AllowRule, ManagerPolicy
from kata_pin.options.allocation.accumulator import Machine
from kata_pin.options.allocation.choice import choose
from kata_pin.options.allocation.demand import StaticOptions
from kata_pin.options.allocation.policies import create
from kata_pin.options.allocation.policy import AllocError
from tests.support.kubelet_pod import KubeletContainer, KubeletPod
from tests.support.kubelet_state import StaticState
from tests.support.kubelet_static import KubeletStatic

PODS: Final = 1000
ALIVE: Final = 25
"""Mean number of pods that live at the same time; 256 CPUs are then about three quarters full."""

SIZES: Final = (1, 1, 2, 2, 2, 4, 4, 8, 16)
RESERVED: Final = CpuSet([0, 128])
"""One core for the system, which also carries the VMs' overhead."""

Held = Mapping[str, Mapping[str, CpuSet]]
"""Pod to container to its exclusive CPUs."""


@dataclass(frozen=True)
class TracePod:
    """A pod of the trace: when it goes, in pods that came, and the CPUs of its containers.

    Its first container has a device on the NUMA node `device`, none if that is negative.
    """

    name: str
    until: float
    sizes: tuple[int, ...]
    device: int = -1


def trace(seed: int = 1, pods: int = PODS, alive: int = ALIVE) -> list[TracePod]:
    """Return the pods in the order in which they come: one to three containers each."""
    chance = random.Random(seed)
    return [
        TracePod(
            f"pod{number}",
            number + chance.expovariate(1 / alive),
            tuple(chance.choice(SIZES) for _ in range(chance.choice((1, 1, 2, 3)))),
        )
        for number in range(pods)
    ]


def with_devices(pods: Iterable[TracePod], nodes: int, seed: int = 2) -> list[TracePod]:
    """Return a trace in which about half of the pods have a device, on any of so many nodes."""
    chance = random.Random(seed)
    return [replace(pod, device=chance.choice((-1, chance.randrange(nodes)))) for pod in pods]


class Allocator(Protocol):
    """What is simulated; refusing is returning False, with nothing given."""

    def come(self, pod: TracePod) -> bool:
        """Give a pod its CPUs."""

    def go(self, pod: str) -> None:
        """Take them back."""

    def held(self) -> Held:
        """Return who has which CPUs."""


class Kubelet:
    """The kubelet's static policy, and its topology manager in the scope `container`."""

    def __init__(
        self,
        topology: HostTopology,
        options: StaticOptions,
        manager: ManagerPolicy = ManagerPolicy.NONE,
    ) -> None:
        machine = Machine.of(topology)
        self._manager = manager
        self._nodes = CpuSet(machine.nodes)
        self._policy = KubeletStatic.create(machine, options, len(RESERVED), RESERVED)
        self._state = self._policy.start(StaticState())

    def come(self, pod: TracePod) -> bool:
        """Give a pod its CPUs."""
        asked = KubeletPod(
            pod.name,
            tuple(
                KubeletContainer(f"c{number}", size * 1000, size * 1000)
                for number, size in enumerate(pod.sizes)
            ),
        )
        state = self._state
        try:
            for container in asked.containers:
                hints = self._policy.hints(state, asked, container)
                affinity = choose(hints, self._manager, self._nodes)
                if not affinity.admit:
                    return False
                state = self._policy.allocate(state, asked, container, affinity.nodes)
        except AllocError:
            return False
        self._state = state
        return True

    def go(self, pod: str) -> None:
        """Take them back."""
        for container in self._state.assignments.get(pod, {}):
            self._state = self._policy.remove(self._state, pod, container)

    def held(self) -> Held:
        """Return who has which CPUs."""
        return self._state.assignments


class Ours:
    """One of our policies, strict; every pod is Kata's and chose exclusive."""

    def __init__(
        self,
        name: str,
        topology: HostTopology,
        options: Mapping[str, str] | None = None,
        manager: ManagerPolicy = ManagerPolicy.NONE,
    ) -> None:
        settings = Alloc(
            reserved=RESERVED,
            strict_reserved=True,
            housekeeping=RESERVED,
            options=options or {},
            topology_manager=manager,
            allow=(AllowRule(namespace="bench"),),
            fail=Fail.STRICT,
        )
        self.policy = create(name, topology, settings)
        self.state: AllocState = self.policy.start()

    def come(self, pod: TracePod) -> bool:
        """Give a pod its CPUs."""
        state = self.state
        for request in requests(pod):
            decision = self.policy.allocate(state, request)
            if decision.refused is not None:
                return False
            state = decision.state
        self.state = state
        return True

    def share(self, pod: str) -> None:
        """Let a pod in that uses the shared pool."""
        (request,) = requests(TracePod(pod, 0, (0,)))
        self.state = self.policy.allocate(self.state, request).state

    def go(self, pod: str) -> None:
        """Take them back."""
        self.state = self.policy.release(self.state, f"vm-{pod}").state

    def held(self) -> Held:
        """Return who has which CPUs."""
        held: dict[str, dict[str, CpuSet]] = {}
        for grant in self.state.grants.values():
            if grant.exclusive:
                held.setdefault(grant.pod_uid, {})[grant.container_id] = grant.exclusive
        return held


def requests(pod: TracePod) -> Iterator[ContainerRequest]:
    """Yield what our policies are asked for a pod."""
    asked = PodRequest(
        pod.name,
        "bench",
        pod.name,
        "kata",
        {POLICY_KEY: "exclusive"},
        Qos.GUARANTEED,
        kata=True,
        sandbox_id=f"vm-{pod.name}",
    )
    for number, size in enumerate(pod.sizes):
        name = f"{pod.name}-c{number}"
        device = AttachedDevice("/dev/vfio/1", node=pod.device)
        devices = () if number or pod.device < 0 else (device,)
        quota_us = size * 100_000
        yield ContainerRequest(name, asked, name, size * 1000, quota_us=quota_us, devices=devices)


@dataclass
class Look:
    """What was seen after each pod that came, as sums."""

    looks: int = 0
    pods: int = 0
    refused: int = 0
    containers: int = 0
    crossing_nodes: int = 0
    crossing_caches: int = 0
    pods_crossing: int = 0
    pods_looked: int = 0
    shared_cores: float = 0.0
    scattered: float = 0.0
    used: float = 0.0
    with_device: int = 0
    from_device: int = 0

    @property
    def far(self) -> float:
        """Containers with CPUs on another NUMA node than their device, in percent."""
        return 100 * self.from_device / max(1, self.with_device)

    @property
    def numa(self) -> float:
        """Containers on more NUMA nodes than they need, in percent."""
        return 100 * self.crossing_nodes / max(1, self.containers)

    @property
    def caches(self) -> float:
        """Containers on more last-level caches than they need, in percent."""
        return 100 * self.crossing_caches / max(1, self.containers)

    @property
    def apart(self) -> float:
        """Pods on more NUMA nodes than they need, in percent."""
        return 100 * self.pods_crossing / max(1, self.pods_looked)

    @property
    def neighbours(self) -> float:
        """Cores in use whose threads belong to different pods, in percent."""
        return 100 * self.shared_cores / max(1, self.looks)

    @property
    def fragmentation(self) -> float:
        """Free CPUs that are not in a wholly free core, in percent."""
        return 100 * self.scattered / max(1, self.looks)

    @property
    def full(self) -> float:
        """CPUs in use, in percent."""
        return 100 * self.used / max(1, self.looks)

    def take(self, pod: TracePod, held: Held, topology: HostTopology) -> None:
        """Look at the node after a pod came."""
        own = held.get(pod.name, {})
        if pod.device >= 0:
            first = next(iter(own.values()), EMPTY)
            self.with_device += 1
            self.from_device += not first <= topology.nodes[pod.device]
        for cpus in own.values():
            self.containers += 1
            self.crossing_nodes += crosses(cpus, topology.nodes)
            self.crossing_caches += crosses(cpus, topology.llcs)
        self.pods_looked += 1
        self.pods_crossing += crosses(union(own.values()), topology.nodes)
        of_pods = {name: union(containers.values()) for name, containers in held.items()}
        used = union(of_pods.values())
        owner = {cpu: name for name, cpus in of_pods.items() for cpu in cpus}
        cores = [core for core in topology.cores.values() if core & used]
        mixed = sum(len({owner[cpu] for cpu in core & used}) > 1 for core in cores)
        free = topology.online - RESERVED - used
        whole = union(core for core in topology.cores.values() if core <= free)
        self.looks += 1
        self.shared_cores += mixed / max(1, len(cores))
        self.scattered += len(free - whole) / max(1, len(free))
        self.used += len(used) / len(topology.online)


def crosses(cpus: CpuSet, units: Mapping[int, CpuSet]) -> bool:
    """Return whether CPUs lie in more units than that many would need on an empty host."""
    touched = sum(1 for unit in units.values() if unit & cpus)
    sizes = sorted((len(unit) for unit in units.values()), reverse=True)
    needed, left = 0, len(cpus)
    while left > 0:
        left -= sizes[needed]
        needed += 1
    return touched > needed


def run(allocator: Allocator, topology: HostTopology, pods: list[TracePod]) -> Look:
    """Run the trace; return what was seen."""
    look = Look()
    leaving: list[tuple[float, str]] = []
    for number, pod in enumerate(pods):
        while leaving and leaving[0][0] <= number:
            allocator.go(heapq.heappop(leaving)[1])
        look.pods += 1
        if not allocator.come(pod):
            look.refused += 1
            continue
        heapq.heappush(leaving, (pod.until, pod.name))
        look.take(pod, allocator.held(), topology)
    for _, name in leaving:
        allocator.go(name)
    assert union(union(one.values()) for one in allocator.held().values()) == EMPTY
    return look
