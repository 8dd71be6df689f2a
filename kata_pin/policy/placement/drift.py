"""How observed affinities differ from the desired ones, and the actions that end it.

Observed is what the kernel shows now, never what was last written (D2).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from kata_pin.model.cpuset import EMPTY
from kata_pin.model.placement import Action, Desired, Drift, DriftKind, Placement
from kata_pin.model.thread import Task, Thread, ThreadKey


def find_drift(
    placement: Placement,
    threads: Iterable[Thread],
    *,
    known: Collection[ThreadKey] | None = None,
    backed_off: Collection[ThreadKey] = (),
) -> tuple[Drift, ...]:
    """Return one drift for each thread that is off its desired affinity, in the order of keys.

    A desired thread that is not among `threads` is THREAD_GONE. `known` are the threads of the
    pass before: one that is not among them and is off is THREAD_NEW (None: all were known).
    `backed_off` are those that another writer keeps moving: their drift is OTHER_WRITER (D13).
    """
    tasks = {task.key: task for task, _role in threads}
    drifts: list[Drift] = []
    for key, desired in placement.desired.items():
        task = tasks.get(key)
        if task is None:
            drifts.append(Drift(key, DriftKind.THREAD_GONE, desired.applied, EMPTY))
        elif task.affinity != desired.applied:
            new = known is not None and key not in known
            kind = _kind(desired, task, new=new, others=key in backed_off)
            drifts.append(Drift(key, kind, desired.applied, task.affinity))
    return tuple(sorted(drifts))  # by key, of which each has another


def _kind(desired: Desired, task: Task, *, new: bool, others: bool) -> DriftKind:
    if others:
        return DriftKind.OTHER_WRITER
    if new:
        return DriftKind.THREAD_NEW
    if desired.step or (task.cpuset and not desired.applied <= task.cpuset):
        return DriftKind.CPUSET_SHRUNK
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
