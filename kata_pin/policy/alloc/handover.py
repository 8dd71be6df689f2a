"""Handing over exclusive CPUs: their next user waits until the former one has left them.

A new state takes effect at once, with one exception: a sandbox's threads leave CPUs with the
next pass over it, and until then no other container may use them (the former grant was exclusive).
Containers of other runtimes are not waited for: the runtime moves all threads of one before it
turns to the next, and narrowed cpusets come first in an answer.

Pure: the daemon keeps which CPUs each sandbox still has to leave. It does not survive a restart:
then the first pass over each sandbox hands over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from kata_pin.model.alloc import AllocState, Grant
from kata_pin.model.cpuset import EMPTY, CpuSet, union

Leaving = Mapping[str, CpuSet]
"""CPUs that were exclusive to containers of sandboxes and no longer are, by container id.

Their threads may run there until a pass over their sandbox has ended.
"""


def still_to_leave(before: AllocState, after: AllocState, still: Leaving) -> Leaving:
    """Return the CPUs to leave after a change of state, `still` included.

    A container that has ended has left.
    """
    leaving: dict[str, CpuSet] = {}
    for name, grant in after.grants.items():
        if not grant.request.pod.sandbox_id:
            continue
        cpus, old = still.get(name, EMPTY), before.grants.get(name)
        if old is not None and old is not grant:
            cpus |= old.exclusive - grant.exclusive
        if cpus:
            leaving[name] = cpus
    return leaving


def after_pass(state: AllocState, leaving: Leaving, sandbox: str) -> Leaving:
    """Return the CPUs still to leave when a pass over a sandbox (its VM's name) has ended."""
    return {
        name: cpus
        for name, cpus in leaving.items()
        if name in state.grants and state.grants[name].request.pod.sandbox_id != sandbox
    }


def held_back(state: AllocState, leaving: Leaving) -> Mapping[str, CpuSet]:
    """Return the CPUs that sandboxes still have to leave, by the sandbox.

    Not those on which the container stays because it shares them now, nor those that are exclusive
    to another container of the sandbox.
    """
    held: dict[str, CpuSet] = {}
    for name, cpus in leaving.items():
        grant = state.grants.get(name)
        if grant is not None and (rest := cpus - grant.cpus):
            sandbox = grant.request.pod.sandbox_id
            held[sandbox] = held.get(sandbox, EMPTY) | rest
    if held:
        for grant in state.grants.values():
            sandbox = grant.request.pod.sandbox_id
            if sandbox in held:
                held[sandbox] -= grant.exclusive
    return {sandbox: cpus for sandbox, cpus in held.items() if cpus}


def in_force(state: AllocState, leaving: Leaving) -> AllocState:
    """Return the part of a state that takes effect while CPUs are being left.

    Only their former sandbox may use those. A container that would have no CPU at all does not
    wait.
    """
    held = held_back(state, leaving)
    if not held:
        return state
    every = union(held.values())
    of_others = {one: union(held[other] for other in held if other != one) for one in held}
    grants = {
        name: _without(grant, of_others.get(grant.request.pod.sandbox_id, every))
        for name, grant in state.grants.items()
    }
    exclusive = union(grant.exclusive for grant in grants.values())
    return replace(state, cpus=(state.cpus - every) | exclusive, grants=grants)


def _without(grant: Grant, cpus: CpuSet) -> Grant:
    if not grant.cpus & cpus or grant.cpus <= cpus:
        return grant
    shared = None if grant.shared is None else grant.shared - cpus
    return replace(grant, exclusive=grant.exclusive - cpus, shared=shared)
