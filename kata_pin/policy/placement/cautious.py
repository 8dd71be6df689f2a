"""What `pin` may set without the daemon: no thread gains an exclusive pCPU (D19).

Such a pass knows less: no events, no QMP, no NRI, only what is stored and what the kubelet's
checkpoint says. So it gives no thread an exclusive pCPU that another pod, or a vCPU of its own
sandbox, has. Where it cannot know it leaves the thread on what it has, and says so. A vCPU gets its
own pCPU. Pure. Out of scope: an undo that the operator asks for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from kata_pin.model.count_noun import count
from kata_pin.model.cpuset import EMPTY, CpuSet, union
from kata_pin.model.placement import Desired, Note, NoteLevel, Placement
from kata_pin.model.thread import Task, Thread, ThreadKey


@dataclass(frozen=True, slots=True)
class OthersCpus:
    """The exclusive CPUs of all other sandboxes and pods, as far as they are known.

    `unknown` says what is missing: no thread gets any CPU then that it does not have.
    """

    exclusive: CpuSet = EMPTY
    unknown: str = ""


def without_gains(
    placement: Placement,
    threads: Iterable[Thread],
    pairs: Mapping[ThreadKey, int],
    others: OthersCpus,
) -> tuple[Placement, tuple[Note, ...]]:
    """Return the placement without exclusive CPUs that threads do not have, and what to say of it.

    `pairs` are the stored ones: a vCPU that is not recognised now stays on its pCPU.
    """
    desired = dict(placement.desired)
    kept, refused = 0, EMPTY
    for task, _role in threads:
        wanted, pair = desired.get(task.key), pairs.get(task.key)
        if _is_lost(wanted, pair, task, placement):
            assert pair is not None
            desired[task.key] = _as_it_is(task, pair, placement)
            kept += 1
        elif wanted is not None and (gain := _gain(wanted, pair, task, placement, others)):
            applied = wanted.applied - gain or task.affinity
            why = f"{wanted.reason}; without the daemon not on {gain}"
            kept_to = applied if wanted.release else wanted.wanted  # an undo sets what is wanted
            desired[task.key] = replace(wanted, wanted=kept_to, applied=applied, reason=why)
            refused |= gain
            kept += 1
    if not kept:
        return placement, ()
    why = others.unknown or f"pCPUs {refused} are exclusive" if refused else "they are vCPUs"
    text = f"{count(kept, 'thread')} kept off pCPUs that the daemon may give: {why}"
    note = Note("offline-narrow", text, NoteLevel.WARNING)
    return replace(placement, desired=desired), (note,)


def _is_lost(wanted: Desired | None, pair: int | None, task: Task, placement: Placement) -> bool:
    """Whether a thread is stored as a vCPU with a pCPU, and this pass takes it for another."""
    if pair is None or (wanted is not None and (wanted.paired or wanted.release)):
        return False
    return pair in placement.mask.exclusive and pair in task.affinity


def _as_it_is(task: Task, pair: int, placement: Placement) -> Desired:
    cpu = CpuSet((pair,))
    owner = next((one for one in placement.mask.claims if cpu <= one.exclusive), None)
    return Desired(
        task.key,
        cpu,
        task.affinity,
        "left on its pCPU: stored as a vCPU, not recognised without the daemon",
        container_id=owner.container_id if owner is not None else "",
    )


def _gain(
    wanted: Desired, pair: int | None, task: Task, placement: Placement, others: OthersCpus
) -> CpuSet:
    """Return the CPUs that a thread must not get, of those that it would get."""
    new = wanted.applied - task.affinity
    stored = union([CpuSet((pair,))] if pair is not None else [])
    if others.unknown:
        return new - stored
    own = placement.mask.exclusive - (wanted.wanted if wanted.paired else EMPTY)
    return new & (others.exclusive | own)
