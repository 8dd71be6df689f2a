"""What the host's CPUs are: numbers, cores, packages, NUMA nodes, caches, and what is online."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

from kata_pin.model.cpuset import EMPTY, CpuSet


@dataclass(frozen=True, slots=True)
class Cpu:
    """One pCPU. `core` is the lowest CPU number of its core (unique on the host, unlike sysfs).

    `llc` is the lowest CPU number that shares the last-level cache. `thread` counts the siblings
    below this CPU in its core. `kind` is empty, or names the core type of a hybrid part.
    """

    cpu: int
    node: int
    package: int
    llc: int
    core: int
    thread: int
    kind: str = ""

    @property
    def order(self) -> tuple[int, int, int, int, int, int]:
        """Sort key of topology order: node, package, LLC, core, thread (D10)."""
        return (self.node, self.package, self.llc, self.core, self.thread, self.cpu)


@dataclass(frozen=True)
class HostTopology:
    """The CPUs of a host.

    Offline CPUs have no topology in sysfs, so `cpus` holds those that are online; `present` and
    `online` are the kernel's own lists. `isolated` is what no scheduler domain balances.
    """

    cpus: tuple[Cpu, ...]
    online: CpuSet
    present: CpuSet
    isolated: CpuSet = EMPTY
    nohz_full: CpuSet = EMPTY
    distances: dict[int, tuple[int, ...]] = field(default_factory=dict, hash=False)

    @cached_property
    def _by_number(self) -> dict[int, Cpu]:
        return {cpu.cpu: cpu for cpu in self.cpus}

    @cached_property
    def nodes(self) -> dict[int, CpuSet]:
        """Online CPUs of each NUMA node that has any; one node 0 on a host without NUMA."""
        return _group(self.cpus, "node")

    @cached_property
    def packages(self) -> dict[int, CpuSet]:
        """Online CPUs of each package."""
        return _group(self.cpus, "package")

    @cached_property
    def llcs(self) -> dict[int, CpuSet]:
        """Online CPUs of each last-level cache."""
        return _group(self.cpus, "llc")

    @cached_property
    def cores(self) -> dict[int, CpuSet]:
        """Online CPUs of each core."""
        return _group(self.cpus, "core")

    def get(self, cpu: int) -> Cpu | None:
        """Return the CPU's place, None if it is offline or unknown."""
        return self._by_number.get(cpu)

    def siblings(self, cpu: int) -> CpuSet:
        """Return all online threads of the CPU's core, itself included."""
        found = self._by_number.get(cpu)
        return EMPTY if found is None else self.cores[found.core]

    def node_of(self, cpu: int) -> int | None:
        """Return the NUMA node of an online CPU."""
        found = self._by_number.get(cpu)
        return None if found is None else found.node

    def in_order(self, cpus: Iterable[int]) -> list[int]:
        """Return the CPUs in topology order; unknown ones follow by number."""
        far = 1 << 30
        return sorted(
            cpus,
            key=lambda n: (
                self._by_number[n].order if n in self._by_number else (far, far, far, far, far, n)
            ),
        )


def _group(cpus: Iterable[Cpu], attribute: str) -> dict[int, CpuSet]:
    groups: dict[int, list[int]] = {}
    for cpu in cpus:
        groups.setdefault(getattr(cpu, attribute), []).append(cpu.cpu)
    return {key: CpuSet(groups[key]) for key in sorted(groups)}
