"""The allocator's messages: refusals and notes, each logged once and kept to be shown.

Lifetime: the daemon's; the next daemon repeats them. Out of scope: when to publish: after a
decision was stored (allocator.py).
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
"""How many refusals and notes are kept."""


@dataclass(frozen=True)
class Refused:
    """A container that did not get what it requested; `at` is time.time()."""

    at: float
    container_id: str
    title: str
    refusal: Refusal


class AllocNews:
    """The newest messages; `refusals` counts all by kind."""

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
        """Log a new note, and keep it."""
        if note.text not in self._notes:
            log.warning("allocator: %s", note.text)
        self._notes.pop(note.text, None)
        self._notes[note.text] = note
        while len(self._notes) > REMEMBERED:
            del self._notes[next(iter(self._notes))]

    def answer(self, request: ContainerRequest, refusal: Refusal | None, *, runs: bool) -> None:
        """Record a decision; the refusal of a container that `runs` counts once until it is served.

        A running container is tried again in each pass.
        """
        container_id = request.container_id
        if refusal is None:
            self.ended(container_id)
        elif self._waits.get(container_id) is not refusal.kind:
            if runs:
                self._waits[container_id] = refusal.kind
            self._refuse(refusal, request)

    def ended(self, container_id: str) -> None:
        """Forget that a container waits for CPUs."""
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
