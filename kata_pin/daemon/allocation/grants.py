"""The allocator's state: stored before anything follows from it, in force once CPUs were left.

A decision is stored first; then notes are published and the sandboxes that it moves get passes.
CPUs that a sandbox still has to leave are not in force for others until a pass over it has ended.

Lifetime: the allocator's; used in the event loop's thread only, between two awaits. Out of scope:
deciding (allocator.py), and the policies' rules (policy/alloc).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from kata_pin.daemon.allocation.notices import AllocNews
from kata_pin.daemon.allocation.pending_passes import PendingPasses
from kata_pin.daemon.store.grants import AllocStore
from kata_pin.model.alloc import AllocState, ContainerRequest, Decision, Grant, GrantKind
from kata_pin.model.cpuset import CpuSet, union
from kata_pin.policy.alloc.allotment import sandbox_of, vm_of
from kata_pin.policy.alloc.handover import Leaving, after_pass, held_back, in_force, still_to_leave
from kata_pin.policy.alloc.shared_pool import changes


class Grants:
    """The grants, and what each sandbox still has to leave. Methods raise StateError."""

    def __init__(self, store: AllocStore, news: AllocNews, passes: PendingPasses | None) -> None:
        """`passes` gives a pass to sandboxes that move; None: there is no daemon."""
        self._store = store
        self._news = news
        self._passes = passes
        self.state = store.read() or AllocState()
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
            with self._store.together():
                yield
        except BaseException:
            self.state, self._leaving = before
            raise
        finally:
            deferred, self._deferred = self._deferred, None
        for publish in deferred:
            publish()

    def take(self, decision: Decision, why: str, request: ContainerRequest | None = None) -> None:
        """Store a decision, then do what follows from it; `request` is the one it answers."""
        before = self.now
        if decision.state != self.state or decision.changed:
            self._store.write(decision.state)
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
            self._store.write(state)
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
        self._store.clear()
        self.state, self._leaving = AllocState(), {}

    def _publish(
        self, decision: Decision, why: str, request: ContainerRequest | None, moved: Iterable[Grant]
    ) -> None:
        for note in decision.notes:
            self._news.note(note)
        if request is not None:
            runs = self.state.get(request.container_id) is not None
            self._news.answer(request, decision.refused, runs=runs)
        self._move(moved, why)

    def _move(self, changed: Iterable[Grant], why: str) -> None:
        sandboxes = {sandbox_of(one.request.pod) for one in changed} - {""}
        if sandboxes and self._passes is not None:
            for sandbox_id in self._passes.request(sandboxes, why):
                self.left(sandbox_id)
