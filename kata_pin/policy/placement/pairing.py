"""Which vCPU is paired with which run of exclusive CPUs (D10).

Claims on a run are considered in this order: a legal pair that exists is kept (by the registry,
else by an observed one-CPU mask); a vCPU goes to the host NUMA node that its guest node's memory is
bound to; guest thread siblings go to host thread siblings; the vCPUs of a container are
neighbours; index. The guest topology is QEMU's, never the guest's own word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from kata_pin.model.cpuset import EMPTY, union
from kata_pin.model.sandbox import GuestTopology
from kata_pin.model.thread import Thread, ThreadKey
from kata_pin.model.topology import HostTopology
from kata_pin.policy.placement.pools import Run


def index_order(vcpus: Iterable[Thread]) -> list[Thread]:
    """Return vCPU threads by index; those of unknown index come first, oldest first.

    First in order is first to stay unpaired: an unknown index cannot be used in the guest map, so
    an exclusive CPU would be wasted on it.
    """

    def order(thread: Thread) -> tuple[int, int, int]:
        key, index = thread.key, thread.role.vcpu
        return (-1 if index is None else index, key.starttime, key.tid)

    return sorted(vcpus, key=order)


def holders(
    vcpus: Sequence[Thread], runs: Sequence[Run], kept: Mapping[ThreadKey, int]
) -> frozenset[ThreadKey]:
    """Return which vCPUs, in index order, are paired with the runs; the others are surplus.

    The first one serves the guest's own work and is surplus before any other. Of the rest, those
    that hold a run (by the registry, else by an observed one-CPU mask) keep it, so that a
    hotplugged vCPU moves no other; the last by index follow.
    """
    if len(vcpus) <= len(runs):
        return frozenset(thread.key for thread in vcpus)
    candidates = vcpus[1:]
    holding: dict[int, ThreadKey] = {}
    for cpu_of in (lambda thread: kept.get(thread.key), _observed_cpu):
        for thread in reversed(candidates):
            cpu = cpu_of(thread)
            number = next((n for n, run in enumerate(runs) if cpu in run.cpus), None)
            if number is not None and thread.key not in holding.values():
                holding.setdefault(number, thread.key)
    chosen = list(holding.values())
    others = [thread.key for thread in candidates if thread.key not in chosen]
    return frozenset(chosen + others[len(others) - (len(runs) - len(chosen)) :])


@dataclass
class Pairing:
    """One matching of vCPUs, in index order, with as many runs."""

    vcpus: Sequence[Thread]
    runs: Sequence[Run]
    guest: GuestTopology
    topology: HostTopology

    def __post_init__(self) -> None:
        self._run_of: dict[int, int] = {}  # rank of a vCPU to the number of its run
        self._free_ranks = dict.fromkeys(range(len(self.vcpus)))
        self._free_runs = dict.fromkeys(range(len(self.runs)))

    def match(self, kept: Mapping[ThreadKey, int]) -> dict[ThreadKey, Run]:
        """Consider all claims in order and return the run of each vCPU."""
        self._keep(lambda thread: kept.get(thread.key))
        self._keep(_observed_cpu)
        if self._free_ranks:
            self._by_node()
            self._by_sibling_and_container(tuple(self._free_ranks), tuple(self._free_runs))
        return {self.vcpus[rank].key: self.runs[number] for rank, number in self._run_of.items()}

    def _take(self, rank: int, number: int) -> None:
        self._run_of[rank] = number
        del self._free_ranks[rank]
        del self._free_runs[number]

    def _keep(self, cpu_of: Callable[[Thread], int | None]) -> None:
        """Keep pairs whose run is still there and not given to another."""
        run_with = {cpu: number for number in self._free_runs for cpu in self.runs[number].cpus}
        for rank in tuple(self._free_ranks):
            cpu = cpu_of(self.vcpus[rank])
            number = None if cpu is None else run_with.get(cpu)
            if number in self._free_runs:
                self._take(rank, number)

    def _by_node(self) -> None:
        """Serve the vCPUs of guest nodes whose memory is bound, narrowest binding first."""
        bound = self.guest.host_nodes
        for guest_node in sorted(bound, key=lambda node: (len(bound[node]), node)):
            ranks = [r for r in self._free_ranks if self._guest_node(r) == guest_node]
            if ranks:
                local = union(self.topology.nodes.get(n, EMPTY) for n in bound[guest_node])
                numbers = [s for s in self._free_runs if self.runs[s].cpus <= local]
                self._by_sibling_and_container(ranks, numbers)

    def _guest_node(self, rank: int) -> int | None:
        index = self.vcpus[rank].role.vcpu
        return None if index is None else self.guest.numa.get(index)

    def _by_sibling_and_container(self, ranks: Sequence[int], numbers: Sequence[int]) -> None:
        if self.guest.threads > 1:
            self._by_sibling(ranks, numbers)
        left_ranks = [rank for rank in ranks if rank in self._free_ranks]
        left_numbers = [number for number in numbers if number in self._free_runs]
        self._by_container(left_ranks, left_numbers)

    def _by_sibling(self, ranks: Sequence[int], numbers: Sequence[int]) -> None:
        """Put the vCPUs of a guest core on the runs of one host core, where one has room."""
        free_of_core: dict[int, list[int]] = {}
        for number in numbers:
            core = self._core_of(self.runs[number])
            if core is not None:
                free_of_core.setdefault(core, []).append(number)
        for siblings in self._guest_cores(ranks):
            core = self._host_core_for(siblings, free_of_core)
            if core is None:
                continue
            free = free_of_core[core]
            for rank in siblings:
                if rank in self._free_ranks and free:
                    self._take(rank, free.pop(0))

    def _guest_cores(self, ranks: Sequence[int]) -> list[list[int]]:
        """Return the guest cores of `ranks`, each with all its ranks, also those served."""
        cores: dict[int, list[int]] = {}
        for rank, thread in enumerate(self.vcpus):
            if thread.role.vcpu is not None:
                cores.setdefault(self.guest.siblings_of(thread.role.vcpu), []).append(rank)
        wanted = set(ranks)
        return [core for core in cores.values() if len(core) > 1 and wanted & set(core)]

    def _host_core_for(self, siblings: list[int], free: Mapping[int, list[int]]) -> int | None:
        for rank in siblings:
            if rank in self._run_of:
                core = self._core_of(self.runs[self._run_of[rank]])
                return core if core in free else None
        return next((core for core, runs in free.items() if len(runs) >= len(siblings)), None)

    def _core_of(self, run: Run) -> int | None:
        """Return the host core that holds the whole run."""
        cpu = self.topology.get(run.cpus.first)
        if cpu is None or not run.cpus <= self.topology.siblings(cpu.cpu):
            return None
        return cpu.core

    def _by_container(self, ranks: list[int], numbers: Sequence[int]) -> None:
        """Give each container neighbouring vCPUs: those next to what it has, else by index."""
        runs_of: dict[str, list[int]] = {}
        for number in numbers:
            runs_of.setdefault(self.runs[number].container_id, []).append(number)
        spans = self._spans()
        for container_id in sorted(runs_of, key=lambda one: one not in spans):
            wanted = runs_of[container_id]
            chosen = _nearest(ranks, spans.get(container_id), len(wanted))
            for rank, number in zip(chosen, wanted, strict=False):
                self._take(rank, number)
            ranks = [rank for rank in ranks if rank in self._free_ranks]

    def _spans(self) -> dict[str, tuple[int, int]]:
        """Return the lowest and highest rank that each container has so far."""
        spans: dict[str, tuple[int, int]] = {}
        for rank, number in self._run_of.items():
            container_id = self.runs[number].container_id
            low, high = spans.get(container_id, (rank, rank))
            spans[container_id] = (min(low, rank), max(high, rank))
        return spans


def _observed_cpu(thread: Thread) -> int | None:
    affinity = thread.task.affinity
    return affinity.first if len(affinity) == 1 else None


def _nearest(ranks: list[int], span: tuple[int, int] | None, count: int) -> list[int]:
    """Return `count` of the ascending ranks, the nearest to the span, ascending."""
    if span is None or len(ranks) <= count:
        return ranks[:count]
    low, high = span
    return sorted(sorted(ranks, key=lambda rank: (max(low - rank, rank - high, 0), rank))[:count])
