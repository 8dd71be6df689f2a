"""The allocator's state, and its messages (D15)."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Final

from msgspec.structs import replace

from kata_pin.base.allocation import AllocState, ContainerRequest, Decision, Grant, Holder, Refusal
from kata_pin.base.cpuset import EMPTY, CpuSet, pcpus_are, union
from kata_pin.base.documents.answers import NodeEventKind
from kata_pin.base.documents.pools import RefusedRequest
from kata_pin.base.errors import ParseError, StateError
from kata_pin.base.placement import NO_VMM, RELEASED, Note, PassOutcome
from kata_pin.base.values import GrantKind, NoteLevel, RefusalKind
from kata_pin.engine.sandboxes import Sandboxes
from kata_pin.options.allocation.requests import dump_state, parse_state
from kata_pin.options.allocation.shared_pool import changes
from kata_pin.placement.masks import sandbox_of, vm_of
from kata_pin.records.database import Database
from kata_pin.records.history import NodeEvents

log = logging.getLogger(__name__)


# Handing over exclusive CPUs: their next user waits until the former one has left them.
#
# A new state takes effect at once, with one exception: a sandbox's threads leave CPUs with the next
# pass over it, and until then no other container may use them (the former grant was exclusive).
# Containers of other runtimes are not waited for: the runtime moves all threads of one before it
# turns to the next, and narrowed cpusets come first in an answer.
#
# Pure: the daemon keeps which CPUs each sandbox still has to leave. It does not survive a restart:
# then the first pass over each sandbox hands over.

Leaving = Mapping[str, CpuSet]
"""CPUs that were exclusive to containers of sandboxes and no longer are, by container id.

