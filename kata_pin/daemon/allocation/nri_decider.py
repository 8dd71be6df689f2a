"""NRI with our own allocator: what is decided when a container is made, changed or over (D14).

The Listener and the Decider of sources/nri.py around the observer (nri.py). Every container of the
node is told to the allocator, not only Kata's: those without CPUs of their own follow the shared
pool. Decisions and records of one event are one transaction. A container that somebody else gave a
cpuset is left alone, and so is the next try of one whose creation failed after we adjusted it: a
plugin behind us may have set the same, and no conflict may fail a pod twice (plugin_conflicts.py).

Lifetime: the daemon's. Out of scope: the connection, and the rules.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Final

from kata_pin.daemon.allocation.allocator import Allocator
from kata_pin.daemon.allocation.delivery import Delivery, written
from kata_pin.daemon.allocation.known_containers import Told
from kata_pin.daemon.allocation.pending_passes import Moves
from kata_pin.daemon.allocation.requests import (
    cpuset_of,
    request_of,
    request_of_record,
    with_asked,
)
from kata_pin.daemon.allocation.restore import give_back
from kata_pin.daemon.intake.nri_events import NOTHING, NriIntake
from kata_pin.daemon.store.database import Registry
from kata_pin.model.alloc import ContainerRequest, Guarantee, Running
from kata_pin.model.sandbox import ContainerKind
from kata_pin.policy.alloc.refusals import other_owner
from kata_pin.sources.nri_listener import CreationRefused
from kata_pin.wire.nri.messages import Event, EventKind, Pod, PodContainer, Snapshot
from kata_pin.wire.nri.replies import Answer, Cpuset, Update

log = logging.getLogger(__name__)

OTHERS: Final = -1
"""The ticket of a start that waits for passes over other sandboxes only."""


class NriDecider:
    """Answers for the allocator; `intake` records what is Kata's."""

    def __init__(
        self,
        intake: NriIntake,
        allocator: Allocator,
        delivery: Delivery,
        registry: Registry,
        moves: Moves,
        *,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """`wake` is told that something may be pending now; what an answer takes along is not."""
        self._intake = intake
        self._allocator = allocator
        self._delivery = delivery
        self._registry = registry
        self._moves = moves
        self._wake = wake
        self._told = Told()
        allocator.running = self._running

    # ---- the decider ---------------------------------------------------------------------

    def decide(self, event: Event, stamp_ns: int) -> Answer:
        """Answer CreateContainer, UpdateContainer and StopContainer. Raises CreationRefused."""
        assert event.container is not None, "these events are about containers"
        self._wake()
        self._allocator.follow_host()
        match event.kind:
            case EventKind.CREATE_CONTAINER:
                return self._create(event, event.container, stamp_ns)
            case EventKind.UPDATE_CONTAINER:
                return self._update(event, event.container)
            case _:
                with self._allocator.together():
                    self.take(event, stamp_ns)
                return Answer(updates=self._updates(but=event.container.id))

    def adopt(self, snapshot: Snapshot) -> tuple[Update, ...]:
        """Bring the allocator in line with everything that there is; return what is to change."""
        self._allocator.follow_host()
        kata = self._intake.kata_among(snapshot.pods)
        pods = {pod.id: pod for pod in snapshot.pods}
        self._allocator.conflicts.reconnected()
        self._delivery.clear()
        self._told.clear()
        for one in snapshot.containers:
            pod = pods.get(one.pod_id)
            if pod is not None:
                self._told.take(self._request(pod, one, kata=pod.id in kata), pod.id)
                self._delivery.has(one.id, cpuset_of(one.cpu), pid=one.pid)
        self._allocator.reconcile([*self._running(), *self._of_other_runtimes(pods.keys())])
        self._allocator.guarantee = Guarantee.NODE
        if self._allocator.switched_off:
            give_back(self._allocator, self._delivery)
            self._allocator.forget()
        return self._updates()

    def ended(self) -> None:
        """Nothing is delivered now, and containers of other runtimes may come unseen."""
        self._delivery.clear()
        self._told.clear()
        self._allocator.guarantee = Guarantee.SANDBOXES

    # ---- the listener --------------------------------------------------------------------

    def take(self, event: Event, stamp_ns: int) -> int:
        """Take an event that is only told; return the ticket for `placed`."""
        self._wake()
        container = event.container
        if event.kind.ends:
            self._end(event)
        elif container is not None:
            self._exists(event.pod, container)
        if event.kind is EventKind.POST_CREATE_CONTAINER:
            if container is not None and cpuset_of(container.cpu).cpus:
                self._leave(container.id)
            return NOTHING
        ticket = self._intake.take(event, stamp_ns)
        return ticket or (OTHERS if self._awaits_others(event) else NOTHING)

    async def placed(self, event: Event, ticket: int) -> None:
        """Return after the pass that an event asked for.

        What starts on exclusive CPUs waits for the passes over the sandboxes that leave them too.
        """
        if ticket != OTHERS:
            await self._intake.placed(event, ticket)
        if self._awaits_others(event):
            await self._moves.all_ended()

    def _awaits_others(self, event: Event) -> bool:
        if event.kind is not EventKind.START_CONTAINER or event.container is None:
            return False
        grant = self._allocator.state.get(event.container.id)
        return grant is not None and bool(grant.exclusive) and self._allocator.decides

    async def rebuild(self, snapshot: Snapshot, stamp_ns: int) -> None:
        """Record all that there is."""
        await self._intake.rebuild(snapshot, stamp_ns)
        self._wake()

    # ---- events --------------------------------------------------------------------------

    def _create(self, event: Event, container: PodContainer, stamp_ns: int) -> Answer:
        """Decide and record, then answer: what could not be stored counts as not answered."""
        request = self._request(event.pod, container, kata=self._intake.is_kata(event.pod))
        self._told.take(request, event.pod.id)
        there = cpuset_of(container.cpu)
        with self._allocator.together():
            refused = self._allocator.admit(request, foreign=bool(there.cpus)).refused
            fails = refused is not None and refused.strict
            if request.pod.kata and not fails:
                self._intake.take(event, stamp_ns)
        if refused is not None and fails:
            self._told.over(container.id)
            raise CreationRefused(refused.message)
        state = self._allocator.state
        grant = state.get(container.id)
        if grant is not None and not grant.exclusive:  # else its start waits for those who leave
            state = self._allocator.now
            grant = state.get(container.id)
        adjust = Cpuset() if grant is None else written(grant, state)
        self._delivery.has(container.id, adjust or there)
        if there.cpus:
            self._leave(container.id)
        else:
            self._allocator.conflicts.answered(request, adjusted=bool(adjust))
        return Answer(adjust, self._updates(but=container.id))

    def _update(self, event: Event, container: PodContainer) -> Answer:
        """Take in what a container is to have from now on; its own cpuset may follow from it.

        Our own update, which comes back to us by CRI, changes nothing: not even what is noted,
        because it may still fail. If it is out of date by now, the newest cpuset takes its place.
        """
        if self._delivery.is_under_way(container.id, cpuset_of(event.asked)):
            state = self._allocator.effective
            return Answer(updates=self._delivery.next(state, only=container.id))
        asked = replace(container, cpu=with_asked(container.cpu, event.asked))
        self._delivery.has(container.id, cpuset_of(asked.cpu))
        told, grant = self._told.get(container.id), self._allocator.state.get(container.id)
        known = grant or told
        if known is not None:
            request = self._request(event.pod, asked, kata=known.request.pod.kata)
            self._told.take(request, event.pod.id)
            if grant is not None:
                self._allocator.change(request, "UpdateContainer")
        return Answer(updates=self._updates())

    def _exists(self, pod: Pod, container: PodContainer) -> None:
        """Take note of what a container that has been made has.

        Without a grant and without a cpuset it was left alone for nothing, or not decided.
        """
        there = cpuset_of(container.cpu)
        self._delivery.has(container.id, there, pid=container.pid)
        self._allocator.conflicts.created(container.id, with_cpuset=bool(there))
        known = self._allocator.state.get(container.id) is not None
        if not known and not there and self._allocator.decides:
            request = self._request(pod, container, kata=self._intake.is_kata(pod))
            self._allocator.change(request, "it runs with no cpuset of its own")

    def _leave(self, container_id: str) -> None:
        """Leave a container alone that has a cpuset of somebody else's, not of the kubelet's."""
        static = other_owner(self._allocator.node.kubelet) is not None
        if not static and self._allocator.state.get(container_id) is None:
            self._told.leave(container_id)

    def _end(self, event: Event) -> None:
        """Give back what a container had, or all of a sandbox's.

        Not of the pod's: a new sandbox of the same pod may run when its old one is removed.
        """
        if event.container is not None:
            over = [event.container.id]
        else:
            over = self._told.of_sandbox(event.pod.id)
        for container_id in over:
            self._told.over(container_id)
            self._allocator.conflicts.ended(container_id)
            self._delivery.gone(container_id)
        self._allocator.release(over, event.kind.method)

    # ---- parts ---------------------------------------------------------------------------

    def _updates(self, *, but: str = "") -> tuple[Update, ...]:
        return self._delivery.next(self._allocator.effective, but=but)

    def _request(self, pod: Pod, container: PodContainer, *, kata: bool) -> ContainerRequest:
        return self._newest(request_of(pod, container, kata=kata, ordered=None), pod.id)

    def _newest(self, told: ContainerRequest, sandbox_id: str) -> ContainerRequest:
        ordered = self._allocator.ordered(told.pod.namespace, told.pod.name, sandbox_id)
        return self._allocator.newest(replace(told, pod=replace(told.pod, ordered=ordered)))

    def _running(self) -> Iterator[Running]:
        """Yield every container that the runtime has told of, but those left to somebody else."""
        for request, sandbox_id, _ in self._told:
            there = self._delivery.there(request.container_id).cpus
            yield Running(self._newest(request, sandbox_id), there or None)

    def _of_other_runtimes(self, listed: Collection[str]) -> Iterator[Running]:
        """Yield what runs in sandboxes that this runtime does not know of."""
        for sandbox_id in self._registry.sandboxes():
            if sandbox_id in listed:
                continue
            for record in self._registry.containers(sandbox_id):
                if record.state.counts and record.kind is ContainerKind.CONTAINER:
                    ordered = self._allocator.ordered(
                        record.pod_namespace, record.pod_name, sandbox_id
                    )
                    yield Running(request_of_record(record, ordered), record.cpus)
