"""What the runtime and Kata's state report of containers becomes records and marks (D8, D14)."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from msgspec.structs import replace

from kata_pin.base.errors import HostError, ParseError, VmmError
from kata_pin.base.sandbox import Container, ProcessKey
from kata_pin.base.steps import Steps, finish
from kata_pin.base.values import ContainerKind, ContainerState, KataRuntime
from kata_pin.engine.counters import Slices
from kata_pin.engine.observe import PATIENCE_S, Survey
from kata_pin.engine.sandbox_cache import KataPinningReader
from kata_pin.engine.sandboxes import Sandboxes
from kata_pin.linux.files import HostRoot
from kata_pin.linux.process import ProcessIndex
from kata_pin.peers.kata import to_containers
from kata_pin.peers.nri.messages import (
    MAX_PODS,
    Event,
    EventKind,
    Pod,
    PodContainer,
    Snapshot,
    container_record,
    pod_record,
)
from kata_pin.peers.oci import OciState, Phase, parse_config, record
from kata_pin.records.bundles import BundleReader
from kata_pin.records.containers import Registry
from kata_pin.vmm.find import NONE_KNOWN, VmmFinder
from kata_pin.vmm.state_files import (
    KataPaths,
    read_container_state,
    read_state,
    state_problem,
    state_stamp,
)

log = logging.getLogger(__name__)


# Turns NRI's events into records and marks (D8, D14).
#
# A record of NRI's has the container's spec with every update in it, so it takes precedence over
# what a hook read in the bundle.

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
    """Records the plugin's events; the Listener of peers/nri/plugin.py.

    `kata_pinning` takes the pods' annotations.
    """

    _registry: Registry
    _finder: VmmFinder
    _index: ProcessIndex
    _kata_pinning: KataPinningReader
    _sandboxes: Sandboxes
    _survey: Survey
    _strangers: dict[str, None] = field(default_factory=dict)

    def receive(self, event: Event, stamp_ns: int) -> int:
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
            await self._sandboxes.wait_for_pass(event.pod.id, ticket)

    async def rebuild(self, snapshot: Snapshot, stamp_ns: int) -> None:
        """Record all that there is, and as deleted what is no longer there. Raises StateError.

        Sandboxes that are not listed are left alone: they may be another runtime's, and a pass
        notices those that ended.
        """
        self._strangers.clear()
        await self._survey.all(patience_s=PATIENCE_S)
        slices = Slices()
        await slices.run(self._index.refresh_in_steps())
        running = await slices.run(self._finder.sandboxes(self._sandboxes.vmms))
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
        running = finish(self._finder.sandboxes(self._sandboxes.vmms))
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


# Records what Kata itself keeps of a sandbox: its containers, and their present cpusets.
#
# For sandboxes that are older than the daemon, for messages that were lost, and for updates, which
# no hook reports. A file is read again if it changed, and whenever an event says that it was
# written.

SETTLED_NS: Final = 1_000_000_000
"""A file changed less than a second ago may change again without a new time: clocks are coarse."""

GONE: Final = "persist.json"
"""The source of a deletion that only the container's absence from Kata's state reports."""

_SOURCES: Final = {KataRuntime.GO: "persist.json", KataRuntime.RUST: "state.json"}


@dataclass
class Adoption:
    """Records what Kata's files say."""

    _root: HostRoot
    _registry: Registry
    _kata: KataPaths
    _finder: VmmFinder
    _index: ProcessIndex
    _bundles: BundleReader
    _stamps: dict[str, tuple[int, int]] = field(default_factory=dict)
    _unread: dict[str, tuple[int, int]] = field(default_factory=dict)

    def all(self, known: Mapping[str, ProcessKey] = NONE_KNOWN) -> Steps[dict[str, int]]:
        """Record what Kata keeps of every sandbox that runs; return how much was new, by id.

        `known` are the VMMs that are known already. Files are read only where they changed since
        what they say was last recorded; StateError from the registry.
        """
        yield from self._index.refresh_in_steps()
        running = yield from self._finder.sandboxes(known)
        self._stamps = {one: stamp for one, stamp in self._stamps.items() if one in running}
        self._unread = {one: stamp for one, stamp in self._unread.items() if one in running}
        new = {}
        for sandbox_id in running:
            new[sandbox_id] = self._changed(sandbox_id)
            yield
        return new

    def one(self, sandbox_id: str) -> int:
        """Record what Kata keeps of one sandbox, whatever the stamp; return how much was new."""
        return self._adopt(sandbox_id, state_stamp(self._root, self._kata, sandbox_id))

    def _changed(self, sandbox_id: str) -> int:
        stamp = state_stamp(self._root, self._kata, sandbox_id)
        return 0 if self._stamps.get(sandbox_id) == stamp else self._adopt(sandbox_id, stamp)

    def _adopt(self, sandbox_id: str, stamp: tuple[int, int]) -> int:
        try:
            persisted = read_state(self._root, self._kata, sandbox_id)
            if persisted is None:  # none, or half written: the next event or audit looks again
                self._log_unread(sandbox_id, stamp)
                return self._record_bundle(sandbox_id)
            states = {
                one.id: read_container_state(self._root, self._kata, sandbox_id, one.id)
                for one in persisted.containers
            }
        except HostError as error:  # a passing reason: the next event or audit looks again
            log.warning("sandbox %s: Kata's state cannot be read now: %s", sandbox_id, error)
            return 0
        changed_ns = _boottime_of(stamp[0])
        try:
            found = to_containers(
                persisted, states=states, stamp_ns=changed_ns, source=_SOURCES[persisted.runtime]
            )
        except ParseError as error:  # one sandbox's annotations must not hide the others
            log.warning("sandbox %s: Kata's state not used: %s", sandbox_id, error)
            self._keep(sandbox_id, stamp)
            return 0
        with self._registry.transaction():  # a full disk leaves nothing half recorded
            new = sum(self._record(one, sandbox_id) for one in found)
            if persisted.lists_all_of(sandbox_id):
                new += self._record_gone({one.id for one in found}, sandbox_id, changed_ns)
        self._keep(sandbox_id, stamp)
        return new

    def _keep(self, sandbox_id: str, stamp: tuple[int, int]) -> None:
        """Remember that a file with this stamp is dealt with, if it can no longer change."""
        if _settled(stamp):
            self._stamps[sandbox_id] = stamp

    def _log_unread(self, sandbox_id: str, stamp: tuple[int, int]) -> None:
        """Log once per stamp that a file cannot be read, unless it is just being written."""
        if not any(stamp) or not _settled(stamp) or self._unread.get(sandbox_id) == stamp:
            return
        problem = state_problem(self._root, self._kata, sandbox_id)
        if problem and state_stamp(self._root, self._kata, sandbox_id) == stamp:
            self._unread[sandbox_id] = stamp
            log.warning("sandbox %s: Kata's state cannot be read: %s", sandbox_id, problem)

    def _record(self, container: Container, sandbox_id: str) -> bool:
        """Record a container of Kata's state; return whether anything in it is new.

        Its cpuset is the live one, to be weighed against other sources' (placement/masks.py). One
        that has stopped stays in Kata's state until it is deleted: a hook knows better. A record
        whose config.json was never read is corrected, and a deletion that only an earlier state
        without the container reported is undone.
        """
        known = self._registry.container(container.id)
        if container.sandbox_id != sandbox_id:
            return False
        if known is None or (known.state.counts and self._registry.is_unread(known.id)):
            return self._registry.adopt(container)
        if known.sandbox_id != sandbox_id:
            log.warning("sandbox %s: container %s belongs to another", sandbox_id, container.id)
            return False
        if known.state is ContainerState.DELETED and known.source == GONE:
            log.info("sandbox %s: container %s is in Kata's state again", sandbox_id, container.id)
            return self._registry.adopt(replace(container, kind=known.kind))
        if container.cpus is None or not known.state.counts:
            return False
        return self._registry.adopt(replace(container, state=known.state, kind=known.kind))

    def _record_bundle(self, sandbox_id: str) -> int:
        """Record a pod sandbox that nothing has reported by its bundle; return 1 if it is new.

        Its VM boots: Kata's state, or a hook, corrects the record.
        """
        if self._registry.containers(sandbox_id):
            return 0
        found = self._bundles.of_pod_container(sandbox_id)
        if found is None:
            return 0
        state = OciState(sandbox_id, found[0])
        now_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        try:
            config = parse_config(found[1])
            pause = record(Phase.CREATE_RUNTIME, state, config, stamp_ns=now_ns, source="bundle")
        except ParseError as error:
            log.warning("sandbox %s: its bundle is not used: %s", sandbox_id, error)
            return 0
        if (pause.sandbox_id, pause.kind) != (sandbox_id, ContainerKind.SANDBOX):
            return 0
        running = replace(pause, state=ContainerState.RUNNING)  # its VM is
        return int(self._registry.record(running, stamp_ns=0, unread=True))

    def _record_gone(self, listed: Collection[str], sandbox_id: str, changed_ns: int) -> int:
        """Record as deleted what Kata no longer keeps: its poststop was lost (D8)."""
        gone = [
            replace(one, state=ContainerState.DELETED, source=GONE, recorded_ns=changed_ns)
            for one in self._registry.containers(sandbox_id)
            if one.state.counts and one.id not in listed
        ]
        return sum(self._registry.record(one, stamp_ns=changed_ns) for one in gone)


def _settled(stamp: tuple[int, int]) -> bool:
    return time.time_ns() - stamp[0] > SETTLED_NS


def _boottime_of(mtime_ns: int) -> int:
    """Return a file's modification time on the hooks' clock; never later than now."""
    age_ns = max(0, time.time_ns() - mtime_ns)
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) - age_ns