Their threads may run there until a pass over their sandbox has ended.
"""


def still_to_leave(before: AllocState, after: AllocState, still: Leaving) -> Leaving:
    """Return the CPUs to leave after a change of state, `still` included.

    A container that has ended has left.
    """
    leaving: dict[str, CpuSet] = {}
    for name, grant in after.grants.items():
        if not grant.request.pod.sandbox_id:
            continue
        cpus, old = still.get(name, EMPTY), before.grants.get(name)
        if old is not None and old is not grant:
            cpus |= old.exclusive - grant.exclusive
        if cpus:
            leaving[name] = cpus
    return leaving


def after_pass(state: AllocState, leaving: Leaving, sandbox: str) -> Leaving:
    """Return the CPUs still to leave when a pass over a sandbox (its VM's name) has ended."""
    return {
        name: cpus
        for name, cpus in leaving.items()
        if name in state.grants and state.grants[name].request.pod.sandbox_id != sandbox
    }


def held_back(state: AllocState, leaving: Leaving) -> Mapping[str, CpuSet]:
    """Return the CPUs that sandboxes still have to leave, by the sandbox.

    Not those on which the container stays because it shares them now, nor those that are exclusive
    to another container of the sandbox.
    """
    held: dict[str, CpuSet] = {}
    for name, cpus in leaving.items():
        grant = state.grants.get(name)
        if grant is not None and (rest := cpus - grant.cpus):
            sandbox = grant.request.pod.sandbox_id
            held[sandbox] = held.get(sandbox, EMPTY) | rest
    if held:
        for grant in state.grants.values():
            sandbox = grant.request.pod.sandbox_id
            if sandbox in held:
                held[sandbox] -= grant.exclusive
    return {sandbox: cpus for sandbox, cpus in held.items() if cpus}


def in_force(state: AllocState, leaving: Leaving) -> AllocState:
    """Return the part of a state that takes effect while CPUs are being left.

    Only their former sandbox may use those. A container that would have no CPU at all does not
    wait.
    """
    held = held_back(state, leaving)
    if not held:
        return state
    every = union(held.values())
    of_others = {one: union(held[other] for other in held if other != one) for one in held}
    grants = {
        name: _without(grant, of_others.get(grant.request.pod.sandbox_id, every))
        for name, grant in state.grants.items()
    }
    exclusive = union(grant.exclusive for grant in grants.values())
    return replace(state, cpus=(state.cpus - every) | exclusive, grants=grants)


def _without(grant: Grant, cpus: CpuSet) -> Grant:
    if not grant.cpus & cpus or grant.cpus <= cpus:
        return grant
    shared = None if grant.shared is None else grant.shared - cpus
    return replace(grant, exclusive=grant.exclusive - cpus, shared=shared)


# The allocator's messages: refusals, notes and conflicts, each logged once and kept to be shown.
#
# Lifetime: the daemon's; the next daemon repeats them.

REMEMBERED: Final = 64
"""How many refusals and notes are kept."""

LEFT_BEHIND: Final = Note(
    "alloc-left-behind",
    "containers may still have cpusets that kata-pin set before alloc.policy was none; they get "
    "all CPUs when NRI is connected",
)


class AllocNews:
    """The newest messages; `refusals` counts all by kind."""

    def __init__(self, events: NodeEvents) -> None:
        """`events` takes what is about the whole node."""
        self._events = events
        self._suspended = ""
        self.refused: deque[RefusedRequest] = deque(maxlen=REMEMBERED)
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
            self._events.report(NodeEventKind.ALLOC_DECIDES, "allocator: assigning CPUs again")

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
            RefusedRequest(
                time=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                id=request.container_id,
                container=title,
                kind=refusal.kind,
                message=refusal.message,
                strict=refusal.strict,
                pod=pod.title,
                pod_uid=pod.pod_uid,
            )
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
    vm = " (VM)" if grant.kind is GrantKind.SANDBOX else ""
    owner = f"{grant.request.pod.title} {grant.request.name}".rstrip() + vm
    return (
        f"{pcpus_are(cpus)} granted to {owner}, and exclusive to {holder.title} "
        f"({holder.source.text}: {holder.reason}); no CPU is moved: give one of the two other CPUs"
    )


# Sandboxes that a decision moves: each gets a pass, and a start on their former CPUs waits for it.
#
# Lifetime: the daemon's.

PATIENCE_S: Final = 30.0
"""How long CPUs are held back for a sandbox whose threads cannot be moved."""


class PendingPasses:
    """The sandboxes whose threads may still be where they were before the newest decision."""

    def __init__(self, passes: Sandboxes) -> None:
        self._passes = passes
        self._tickets: dict[str, int] = {}
        self._stuck_since: dict[str, float] = {}

    def request(self, sandbox_ids: Collection[str], why: str) -> frozenset[str]:
        """Request passes; return the sandboxes that are not supervised: nothing is pinned there.

        A first pass over one of those comes by itself.
        """
        here = frozenset(sandbox_ids) & frozenset(self._passes.ids)
        for sandbox_id in here:
            self._tickets[sandbox_id] = self._passes.mark(sandbox_id, f"allocator: {why}")
        return frozenset(sandbox_ids) - here

    def passed(self, outcome: PassOutcome) -> bool:
        """Record a pass; return whether the threads are off their former CPUs, or never will be.

        Not after a pass that began before the decision, for another follows. Nor after one that
        found no VMM or could not move every thread; such a sandbox is waited for PATIENCE_S, and
        then no more.
        """
        sandbox_id = outcome.sandbox_id
        if self._tickets.get(sandbox_id, 0) > self._passes.began(sandbox_id):
            return False
        self._tickets.pop(sandbox_id, None)
        if outcome.state == RELEASED or (outcome.state != NO_VMM and outcome.report.all_placed):
            self._stuck_since.pop(sandbox_id, None)
            return True
        since = self._stuck_since.setdefault(sandbox_id, time.monotonic())
        return time.monotonic() - since >= PATIENCE_S

    def ended(self, sandbox_id: str) -> None:
        """Forget a sandbox."""
        self._tickets.pop(sandbox_id, None)
        self._stuck_since.pop(sandbox_id, None)

    async def another(self, sandbox_id: str) -> None:
        """Return when another pass over a sandbox has ended; at once if it is not supervised."""
        if sandbox_id in self._passes.ids:
            why = "allocator: its cpuset becomes smaller"
            ticket = self._passes.mark(sandbox_id, why, event=False)
            await self._passes.wait_for_pass(sandbox_id, ticket)

    async def all_ended(self) -> None:
        """Return when the passes requested until now have ended; the caller has a deadline."""
        for sandbox_id, ticket in list(self._tickets.items()):
            await self._passes.wait_for_pass(sandbox_id, ticket)


# The allocator's state: stored before anything follows from it, in force once CPUs were left.
#
# It is one row of the registry's file, replaced whole, so that it is stored in one transaction with
# the record that it is about. A row that cannot be read counts as none: the state is then rebuilt
# from what runs.
#
# A decision is stored first; then notes are published and the sandboxes that it moves get passes.
# CPUs that a sandbox still has to leave are not in force for others until a pass over it has ended.
#
# Lifetime: the allocator's; used in the event loop's thread only, between two awaits.


_TABLE: Final = (
    "CREATE TABLE IF NOT EXISTS alloc (number INTEGER PRIMARY KEY CHECK (number = 1), state TEXT)"
)


class Grants:
    """The grants, and what each sandbox still has to leave. Methods raise StateError."""

    def __init__(self, db: Database, news: AllocNews, passes: PendingPasses | None) -> None:
        """`passes` gives a pass to sandboxes that move; None: there is no daemon."""
        self._db = db
        db.run(_TABLE)
        self._news = news
        self._passes = passes
        self.state = self._stored() or AllocState()
        """The grants, also while they have no effect."""
        self._leaving: Leaving = {}
        self._now: tuple[AllocState, Leaving, AllocState] | None = None
        self._deferred: list[Callable[[], None]] | None = None

    @property
    def now(self) -> AllocState:
        """The state to act on: without CPUs that a sandbox still has to leave."""
        known = self._now
        if known is None or known[0] is not self.state or known[1] is not self._leaving:
            known = self.state, self._leaving, in_force(self.state, self._leaving)
            self._now = known
        return known[2]

    @property
    def held_back(self) -> CpuSet:
        """The CPUs held back until a pass over the sandbox that leaves them has ended."""
        return union(held_back(self.state, self._leaving).values())

    def containers(self) -> Iterator[Grant]:
        """Yield the grants of containers, without those of VMs."""
        return (one for one in self.state.grants.values() if one.kind is GrantKind.CONTAINER)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Store decisions and records of the block in one transaction, or none of them.

        Whatever follows from them is done after that, and only if they were stored.
        """
        before = self.state, self._leaving
        self._deferred = []
        try:
            with self._db.transaction():
                yield
        except BaseException:
            self.state, self._leaving = before
            raise
        finally:
            deferred, self._deferred = self._deferred, None
        for publish in deferred:
            publish()

    def commit(self, decision: Decision, why: str, request: ContainerRequest | None = None) -> None:
        """Store a decision, then do what follows from it; `request` is the one it answers."""
        before = self.now
        if decision.state != self.state or decision.changed:
            self._write(decision.state)
            if self._passes is not None:  # else no pass would end the handover
                self._leaving = still_to_leave(self.state, decision.state, self._leaving)
            self.state = decision.state
        moved = (*decision.changed, *changes(before, self.now))
        publish = partial(self._publish, decision, why, request, moved)
        if self._deferred is None:
            publish()
        else:
            self._deferred.append(publish)

    def keep(self, state: AllocState) -> None:
        """Store a state from which nothing follows."""
        if state is not self.state:
            self._write(state)
            self.state = state

    def set_taken(self, cpus: CpuSet) -> bool:
        """Set the CPUs that others gave out, which are not stored; return whether they changed."""
        if cpus == self.state.taken:
            return False
        self.state = replace(self.state, taken=cpus)
        return True

    def left(self, sandbox_id: str) -> None:
        """Record that a sandbox is off its former CPUs: others may have them now."""
        if self._leaving:
            before = self.now
            self._leaving = after_pass(self.state, self._leaving, vm_of(sandbox_id))
            self._move(changes(before, self.now), "handed over")

    def forget(self) -> None:
        """Drop the state."""
        self._db.run("DELETE FROM alloc")
        self.state, self._leaving = AllocState(), {}

    def _stored(self) -> AllocState | None:
        try:
            row = self._db.row("SELECT state FROM alloc")
            return parse_state(row[0].encode()) if row else None
        except (StateError, ParseError, AttributeError) as error:
            log.warning("registry %s: allocations cannot be read: %s", self._db.path, error)
            return None

    def _write(self, state: AllocState) -> None:
        self._db.run("INSERT OR REPLACE INTO alloc VALUES (1, ?)", (dump_state(state).decode(),))

    def _publish(
        self, decision: Decision, why: str, request: ContainerRequest | None, moved: Iterable[Grant]
    ) -> None:
        for note in decision.notes:
            self._news.note(note)
        if request is not None:
            runs = self.state.get(request.container_id) is not None
            self._news.answer(request, decision.refused, runs=runs)
        for container_id, refusal in decision.waiting:
            waits = decision.state.grants[container_id].request
            self._news.answer(waits, refusal, runs=True)
        self._move(moved, why)

    def _move(self, changed: Iterable[Grant], why: str) -> None:
        sandboxes = {sandbox_of(one.request.pod) for one in changed} - {""}
        if sandboxes and self._passes is not None:
            for sandbox_id in self._passes.request(sandboxes, why):
                self.left(sandbox_id)
