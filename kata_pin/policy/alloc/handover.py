"""Handing exclusive CPUs over: who receives them waits until their owner has left them.

A new state is in force at once but for that: a sandbox's threads leave CPUs with the next pass over
it, and until then nobody else may be there (the guarantee was the owner's, and holds until it is
gone). Containers of other runtimes are not waited for: the runtime moves all threads of one before
it turns to the next, and narrowing comes first in an answer.

Pure: the daemon keeps what was exclusive before the last pass over each sandbox. Nothing of it
survives a restart: then the first pass over each sandbox hands over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from kata_pin.model.alloc import AllocState, Grant
from kata_pin.model.cpuset import EMPTY, CpuSet, union

Once = Mapping[str, CpuSet]
"""CPUs that containers of sandboxes had for themselves and have no longer, by container id.

Their threads may be there until a pass over their sandbox has ended.
"""


def once_exclusive(before: AllocState, after: AllocState, still: Once) -> Once:
    """Return what containers had for themselves before a change of state, `still` included.

    A container that is over has left.
    """
    once: dict[str, CpuSet] = {}
    for name, grant in after.grants.items():
        if not grant.request.pod.sandbox_id:
            continue
        cpus, old = still.get(name, EMPTY), before.grants.get(name)
        if old is not None and old is not grant:
            cpus |= old.exclusive - grant.exclusive
        if cpus:
            once[name] = cpus
    return once


def after_pass(state: AllocState, once: Once, sandbox: str) -> Once:
    """Return what is left when a pass over a sandbox, as policies know it, has ended."""
    return {
        name: cpus
        for name, cpus in once.items()
        if name in state.grants and state.grants[name].request.pod.sandbox_id != sandbox
    }


def held_back(state: AllocState, once: Once) -> Mapping[str, CpuSet]:
    """Return the CPUs that sandboxes still have to leave, by the sandbox.

    Those on which their container stays, because it shares them from now on, are not left: nobody
    waits for those. Nor are those that another container of the sandbox has for itself.
    """
    held: dict[str, CpuSet] = {}
    for name, cpus in once.items():
        grant = state.grants.get(name)
        if grant is not None and (rest := cpus - grant.cpus):
            sandbox = grant.request.pod.sandbox_id
            held[sandbox] = held.get(sandbox, EMPTY) | rest
    if held:
        for grant in state.grants.values():
            sandbox = grant.request.pod.sandbox_id
            if sandbox in held:
                held[sandbox] -= grant.own
    return {sandbox: cpus for sandbox, cpus in held.items() if cpus}


def in_force(state: AllocState, once: Once) -> AllocState:
    """Return what may be acted on of a state while CPUs are being left.

    Nobody but their sandbox is on those. Who would have no CPU at all does not wait.
    """
    held = held_back(state, once)
    if not held:
        return state
    every = union(held.values())
    grants = {
        name: _without(grant, every - held.get(grant.request.pod.sandbox_id, EMPTY))
        for name, grant in state.grants.items()
    }
    exclusive = union(grant.exclusive for grant in grants.values())
    return replace(state, cpus=(state.cpus - every) | exclusive, grants=grants)


def _without(grant: Grant, cpus: CpuSet) -> Grant:
    if not grant.cpus & cpus or grant.cpus <= cpus:
        return grant
    shared = None if grant.shared is None else grant.shared - cpus
    return replace(grant, exclusive=grant.exclusive - cpus, shared=shared)
