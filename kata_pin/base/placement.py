"""What a pass decides for a sandbox, what it needs to know about the node, and what came of it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from enum import StrEnum
from typing import Final, NamedTuple

from msgspec import Struct, field

from kata_pin.base.cpuset import EMPTY, CpuSet, HostTopology, union
from kata_pin.base.sandbox import Sandbox, Thread
from kata_pin.base.settings import PlacementSettings
from kata_pin.base.threads import ThreadKey
from kata_pin.base.values import (
    ChangeState,
    NoteLevel,
    Outcome,
    Provenance,
    SandboxState,
    ThreadState,
)

# What policy decides, what differs from it, what is to be done, and what came of it.


class Claim(Struct, frozen=True):
    """The exclusive CPUs of one container, or the reason that it has none."""

    container_id: str
    exclusive: CpuSet
    provenance: Provenance
    reason: str


class SandboxMask(Struct, frozen=True):
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


MOST_BOUND_S: Final = 30 * 86_400
"""Longest time for which a binding is made."""


class Binding(Struct, frozen=True):
    """What an administrator named for one sandbox: the CPUs of vCPUs, and of everything else.

    `overhead` is empty where the settings decide. It holds until `until_ns` (CLOCK_BOOTTIME; None:
    until it is cleared); `until` is the same time for people.
    """

    vcpus: CpuSet
    cpus: CpuSet
    overhead: CpuSet = EMPTY
    until_ns: int | None = None
    until: str = ""

    def __str__(self) -> str:
        text = f"vCPUs {self.vcpus} on pCPUs {self.cpus}"
        text += f", overhead on {self.overhead}" if self.overhead else ""
        return text + (f", until {self.until}" if self.until else "")


class Desired(Struct, frozen=True):
    """Where a thread should run; threads that should run alike share one.

    `wanted` is the policy's choice, `applied` = wanted with the cgroup's cpuset and the online
    CPUs taken into account (D7); `step` names the fallback that was needed (empty: none).
    `release` is True where an affinity is restored (D18). `paired` is True for a vCPU that has
    exclusive CPUs, those of container `container_id`.
    """

    wanted: CpuSet
    applied: CpuSet
    reason: str
    step: str = ""
    paired: bool = False
    container_id: str = ""
    release: bool = False


class Note(Struct, frozen=True):
    """Something the operator should know about a placement; `code` is stable, for machines."""

    code: str
    text: str
    level: NoteLevel = NoteLevel.INFO


class Placement(Struct, frozen=True):
    """The whole decision for one sandbox. A thread absent from `desired` is unmanaged.

    `binding` is the one that holds; `unbound` says why the one there was cannot be applied.
    """

    sandbox_id: str
    mask: SandboxMask
    desired: Mapping[ThreadKey, Desired] = field(default_factory=dict)
    notes: tuple[Note, ...] = ()
    binding: Binding | None = None
    unbound: str = ""


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


class ActionResult(NamedTuple):
    """An action and what the kernel says now (`after` is None when nothing could be read)."""

    action: Action
    outcome: Outcome
    after: CpuSet | None = None

    @property
    def is_narrower(self) -> bool:
        """Whether the thread has a part of the target: it runs only where it may."""
        return self.outcome is Outcome.CLIPPED and (self.after or EMPTY) < self.action.target


class Report(Struct, frozen=True):
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
    def all_placed(self) -> bool:
        """Whether every thread is where it should be."""
        bad = {
            *(Outcome.REFUSED, Outcome.DENIED, Outcome.UNVERIFIED, Outcome.REUSED),
            Outcome.CLIPPED,
        }
        return self.placement is not None and not any(
            one.outcome in bad and not one.is_narrower for one in self.results
        )


# The outcome of a pass over a sandbox, in the words that documents, history and metrics share.

NO_VMM: Final = "no-vmm"
RELEASED: Final = "released"
GONE: Final = "gone"
"""The state of a sandbox that ended; only the history uses it."""

_MOVED: Final = frozenset({Outcome.DONE, Outcome.CLIPPED})


class Cause(Struct, frozen=True):
    """Why a pass runs: the reasons given, and when the first was given (CLOCK_MONOTONIC, seconds).

    A pass that only repeats another keeps that one's cause: its pins are what was asked for then.
    """

    reasons: tuple[str, ...] = ()
    since: float = 0.0


class PassOutcome(Struct, frozen=True):
    """One pass over one sandbox, and why it ran. `state` is the sandbox's state after it."""

    sandbox_id: str
    pod: str
    state: ChangeState
    report: Report
    cause: Cause

    @property
    def mask(self) -> CpuSet | None:
        """The sandbox mask, None without one; an unpinned sandbox has none, whatever is decided."""
        placement = self.report.placement
        if placement is None or self.state == RELEASED:
            return None
        return placement.mask.mask

    @property
    def moved(self) -> int:
        """How many threads have another affinity than before."""
        return sum(
            one.outcome in _MOVED and one.after != one.action.before for one in self.report.results
        )


