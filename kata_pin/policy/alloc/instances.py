"""The instances of one container: a grant belongs to its name in its pod, not to its id.

A container that restarts, or whose start failed, comes back with another id. The new instance has
the former one's grant, and between two of them the CPUs are nobody else's, as with the kubelet: it
keeps an entry by pod uid and container name as long as the pod is active. Pure. Out of scope: when
a pod has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from kata_pin.model.alloc import AllocState, ContainerRequest, Grant, GrantKind, Running


def formers(state: AllocState, request: ContainerRequest) -> tuple[Grant, ...]:
    """Return the grants of other instances of a container, in their order."""
    if not request.name:
        return ()
    return tuple(
        one
        for one in state.of_pod(request.pod.pod_uid)
        if one.request.name == request.name
        and one.kind is GrantKind.CONTAINER
        and one.container_id != request.container_id
    )


def inherited(state: AllocState, request: ContainerRequest) -> AllocState:
    """Return the state in which a new instance has the grant of the last one.

    It is the same if there is none, or if this instance has a grant already.
    """
    found = formers(state, request)
    if not found or state.get(request.container_id) is not None:
        return state
    last, others = found[-1], found[:-1]
    named = replace(last.request, container_id=request.container_id, ended_in="")
    rest = state.without(*(one.container_id for one in others))
    grant = replace(last, request=named)
    every = (grant if one is last else one for one in rest.grants.values())
    return replace(state, grants={one.container_id: one for one in every})


def resumed(state: AllocState, running: Sequence[Running]) -> AllocState:
    """Return the state in which running instances have the grants of those that run no more."""
    runs = {one.request.container_id for one in running}
    for one in running:
        if state.get(one.request.container_id) is None:
            former = formers(state, one.request)
            if not any(grant.container_id in runs for grant in former):
                state = inherited(state, one.request)
    return state


def keeps(grant: Grant) -> bool:
    """Whether the CPUs of a container that ends are kept for its next instance."""
    request = grant.request
    return bool(grant.own and request.name and not request.ended_in)


def ended(state: AllocState, container_id: str, sandbox_id: str) -> AllocState:
    """Return the state in which a container's grant is kept for its next instance."""
    grant = state.grants[container_id]
    return state.with_grant(replace(grant, request=replace(grant.request, ended_in=sandbox_id)))


def donated(
    state: AllocState, request: ContainerRequest, is_init: Callable[[ContainerRequest], bool]
) -> AllocState:
    """Return the state in which ended init containers of a container's pod are marked as such.

    A policy gives their CPUs to the pod's next container. The same state if there are none.
    """
    found = {
        one.container_id: replace(one, request=replace(one.request, init=True))
        for one in state.of_pod(request.pod.pod_uid)
        if one.request.ended_in and not one.request.init and is_init(one.request)
    }
    return replace(state, grants={**state.grants, **found}) if found else state
