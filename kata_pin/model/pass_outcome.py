"""The outcome of a pass over a sandbox, in the words that documents, history and metrics share."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from kata_pin.model.cpuset import CpuSet
from kata_pin.model.placement import Desired, Outcome, Report
from kata_pin.model.sandbox import Sandbox
from kata_pin.model.thread import Thread

NO_VMM: Final = "no-vmm"
RELEASED: Final = "released"
GONE: Final = "gone"
"""The state of a sandbox that ended; only the history uses it."""

_MOVED: Final = frozenset({Outcome.DONE, Outcome.CLIPPED})


@dataclass(frozen=True)
class Cause:
    """Why a pass runs: the reasons given, and when the first was given (CLOCK_MONOTONIC, seconds).

    A pass that only repeats another keeps that one's cause: its pins are what was asked for then.
    """

    reasons: tuple[str, ...] = ()
    since: float = 0.0


@dataclass(frozen=True)
class PassOutcome:
    """One pass over one sandbox, and why it ran. `state` is the sandbox's state after it."""

    sandbox_id: str
    pod: str
    state: str
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
) -> str:
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
    if affinity < desired.applied and not desired.release:
        return "narrowed"
    if affinity != desired.applied:
        return "drift"
    return RELEASED if desired.release else "ok"


def thread_states(report: Report, *, released: bool) -> Iterator[tuple[Thread, str]]:
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
) -> str:
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
