"""The actions that take observed affinities to the desired ones, and no others."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from kata_pin.model.cpuset import CpuSet
from kata_pin.model.placement import Action, Placement
from kata_pin.model.thread import Thread, ThreadKey


def make_plan(
    placement: Placement, threads: Iterable[Thread], *, skip: Collection[ThreadKey] = ()
) -> tuple[Action, ...]:
    """Return the actions for threads that differ: first those that widen, then moves, then narrow.

    Applied to the same observation they leave no drift, and a second plan is empty. Threads that
    are gone, that nothing is desired for, or that are `skip` (another writer keeps them,
    DESIGN D13) get none. Two observations of one thread give one action.
    """
    actions: dict[ThreadKey, Action] = {}
    for thread in threads:
        desired = placement.desired.get(thread.key)
        observed = thread.task.affinity
        if desired is None or not desired.applied or desired.applied == observed:
            continue
        if thread.key not in skip:
            actions[thread.key] = Action(thread.key, desired.applied, observed, desired.reason)
    return tuple(sorted(actions.values(), key=_order))


def _order(action: Action) -> tuple[int, int, int, int]:
    key = action.key
    return (_rank(action.before, action.target), key.tgid, key.tid, key.starttime)


def _rank(before: CpuSet, target: CpuSet) -> int:
    if before < target:
        return 0
    return 2 if target < before else 1
