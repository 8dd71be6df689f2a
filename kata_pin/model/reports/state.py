"""The state document: the node with its pCPUs, its sandboxes and the allocator."""

from __future__ import annotations

from dataclasses import dataclass

from kata_pin.model.reports import VERSION, Cpus, Note
from kata_pin.model.reports.daemon import Daemon
from kata_pin.model.reports.pools import Allocation
from kata_pin.model.reports.quiet import KeptQuiet, Quiet
from kata_pin.model.reports.sandbox import Sandbox


@dataclass(frozen=True, slots=True)
class CpuPlace:
    """One online pCPU and its place in the topology."""

    cpu: int  #: the pCPU
    node: int  #: NUMA node
    package: int  #: package (socket)
    llc: int  #: lowest pCPU that shares the last-level cache
    core: int  #: lowest pCPU of the core
    thread: int  #: index among the core's siblings
    kind: str  #: core type of a hybrid CPU, else empty


@dataclass(frozen=True, slots=True)
class Kubelet:
    """The kubelet's CPU manager checkpoint."""

    policy: str  #: CPU manager policy
    default: Cpus  #: the default (shared) set


@dataclass(frozen=True, slots=True)
class Node:
    """The node."""

    hostname: str  #: host name
    kernel: str  #: kernel release
    online: Cpus  #: online pCPUs
    present: Cpus  #: present pCPUs; those not online are offline
    isolated: Cpus  #: pCPUs excluded from load balancing
    nohz_full: Cpus  #: pCPUs without a scheduler tick
    cpus: tuple[CpuPlace, ...]  #: one object per online pCPU
    kubelet: Kubelet | None  #: the kubelet's checkpoint; null: there is none
    thread_events: bool  #: whether new threads are reported at once; false: audits find them
    mode: str  #: One of `act`, `observe`
    assigned: Cpus = ""  #: pCPUs that the kubelet and DRA claims gave, also to pods without a VM


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Printed by `show`; with a sandbox named, `sandboxes` holds only that one."""

    version: int = VERSION  #: version of the document
    kind: str = "state"  #: kind of the document
    time: str  #: when it was made
    daemon: Daemon  #: whether the daemon made it
    node: Node  #: the node
    sandboxes: tuple[Sandbox, ...]  #: one object per sandbox
    allocation: Allocation | None  #: kata-pin's allocator; null: `alloc.policy` is `none`
    notes: tuple[Note, ...]  #: what the operator should know about the node
    #: what disturbs exclusive pCPUs; read by `show --cpus` alone; null: not read
    quiet: Quiet | None = None
    #: what the daemon does to keep them quiet; null: no daemon, or `quiet` is `off` or `report`
    kept_quiet: KeptQuiet | None = None
