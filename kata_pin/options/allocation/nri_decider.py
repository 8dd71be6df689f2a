"""NRI with our own allocator: what is decided when a container is created, changed or ends (D14).

The Listener and the Decider of peers/nri/plugin.py, around a recorder of Kata's containers. The
allocator decides about every container of the node, not only Kata's: those without exclusive CPUs
follow the shared pool. Decisions and records of one event are one transaction. A container that
another plugin gave a cpuset is left alone, and so is the next try of one whose creation failed
after we adjusted it: a later plugin may have set the same, and no conflict may fail a pod twice
(holders.py).

Lifetime: the daemon's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cache
from typing import Final

from msgspec.structs import replace

from kata_pin.base.allocation import (
    NOTHING_MORE,
    AttachedDevice,
    ContainerRequest,
    DeviceNode,
    RunningContainer,
)
from kata_pin.base.values import ContainerKind, ContainerState
from kata_pin.follow.reports import NriIntake
from kata_pin.options.allocation.allocator import Allocator
from kata_pin.options.allocation.grants import PendingPasses
from kata_pin.options.allocation.holders import set_fields
from kata_pin.options.allocation.ledger import cpuset_for
from kata_pin.options.allocation.policy import formers, other_owner
from kata_pin.options.allocation.push import restore_cpusets
from kata_pin.options.allocation.requests import (
    cpuset_of,
    pod_uid,
    request_of,
    request_of_record,
    with_asked,
)
from kata_pin.peers.nri.messages import Event, EventKind, Pod, PodContainer, Snapshot
from kata_pin.peers.nri.replies import Cpuset, NriAnswer, Update
from kata_pin.peers.nri.session import CreationRefused
from kata_pin.records.containers import Registry

NOTHING: Final = 0
"""The ticket of an event after which nothing is awaited."""

OTHERS: Final = -1
"""The ticket of a start that waits only for passes over other sandboxes."""


class NriDecider:
    """Answers for the allocator."""

    def __init__(
        self, recorder: NriIntake, allocator: Allocator, registry: Registry, passes: PendingPasses
    ) -> None:
        self._recorder = recorder
        self._allocator = allocator
        self._ledger = allocator.ledger
        self._registry = registry
        self._passes = passes

    # ---- the decider ---------------------------------------------------------------------

    def decide(self, event: Event, stamp_ns: int) -> NriAnswer:
        """Answer CreateContainer, UpdateContainer and StopContainer. Raises CreationRefused."""
        assert event.container is not None, "these events are about containers"
        self._ledger.wake()
        self._allocator.follow_host()
        match event.kind:
            case EventKind.CREATE_CONTAINER:
                return self._create(event, event.container, stamp_ns)
            case EventKind.UPDATE_CONTAINER:
                return self._update(event, event.container)
            case _:
                with self._allocator.grants.together():
                    self.receive(event, stamp_ns)
                return NriAnswer(updates=self._updates(but=event.container.id))

    def adopt(self, snapshot: Snapshot) -> tuple[Update, ...]:
        """Bring the allocator in line with everything that runs; return what is to change."""
        self._allocator.follow_host()
        kata = self._recorder.kata_among(snapshot.pods)
        pods = {pod.id: pod for pod in snapshot.pods}
        self._allocator.conflicts.reconnected()
        self._ledger.disconnected()
        locate = cache(self._allocator.devices.locate)  # many containers may have the same ones
        for one in snapshot.containers:
            pod = pods.get(one.pod_id)
            if pod is not None:
                request = self._request(pod, one, kata=pod.id in kata, locate=locate)
                self._ledger.requested(request, pod.id)
                self._ledger.reported(one.id, _has(one), pid=one.pid, runs=_runs(one))
        self._ledger.connected()
        self._allocator.follow_host()  # what the runtime has reported is not another's
        alive = {one.id for one in snapshot.pods if one.pid}  # stopped ones are listed, too
        alive |= {one.pod_id for one in snapshot.containers}
        self._allocator.reconcile(
            [
                *self._allocator.reported(),
                *self._of_other_runtimes(pods.keys()),
                *self._between_instances([pods[one] for one in pods.keys() & alive], pods.keys()),
            ]
        )
        if self._allocator.switched_off:
            restore_cpusets(self._allocator)
            self._allocator.grants.forget()
        return self._updates()

    def ended(self) -> None:
        """Record that the connection has ended: containers of other runtimes may come unseen."""
        self._ledger.disconnected()

    # ---- the listener --------------------------------------------------------------------

    def receive(self, event: Event, stamp_ns: int) -> int:
        """Take an event that needs no answer; return the ticket for `placed`."""
        self._ledger.wake()
        container = event.container
        if event.kind.ends:
            self._end(event)
        elif container is not None:
            self._exists(event.pod, container)
        if event.kind is EventKind.POST_CREATE_CONTAINER:
            if container is not None and cpuset_of(container.cpu).cpus:
                self._leave_alone(container.id)
            return NOTHING
        ticket = self._recorder.receive(event, stamp_ns)
        return ticket or (OTHERS if self._awaits_others(event) else NOTHING)

    async def placed(self, event: Event, ticket: int) -> None:
        """Return after the pass that an event requested.

        A start on exclusive CPUs also waits for the passes over the sandboxes that leave them.
        """
        if ticket != OTHERS:
            await self._recorder.placed(event, ticket)
        if self._awaits_others(event):
            await self._passes.all_ended()

    def _awaits_others(self, event: Event) -> bool:
        if event.kind is not EventKind.START_CONTAINER or event.container is None:
            return False
        grant = self._allocator.state.get(event.container.id)
        return grant is not None and bool(grant.exclusive) and self._allocator.decides

    async def rebuild(self, snapshot: Snapshot, stamp_ns: int) -> None:
        """Record everything that runs."""
        await self._recorder.rebuild(snapshot, stamp_ns)
        self._ledger.wake()

    # ---- events --------------------------------------------------------------------------

    def _create(self, event: Event, container: PodContainer, stamp_ns: int) -> NriAnswer:
        """Decide and record, then answer: a decision that could not be stored is none."""
        request = self._request(event.pod, container, kata=self._recorder.is_kata(event.pod))
        self._ledger.requested(request, event.pod.id)
        former = formers(self._allocator.state, request)
        has = _has(container)
        with self._allocator.grants.together():
            refused = self._allocator.admit(request, foreign=bool(has.cpus)).refused
            fails = refused is not None and refused.strict
            if request.pod.kata and not fails:
                self._recorder.receive(event, stamp_ns)
        if refused is not None and fails:
            self._ledger.ended(container.id)
            raise CreationRefused(refused.message)
        state = self._allocator.state
        for one in former:
            if state.get(one.container_id) is None:  # this one has its grant now
                self._ledger.ended(one.container_id)
        grant = state.get(container.id)
        if grant is not None and not grant.exclusive:  # else its start waits for former users
            state = self._allocator.now
            grant = state.get(container.id)
        adjust = Cpuset() if grant is None else cpuset_for(grant, state)
        creation = NOTHING_MORE if grant is None else grant.creation
        self._ledger.reported(container.id, adjust.over(has))
        if has.cpus:
            self._leave_alone(container.id)
        else:
            self._allocator.conflicts.answered(request, set_fields(adjust, creation))
        return NriAnswer(adjust, self._updates(but=container.id), creation)

    def _update(self, event: Event, container: PodContainer) -> NriAnswer:
        """Record what a container is to have from now on; its own cpuset may follow from it.

        Our own push, which comes back as an event by CRI, changes nothing: it may still fail. If it
        is out of date by now, the newest cpuset takes its place.
        """
        asks = cpuset_of(event.asked, event.asked_memory)
        if self._ledger.is_pushed(container.id, asks):
            state = self._allocator.effective
            return NriAnswer(updates=self._ledger.updates(state, only=container.id))
        asked = replace(container, cpu=with_asked(container.cpu, event.asked))
        self._ledger.reported(container.id, asks.over(_has(container)))
        grant, entry = self._allocator.state.get(container.id), self._ledger.get(container.id)
        known = grant or entry
        if known is not None and known.request is not None:
            request = self._request(event.pod, asked, kata=known.request.pod.kata)
            self._ledger.requested(request, event.pod.id)
            if grant is not None:
                self._allocator.change(request, "UpdateContainer")
        return NriAnswer(updates=self._updates())

    def _exists(self, pod: Pod, container: PodContainer) -> None:
        """Record what a container that has been created has.

        Without a grant and without a cpuset it was left alone without need, or not decided.
        """
        has = _has(container)
        self._ledger.reported(container.id, has, pid=container.pid, runs=_runs(container))
        self._allocator.conflicts.created(container.id, with_cpuset=has.confines)
        known = self._allocator.state.get(container.id) is not None
        if not known and not has.confines and self._allocator.decides:
            request = self._request(pod, container, kata=self._recorder.is_kata(pod))
            self._allocator.change(request, "it runs with no cpuset of its own")

    def _leave_alone(self, container_id: str) -> None:
        """Leave a container alone whose cpuset is another plugin's, not the kubelet's."""
        static = other_owner(self._allocator.node.kubelet) is not None
        if not static and self._allocator.state.get(container_id) is None:
            self._ledger.leave_alone(container_id)

    def _end(self, event: Event) -> None:
        """Release what a container had, or all containers of a sandbox.

        A container that ran keeps its own CPUs for its next instance, until its sandbox is stopped.
        One that never had a process does not: containerd reports the end of a failed start only
        when the container is removed. Not those of the pod: a new sandbox of the same pod may run
        when its old one is removed.
        """
        if event.container is None:
            for container_id in self._ledger.of_sandbox(event.pod.id):
                self._allocator.conflicts.ended(container_id)
                self._ledger.ended(container_id)
                self._allocator.release([container_id], event.kind.method)
            self._allocator.release_sandbox(event.pod.id)
            return
        container_id = event.container.id
        self._allocator.conflicts.ended(container_id)
        grant = self._allocator.state.get(container_id)
        kept = grant is not None and bool(grant.request.ended_in)
        if self._ledger.ended(container_id):
            self._allocator.ended([container_id], event.pod.id, event.kind.method)
        elif not kept:
            self._allocator.release([container_id], event.kind.method)

    # ---- parts ---------------------------------------------------------------------------

    def _updates(self, *, but: str = "") -> tuple[Update, ...]:
        return self._ledger.updates(self._allocator.effective, but=but)

    def _request(
        self,
        pod: Pod,
        container: PodContainer,
        *,
        kata: bool,
        locate: Callable[[DeviceNode], AttachedDevice] | None = None,
    ) -> ContainerRequest:
        request = request_of(pod, container, kata=kata)
        if container.devices:
            places = map(locate or self._allocator.devices.locate, container.devices)
            request = replace(request, devices=tuple(places))
        return self._allocator.newest(request, pod.id)

    def _between_instances(
        self, alive: Iterable[Pod], listed: Collection[str]
    ) -> Iterator[RunningContainer]:
        """Yield the ended containers whose CPUs are kept: their pods' sandboxes are alive still.

        The end of some was not reported.
        """
        sandboxes = {pod_uid(pod): pod.id for pod in alive}
        others = frozenset(self._registry.sandboxes()) - frozenset(listed)
        runs = {(one.pod.pod_uid, one.name) for one, _, _ in self._ledger.requests()}
        for grant in self._allocator.grants.containers():
            request = grant.request
            if self._ledger.knows(request.container_id) or (grant.pod_uid, request.name) in runs:
                continue
            sandbox_id = sandboxes.get(grant.pod_uid, "")
            if request.ended_in in others:
                sandbox_id = request.ended_in
            if sandbox_id and grant.own and request.name:
                yield RunningContainer(replace(request, ended_in=sandbox_id), grant.cpus)

    def _of_other_runtimes(self, listed: Collection[str]) -> Iterator[RunningContainer]:
        """Yield what runs in sandboxes that this runtime does not know.

        Not containers that others gave a cpuset: kata-pin sets none without NRI.
        """
        for sandbox_id in self._registry.sandboxes():
            if sandbox_id in listed:
                continue
            for record in self._registry.containers(sandbox_id):
                if not record.state.counts or record.kind is not ContainerKind.CONTAINER:
                    continue
                if record.cpus is None or self._allocator.state.get(record.id) is not None:
                    request = self._allocator.newest(request_of_record(record), sandbox_id)
                    yield RunningContainer(request, record.cpus)


def _has(container: PodContainer) -> Cpuset:
    return cpuset_of(container.cpu, container.memory)


def _runs(container: PodContainer) -> bool:
    """Whether a container has, or has had, a process; not all runtimes report its pid."""
    return container.pid > 0 or container.state is not ContainerState.CREATED
