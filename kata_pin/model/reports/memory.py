"""The memory document: on which NUMA nodes the memory of sandboxes is, beside their vCPUs."""

from __future__ import annotations

from dataclasses import dataclass

from kata_pin.model.reports import VERSION, Cpus
from kata_pin.model.reports.daemon import Daemon
from kata_pin.model.reports.sandbox import Memory


@dataclass(frozen=True, slots=True)
class NodeMemory:
    """Memory on one NUMA node."""

    node: int  #: the NUMA node
    bytes: int  #: memory there, in bytes
    huge_bytes: int  #: the part that is in huge pages, as far as the source tells


@dataclass(frozen=True, slots=True)
class SandboxMemory:
    """The memory of one sandbox."""

    id: str  #: sandbox id
    pod: str  #: `namespace/name`; the id if no pod is known
    pid: int | None  #: its VMM; null: none was accepted
    vcpu_nodes: Cpus  #: NUMA nodes that its vCPUs may run on, as a list; empty: no vCPU is known
    #: One of `cgroup` (memory.numa_stat and hugetlb's, all in it but page cache), `process`
    #: (numa_maps of the VMM, what it has mapped), `none`
    source: str
    cgroup: str  #: the folder that was read; empty: none
    nodes: tuple[NodeMemory, ...]  #: one object per NUMA node that has any
    total_bytes: int | None  #: the sum; null: unknown
    remote_bytes: int | None  #: on nodes that no vCPU may run on; null: unknown
    remote_percent: float | None  #: the same of the sum; null: unknown
    problem: str  #: what could not be read; empty: nothing
    move: Memory | None = None  #: moves to the vCPUs' nodes; null: the setting `memory` is report


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryDocument:
    """Printed by `show --memory`."""

    version: int = VERSION  #: version of the document
    kind: str = "memory"  #: kind of the document
    time: str  #: when it was made
    daemon: Daemon  #: whether the daemon named the sandboxes
    node_count: int  #: number of NUMA nodes with online pCPUs
    sandboxes: tuple[SandboxMemory, ...]  #: one object per sandbox
