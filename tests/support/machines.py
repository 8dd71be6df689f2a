"""Invented hosts for tests of the allocator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kata_pin.base.cpuset import CpuPlace, CpuSet, HostTopology


@dataclass(frozen=True)
class Shape:
    """A regular host: how many of each unit there are in the next larger one.

    With `packages_per_node` above 1 the packages lie in the nodes, else the nodes in the packages.
    """

    uppers: int = 1
    lowers: int = 1
    llcs: int = 1
    cores: int = 2
    threads: int = 2
    packages_in_nodes: bool = False
    threads_apart: bool = True
    """Number the threads of a core far apart (0 and 4 of 8), as most x86 hosts do."""

    def cpus(self) -> list[CpuPlace]:
        """Return the host's CPUs in order of their numbers."""
        lowers = self.uppers * self.lowers
        llcs = lowers * self.llcs
        cores = llcs * self.cores
        numbers: Callable[[int, int], int] = (
            (lambda core, thread: thread * cores + core)
            if self.threads_apart
            else (lambda core, thread: core * self.threads + thread)
        )
        made = []
        for core in range(cores):
            llc = core // self.cores
            lower = llc // self.llcs
            upper = lower // self.lowers
            node, package = (upper, lower) if self.packages_in_nodes else (lower, upper)
            first = numbers(core, 0)
            shared = numbers(llc * self.cores, 0)
            made += [
                CpuPlace(numbers(core, thread), node, package, shared, first, thread, "")
                for thread in range(self.threads)
            ]
        return sorted(made, key=lambda cpu: cpu.cpu)


def host(cpus: list[CpuPlace]) -> HostTopology:
    """Return the topology of these CPUs, all online."""
    everything = CpuSet(cpu.cpu for cpu in cpus)
    return HostTopology(cpus=tuple(cpus), online=everything, present=everything)


def server(nodes_per_package: int = 1) -> HostTopology:
    """Return 2 packages of 64 cores with 2 threads: 256 CPUs, 8 cores a cache."""
    llcs = 8 // nodes_per_package
    return host(Shape(uppers=2, lowers=nodes_per_package, llcs=llcs, cores=8).cpus())


def hybrid() -> HostTopology:
    """Return 8 cores of 2 threads and 8 of 1: 24 CPUs, 16 cores, as desktop parts have them."""
    big = [
        CpuPlace(number, 0, 0, 0, number - number % 2, number % 2, "big") for number in range(16)
    ]
    small = [CpuPlace(number, 0, 0, 0, number, 0, "small") for number in range(16, 24)]
    return host(big + small)


def halved() -> HostTopology:
    """Return 3 cores with siblings n and n + 3, of which CPU 3 is offline: 5 CPUs, one node."""
    return host([cpu for cpu in Shape(cores=3).cpus() if cpu.cpu != 3])
