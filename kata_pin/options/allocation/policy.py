"""What an allocation policy is, why an allocation failed (D14), and what instances inherit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Final, Protocol, TypeAlias, runtime_checkable

from msgspec.structs import replace

from kata_pin.base.allocation import (
    AllocState,
    Candidate,
    ContainerRequest,
    Decision,
    Grant,
    Refusal,
    RunningContainer,
)
from kata_pin.base.config.alloc import Alloc
from kata_pin.base.cpuset import HostTopology
from kata_pin.base.errors import KataPinError
from kata_pin.base.placement import KubeletState
from kata_pin.base.values import GrantKind, RefusalKind

# A policy is made for one host and one set of settings, and holds no state: each call takes an
# AllocState and returns a Decision. When the host or the settings change, a new policy is made and
# `reconcile` called. Other packages provide a Factory by the entry point group GROUP; the daemon
# loads it (options/allocation/checked_policy.py).

GROUP: Final = "kata_pin.policies"
"""The entry point group of other packages' policies; an entry point's name is its policy's."""


@runtime_checkable
class Policy(Protocol):
    """Decides which container gets which CPUs. Every method is pure and deterministic.

    `state.taken` are CPUs that others hold exclusively (D28). No method changes them, and no grant
    gets one; a grant that has one already may keep it.
    """

    @property
    def name(self) -> str:
        """The policy's name, as in the setting and in grants."""
        ...

    def start(self) -> AllocState:
        """Return the state of a node without containers."""
        ...

    def allocate(self, state: AllocState, request: ContainerRequest) -> Decision:
        """Give a new container its CPUs; one with a grant keeps it.

        Called for every container of the node, not only Kata's: those without own CPUs follow the
        shared pool.
        """
        ...

    def release(self, state: AllocState, container_id: str) -> Decision:
        """Release a container's CPUs; they go to the shared pool, unless others wait for them.

        A sandbox's id means its whole pod. An unknown container changes nothing.
        """
        ...

    def change(self, state: AllocState, request: ContainerRequest) -> Decision:
        """Give a running container what it requests now: another class, another size, or the same.

        CPUs in use are kept as far as possible. A container that cannot be served keeps what it
        has, even if `strict`. One without a grant gets one, in the shared pool if nothing else
        fits: it runs already.
        """
        ...

    def reconcile(self, state: AllocState, running: Sequence[RunningContainer]) -> Decision:
        """Bring a state in line with what runs and with the host as it is now. Never refuses.

        For lost or old states, a changed host, offline CPUs. `changed` lists the grants whose CPUs
        differ from those the container is observed to have, `waiting` who cannot be served.
        """
        ...

    def decline(self, state: AllocState, request: ContainerRequest, refusal: Refusal) -> Decision:
        """Answer while the kubelet or another plugin decides (`failure`): the state stays.

        Only a container for which CPUs were chosen, by annotation or override, is refused, strictly
        if it or the node says so; eligible ones are not.
        """
        ...

    def candidates(self, state: AllocState, request: ContainerRequest) -> tuple[Candidate, ...]:
        """Return the choices considered for a request, in their order."""
        ...


Factory: TypeAlias = Callable[[HostTopology, Alloc], Policy]
"""Makes a policy; raises ConfigError when the settings do not suit the host."""


# Why an allocation failed, or why kata-pin allocates nothing on this node (D14).


class AllocFailure(StrEnum):
    """The kubelet's kinds of failure, and SHARED_MINIMUM, which is ours."""

    NOT_ENOUGH_CPUS = "not-enough-cpus"
    FAILED = "failed-to-allocate"
    SMT_ALIGNMENT = "smt-alignment"
    TOPOLOGY_AFFINITY = "topology-affinity"
    SHARED_MINIMUM = "shared-minimum"


_REFUSALS: Final = {
    AllocFailure.SMT_ALIGNMENT: RefusalKind.ALIGNMENT,
    AllocFailure.TOPOLOGY_AFFINITY: RefusalKind.ALIGNMENT,
    AllocFailure.SHARED_MINIMUM: RefusalKind.SHARED_MINIMUM,
}


class AllocError(KataPinError):
    """CPUs could not be given, and nothing was recorded; `failure` is the kind."""

    def __init__(self, failure: AllocFailure, message: str) -> None:
        super().__init__(message)
        self.failure = failure

    def refusal(self, *, strict: bool) -> Refusal:
        """Return the refusal of the container that the CPUs were for."""
        kind = _REFUSALS.get(self.failure, RefusalKind.NOT_ENOUGH_CPUS)
        return Refusal(kind, self.message, strict)


def not_enough(requested: int, available: int) -> AllocError:
    """Return the error for a request above what is available (both in CPUs)."""
    return AllocError(
        AllocFailure.NOT_ENOUGH_CPUS,
        f"not enough CPUs available to satisfy request: requested={requested}, "
        f"available={available}",
    )


def other_owner(kubelet: KubeletState | None, plugins: tuple[str, ...] = ()) -> Refusal | None:
    """Return why our allocator decides nothing on this node, None if it decides.

    `plugins` are other NRI plugins that set cpusets: if two set the same container's CPUs, its
    creation fails. Policy.decline takes the result.
    """
    if kubelet is not None and kubelet.static:
        return Refusal(
            RefusalKind.KUBELET_STATIC,
            "the kubelet's CPU manager policy is static: it decides the cpusets of this node",
        )
    if plugins:
        return Refusal(
            RefusalKind.FOREIGN_PLUGIN,
            f"another NRI plugin decides the cpusets of this node: {', '.join(plugins)}",
        )
    return None


# The instances of one container: a grant belongs to its name in its pod, not to its id.
#
# A container that restarts, or whose start failed, comes back with another id. The new instance has
# the former one's grant, and between two of them the CPUs are nobody else's, as with the kubelet:
# it keeps an entry by pod uid and container name as long as the pod is active.


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


def resumed(state: AllocState, running: Sequence[RunningContainer]) -> AllocState:
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
