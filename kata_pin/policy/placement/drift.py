"""How observed affinities differ from the desired ones, and the actions that end it.

Observed is what the kernel shows now, never what was last written (D2).

A thread on a part of the CPUs it should have is no drift: it runs where it may. Something else
narrowed it (a cpuset that cannot be read, Kata, the VMM itself), unless kata-pin is about to give
it more. It is set once, and then left (`narrowed`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from kata_pin.model.cpuset import EMPTY, CpuSet
from kata_pin.model.placement import Action, Desired, Drift, DriftKind, Placement
from kata_pin.model.thread import Task, Thread, ThreadKey


def find_drift(
    placement: Placement,
    threads: Iterable[Thread],
    *,
    known: Collection[ThreadKey] | None = None,
    before: Mapping[ThreadKey, Desired] | None = None,
    backed_off: Collection[ThreadKey] = (),
) -> tuple[Drift, ...]:
    """Return one drift for each thread that may run off its CPUs, in the order of keys.

    A desired thread that is not among `threads` is THREAD_GONE. `known` are the threads of the
    pass before: one that is not among them and is off is THREAD_NEW (None: all were known).
    `before` is what was desired then: where that was something else it is PLACEMENT_CHANGED (None:
    it was the same). `backed_off` are those that another writer keeps moving: their drift is
    OTHER_WRITER (D13).
    """
    tasks = {task.key: task for task, _role in threads}
    drifts: list[Drift] = []
    for key, desired in placement.desired.items():
        task = tasks.get(key)
        if task is None:
            drifts.append(Drift(key, DriftKind.THREAD_GONE, desired.applied, EMPTY))
        elif task.affinity != desired.applied and not is_narrower(task, desired):
            new = known is not None and key not in known
            past = desired if before is None else before.get(key)
            changed = past is None or past.applied != desired.applied
            kind = _kind(desired, task, new=new, changed=changed, others=key in backed_off)
            drifts.append(Drift(key, kind, desired.applied, task.affinity))
    return tuple(sorted(drifts))  # by key, of which each has another


def is_narrower(task: Task, desired: Desired) -> bool:
    """Whether a thread runs on a part of its CPUs; not while its former affinity is restored."""
    return not desired.release and task.affinity < desired.applied


def narrowed(
    placement: Placement, threads: Iterable[Thread], asked: Mapping[ThreadKey, CpuSet]
) -> frozenset[ThreadKey]:
    """Return the threads on a part of their CPUs that were given all of them before.

    `asked` maps threads to what they were last set to. To set them again would change nothing.
    """
    return frozenset(
        task.key
        for task, _role in threads
        if (desired := placement.desired.get(task.key)) is not None
        and is_narrower(task, desired)
        and asked.get(task.key) == desired.applied
    )


def _kind(desired: Desired, task: Task, *, new: bool, changed: bool, others: bool) -> DriftKind:
    if others:
        return DriftKind.OTHER_WRITER
    if new:
        return DriftKind.THREAD_NEW
    if desired.step or (task.cpuset and not desired.applied <= task.cpuset):
        return DriftKind.CPUSET_SHRUNK
    if changed:
        return DriftKind.PLACEMENT_CHANGED
    if task.affinity > desired.applied:
        return DriftKind.WIDENED
    if task.affinity < desired.applied:
        return DriftKind.NARROWED
    return DriftKind.MOVED


def make_plan(
    placement: Placement, threads: Iterable[Thread], *, skip: Collection[ThreadKey] = ()
) -> tuple[Action, ...]:
    """Return the actions for threads that differ: first those that widen, then moves, then narrow.

    Applied to the same observation they leave no drift, and a second plan is empty. Threads that
    are gone, that nothing is desired for, or that are `skip` (another writer keeps them,
    D13) get none. Two observations of one thread give one action.
    """
    actions: dict[ThreadKey, Action] = {}
    for task, _role in threads:
        key, observed = task.key, task.affinity
        desired = placement.desired.get(key)
        if desired is None or not desired.applied or desired.applied == observed:
            continue
        if key not in skip:
            actions[key] = Action(key, desired.applied, observed, desired.reason)
    return tuple(sorted(actions.values(), key=_order))


def _order(action: Action) -> tuple[int, ThreadKey]:
    before, target = action.before, action.target
    if before <= target:  # they differ
        return 0, action.key
    return 2 if target <= before else 1, action.key
