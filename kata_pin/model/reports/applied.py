"""What `pin`, `unpin` and `reconcile` did."""

from __future__ import annotations

from dataclasses import dataclass

from kata_pin.model.reports import VERSION, Cpus, Note
from kata_pin.model.reports.pools import KeptCpuset


@dataclass(frozen=True, slots=True)
class Result:
    """One thread whose affinity was set."""

    tid: int  #: thread id
    before: Cpus  #: affinity before
    target: Cpus  #: affinity that was set
    after: Cpus | None  #: affinity read back; null: it could not be read
    #: One of `done`, `clipped` (fewer pCPUs than requested), `gone` (exited), `reused` (the tid now
    #: is another thread), `refused` (EINVAL), `denied` (EPERM), `unverified`
    #: (EACCES: the broker does not accept the process), `fixed` (cannot be moved)
    outcome: str
    reason: str  #: why these pCPUs


@dataclass(frozen=True, slots=True)
class AppliedSandbox:
    """What was done to one sandbox."""

    id: str  #: sandbox id
    pod: str  #: `namespace/name`; the id if no pod is known
    state: str  #: as in `state`
    vmm_problem: str  #: why there is no VMM
    threads: int  #: number of its threads
    duration_ms: float | None  #: duration of the pass
    results: tuple[Result, ...]  #: one object per thread that was moved
    notes: tuple[Note, ...]  #: what the operator should know


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """Printed by `pin` and `unpin`; also the daemon's answer to `reconcile` and `release`."""

    version: int = VERSION  #: version of the document
    kind: str  #: One of `pin`, `unpin`, `reconcile`
    sandboxes: tuple[AppliedSandbox, ...]  #: one object per sandbox
    #: containers that keep a cpuset of the allocator, after `release` (uninstall) only
    cpusets_kept: tuple[KeptCpuset, ...] = ()
    #: what `quiet` changed and could not be restored, and why; after `release` only
    quiet_kept: tuple[str, ...] = ()
