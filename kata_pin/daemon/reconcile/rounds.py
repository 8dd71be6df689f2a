"""One round of a pass: what it saw and decided, what it changed, and what kept it from more."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from kata_pin.daemon.reconcile.other_writers import OtherWriters
from kata_pin.model.count_noun import count
from kata_pin.model.cpuset import EMPTY, CpuSet
from kata_pin.model.placement import Action, ActionResult, Note, NoteLevel, Outcome, Placement
from kata_pin.model.thread import Thread, ThreadKey, ThreadRole
from kata_pin.policy.placement.drift import make_plan, narrowed
from kata_pin.policy.placement.release import undo

_GONE: Final = frozenset({Outcome.GONE, Outcome.REUSED})
_NOT_RESTORED: Final = frozenset(
    {Outcome.CLIPPED, Outcome.REFUSED, Outcome.DENIED, Outcome.UNVERIFIED}
)


@dataclass
class Round:
    """What one round saw and decided; `pairs` and `first_seen` are what was remembered."""

    threads: list[Thread]
    placement: Placement
    pairs: Mapping[ThreadKey, int]
    first_seen: Mapping[ThreadRole, CpuSet]
    notes: tuple[Note, ...] = ()

    def plan(
        self, backed_off: Collection[ThreadKey], asked: Mapping[ThreadKey, CpuSet]
    ) -> tuple[Action, ...]:
        """Return what is to be set; nothing without a mask where we never set any.

        `asked` maps threads to what they were last set to: those that something narrowed since are
        left.
        """
        if self.released:
            return undo(self.placement, self.threads, skip=backed_off)
        if self.placement.mask.mask is None:
            return ()
        left = narrowed(self.placement, self.threads, asked)
        return make_plan(self.placement, self.threads, skip={*backed_off, *left})

    @property
    def released(self) -> bool:
        """Whether this round restores affinities that kata-pin had set."""
        return self.placement.mask.mask is None and bool(self.first_seen)


def all_restored(
    seen: Round, results: Mapping[ThreadKey, ActionResult], skipped: Collection[ThreadKey]
) -> bool:
    """Whether every thread that lives has its former affinity back.

    If not, what is needed to restore it is kept for the next attempt.
    """
    tried = seen.placement.desired
    return not any(
        one.key in skipped
        or (one.key in tried and one.key not in results)
        or (one.key in results and results[one.key].outcome in _NOT_RESTORED)
        for one in seen.threads
    )


def first_masks(threads: Iterable[Thread], free: CpuSet) -> dict[ThreadRole, CpuSet]:
    """Return each role's affinity before the first pin: all of them where threads differ.

    They may be pinned one by one already, by Kata or by a daemon that lost its registry: one
    thread's affinity would later put all of them on one CPU. A thread that may use the whole cpuset
    of its cgroup has no affinity of its own, so `free` is added: cpusets grow.
    """
    masks: dict[ThreadRole, CpuSet] = {}
    for thread in threads:
        role, task = thread.role.role, thread.task
        own = free if task.cpuset and task.cpuset <= task.affinity else EMPTY
        masks[role] = masks.get(role, EMPTY) | task.affinity | own
    return masks


def after_actions(threads: Iterable[Thread], done: Iterable[ActionResult]) -> list[Thread]:
    """Return the threads as they are after the actions, without those that exited."""
    by_key = {one.action.key: one for one in done}
    after: list[Thread] = []
    for thread in threads:
        task, role = thread
        result = by_key.get(task.key)
        if result is not None and result.after is not None:
            moved = task.moved(result.after, task.cpuset, task.cgroup)
            after.append(Thread(moved, role))
        elif result is None or result.outcome not in _GONE:
            after.append(thread)
    return after


def obstacle_notes(
    results: Iterable[ActionResult],
    backed_off: Collection[ThreadKey],
    others: OtherWriters,
    now: float,
) -> Iterator[Note]:
    """Yield what kept threads from being pinned, one note per kind."""
    outcomes = [one.outcome for one in results if not one.is_narrower]
    for outcome, text in _OBSTACLES.items():
        number = outcomes.count(outcome)
        if number:
            said = f"{count(number, 'thread')}: {text}"
            yield Note(f"affinity-{outcome.value}", said, NoteLevel.WARNING)
    writer = others.writer(now) if backed_off else None
    if writer is not None:
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - (writer.since_s or 0.0)))
        text = (
            f"another process changed {count(len(backed_off), 'affinity', 'affinities')}"
            f" {count(writer.count, 'time')} since {since}; backing off, retrying in"
            f" {max(0.0, others.retry_at() - now):.0f} s"
        )
        yield Note("other-writer", text, NoteLevel.WARNING)


def crowd_notes(left_out: int) -> Iterator[Note]:
    """Yield a note about threads that are not looked at because the sandbox has too many."""
    if left_out:
        text = f"too many threads: {count(left_out, 'thread')} not looked at; they keep the"
        yield Note("crowd", f"{text} affinity of the thread that made them", NoteLevel.WARNING)


_OBSTACLES: Final = {
    Outcome.REFUSED: "cannot be pinned: their cgroup allows none of the CPUs (EINVAL)",
    Outcome.DENIED: "cannot be pinned: the daemon lacks CAP_SYS_NICE (EPERM)",
    Outcome.UNVERIFIED: "cannot be pinned: the broker accepts no such executable (EACCES); add it "
    "to the setting hypervisors if it is Kata's, and restart the daemon",
    Outcome.CLIPPED: "the kernel allows other CPUs than asked for: the cpuset is changing",
    Outcome.FIXED: "cannot be pinned: kernel threads with a fixed affinity",
}
