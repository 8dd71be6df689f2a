"""Whether another NRI plugin sets cpusets on this node, judged by what becomes of containers (D14).

NRI names no other plugin before its version 0.10. One that is asked before us shows itself by the
cpusets that containers come with. One that is asked after us makes a creation fail that we have
adjusted: its next try is left alone, and only if that one succeeds, with a cpuset, have we met a
rival. One that fails either way (a bad mount, no space) says nothing, nor does one that succeeds
without a cpuset: nobody else has set one.

Whoever makes pods must not be able to switch the allocator off: what one pod does counts once, what
only one namespace's pods do is no conflict, and everything is forgotten after a while.

Lifetime: the daemon's; nothing of it needs to survive. Out of scope: what is decided meanwhile.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final, NamedTuple, TypeVar

from kata_pin.model.alloc import ContainerRequest

log = logging.getLogger(__name__)

K = TypeVar("K")

PODS: Final = 3
"""So many pods have to show a rival, in a row, before kata-pin stands aside."""

NAMESPACES: Final = 2
"""Of so many namespaces at least are the pods that show one that is asked after us."""

EXPIRY_S: Final = 600.0
"""So long a sign counts, and so long a container whose creation has failed is left alone."""

REMEMBERED: Final = 256
"""Most entries of each kind."""

BEFORE: Final = "one that is asked before kata-pin"
BEHIND: Final = "one that is asked after kata-pin, and sets the same"
SUSPECTED: Final = "its creation failed with a cpuset of ours: another NRI plugin may set the same"


class Name(NamedTuple):
    """What a container is known by across the tries to create it."""

    pod_uid: str
    namespace: str
    container: str

    @classmethod
    def of(cls, request: ContainerRequest) -> Name:
        """Return the name of a container that is asked for."""
        return cls(request.pod.pod_uid, request.pod.namespace, request.name)


class Rivals:
    """Takes note of creations, and says whom to leave alone."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` is CLOCK_MONOTONIC, in seconds."""
        self._clock = clock
        self._given: dict[str, tuple[float, str]] = {}
        self._conflicts: dict[str, tuple[float, str]] = {}
        self._failed: dict[Name, tuple[float, str]] = {}
        self._open: dict[str, tuple[Name, bool]] = {}

    # ---- what follows --------------------------------------------------------------------

    @property
    def present(self) -> tuple[str, ...]:
        """The other plugins that are known of, by what is known of them."""
        before = (BEFORE,) if self.given >= PODS else ()
        return (*before, *((BEHIND,) if self._behind else ()))

    @property
    def given(self) -> int:
        """How many pods came with cpusets lately, and none without since."""
        return len(self._recent(self._given))

    @property
    def conflicts(self) -> int:
        """How many pods could be made only without a cpuset of ours lately, and none with one."""
        return len(self._recent(self._conflicts))

    @property
    def _behind(self) -> bool:
        found = self._recent(self._conflicts)
        return len(found) >= PODS and len(set(found.values())) >= NAMESPACES

    def leaves(self, request: ContainerRequest) -> bool:
        """Whether a container is not to be adjusted, because it might not be made then."""
        return self._behind or Name.of(request) in self._recent(self._failed)

    # ---- what is told --------------------------------------------------------------------

    def came(self, request: ContainerRequest, *, with_cpuset: bool) -> None:
        """Take note of a new container before we do anything about it."""
        if with_cpuset:
            self._note(self._given, request.pod.pod_uid, request.pod.namespace)
        else:
            self._given.clear()

    def answered(self, request: ContainerRequest, *, adjusted: bool) -> None:
        """Take note of our answer to a creation: `made` or `ended` follows."""
        name = Name.of(request)
        if adjusted or name in self._recent(self._failed):
            self._open[request.container_id] = name, adjusted

    def made(self, container_id: str, *, with_cpuset: bool) -> None:
        """Take note that a creation has succeeded."""
        name, adjusted = self._open.pop(container_id, (None, False))
        if name is None:
            return
        if adjusted:
            self._conflicts.clear()
        if adjusted or not with_cpuset:
            self._failed.pop(name, None)
            return
        log.warning(
            "allocator: container %s, whose creation failed after we set its cpuset, was made with "
            "that of another NRI plugin",
            container_id,
        )
        self._note(self._failed, name, name.namespace)
        self._note(self._conflicts, name.pod_uid, name.namespace)

    def ended(self, container_id: str) -> None:
        """Take note of the end of a container; of a creation that failed, if it was not made."""
        name, adjusted = self._open.pop(container_id, (None, False))
        if name is None:
            return
        if not adjusted:  # so it was not for us that it failed before
            self._failed.pop(name, None)
            return
        log.warning(
            "allocator: creation of container %s failed after its cpuset was set; the next one of "
            "that name is left alone",
            container_id,
        )
        self._note(self._failed, name, name.namespace)

    def begin_anew(self) -> None:
        """Forget conflicts and what is under way: the runtime is connected anew.

        Containers whose creation has failed are left alone still.
        """
        self._conflicts.clear()
        self._open.clear()

    # ---- parts ---------------------------------------------------------------------------

    def _note(self, entries: dict[K, tuple[float, str]], key: K, namespace: str) -> None:
        entries.pop(key, None)
        entries[key] = self._clock(), namespace
        while len(entries) > REMEMBERED:
            del entries[next(iter(entries))]

    def _recent(self, entries: dict[K, tuple[float, str]]) -> dict[K, str]:
        """Return the namespaces of entries that still count."""
        since = self._clock() - EXPIRY_S
        return {key: namespace for key, (at, namespace) in entries.items() if at > since}
