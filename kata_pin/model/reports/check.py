"""The check document: what is not as it should be."""

from __future__ import annotations

from dataclasses import dataclass

from kata_pin.model.reports import VERSION, Cpus
from kata_pin.model.reports.daemon import Daemon
from kata_pin.model.reports.prove import RanTask
from kata_pin.model.reports.who import HostProcess


@dataclass(frozen=True, slots=True)
class IntruderGroup:
    """Processes of one pod, systemd unit or cgroup that may run on others' exclusive pCPUs.

    How much CPU time they used there is known only for the time of the measurement.
    """

    name: str  #: pod, systemd unit or cgroup
    unit: str  #: systemd unit; empty: none
    cgroup: str  #: cgroup of the first process
    sandbox: str  #: id of their sandbox; empty: none
    cpus: Cpus  #: exclusive pCPUs of others that they may run on
    threads: int  #: number of threads that may run there
    measured_ms: float  #: how long they ran there while that was measured
    last_there: int  #: number of these threads that ran there last
    there_s: float  #: CPU time of those that ran there last, used there or elsewhere
    cpu_s: float  #: CPU time of all these processes
    processes: tuple[HostProcess, ...]  #: the processes; those that used most time there first
    remedy: str  #: what would keep them off
    command: str  #: a command that does; empty: there is none


@dataclass(frozen=True, slots=True)
class Foreign:
    """What ran on an exclusive pCPU of another owner."""

    cpu: int  #: the pCPU
    percent: float  #: share of its time
    tasks: tuple[RanTask, ...]  #: the tasks, longest first; empty: the method does not name them
    seen_s: float | None = None  #: age, where the daemon's watch saw it; null: measured now


@dataclass(frozen=True, slots=True)
class Measurement:
    """How the exclusive pCPUs were measured."""

    cpus: Cpus  #: the pCPUs
    seconds: float  #: how long
    method: str  #: One of `perf`, `hist`, `schedstat`, `wait`, `watch` (the daemon's counters)
    max_foreign_percent: float  #: share of a pCPU's time that others may have


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is not as it should be."""

    #: One of `drift`, `foreign` (others ran on an exclusive pCPU), `conflict`, `intruder` (others
    #: may run on one), `no-vmm`, `orphan`, `unpinned`, `warning` (of a pass over the sandbox)
    kind: str
    fails: bool  #: whether it makes `ok` false
    sandbox: str  #: id of the sandbox; empty: not about a sandbox
    cpus: Cpus  #: the pCPUs concerned
    text: str  #: the finding in words
    group: IntruderGroup | None = None  #: the intruders; null: another kind of finding
    foreign: Foreign | None = None  #: who ran there; null: another kind of finding


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckDocument:
    """Printed by `check`."""

    version: int = VERSION  #: version of the document
    kind: str = "check"  #: kind of the document
    time: str  #: when it was made
    daemon: Daemon  #: whether the daemon made it
    #: One of `ok`, `findings` (some fail: exit status 3), `unknown` (could not tell: exit status 4)
    verdict: str
    ok: bool  #: whether the verdict is `ok`
    unknown: tuple[str, ...]  #: what could not be checked, and why; also beside findings
    sandboxes: int  #: number of sandboxes checked
    threads: int  #: number of threads checked
    findings: tuple[Finding, ...]  #: what was found
    free: Cpus  #: pCPUs that no container has exclusively
    measured: Measurement | None = None  #: how; null: nothing is exclusive, or it was not measured
