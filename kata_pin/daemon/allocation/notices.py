"""What the allocator has to say: who did not get what it asked for, and notes; each once.

Lifetime: the daemon's; a later one says it again. Out of scope: when something may be said: after
it was stored (allocator.py).
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from dataclasses import dataclass
from typing import Final

from kata_pin.model.alloc import ContainerRequest, Refusal, RefusalKind
from kata_pin.model.placement import Note

log = logging.getLogger(__name__)

REMEMBERED: Final = 64
"""Refusals and notes that are kept to be shown."""


@dataclass(frozen=True)
class Refused:
    """A container that did not get what it asked for, to be shown; `at` is time.time()."""

    at: float
    container_id: str
    title: str
    refusal: Refusal


class AllocNews:
    """What was said; `refusals` counts them all, the rest are the newest."""

    def __init__(self) -> None:
        self.refused: deque[Refused] = deque(maxlen=REMEMBERED)
        self.refusals: Counter[RefusalKind] = Counter()
        self._notes: dict[str, Note] = {}
        self._waits: dict[str, RefusalKind] = {}

    @property
    def notes(self) -> tuple[Note, ...]:
        """The newest notes."""
        return tuple(self._notes.values())

    def note(self, note: Note) -> None:
        """Say a note, and keep it to be shown."""
        if note.text not in self._notes:
            log.warning("allocator: %s", note.text)
        self._notes.pop(note.text, None)
        self._notes[note.text] = note
        while len(self._notes) > REMEMBERED:
            del self._notes[next(iter(self._notes))]

    def answer(self, request: ContainerRequest, refusal: Refusal | None, *, runs: bool) -> None:
        """Say a refusal, if it is one; that of a container that `runs` is told once, until served.

        A running container is tried again in each pass; one that does not run is not made.
        """
        container_id = request.container_id
        if refusal is None:
            self.over(container_id)
        elif self._waits.get(container_id) is not refusal.kind:
            if runs:
                self._waits[container_id] = refusal.kind
            self._refuse(refusal, request)

    def over(self, container_id: str) -> None:
        """Take note that a container waits for nothing any more."""
        self._waits.pop(container_id, None)

    def _refuse(self, refusal: Refusal, request: ContainerRequest) -> None:
        title = f"{request.pod.title} {request.name}"
        log.warning(
            "allocator: %s: %s: %s",
            title,
            "creation refused" if refusal.strict else "runs in the shared pool",
            refusal.message,
        )
        self.refusals[refusal.kind] += 1
        self.refused.append(Refused(time.time(), request.container_id, title, refusal))
