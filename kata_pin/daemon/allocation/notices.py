"""The allocator's messages: refusals, notes and conflicts, each logged once and kept to be shown.

Lifetime: the daemon's; the next daemon repeats them. Out of scope: when to publish: after a
decision was stored (allocator.py).
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Final

from kata_pin.daemon.store.node_events import NodeEvents
from kata_pin.model.alloc import ContainerRequest, Grant, GrantKind, Holder, Refusal, RefusalKind
from kata_pin.model.cpuset import CpuSet, union
from kata_pin.model.placement import Note, NoteLevel
from kata_pin.model.reports.history import NodeEventKind

log = logging.getLogger(__name__)

REMEMBERED: Final = 64
"""How many refusals and notes are kept."""

LEFT_BEHIND: Final = Note(
    "alloc-left-behind",
    "containers may still have cpusets that kata-pin set before alloc.policy was none; they get "
    "all CPUs when NRI is connected",
)


@dataclass(frozen=True)
class Refused:
    """A container that did not get what it requested; `at` is time.time()."""

    at: float
    container_id: str
    title: str
    refusal: Refusal
    pod: str
    pod_uid: str


class AllocNews:
    """The newest messages; `refusals` counts all by kind."""

    def __init__(self, events: NodeEvents) -> None:
        """`events` takes what is about the whole node."""
        self._events = events
        self._suspended = ""
        self.refused: deque[Refused] = deque(maxlen=REMEMBERED)
        self.refusals: Counter[RefusalKind] = Counter()
        self._notes: dict[str, Note] = {}
        self._conflicts: dict[str, Note] = {}
        self._waits: dict[str, RefusalKind] = {}

    @property
    def notes(self) -> tuple[Note, ...]:
        """The newest notes."""
        return (*self._conflicts.values(), *self._notes.values())

    def note(self, note: Note) -> None:
        """Log a new note, and keep it."""
        if note.text not in self._notes:
            log.warning("allocator: %s", note.text)
        self._notes.pop(note.text, None)
        self._notes[note.text] = note
        while len(self._notes) > REMEMBERED:
            del self._notes[next(iter(self._notes))]

    def suspended(self, why: str) -> None:
        """Report once that the allocator is suspended and why, or for "" that it decides again."""
        if why == self._suspended:
            return
        self._suspended = why
        if why:
            self._events.report(NodeEventKind.ALLOC_SUSPENDED, "allocator: suspended: %s", why)
            self.conflicts((), ())
        else:
            self._events.report(NodeEventKind.ALLOC_DECIDES, "allocator: deciding again")

    def conflicts(self, holders: Iterable[Holder], grants: Collection[Grant]) -> None:
        """Note the CPUs that are a grant's own and a holder's; log conflicts that begin or end."""
        before, self._conflicts = self._conflicts, {}
        for holder, grant, cpus in islice(_conflicts(holders, grants), REMEMBERED):
            text = _conflict(holder, grant, cpus)
            self._conflicts[text] = Note("alloc-conflict", text, NoteLevel.WARNING)
            if text not in before:
                self._events.report(
                    NodeEventKind.EXCLUSIVE_CONFLICT,
                    "allocator: container %s: %s",
                    grant.container_id,
                    text,
                    cpus=str(cpus),
                    holder=holder.container_id,
                )
        for text in before.keys() - self._conflicts.keys():
            log.info("allocator: conflict ended: %s", text)

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
        pod = request.pod
        title = f"{pod.title} {request.name}"
        log.warning(
            "allocator: %s: %s: %s",
            title,
            "creation refused" if refusal.strict else "runs in the shared pool",
            refusal.message,
        )
        self.refusals[refusal.kind] += 1
        self.refused.append(
            Refused(time.time(), request.container_id, title, refusal, pod.title, pod.pod_uid)
        )


def _conflicts(
    holders: Iterable[Holder], grants: Collection[Grant]
) -> Iterator[tuple[Holder, Grant, CpuSet]]:
    """Yield the CPUs that a grant has as its own although they are a holder's."""
    owned = union(one.own for one in grants)
    for holder in holders:
        if holder.cpus & owned:
            for grant in grants:
                if both := holder.cpus & grant.own:
                    yield holder, grant, both


def _conflict(holder: Holder, grant: Grant, cpus: CpuSet) -> str:
    which = f"pCPU {cpus} is" if len(cpus) == 1 else f"pCPUs {cpus} are"
    vm = " (VM)" if grant.kind is GrantKind.SANDBOX else ""
    owner = f"{grant.request.pod.title} {grant.request.name}".rstrip() + vm
    return (
        f"{which} granted to {owner}, and exclusive to {holder.title} ({holder.source.text}: "
        f"{holder.reason}); no CPU is moved: give one of the two other CPUs"
    )
