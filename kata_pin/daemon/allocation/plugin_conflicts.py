"""Whether another NRI plugin sets cpusets on this node, judged by what becomes of containers (D14).

NRI names no other plugin before its version 0.10. One that is asked before kata-pin shows itself by
the cpusets that containers come with. One that is asked after it makes a creation fail that we
adjusted: the next try is left alone, and only if that one succeeds, with a cpuset, was it a
conflict. A creation that fails either way (a bad mount, no space) is no evidence, nor is one that
succeeds without a cpuset where that was all we set: no other plugin has set one. What else another
plugin sets cannot be seen before NRI 0.10, so a success without our other fields is a conflict of
that container only, and suspends nothing.

Users who create pods must not be able to switch the allocator off: one pod counts once, pods of
only one namespace are no conflict, and all evidence expires.

Lifetime: the daemon's; nothing of it survives a restart. Out of scope: what is decided meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, NamedTuple, TypeVar

from kata_pin.daemon.store.node_events import NodeEvents
from kata_pin.model.adjustment import AtCreation
from kata_pin.model.alloc import ContainerRequest, Refusal, RefusalKind
from kata_pin.model.reports.history import NodeEventKind
from kata_pin.policy.alloc.failure import other_owner
from kata_pin.wire.nri.replies import Cpuset

K = TypeVar("K")

PODS: Final = 3
"""How many pods in a row have to show another plugin before the allocator is suspended."""

NAMESPACES: Final = 2
"""Minimum number of namespaces with conflicts before a later plugin is assumed."""

EXPIRY_S: Final = 600.0
"""How long evidence counts, and how long a container whose creation failed is left alone."""

REMEMBERED: Final = 256
"""Most entries of each kind."""

CPUSET: Final = "cpuset"

BEFORE: Final = "one that is asked before kata-pin"
BEHIND: Final = "one that is asked after kata-pin, and sets the same"
SUSPECTED: Final = (
    "its creation failed after kata-pin set its resources: another NRI plugin may set the same"
)


class Name(NamedTuple):
    """What identifies a container across the tries to create it."""

    pod_uid: str
    namespace: str
    container: str

    @classmethod
    def of(cls, request: ContainerRequest) -> Name:
        """Return the name of a requested container."""
        return cls(request.pod.pod_uid, request.pod.namespace, request.name)


class PluginConflicts:
    """Records creations, and says which containers to leave alone."""

    def __init__(self, events: NodeEvents, clock: Callable[[], float] = time.monotonic) -> None:
        """`events` takes what is found; `clock` is CLOCK_MONOTONIC, in seconds."""
        self._events = events
        self._clock = clock
        self._given: dict[str, tuple[float, str]] = {}
        self._conflicts: dict[str, tuple[float, str]] = {}
        self._failed: dict[Name, tuple[float, str]] = {}
        self._open: dict[str, tuple[Name, str]] = {}

    @property
    def present(self) -> tuple[str, ...]:
        """The other plugins that are known of, each by its place in NRI's order."""
        before = (BEFORE,) if self.given >= PODS else ()
        return (*before, *((BEHIND,) if self._behind else ()))

    @property
    def given(self) -> int:
        """How many pods came with cpusets lately, since the last one without."""
        return len(self._recent(self._given))

    @property
    def conflicts(self) -> int:
        """How many pods could only be created without our cpuset lately, since the last success."""
        return len(self._recent(self._conflicts))

    @property
    def _behind(self) -> bool:
        found = self._recent(self._conflicts)
        return len(found) >= PODS and len(set(found.values())) >= NAMESPACES

    def leaves_alone(self, request: ContainerRequest) -> bool:
        """Whether a container is not to be adjusted, because its creation might fail then."""
        return self._behind or Name.of(request) in self._recent(self._failed)

    def owner(self, request: ContainerRequest, *, foreign: bool) -> Refusal | None:
        """Return why a new container is left to another plugin, None if it is not.

        `foreign`: it came with a cpuset.
        """
        if foreign:
            return other_owner(None, (BEFORE,))
        if not self.leaves_alone(request):
            return None
        known = other_owner(None, self.present)
        return known or Refusal(RefusalKind.FOREIGN_PLUGIN, SUSPECTED)

    def arrived(self, request: ContainerRequest, *, with_cpuset: bool) -> None:
        """Record a new container, before it is adjusted."""
        if with_cpuset:
            self._note(self._given, request.pod.pod_uid, request.pod.namespace)
        else:
            self._given.clear()

    def answered(self, request: ContainerRequest, fields: str) -> None:
        """Record our answer to a creation: `created` or `ended` follows.

        `fields` are what we set, in words; empty: nothing.
        """
        name = Name.of(request)
        if fields or name in self._recent(self._failed):
            self._open[request.container_id] = name, fields

    def created(self, container_id: str, *, with_cpuset: bool) -> None:
        """Record that a creation has succeeded."""
        name, fields = self._open.pop(container_id, (None, ""))
        if name is None:
            return
        refused = self._recent(self._failed).get(name, CPUSET)
        if fields:
            self._conflicts.clear()
        if fields or (refused == CPUSET and not with_cpuset):
            self._failed.pop(name, None)
            return
        self._note(self._failed, name, refused)
        if with_cpuset:
            self._note(self._conflicts, name.pod_uid, name.namespace)
            text = "container %s was created with the cpuset of another NRI plugin, after its "
            text += "creation had failed with kata-pin's %s"
        else:
            text = "container %s was created without kata-pin's %s, after its creation had failed "
            text += "with it: another NRI plugin may set the same"
        self._events.report(
            NodeEventKind.PLUGIN_CONFLICT, f"allocator: {text}", container_id, refused
        )

    def ended(self, container_id: str) -> None:
        """Record the end of a container: its creation failed unless `created` came before."""
        name, fields = self._open.pop(container_id, (None, ""))
        if name is None:
            return
        if not fields:  # so what we set was not the reason
            self._failed.pop(name, None)
            return
        self._events.report(
            NodeEventKind.PLUGIN_CONFLICT,
            "allocator: creation of container %s failed after kata-pin set its %s; the next try is "
            "left alone",
            container_id,
            fields,
        )
        self._note(self._failed, name, fields)

    def reconnected(self) -> None:
        """Forget conflicts and unfinished creations; failed containers are left alone still."""
        self._conflicts.clear()
        self._open.clear()

    def _note(self, entries: dict[K, tuple[float, str]], key: K, text: str) -> None:
        entries.pop(key, None)
        entries[key] = self._clock(), text
        while len(entries) > REMEMBERED:
            del entries[next(iter(entries))]

    def _recent(self, entries: dict[K, tuple[float, str]]) -> dict[K, str]:
        """Return the entries that have not expired: namespaces, and of failures what was set."""
        since = self._clock() - EXPIRY_S
        return {key: text for key, (at, text) in entries.items() if at > since}


def set_fields(adjust: Cpuset, creation: AtCreation) -> str:
    """Return what an answer to a creation sets, in words; empty if nothing."""
    limits = adjust.limits
    fields = {
        CPUSET: adjust.confines,
        "CPU shares": limits.shares is not None,
        "CPU quota": limits.quota_us is not None,
        "CPU period": limits.period_us is not None,
        "memory limit": limits.memory is not None,
        "hugepage limits": creation.hugepages,
        "RDT class": creation.rdt_class,
        "block-I/O class": creation.blockio_class,
        "environment": creation.env,
        "mounts": creation.mounts,
    }
    return ", ".join(name for name, value in fields.items() if value)
