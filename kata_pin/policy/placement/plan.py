"""The actions that take observed affinities to the desired ones, and no others."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from kata_pin.model.placement import Action, Placement
from kata_pin.model.thread import Thread, ThreadKey


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
