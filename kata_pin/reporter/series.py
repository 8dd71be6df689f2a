"""Events on pods: one per kind and sandbox, repeated as a series.

An Event is created when something begins, and counted again when it comes back, or every half hour
while it lasts (the API server forgets Events after an hour). Its name follows from kind and
sandbox, so a restarted reporter goes on with the same one.
"""

from __future__ import annotations

import hashlib
import http.client
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

from kata_pin.model.node_placement import PodEvent
from kata_pin.reporter.api import ApiRefused, ApiServer
from kata_pin.wire.kube.objects import is_object_name

log = logging.getLogger(__name__)

LASTS_S: Final = 1800.0
"""How often an Event that lasts is counted again."""

AGAIN_S: Final = 60.0
"""An Event that comes back sooner is not counted again."""

MOST: Final = 1024
"""Most Events that are remembered."""

MOST_AT_ONCE: Final = 16
"""Most requests of one turn; the others' turn comes next time."""

_ABOUT_IT: Final = frozenset(
    {
        http.client.FORBIDDEN,  # its namespace is being deleted
        http.client.NOT_FOUND,  # its namespace is gone
        http.client.UNPROCESSABLE_ENTITY,
    }
)
"""Refusals that are about one Event, and must not hold up the others."""

Key = tuple[str, str]
"""Kind and sandbox."""


@dataclass
class _Reported:
    at: float
    lasts: bool = True


@dataclass
class Series:
    """What was reported on pods of one node."""

    api: ApiServer
    node: str
    _known: dict[Key, _Reported] = field(default_factory=dict)

    async def report(self, events: Sequence[PodEvent]) -> None:
        """Report what holds now; raises ApiRefused and StateError of the first that fails."""
        now = time.monotonic()
        due = [one for one in events if self._is_due((one.kind, one.sandbox), now)]
        holds = {(one.kind, one.sandbox) for one in events}
        for key, known in self._known.items():
            known.lasts = key in holds
        for event in due[:MOST_AT_ONCE]:
            await self._write(event)
            self._known.pop((event.kind, event.sandbox), None)
            self._known[event.kind, event.sandbox] = _Reported(now)
        while len(self._known) > MOST:
            del self._known[next(iter(self._known))]

    def _is_due(self, key: Key, now: float) -> bool:
        known = self._known.get(key)
        return known is None or now - known.at >= (LASTS_S if known.lasts else AGAIN_S)

    async def _write(self, event: PodEvent) -> None:
        name, when = event_name(event), _now()
        if not name:
            log.debug("no Event: %r is no pod's name", event.pod)
            return
        try:
            await self._create_or_repeat(event, name, when)
        except ApiRefused as error:
            if error.status not in _ABOUT_IT:
                raise
            log.warning("Event %s not reported: %s", name, error)

    async def _create_or_repeat(self, event: PodEvent, name: str, when: str) -> None:
        try:
            await self.api.report(event, name=name, node=self.node, when=when)
        except ApiRefused as error:
            if error.status != http.client.CONFLICT:
                raise
            await self.api.repeat(event, name=name, when=when)


def event_name(event: PodEvent) -> str:
    """Return the name of an Event's object; empty if its pod can have none."""
    namespace, _, pod = event.pod.partition("/")
    if not is_object_name(pod) or not is_object_name(namespace):
        return ""
    digest = hashlib.sha256(f"{event.kind} {event.sandbox}".encode()).hexdigest()[:16]
    return f"{pod[:230].rstrip('-.')}.{digest}"


def _now() -> str:
    now = datetime.now(tz=UTC)
    return now.isoformat(timespec="microseconds").replace("+00:00", "Z")
