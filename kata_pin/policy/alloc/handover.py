"""Handing exclusive CPUs over: who receives them waits until their owner has left them.

A new state is in force at once but for that: a sandbox's threads leave CPUs with the next pass over
it, and until then nobody else may be there (the guarantee was the owner's, and holds until it is
gone). Containers of other runtimes are not waited for: the runtime moves all threads of one before
it turns to the next, and narrowing comes first in an answer.

Pure: the daemon keeps what is being left, and forgets a sandbox's part when a pass over it ended.
Nothing of it needs to survive: the passes after a start are over every sandbox.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from kata_pin.model.alloc import AllocState, Grant
from kata_pin.model.cpuset import EMPTY, CpuSet, union

Leaving = Mapping[str, CpuSet]
"""CPUs that sandboxes still have to leave, by the sandbox that policies know (PodRequest)."""


def leaving(before: AllocState, after: AllocState, still: Leaving) -> Leaving:
    """Return what sandboxes have to leave after a change of state, `still` included.

    Exclusive CPUs on which their container stays, because it shares them from now on, are not left:
    nobody waits for those. A container that is over has left.
    """
    left = dict(still)
    stays: dict[str, CpuSet] = {}
    for name, grant in after.grants.items():
        sandbox = grant.request.pod.sandbox_id
        if not sandbox:
            continue
        stays[sandbox] = stays.get(sandbox, EMPTY) | grant.own
        old = before.grants.get(name)
        if old is not None and old is not grant:
            left[sandbox] = left.get(sandbox, EMPTY) | (old.exclusive - grant.cpus)
    rest = {one: cpus - stays[one] for one, cpus in left.items() if one in stays}
    return {one: cpus for one, cpus in rest.items() if cpus}


def in_force(state: AllocState, left: Leaving) -> AllocState:
    """Return what may be acted on of a state while CPUs are being left.

    Nobody but their sandbox is on those. Who would have no CPU at all does not wait.
    """
    if not left:
        return state
    every = union(left.values())
    grants = {
        name: _without(grant, every - left.get(grant.request.pod.sandbox_id, EMPTY))
        for name, grant in state.grants.items()
    }
    held = union(grant.exclusive for grant in grants.values())
    return replace(state, cpus=(state.cpus - every) | held, grants=grants)


def _without(grant: Grant, cpus: CpuSet) -> Grant:
    if not grant.cpus & cpus or grant.cpus <= cpus:
        return grant
    shared = None if grant.shared is None else grant.shared - cpus
    return replace(grant, exclusive=grant.exclusive - cpus, shared=shared)
