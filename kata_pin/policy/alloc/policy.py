"""What an allocation policy is: one Protocol, for ours and for those of others.

A policy is made for one host and one set of settings, and holds no state: each call takes an
AllocState and returns a Decision. When the host or the settings change, a new policy is made and
`reconcile` called. Other packages provide a Factory by the entry point group GROUP; the daemon
loads it (allocation/checked_policy.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol, TypeAlias, runtime_checkable

from kata_pin.model.alloc import AllocState, Candidate, ContainerRequest, Decision, Refusal, Running
from kata_pin.model.settings import AllocSettings
from kata_pin.model.topology import HostTopology

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

    def reconcile(self, state: AllocState, running: Sequence[Running]) -> Decision:
        """Bring a state in line with what runs and with the host as it is now. Never refuses.

        For lost or old states, a changed host, offline CPUs. `changed` lists the grants whose CPUs
        differ from those the container is observed to have.
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


Factory: TypeAlias = Callable[[HostTopology, AllocSettings], Policy]
"""Makes a policy; raises ConfigError when the settings do not suit the host."""