def thread_state(
    thread: Thread, desired: Desired | None, *, released: bool, backed_off: Collection[int] = ()
) -> ThreadState:
    """Return `unmanaged`, `released`, `drift`, `narrowed` or `ok`.

    `backed_off` tids have another writer. A narrowed thread runs on a part of its CPUs.
    """
    if desired is None:
        return "unmanaged"
    if released:
        return RELEASED
    affinity = thread.task.affinity
    if thread.key.tid in backed_off:
        return "drift"
    if affinity == desired.applied:
        return RELEASED if desired.release else "ok"
    return "narrowed" if affinity < desired.applied and not desired.release else "drift"


def thread_states(report: Report, *, released: bool) -> Iterator[tuple[Thread, ThreadState]]:
    """Yield a report's threads with their states."""
    desired = report.placement.desired if report.placement is not None else {}
    for thread in report.threads:
        yield thread, thread_state(thread, desired.get(thread.key), released=released)


def outcome_of(sandbox: Sandbox, report: Report, cause: Cause, *, released: bool) -> PassOutcome:
    """Return the outcome of a pass over a sandbox."""
    placement = report.placement
    state = sandbox_state(
        (word for _, word in thread_states(report, released=released)),
        vmm=sandbox.vmm is not None,
        mask=placement.mask.mask if placement is not None else None,
        released=released,
    )
    return PassOutcome(sandbox.id, sandbox.pod, state, report, cause)


def sandbox_state(
    threads: Iterable[str], *, vmm: bool, mask: CpuSet | None, released: bool, shared: bool = False
) -> SandboxState:
    """Return a sandbox's state by those of its threads; `shared`: others claim its exclusive pCPUs.

    The words are those of the state document (docs/json.md).
    """
    if released:
        return RELEASED
    if not vmm:
        return NO_VMM
    if shared:
        return "conflict"
    if mask is None:
        return "unpinned"
    return "drift" if "drift" in threads else "ok"


# What policy needs to know about the node beside the sandbox itself.


class DoubleAssignment(Struct, frozen=True):
    """Exclusive CPUs that the kubelet gave to several pods, or to one and the shared pool.

    `pods` are uids; `in_default` says whether the CPUs, or some of them, are in the shared pool.
    """

    cpus: CpuSet
    pods: tuple[str, ...]
    in_default: bool = False


class KubeletState(Struct, frozen=True):
    """The kubelet's CPU manager checkpoint, verified.

    `entries` maps pod uid to container name to its exclusive CPUs; `pod_entries` maps pod uid to
    the CPUs of a pod-level assignment (versions 3 and 4). Containers that share such CPUs have what
    they share as an entry each. `default` is the shared pool. `doubles` are the first CPUs that are
    assigned twice, as the kubelet does on hosts with cores of different sizes. A pod's own
    containers may overlap (with an init container that has ended): that is none.
    """

    policy: str
    default: CpuSet
    entries: Mapping[str, Mapping[str, CpuSet]] = field(default_factory=dict)
    pod_entries: Mapping[str, CpuSet] = field(default_factory=dict)
    version: int = 2
    doubles: tuple[DoubleAssignment, ...] = field(default=())

    @property
    def static(self) -> bool:
        """Whether the kubelet allocates exclusive CPUs on this node."""
        return self.policy == "static"


class Node(Struct, frozen=True):
    """Facts of the node that placement depends on.

    `claims` are the CPUs of DRA claims, by the claim's uid: each claim is one container's.

    `release_mask` is what a thread gets when it is released and nothing else is known: the
    affinity of pid 1 with offline CPUs taken out (D18). `live_threads` says whether new
    threads are reported as they are born: without that the VMM's main thread keeps the whole
    sandbox mask, because new threads inherit its affinity (D11).
    """

    topology: HostTopology
    settings: PlacementSettings = field(default_factory=PlacementSettings)
    kubelet: KubeletState | None = None
    claims: Mapping[str, CpuSet] = field(default_factory=dict)
    release_mask: CpuSet = EMPTY
    live_threads: bool = True

    @property
    def assigned(self) -> CpuSet:
        """What DRA claims and the kubelet's checkpoint give, also to pods without a VM."""
        claimed, kubelet = union(self.claims.values()), self.kubelet
        if kubelet is None or not kubelet.static:
            return claimed
        entries = (cpus for of in kubelet.entries.values() for cpus in of.values())
        return union((claimed, *entries, *kubelet.pod_entries.values()))
