"""The node: its pCPUs and what the kubelet assigned."""

from __future__ import annotations

from dataclasses import dataclass

from kata_pin.model.reports.cpulist import Cpus


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
