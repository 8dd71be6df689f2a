"""The who document: every thread of the host that may run on some pCPUs."""

from __future__ import annotations

from dataclasses import dataclass

from kata_pin.model.reports import VERSION, Cpus
from kata_pin.model.reports.daemon import Daemon


@dataclass(frozen=True, slots=True)
class Place:
    """The pCPU's place in the topology."""

    cpu: int  #: the pCPU
    node: int  #: NUMA node
    package: int  #: package (socket)
    llc: int  #: lowest pCPU that shares the last-level cache
    core: int  #: lowest pCPU of the core
    thread: int  #: index among the core's siblings
    kind: str  #: core type of a hybrid CPU, else empty
    siblings: Cpus  #: all pCPUs of the core
    marks: tuple[str, ...]  #: core type, `isolated`, `nohz_full`


@dataclass(frozen=True, slots=True)
class CpuClaim:
    """A sandbox whose mask contains the pCPU."""

    sandbox: str  #: sandbox id
    pod: str  #: `namespace/name`; the id if no pod is known
    claim: str  #: One of `exclusive`, `shared`
    container: str  #: the container that owns the exclusive pCPU; empty: shared


@dataclass(frozen=True, slots=True)
class ProcessThread:
    """A thread that may run on one of the pCPUs."""

    tid: int  #: thread id
    comm: str  #: thread name
    affinity: Cpus  #: its CPU affinity
    label: str  #: its role in a sandbox; empty: none


@dataclass(frozen=True, slots=True)
class HostProcess:
    """A user process with threads that may run on one of the pCPUs."""

    pid: int  #: process id
    comm: str  #: process name
    user: str  #: name or number of its user; empty: unknown
    command: str  #: its command line, at most 200 characters; empty: none, or unknown
    age_s: float | None  #: age; null: unknown
    cpu_s: float | None  #: CPU time that it has used; null: unknown
    sandbox: str  #: id of the sandbox that it works for; empty: none
    pod: str  #: the sandbox's pod; empty: none
    intruder: bool  #: whether it is allowed on another owner's exclusive pCPU
    #: its threads that may run on one of the pCPUs; in `check`, those that may run where others are
    #: alone
    threads: tuple[ProcessThread, ...]


@dataclass(frozen=True, slots=True)
class KernelThread:
    """A kernel thread."""

    tid: int  #: thread id
    comm: str  #: thread name


@dataclass(frozen=True, slots=True)
class KernelThreads:
    """Kernel threads that may run on one of the pCPUs."""

    bound: tuple[KernelThread, ...]  #: those that may run on these pCPUs only
    roaming: tuple[KernelThread, ...]  #: those that may run on other pCPUs too


@dataclass(frozen=True, slots=True)
class WhoPcpu:
    """One of the pCPUs asked for."""

    cpu: int  #: the pCPU
    online: bool  #: whether it is online
    place: Place | None  #: its place in the topology; null: offline
    claims: tuple[CpuClaim, ...]  #: sandboxes whose mask contains it
    busy_percent: float | None = None  #: share of 0.2 s in which it was busy; null: offline


@dataclass(frozen=True, slots=True, kw_only=True)
class WhoDocument:
    """Printed by `who`."""

    version: int = VERSION  #: version of the document
    kind: str = "who"  #: kind of the document
    time: str  #: when it was made
    daemon: Daemon  #: whether the daemon made it
    cpus: Cpus  #: the pCPUs asked for
    pcpus: tuple[WhoPcpu, ...]  #: one object for each of them
    processes: tuple[HostProcess, ...]  #: user processes allowed on one of them, intruders first
    kernel: KernelThreads  #: kernel threads allowed on one of them
