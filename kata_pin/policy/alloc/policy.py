"""What an allocation policy is: one Protocol, for ours and for those of others.

A policy is made for one host and one set of settings, holds no state of its own and touches
nothing: each call takes an AllocState and returns a Decision. When the host or the settings change,
a new policy is made and `reconcile` called. Third policies come by the entry point group
GROUP: a factory with the signature of Factory; loading them is not this layer's business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol, TypeAlias, runtime_checkable

from kata_pin.model.alloc import AllocState, Candidate, ContainerRequest, Decision, Refusal, Running
from kata_pin.model.settings import AllocSettings
from kata_pin.model.topology import HostTopology

GROUP: Final = "kata_pin.policies"
"""The entry point group of third policies; the entry point's name is the policy's."""


@runtime_checkable
class Policy(Protocol):
    """Who gets which CPUs. Every method is pure and deterministic."""

    @property
    def name(self) -> str:
        """The policy's name, as in the setting and in grants."""
        ...

    def start(self) -> AllocState:
        """Return the state of a node without containers."""
        ...

    def allocate(self, state: AllocState, request: ContainerRequest) -> Decision:
        """Give a new container its CPUs; one that has a grant keeps it.

        Every container of the node comes here, not only Kata's: those without CPUs of their own
        follow the shared pool.
        """
        ...

    def release(self, state: AllocState, container_id: str) -> Decision:
        """Take a container's CPUs back; the shared pool grows by them, unless others wait for them.

        A sandbox's id stands for all of its pod. An unknown container changes nothing.
        """
        ...

    def change(self, state: AllocState, request: ContainerRequest) -> Decision:
        """Give a running container what it asks for now: another class, another size, or the same.

        CPUs in use are kept as far as they can be. Who cannot be served keeps what it has, also
        under `strict`. A container without a grant is allocated one, if need be the shared pool's:
        it runs already.
        """
        ...

    def reconcile(self, state: AllocState, running: Sequence[Running]) -> Decision:
        """Bring a state in line with what runs and with the host as it is now. Never refuses.

        For lost or old states, a changed host, offline CPUs. `changed` lists whose CPUs differ from
        those it was seen to have.
        """
        ...

    def decline(self, state: AllocState, request: ContainerRequest, refusal: Refusal) -> Decision:
        """Answer for a node on which somebody else decides (`refusals`): the state stays.

        Only a container for which CPUs were asked, by annotation or order, is refused, strictly if
        it or the node says; being eligible is not asking.
        """
        ...

    def candidates(self, state: AllocState, request: ContainerRequest) -> tuple[Candidate, ...]:
        """Return the choices considered for a request, in the order in which they were."""
        ...


Factory: TypeAlias = Callable[[HostTopology, AllocSettings], Policy]
"""Makes a policy; raises ConfigError when the settings do not suit the host."""
