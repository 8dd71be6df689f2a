"""The kubelet's static policy, played: same requests, same CPUs as kubelet policy_static.go.

It allocates by the functions that kata-pin's own policies use, so the kubelet's test rows (oracles)
and comparisons with the kubelet prove those. A KubeletStatic is made once from the host and the
settings and never changes; each call takes a state and returns the next one. Out of scope:
pod-level pools and in-place resize of exclusive containers (alpha in Kubernetes).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Final

from kata_pin.base.cpuset import EMPTY, CpuSet
from kata_pin.base.errors import ConfigError
from kata_pin.options.allocation.accumulator import Machine
from kata_pin.options.allocation.choice import Hint, choose_cpus, make_hints, take_hinted
from kata_pin.options.allocation.demand import StaticOptions
from kata_pin.options.allocation.policy import AllocError, AllocFailure
from tests.support.kubelet_pod import ContainerRole, KubeletContainer, KubeletPod
from tests.support.kubelet_state import Reusable, StaticState

_REASONS: Final = {
    AllocFailure.SMT_ALIGNMENT: "SMTAlignmentError",
    AllocFailure.TOPOLOGY_AFFINITY: "TopologyAffinityError",
}


def status_reason(error: AllocError) -> str:
    """Return the word in a refused pod's status: UnexpectedAdmissionError for untyped errors."""
    return _REASONS.get(error.failure, "UnexpectedAdmissionError")


