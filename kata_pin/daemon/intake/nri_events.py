"""Turns NRI's events into records and marks (D8, D14).

A record of NRI's has the container's spec with every update in it, so it takes precedence over what
a hook read in the bundle.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from kata_pin.daemon.reconcile.kata_pinning import KataPinningReader
from kata_pin.daemon.reconcile.sandboxes import Sandboxes
from kata_pin.daemon.reconcile.survey import PATIENCE_S, Survey
from kata_pin.daemon.store.containers import Registry
from kata_pin.errors import VmmError
from kata_pin.host.process import ProcessIndex
from kata_pin.model.sandbox import Container, ContainerKind, ContainerState
from kata_pin.vmm.find import VmmFinder
from kata_pin.wire.nri.messages import (
    MAX_PODS,
    Event,
    EventKind,
    Pod,
    PodContainer,
    Snapshot,
    container_record,
    pod_record,
)

log = logging.getLogger(__name__)

_STATES: Final[Mapping[EventKind, ContainerState]] = {
    EventKind.RUN_POD_SANDBOX: ContainerState.RUNNING,
    EventKind.START_CONTAINER: ContainerState.CREATED,
    EventKind.POST_START_CONTAINER: ContainerState.RUNNING,
    EventKind.STOP_POD_SANDBOX: ContainerState.STOPPED,
    EventKind.STOP_CONTAINER: ContainerState.STOPPED,
    EventKind.REMOVE_POD_SANDBOX: ContainerState.DELETED,
    EventKind.REMOVE_CONTAINER: ContainerState.DELETED,
}
"""The state after an event; PostUpdateContainer has the container's own."""

NOTHING: Final = 0
"""The ticket of an event that asked for no pass."""


