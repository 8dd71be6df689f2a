"""What policy decides, what differs from it, what is to be done, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from kata_pin.model.cpuset import EMPTY, CpuSet
from kata_pin.model.thread import Thread, ThreadKey


class Provenance(StrEnum):
    """How it is known that a container's CPUs are exclusive, or are not (D9)."""

    ALLOCATOR = "allocator"
    KUBELET = "kubelet"
    CLAIM = "claim"
    ADMINISTRATOR = "administrator"
    INFERRED = "inferred"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Claim:
    """The exclusive CPUs of one container, or the reason that it has none."""

    container_id: str
    exclusive: CpuSet
    provenance: Provenance
    reason: str


@dataclass(frozen=True, slots=True)
class SandboxMask:
    """The union of the counting containers' cpusets and its parts.

    `mask` is None when nothing confines the sandbox: then pins we made are released (D8).
    `exclusive` and `shared` split it; the pause container's cpuset is in `mask` only through
    `overhead_extra`, which vCPUs paired with containers never use.
    """

    mask: CpuSet | None
    exclusive: CpuSet = EMPTY
    shared: CpuSet = EMPTY
    overhead_extra: CpuSet = EMPTY
    origin: str = ""
    claims: tuple[Claim, ...] = ()


@dataclass(frozen=True, slots=True)
class Desired:
    """Where one thread should run.

    `wanted` is the policy's choice, `applied` = wanted with the cgroup's cpuset and the online
    CPUs taken into account (D7); `step` names the fallback that was needed (empty: none).
    `release` is True where an affinity is restored (D18). `paired` is True for a vCPU that has
    exclusive CPUs, those of container `container_id`.
    """

    key: ThreadKey
    wanted: CpuSet
    applied: CpuSet
    reason: str
    step: str = ""
    paired: bool = False
    container_id: str = ""
    release: bool = False


class NoteLevel(StrEnum):
    """How much a note matters."""

    INFO = "info"
    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class Note:
    """Something the operator should know about a placement; `code` is stable, for machines."""

    code: str
    text: str
    level: NoteLevel = NoteLevel.INFO


@dataclass(frozen=True)
class Placement:
    """The whole decision for one sandbox. A thread absent from `desired` is unmanaged."""

    sandbox_id: str
    mask: SandboxMask
    desired: Mapping[ThreadKey, Desired] = field(default_factory=dict)
    notes: tuple[Note, ...] = ()


class DriftKind(StrEnum):
    """How a thread's affinity differs from the desired one."""

    MOVED = "moved"  # other CPUs than desired
    WIDENED = "widened"  # more than desired
    NARROWED = "narrowed"  # fewer than it had before it was pinned, while that is restored
    CPUSET_SHRUNK = "cpuset_shrunk"  # its cgroup no longer allows what we wanted
    THREAD_NEW = "thread_new"  # not placed before
    THREAD_GONE = "thread_gone"
    PLACEMENT_CHANGED = "placement_changed"  # other CPUs are desired than before
    OTHER_WRITER = "other_writer"  # came back three times: another writer (D13)

    @property
    def expected(self) -> bool:
        """Whether nobody moved the thread: kata-pin had not placed it there yet, or it ended."""
        return self in {self.THREAD_NEW, self.THREAD_GONE, self.PLACEMENT_CHANGED}


class Drift(NamedTuple):
    """One thread off its desired affinity."""

    key: ThreadKey
    kind: DriftKind
    desired: CpuSet
    observed: CpuSet


class Action(NamedTuple):
    """Set one thread's affinity.

    `ask` is what the kernel is asked for where that is wider than what it can grant now, which is
    `target`: from Linux 6.2 on it is remembered, and holds again when the cpuset grows.
    """

    key: ThreadKey
    target: CpuSet
    before: CpuSet
    reason: str
    ask: CpuSet = EMPTY


class Outcome(StrEnum):
    """What came of an action, read back from the kernel."""

    DONE = "done"
    GONE = "gone"  # the thread exited
    REUSED = "reused"  # the tid belongs to another thread now; nothing was undone
    REFUSED = "refused"  # EINVAL: no CPU of the target is in the thread's cpuset
    DENIED = "denied"  # EPERM: CAP_SYS_NICE is missing
    UNVERIFIED = "unverified"  # EACCES: the broker does not accept the process as a VMM's
    CLIPPED = "clipped"  # set, but the kernel applies fewer CPUs than asked
    FIXED = "fixed"  # a kernel thread whose affinity cannot be changed


class ActionResult(NamedTuple):
    """An action and what the kernel says now (`after` is None when nothing could be read)."""

    action: Action
    outcome: Outcome
    after: CpuSet | None = None

    @property
    def is_narrower(self) -> bool:
        """Whether the thread has a part of the target: it runs only where it may."""
        return self.outcome is Outcome.CLIPPED and (self.after or EMPTY) < self.action.target


@dataclass(frozen=True)
class Report:
    """One pass over one sandbox: what was found, wanted and done, and how long it took."""

    sandbox_id: str
    threads: tuple[Thread, ...] = ()
    placement: Placement | None = None
    drifts: tuple[Drift, ...] = ()
    results: tuple[ActionResult, ...] = ()
    notes: tuple[Note, ...] = ()
    rounds: int = 0
    duration_ns: int = 0

    @property
    def settled(self) -> bool:
        """Whether every thread is where it should be."""
        bad = {
            *(Outcome.REFUSED, Outcome.DENIED, Outcome.UNVERIFIED, Outcome.REUSED),
            Outcome.CLIPPED,
        }
        return self.placement is not None and not any(
            one.outcome in bad and not one.is_narrower for one in self.results
        )
