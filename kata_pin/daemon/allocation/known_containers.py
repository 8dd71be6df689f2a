"""Which containers a runtime has told of, and what they ask for: those without a grant too.

Whoever is made while kata-pin stands aside has no grant, and is to have one when it decides again;
else it would run on CPUs that are given out as exclusive then.

Lifetime: a connection's; each one begins with everything there is. Out of scope: who gets what.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kata_pin.model.alloc import ContainerRequest
from kata_pin.wire.nri.messages import MAX_CONTAINERS


class Telling(NamedTuple):
    """A container, as it was told last. `left`: somebody else decides about it."""

    request: ContainerRequest
    sandbox_id: str
    left: bool = False


class Told:
    """The containers, by id."""

    def __init__(self) -> None:
        self._known: dict[str, Telling] = {}

    def __iter__(self) -> Iterator[Telling]:
        """Yield those about which kata-pin is to decide."""
        return (one for one in self._known.values() if not one.left)

    def get(self, container_id: str) -> Telling | None:
        """Return what was told of a container."""
        return self._known.get(container_id)

    def take(self, request: ContainerRequest, sandbox_id: str) -> None:
        """Take what a container asks for; a node has no more of them than Synchronize may tell."""
        known = self._known.get(request.container_id)
        if known is not None or len(self._known) < MAX_CONTAINERS:
            left = known is not None and known.left
            self._known[request.container_id] = Telling(request, sandbox_id, left)

    def leave(self, container_id: str) -> None:
        """Take note that somebody else has decided about a container."""
        known = self._known.get(container_id)
        if known is not None:
            self._known[container_id] = known._replace(left=True)

    def of_sandbox(self, sandbox_id: str) -> list[str]:
        """Return the ids of a sandbox's containers."""
        return [name for name, one in self._known.items() if one.sandbox_id == sandbox_id]

    def over(self, container_id: str) -> None:
        """Forget a container."""
        self._known.pop(container_id, None)

    def clear(self) -> None:
        """Forget everything: the connection has ended, or the runtime tells it anew."""
        self._known.clear()