@dataclass
class NriIntake:
    """Records the plugin's events; the Listener of sources/nri.py.

    `kata_pinning` takes the pods' annotations.
    """

    _registry: Registry
    _finder: VmmFinder
    _index: ProcessIndex
    _kata_pinning: KataPinningReader
    _sandboxes: Sandboxes
    _survey: Survey
    _strangers: dict[str, None] = field(default_factory=dict)

    def take(self, event: Event, stamp_ns: int) -> int:
        """Record an event and ask for a pass; return the ticket for `placed`. Raises StateError."""
        pod = self._of_kata(event.pod)
        if event.kind is EventKind.REMOVE_POD_SANDBOX:
            self._strangers.pop(event.pod.id, None)
        if pod is None:
            return NOTHING
        source = f"nri:{event.kind.method}"
        self._kata_pinning.take_annotations(pod.id, pod.annotations)
        records = list(self._records(replace(event, pod=pod), stamp_ns, source))
        recorded = [self._record(one) for one in records]
        return self._sandboxes.mark(pod.id, source) if any(recorded) else NOTHING

    async def placed(self, event: Event, ticket: int) -> None:
        """Return after a pass that began after the event was taken; the caller has a deadline."""
        if ticket != NOTHING:
            await self._sandboxes.settled(event.pod.id, ticket)

    async def rebuild(self, snapshot: Snapshot, stamp_ns: int) -> None:
        """Record all that there is, and as deleted what is no longer there. Raises StateError.

        Sandboxes that are not listed are left alone: they may be another runtime's, and a pass
        notices those that ended.
        """
        self._strangers.clear()
        await self._survey.all(patience_s=PATIENCE_S)
        self._index.refresh()
        running = self._finder.sandboxes(self._sandboxes.vmms)
        containers: dict[str, list[PodContainer]] = {}
        for container in snapshot.containers:
            containers.setdefault(container.pod_id, []).append(container)
        for listed in snapshot.pods:
            pod = self._of_kata(listed, running=listed.id in running)
            if pod is not None:
                self._rebuild_pod(pod, containers.get(pod.id, []), stamp_ns)
                self._sandboxes.mark(pod.id, "nri:Synchronize")
            await asyncio.sleep(0)  # events and hooks come between any two pods

    def _rebuild_pod(self, pod: Pod, containers: list[PodContainer], stamp_ns: int) -> None:
        source = "nri:Synchronize"
        self._kata_pinning.take_annotations(pod.id, pod.annotations)
        self._record(pod_record(pod, ContainerState.RUNNING, stamp_ns=stamp_ns, source=source))
        for one in containers:
            self._record(container_record(pod, one, one.state, stamp_ns=stamp_ns, source=source))
        listed = {one.id for one in containers}
        for known in self._registry.containers(pod.id):
            if known.kind is ContainerKind.CONTAINER and known.id not in listed:
                self._record(_ended(known, ContainerState.DELETED, stamp_ns, source))

    def _records(self, event: Event, stamp_ns: int, source: str) -> Iterator[Container]:
        """Yield the records that an event is about."""
        pod, container, kind = event.pod, event.container, event.kind
        state = _STATES.get(kind)
        if kind.ends:
            assert state is not None, "every event that ends something has a state"
            for known in self._registry.containers(pod.id):
                if container is None or known.id == container.id:
                    yield _ended(known, state, stamp_ns, source)
        elif container is None:
            yield pod_record(pod, ContainerState.RUNNING, stamp_ns=stamp_ns, source=source)
        else:
            yield container_record(
                pod, container, state or container.state, stamp_ns=stamp_ns, source=source
            )

    def _record(self, container: Container) -> bool:
        """Record it unless it is older than what is known; return whether it was recorded.

        A CRI container never runs twice: one that ended stays ended, whatever comes late.
        """
        known = self._registry.container(container.id)
        if known is not None:
            same = (known.sandbox_id, known.kind) == (container.sandbox_id, container.kind)
            if not same and not self._registry.is_unread(known.id):
                log.warning("NRI: container %s belongs to another sandbox; ignored", container.id)
                return False
            over = not known.state.counts
            if over and (container.state.counts or known.state is ContainerState.DELETED):
                return False
        return self._registry.record(container, stamp_ns=container.recorded_ns)

    def is_kata(self, pod: Pod) -> bool:
        """Whether a pod has a VMM, or a process that says it is the pod's."""
        return self._of_kata(pod) is not None or self._is_claimed(pod)

    def kata_among(self, pods: Iterable[Pod]) -> frozenset[str]:
        """Return the ids of the pods of which `is_kata` holds, with one look at all processes."""
        self._index.refresh()
        running = self._finder.sandboxes(self._sandboxes.vmms)
        return frozenset(
            pod.id
            for pod in pods
            if self._of_kata(pod, running=pod.id in running) is not None or self._is_claimed(pod)
        )

    def _is_claimed(self, pod: Pod) -> bool:
        return self._finder.is_claimed(pod.id, {pod.pid: 0} if pod.pid else {})

    def _of_kata(self, pod: Pod, *, running: bool | None = None) -> Pod | None:
        """Return a pod that has a VMM, its pid 0 if that is not Kata's; None for any other pod.

        `running`: whether it is known to have one. The handler's name proves nothing. When the
        first event of a pod comes, its VMM runs already.
        """
        known = running or self._sandboxes.cache(pod.id) is not None
        if known:  # also a pod that was judged before its VMM was there
            self._strangers.pop(pod.id, None)
        elif pod.id in self._strangers:
            return None
        if pod.pid and self._finder.is_kata(pod.pid):
            return pod
        pod = replace(pod, pid=0)
        if known or (running is None and self._finds_vmm(pod.id)):
            return pod
        if running is None and self._survey.is_due():
            return None  # its VMM may be among the processes to be read; the next event asks again
        if len(self._strangers) < MAX_PODS:
            self._strangers[pod.id] = None
        return None

    def _finds_vmm(self, sandbox_id: str) -> bool:
        self._index.refresh()
        try:
            self._finder.find(sandbox_id)
        except VmmError as error:
            log.debug("NRI: pod %s is not Kata's: %s", sandbox_id, error)
            return False
        return True


def _ended(known: Container, state: ContainerState, stamp_ns: int, source: str) -> Container:
    return replace(known, state=state, source=source, recorded_ns=stamp_ns)
