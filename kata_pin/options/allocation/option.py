"""Our own allocator, which decides cpusets (`alloc.policy`)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from msgspec.structs import replace

from kata_pin.base.allocation import ContainerRequest, Grant
from kata_pin.base.config.alloc import UNIX
from kata_pin.base.config.tree import Nri, NriEnabled
from kata_pin.base.cpuset import EMPTY, CpuSet, union
from kata_pin.base.errors import HostError, KataPinError, reason_of
from kata_pin.base.placement import Note, PassOutcome
from kata_pin.base.sandbox import Container
from kata_pin.base.values import ContainerKind, ContainerState, Guarantee, ThreadRole
from kata_pin.engine.counters import Shown, readings
from kata_pin.linux.cgroups import CpusetReader
from kata_pin.options.allocation.allocator import Allocator
from kata_pin.options.allocation.grants import PendingPasses
from kata_pin.options.allocation.nri_decider import NriDecider
from kata_pin.options.allocation.orders import OrdersFile
from kata_pin.options.allocation.placement_files import file_text
from kata_pin.options.allocation.push import Pusher, kept_cpusets, restore_cpusets
from kata_pin.options.allocation.report import METRICS, allocation_report
from kata_pin.options.allocation.requests import request_of_record
from kata_pin.peers.cri import CriClient
from kata_pin.placement.masks import Allotment, allot, nothing_allotted, sandbox_of
from kata_pin.service.options import Core, Running, Serving

log = logging.getLogger(__name__)

LAST: Final = "99"
"""Our index among NRI's plugins if the setting is the default: so it sees what others set."""

GUEST_S: Final = 2.0
"""Longest until a Kata container's file has its guest CPUs."""

AT_ONCE: Final = 20
"""Files written in one go, some 2 ms."""

RESTORE_S: Final = 5.0
"""Longest that an uninstall waits for pushes that restore all CPUs."""


# What a pass over one sandbox asks the allocator: its containers with their CPUs.
#
# A pass also admits containers that no event reported and releases stopped ones, so that hooks
# alone are enough for sandboxes. Nothing is kept here.


def view(allocator: Allocator, containers: Sequence[Container]) -> Allotment:
    """Return what the grants mean for recorded containers, after they were brought up to date."""
    if not allocator.on:
        return nothing_allotted(containers)
    if allocator.at_work:
        allocator.follow_host(containers)
        if allocator.decides:
            _settle(allocator, containers)
    else:
        allocator.follow_holders(containers)
    return granted(allocator, containers)


def granted(allocator: Allocator, containers: Sequence[Container]) -> Allotment:
    """Return what the grants made so far mean for recorded containers; decides nothing."""
    return allot(containers, allocator.now) if allocator.decides else nothing_allotted(containers)


def _settle(allocator: Allocator, containers: Sequence[Container]) -> None:
    for one in containers:
        if not one.state.counts:
            allocator.ended([one.id], one.sandbox_id, "its container has stopped")
    running = [
        one for one in containers if one.kind is ContainerKind.CONTAINER and one.state.counts
    ]
    newest = {(one.pod_uid, one.name): one.id for one in running if one.name}
    for one in running:
        if newest.get((one.pod_uid, one.name), one.id) != one.id:
            continue  # a former instance, whose grant the newest has
        request = allocator.newest(request_of_record(one), one.sandbox_id)
        grant = allocator.state.get(one.id)
        if grant is None:
            if one.cpus is None:
                allocator.change(request, "it runs already")
        elif allocator.guarantee is not Guarantee.NODE:  # else the runtime reports changes itself
            _follow_record(allocator, grant.request, request)


def _follow_record(
    allocator: Allocator, known: ContainerRequest, recorded: ContainerRequest
) -> None:
    """Follow a record that has changed: a later source may know names and sizes."""
    if recorded.cpu_millis == 0 and recorded.quota_us is None:
        recorded = replace(
            recorded,
            cpu_millis=known.cpu_millis,
            quota_us=known.quota_us,
            period_us=known.period_us,
        )
    if recorded != known:
        allocator.change(recorded, "its record")