@dataclass(frozen=True)
class KubeletStatic:
    """The static policy on one host; make it with `create`.

    `reserved` CPUs are never given out. They stay in the shared pool unless the reservation is
    strict.
    """

    machine: Machine
    options: StaticOptions
    reserved: CpuSet

    @classmethod
    def create(
        cls,
        machine: Machine,
        options: StaticOptions,
        reserve: int,
        reserved: CpuSet = EMPTY,
        *,
        single_numa_node: bool = False,
    ) -> KubeletStatic:
        """Reserve `reserve` CPUs: those listed in `reserved`, or chosen like a request.

        Raises ConfigError if the list has another size or a CPU that the host lacks, if there are
        not as many CPUs, or if the options do not suit the host.
        """
        options.check_against(machine, single_numa_node=single_numa_node)
        if not reserved:
            try:
                reserved = choose_cpus(machine, machine.cpus, reserve, options)
            except AllocError as error:
                raise ConfigError(error.message, key="systemReserved") from error
        if len(reserved) != reserve:
            raise ConfigError(
                f"{reserved} has {len(reserved)} CPUs, {reserve} are to be reserved",
                key="reservedSystemCPUs",
            )
        if not reserved <= machine.cpus:
            raise ConfigError(
                f"no such CPU on this host: {reserved - machine.cpus}", key="reservedSystemCPUs"
            )
        return cls(machine, options, reserved)

    @property
    def pool(self) -> CpuSet:
        """What the shared pool holds when nothing is assigned."""
        cpus = self.machine.cpus
        return cpus - self.reserved if self.options.strict_cpu_reservation else cpus

    def start(self, state: StaticState) -> StaticState:
        """Return the state to begin with: the one found, or a first one in place of an empty one.

        Raises AllocError when it can not be of this host and these settings.
        """
        if not state.shared:
            if state.assignments:
                raise _invalid("the shared pool is empty but there are assignments")
            return dataclasses.replace(state, shared=self.pool)
        self._check_reserved(state)
        self._check_assignments(state)
        known = state.shared | state.exclusive
        if known != self.pool:
            raise _invalid(f"the host has CPUs {self.pool}, the state {known}")
        return state

    def available(self, state: StaticState) -> CpuSet:
        """Return what can be given out: the shared pool without reserved CPUs."""
        return state.shared - self.reserved

    def allocate(
        self,
        state: StaticState,
        pod: KubeletPod,
        container: KubeletContainer,
        nodes: CpuSet | None = None,
    ) -> StaticState:
        """Return the state with the container's CPUs in it; the same state if it gets none.

        `nodes` is the NUMA hint: those nodes are drawn from first. A container that has CPUs
        already keeps them. Raises AllocError, and then nothing has changed.
        """
        wanted = pod.exclusive_cpus(container)
        if wanted == 0:
            return state
        if self.options.full_pcpus_only:
            self._check_smt(state, wanted)
        cpus = state.get(pod.uid, container.name)
        if cpus is None:
            allocatable = self.available(state) | state.reusable.of(pod.uid)
            cpus = take_hinted(self.machine, allocatable, wanted, self.options, nodes)
            state = state.assigned(pod.uid, container.name, cpus)
        return dataclasses.replace(state, reusable=_reusable_after(state, pod, container, cpus))

    def remove(self, state: StaticState, pod: str, container: str) -> StaticState:
        """Return the state without the container; its CPUs return to the shared pool.

        CPUs that another container of the pod still has stay with that one.
        """
        return state.removed(pod, container)

    def hints(
        self, state: StaticState, pod: KubeletPod, container: KubeletContainer
    ) -> tuple[Hint, ...] | None:
        """Return the NUMA hints for a container; None = no opinion, empty = can not be served.

        A container that has CPUs gets hints for exactly those.
        """
        wanted = pod.exclusive_cpus(container)
        if wanted == 0:
            return None
        held = state.get(pod.uid, container.name)
        if held is not None:
            return self._hints(held, EMPTY, wanted) if len(held) == wanted else ()
        return self._hints(self.available(state), state.reusable.of(pod.uid), wanted)

    def pod_hints(self, state: StaticState, pod: KubeletPod) -> tuple[Hint, ...] | None:
        """Return the NUMA hints for a whole pod (the topology manager's scope `pod`)."""
        wanted = pod.exclusive_cpus_of_pod()
        if wanted == 0:
            return None
        held = EMPTY
        for container in pod.containers:
            cpus = state.get(pod.uid, container.name)
            if cpus is not None and len(cpus) != pod.exclusive_cpus(container):
                return ()
            held |= cpus or EMPTY
        if len(held) == wanted:
            return self._hints(held, EMPTY, wanted)
        return self._hints(self.available(state), state.reusable.of(pod.uid) | held, wanted)

    def _hints(self, available: CpuSet, reusable: CpuSet, wanted: int) -> tuple[Hint, ...]:
        return make_hints(
            self.machine,
            available,
            reusable,
            wanted,
            align_by_socket=self.options.align_by_socket,
        )

    def _check_smt(self, state: StaticState, wanted: int) -> None:
        threads = self.machine.threads_per_core
        if wanted % threads:
            raise AllocError(
                AllocFailure.SMT_ALIGNMENT,
                f"requested {wanted} CPUs, not a multiple of CPUs per core = {threads}",
            )
        # A reserved CPU may leave its sibling alone: counting that one would let a request be
        # served from single threads.
        cores, reserved = self.machine.cores.values(), self.reserved.bits
        blocked = CpuSet.from_bits(Machine.union(core for core in cores if core & reserved))
        available = len(state.shared - blocked)
        if wanted > available:
            raise AllocError(
                AllocFailure.SMT_ALIGNMENT,
                f"not enough free CPUs in whole cores: available={available}, "
                f"requested={wanted}, CPUs per core = {threads}",
            )

    def _check_reserved(self, state: StaticState) -> None:
        shared = self.reserved & state.shared
        if self.options.strict_cpu_reservation and shared:
            raise _invalid(f"strictly reserved CPUs {shared} are in the shared pool {state.shared}")
        if not self.options.strict_cpu_reservation and shared != self.reserved:
            raise _invalid(
                f"reserved CPUs {self.reserved} are not all in the shared pool {state.shared}"
            )

    def _check_assignments(self, state: StaticState) -> None:
        for pod, containers in state.assignments.items():
            for container, cpus in containers.items():
                if not cpus.isdisjoint(state.shared):
                    raise _invalid(
                        f"container {container} of pod {pod} has CPUs {cpus & state.shared} "
                        "that are in the shared pool"
                    )


def _reusable_after(
    state: StaticState, pod: KubeletPod, container: KubeletContainer, cpus: CpuSet
) -> Reusable:
    """Return what the pod's next container may reuse; other pods' reusable CPUs are forgotten.

    An init container gives its CPUs, any other takes its own out. What a running container of the
    pod has is never offered: after a restart containers can come again in another order.
    """
    reusable = state.reusable.of(pod.uid)
    if container.role is ContainerRole.INIT:
        reusable |= cpus
    for one in pod.containers:
        if one.role is not ContainerRole.INIT:
            reusable -= state.get(pod.uid, one.name) or EMPTY
    return Reusable(pod.uid, reusable)


def _invalid(message: str) -> AllocError:
    return AllocError(AllocFailure.FAILED, f"{message}: drain the node and remove the state")
