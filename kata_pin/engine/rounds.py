"""One round of a pass, and what a release restores (D18)."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from msgspec import Struct, field

from kata_pin.base.cpuset import EMPTY, CpuSet, union
from kata_pin.base.errors import TaskGone
from kata_pin.base.placement import Action, ActionResult, Note, Placement, Report
from kata_pin.base.sandbox import Sandbox, Task, Thread
from kata_pin.base.threads import ThreadKey
from kata_pin.base.values import NoteLevel, Outcome, ThreadRole, count
from kata_pin.engine.sandbox_cache import OtherWriters
from kata_pin.linux.cgroup_mounts import CgroupMount
from kata_pin.linux.cgroups import CpusetReader
from kata_pin.linux.files import HostRoot
from kata_pin.linux.tasks import get_affinity
from kata_pin.placement.drift import KataPinning, KataPinningMode, make_plan, narrowed
from kata_pin.placement.notes import KATA_PINS_VCPUS
from kata_pin.placement.place import undo

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

    def failed_binding(self, done: Iterable[ActionResult]) -> str:
        """Return why a binding is not applied whole, after these results; empty if it is."""
        binding = self.placement.binding
        if binding is None:
            return self.placement.unbound
        roles = {one.key: one.role for one in self.threads}
        for one in done:
            role = roles.get(one.action.key)
            named = role is not None and role.vcpu is not None and role.vcpu in binding.vcpus
            bad = one.outcome is not Outcome.DONE if named else one.outcome in _NOT_RESTORED
            if bad and (named or binding.overhead):
                who = f"vCPU {role.vcpu}" if named and role else f"thread {one.action.key.tid}"
                return f"the affinity of {who} was not set ({one.outcome.value})"
        return ""

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


def all_restored(seen: Round, results: Mapping[ThreadKey, ActionResult]) -> bool:
    """Whether every thread that lives has its former affinity back.

    If not, what is needed to restore it is kept for the next attempt.
    """
    tried = seen.placement.desired
    return all(
        one.key in results and results[one.key].outcome not in _NOT_RESTORED
        for one in seen.threads
        if one.key in tried
    )


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
    left_out: int,
) -> Iterator[Note]:
    """Yield what kept threads from being pinned, one note per kind.

    `left_out` are those that are not looked at because the sandbox has too many.
    """
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
            f"the VMM or another process changed {count(len(backed_off), 'affinity', 'affinities')}"
            f" {count(writer.count, 'time')} since {since}; backing off, retrying in"
            f" {max(0.0, others.retry_at() - now):.0f} s"
        )
        yield Note("other-writer", text, NoteLevel.WARNING)
    if left_out:
        text = f"too many threads: {count(left_out, 'thread')} not looked at; they keep the"
        yield Note("crowd", f"{text} affinity of the thread that made them", NoteLevel.WARNING)


def undo_notes(seen: Round, free: CpuSet) -> Iterator[Note]:
    """Yield what an undo leaves on fewer CPUs than its cgroup allows, one note per reason.

    `free` is the affinity of an unconfined thread.
    """
    kept: dict[str, list[Thread]] = {}
    katas = any(note.code == KATA_PINS_VCPUS for note in seen.placement.notes)
    for thread in seen.threads:
        task, role = thread
        if (task.cpuset & free if task.cpuset else free) <= task.affinity:
            continue
        if katas and role.role is ThreadRole.VCPU:
            reason = ""
        elif task.key in seen.placement.desired and role.role in seen.first_seen:
            reason = "their affinity before kata-pin set it"
        else:
            reason = "kata-pin did not set it"
        kept.setdefault(reason, []).append(thread)
    for reason, threads in sorted(kept.items()):
        cpus = union(thread.task.affinity for thread in threads)
        if not reason:
            text = f"{count(len(threads), 'vCPU stays', 'vCPUs stay')} as Kata pinned them: {cpus}"
            yield Note("kept-kata-pins", text)
            continue
        keep = count(len(threads), "thread keeps", "threads keep")
        text = f"{keep} {cpus}, fewer CPUs than their cgroup allows: {reason}"
        yield Note("kept-narrow", text, NoteLevel.WARNING)


_OBSTACLES: Final = {
    Outcome.REFUSED: "cannot be pinned: their cgroup allows none of the CPUs (EINVAL)",
    Outcome.DENIED: "cannot be pinned: the daemon lacks CAP_SYS_NICE (EPERM)",
    Outcome.UNVERIFIED: "cannot be pinned: the broker accepts no such executable (EACCES); add it "
    "to the setting hypervisors if it is Kata's, and restart the daemon",
    Outcome.CLIPPED: "the kernel allows other CPUs than asked for: the cpuset is changing",
    Outcome.FIXED: "cannot be pinned: kernel threads with a fixed affinity",
}


class FirstMasks(Struct, frozen=True):
    """What a release restores: the affinity that each role had before kata-pin set it (D18).

    An affinity that is narrower than the cgroup allows is remembered only if something set it
    for a reason of its own. It is not when

    - a cpuset in transition made it: Kata writes one while the pass reads, so the cgroup and the
      threads are not seen at one moment, or a thread still has the cpuset of the pass before;
    - it is a container's cpuset, or the CPUs that the thread is about to get: a pin of Kata, or of
      a daemon that lost its registry;
    - it is a vCPU's, and Kata pins vCPUs too;
    - the role is set for the first time later than others: its threads inherited a pin.

    Such a role gets the affinity of an unconfined thread instead.

    Lives for one pass; `last` is the report of the pass before.

    `free` is the affinity of an unconfined thread.
    """

    root: HostRoot
    mounts: Sequence[CgroupMount]
    sandbox: Sandbox
    free: CpuSet
    kata: KataPinning
    last: Report | None
    _known: dict[tuple[str, CpuSet, CpuSet], bool] = field(default_factory=dict)

    def of(self, seen: Round) -> Mapping[ThreadRole, CpuSet]:
        """Return what to remember once this round's pins are set: roles that it sets are added.

        Where threads of a role differ it is all of their affinities: one thread's would later put
        all of them on one CPU. The role of vCPUs that Kata has on its own pins is left out.
        """
        desired = seen.placement.desired
        if seen.placement.mask.mask is None:
            return seen.first_seen
        masks = dict(seen.first_seen)
        ours = {t.role.role for t in seen.threads if t.key in desired}
        if any(note.code == KATA_PINS_VCPUS for note in seen.placement.notes):
            if ThreadRole.VCPU not in ours:
                masks.pop(ThreadRole.VCPU, None)
            ours.discard(ThreadRole.VCPU)
        for task, known in seen.threads:
            if known.role not in ours or known.role in seen.first_seen:
                continue
            wanted = desired[task.key].applied if task.key in desired else EMPTY
            is_own = not seen.first_seen and self._is_own(task, known.role, wanted)
            mask = task.affinity if is_own else self.free
            masks[known.role] = masks.get(known.role, EMPTY) | mask
        return masks

    def _is_own(self, task: Task, role: ThreadRole, wanted: CpuSet) -> bool:
        """Whether something set the affinity for a reason of its own."""
        affinity = task.affinity
        if (task.cpuset and task.cpuset <= affinity) or affinity == wanted:
            return False
        if role is ThreadRole.VCPU and self.kata.mode is not KataPinningMode.OFF:
            return False
        cpusets = [one.cpus or EMPTY for one in self.sandbox.containers]
        if affinity == union(cpus for cpus in cpusets if cpus <= affinity):
            return False
        same = task.cgroup, task.cpuset, affinity
        if same not in self._known:
            self._known[same] = affinity not in self._former(task) and self._stays(task)
        return self._known[same]

    def _former(self, task: Task) -> set[CpuSet]:
        """Return the cpusets that the thread's cgroup had in the pass before."""
        threads = self.last.threads if self.last is not None else ()
        return {one.task.cpuset for one in threads if one.task.cgroup == task.cgroup}

    def _stays(self, task: Task) -> bool:
        """Whether the cgroup and the affinity are still as the pass read them."""
        tgid, tid, _ = task.key
        try:
            before = CpusetReader(self.root, self.mounts).of(tgid, tid)
            affinity = get_affinity(tid, self.root)
            after = CpusetReader(self.root, self.mounts).of(tgid, tid)
        except TaskGone:
            return False
        return affinity == task.affinity and before == after == (task.cgroup, task.cpuset)