class StoredAllocation(Running):
    """What was decided, for a command without a daemon; decides nothing."""

    def __init__(self, core: Core, allocator: Allocator) -> None:
        self._core = core
        self._allocator = allocator

    def allot(self, containers: Sequence[Container]) -> Allotment:
        """Return the containers with the CPUs of their grants."""
        return view(self._allocator, containers)

    def granted(self, containers: Sequence[Container]) -> Allotment:
        """Return the same; decides nothing."""
        return granted(self._allocator, containers)

    def exclusive(self) -> CpuSet:
        """Return what containers have exclusively."""
        return union(one.exclusive for one in self._allocator.effective.grants.values())

    def state(self) -> Mapping[str, Any]:
        """Return pools and grants."""
        return {"allocation": allocation_report(self._allocator)}

    async def give_back(self, ids: Collection[str] | None) -> Mapping[str, Any]:
        """Return whose cpuset is still kata-pin's: only a runtime can change it."""
        if ids is not None:
            return {}
        return {"cpusets_kept": kept_cpusets(self._allocator, self._core.registry)}


class Allocation(StoredAllocation):
    """The option at work in a daemon: in step with overrides, annotations, passes, the runtime.

    Everything is off, and costs nothing, with alloc.policy none.
    """

    def __init__(self, core: Core, serving: Serving) -> None:
        """Raises StateError."""
        self._passes = PendingPasses(core.sandboxes)
        super().__init__(core, Allocator(core, self._passes))
        self._guests = serving.guests
        self._ledger = self._allocator.ledger
        self._node = core.node
        self._root = core.root
        self._registry = core.registry
        config, plugin = core.live.now, serving.nri
        if plugin is not None:
            # without a policy only as long as grants of an earlier daemon are to be restored
            if config.alloc.on or any(self._allocator.grants.containers()):
                plugin.listener = plugin.decider = NriDecider(
                    serving.nri_intake, self._allocator, core.registry, self._passes
                )
            if config.alloc.on and config.nri.index == Nri().index:
                plugin.index = LAST
        cri = config.alloc.cri
        self._cri = CriClient(cri, calls=core.root.calls) if cri else None
        self._pusher = Pusher(
            self._allocator, config.alloc, passes=self._passes, plugin=plugin, cri=self._cri
        )
        self._doubted: set[str] = set()
        self._vms: dict[str, tuple[str, CpuSet]] = {}
        """The cgroup of each sandbox's vCPUs, and its CPUs, as the last pass saw them."""
        self._sent_again: dict[str, CpuSet] = {}
        """What a VM's cgroup allowed when too much made us send its cpusets once more."""
        self._orders = OrdersFile(config.alloc.orders)
        self._problems: dict[str, str] = {}
        """Why overrides or annotations could not be read."""
        self._catch_up()

    def tasks(self) -> Iterator[Coroutine[object, object, None]]:
        """Yield what follows overrides and annotations, and sends cpusets and placements."""
        if self._allocator.on:
            yield self._follow_orders()
            yield self._follow_pods()
            yield self._pusher.run()
        yield self._write_placements()

    def node_notes(self) -> Sequence[Note]:
        """Return why nothing is decided, for example."""
        return self._allocator.notes

    def state(self) -> Mapping[str, Any]:
        """Return pools, grants, and what is sent to the runtime."""
        problems = tuple(self._problems.values())
        return {"allocation": allocation_report(self._allocator, problems, self._pusher)}

    def metrics(self) -> Iterable[Shown]:
        """Return pools, pushes and refusals; nothing where nothing is decided."""
        return readings(METRICS, self._pusher) if self._allocator.on else ()

    async def give_back(self, ids: Collection[str] | None) -> Mapping[str, Any]:
        """Decide nothing more, and restore all CPUs; return the containers that still wait.

        This is not stored: the next daemon decides again, if it is to. Grants stay stored as long
        as any container has its cpuset.
        """
        if ids is not None:
            return {}
        restore_cpusets(self._allocator, sure=self._allocator.decides)
        self._allocator.stop("all CPUs were restored; nothing is decided until kata-pin restarts")
        self._ledger.wake()
        if self._allocator.on:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RESTORE_S):
                    await self._ledger.tried.wait()
        waiting = kept_cpusets(self._allocator, self._registry)
        if not waiting:
            self._allocator.grants.forget()
        return {"cpusets_kept": waiting}

    def _catch_up(self) -> None:
        """Read the overrides, and bring the state in line with the host and with the records."""
        if not self._allocator.on:
            return
        self._read_orders()
        try:
            self._allocator.follow_host()
            self._release_ended()
        except (KataPinError, OSError) as error:  # nothing here keeps the daemon from starting
            log.error("allocator: not reconciled with what runs: %s", reason_of(error))
            log.debug("allocator: start", exc_info=True)

    def _release_ended(self) -> None:
        """Release grants of an earlier daemon, and those whose containers' end was missed."""
        alive = frozenset(self._registry.sandboxes())
        for grant in [*self._allocator.grants.containers()]:
            request = grant.request
            sandbox_id = request.ended_in or sandbox_of(request.pod)
            if not request.pod.kata:
                gone = self._node.config.nri.enabled is NriEnabled.NO
            else:
                gone = sandbox_id not in alive
            if gone:
                self._allocator.release([grant.container_id], "container no longer exists")
            elif request.pod.kata and not self._counts(grant.container_id):
                self._allocator.ended([grant.container_id], sandbox_id, "container has ended")

    def _counts(self, container_id: str) -> bool:
        """Whether a Kata container is recorded as one that may run."""
        record = self._registry.container(container_id)
        return record is not None and record.state.counts

    def _take_ended_processes(self) -> None:
        """Take the end of other runtimes' containers whose process is gone; Kata's is the VMM."""
        for grant in [*self._allocator.grants.containers()]:
            entry = self._ledger.get(grant.container_id)
            if entry is None or not entry.pid or grant.request.pod.kata:
                continue
            if not _has_process(entry.pid):
                self._ledger.ended(grant.container_id)
                why = "its process has ended"
                self._allocator.ended([grant.container_id], entry.sandbox_id, why)

    async def before_deep_audit(self) -> None:
        """Take the end of containers of which no start was reported, for audits (`alloc.cri`).

        containerd reports a failed creation or start to nobody. Nothing is asked while every
        container is known to have had a process: NRI reports the end of those. One that is being
        created is not listed yet, so only the second audit asks about it.
        """
        every = [one for one in self._allocator.grants.containers() if self._is_doubtful(one)]
        known, self._doubted = self._doubted, {one.container_id for one in every}
        doubtful = {one.container_id: one for one in every if one.container_id in known}
        if not doubtful or self._cri is None or self._cri.problem or not self._allocator.decides:
            return
        try:
            listed = await self._cri.containers()
        except KataPinError as error:  # the next audit asks again
            log.debug("allocator: containers not listed: %s", error)
            return
        for container_id, grant in doubtful.items():
            state = listed.get(container_id, ContainerState.DELETED)
            if not state.counts and self._is_doubtful(grant):
                log.info("allocator: container %s is %s by CRI", container_id, state.value)
                self._ended(grant, state)

    def _is_doubtful(self, grant: Grant) -> bool:
        """Whether the runtime reported a container, but no process of it."""
        entry = self._ledger.get(grant.container_id)
        return entry is not None and entry.confirmed is not None and not entry.ran

    def _ended(self, grant: Grant, state: ContainerState) -> None:
        """Record the end of a container that never had a process.

        While the runtime knows it, its CPUs wait for the next try, as with the kubelet.
        """
        container_id, why = grant.container_id, "CRI ListContainers"
        record = self._registry.container(container_id)
        if record is not None and record.state.counts:
            now_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
            over = replace(record, state=state, source="cri", recorded_ns=now_ns)
            self._registry.record(over, stamp_ns=now_ns)
            self._passes.request({record.sandbox_id}, why)
        entry = self._ledger.get(container_id)
        self._ledger.ended(container_id)
        if state is ContainerState.DELETED:
            self._allocator.release([container_id], why)
        elif entry is not None:
            self._allocator.ended([container_id], entry.sandbox_id, why)

    # ---- what is followed ----------------------------------------------------------------

    async def _follow_orders(self) -> None:
        """Apply the administrator's overrides whenever their file changes."""
        async for _ in self._orders.watch():
            self._read_orders()

    async def _follow_pods(self) -> None:
        """Apply what the kubelet lists of pods now, where `alloc.pods_url` says from whom.

        If the list cannot be read, pods keep what was listed last.
        """
        alloc = self._node.config.alloc
        if not alloc.pods_url:
            return
        from kata_pin.peers.kubelet.pods import PodList, PodsApi  # noqa: PLC0415 - few need them

        pods: PodsApi | PodList
        if alloc.pods_url.startswith(UNIX):
            pods = PodsApi(alloc.pods_url.removeprefix(UNIX), calls=self._root.calls)
        else:
            pods = PodList(
                alloc.pods_url,
                token=alloc.pods_token,
                ca=alloc.pods_ca,
                name=alloc.pods_name,
                certificate=alloc.pods_certificate,
            )
        while True:
            try:
                self._allocator.set_specs(await pods.read())
                self._succeeded("annotations")
            except (KataPinError, OSError) as error:  # of the list, or of the policy
                self._failed("annotations", error)
                log.debug("allocator: annotations not applied", exc_info=True)
            await asyncio.sleep(alloc.pods_s)

    def _read_orders(self) -> None:
        try:
            self._allocator.set_orders(self._orders.read())
            self._succeeded("overrides")
        except (KataPinError, OSError) as error:  # the former overrides stay in force
            self._failed("overrides", error)
            log.debug("allocator: overrides not applied", exc_info=True)

    def _succeeded(self, source: str) -> None:
        self._problems.pop(source, None)
        self._ledger.wake()

    def _failed(self, source: str, error: Exception) -> None:
        problem = reason_of(error)
        if problem != self._problems.get(source):
            log.warning("allocator: %s not applied: %s", source, problem)
        self._problems[source] = problem

    # ---- audits ---------------------------------------------------------------

    def after_deep_audit(self) -> None:
        """Compare cgroups with the cpusets that were sent: an answer may be lost, or not applied.

        Kata may be set up not to confine a VM: its cpusets are sent once more for what is seen.
        """
        if not self._allocator.on:
            return
        self._allocator.follow_host()
        self._release_ended()
        self._take_ended_processes()
        if self._allocator.decides:
            for container_id in self._ledger.misplaced(self._allocator.now, self._cgroup_of):
                log.warning(
                    "allocator: container %s may run on CPUs that it was not given", container_id
                )
                entry = self._ledger.get(container_id)
                if entry is not None and entry.sandbox_id in self._vms:
                    self._sent_again[entry.sandbox_id] = self._vms.pop(entry.sandbox_id)[1]
        self._ledger.wake()

    def _cgroup_of(self, place: int | str) -> tuple[str, CpuSet]:
        """Return the cgroup of a process, or of a sandbox's VM, and its CPUs."""
        if isinstance(place, str):
            return self._vms.get(place, ("", EMPTY))
        reader = CpusetReader(self._root, self._node.cgroup_mounts)
        try:
            return reader.of(place, place) if place else ("", EMPTY)
        except HostError:  # TaskGone is one
            return "", EMPTY

    # ---- what containers can read --------------------------------------------------------

    async def _write_placements(self) -> None:
        """Rewrite the files in which containers read their placement, until cancelled.

        Guests report nothing, so theirs are looked at again every GUEST_S.
        """
        files = self._allocator.placements
        while files.on:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GUEST_S):
                    await self._ledger.woken.wait()
            self._ledger.woken.clear()
            state, topology = self._allocator.effective, self._allocator.node.topology
            for number, name in enumerate(files.containers()):
                grant = state.get(name)
                if grant is not None:
                    files.write(name, file_text(grant, topology, self._guest_cpus(grant)))
                elif self._ledger.knows(name) or self._allocator.state.get(name) is not None:
                    files.write(name, "")  # nothing is decided for it now
                elif self._ledger.is_connected:
                    files.remove(name)
                if number % AT_ONCE == AT_ONCE - 1:
                    await asyncio.sleep(0)  # a runtime may wait for an answer

    def _guest_cpus(self, grant: Grant) -> CpuSet | None:
        return self._guests.cpus_of(sandbox_of(grant.request.pod), grant.container_id)

    # ---- passes --------------------------------------------------------------------------

    def passed(self, outcome: PassOutcome) -> None:
        """Let others have the CPUs that a sandbox left."""
        if self._passes.passed(outcome) or not self._allocator.decides:
            self._allocator.grants.left(outcome.sandbox_id)
        seen = _vcpu_cgroup(outcome)
        if self._sent_again.get(outcome.sandbox_id, EMPTY) != seen[1]:
            self._sent_again.pop(outcome.sandbox_id, None)
            self._vms[outcome.sandbox_id] = seen
        self._ledger.wake()

    def ended(self, outcome: PassOutcome) -> None:
        """Release what a sandbox had."""
        self._passes.ended(outcome.sandbox_id)
        for known in (self._vms, self._sent_again):
            known.pop(outcome.sandbox_id, None)
        self._allocator.grants.left(outcome.sandbox_id)
        self._allocator.release_sandbox(outcome.sandbox_id)
        self._ledger.wake()


def start(core: Core) -> StoredAllocation:
    """Return the option at work; raises StateError."""
    if core.serving is not None:
        return Allocation(core, core.serving)
    return StoredAllocation(core, Allocator(core, None))


def _vcpu_cgroup(outcome: PassOutcome) -> tuple[str, CpuSet]:
    """Return the cgroup that a pass saw a vCPU in, and its CPUs; both empty without one."""
    tasks = (one.task for one in outcome.report.threads if one.role.role is ThreadRole.VCPU)
    return next(((one.cgroup, one.cpuset) for one in tasks), ("", EMPTY))


def _has_process(pid: int) -> bool:
    """Whether a process exists, whosever it is."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
