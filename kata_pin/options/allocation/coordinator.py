"""The allocator together with what it depends on: overrides, annotations, passes, pushes.

    coordinator = Coordinator(allocator, passes, plugin, node=..., root=..., registry=...)
    coordinator.catch_up()                # before the first pass
    await coordinator.follow_orders()     # until cancelled; follow_pods and push beside it

Everything is off, and costs nothing, with alloc.policy none. Lifetime: the daemon's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable
from typing import Final

from msgspec.structs import replace

from kata_pin.base.allocation import Grant
from kata_pin.base.config.alloc import UNIX
from kata_pin.base.config.tree import NriEnabled
from kata_pin.base.cpuset import EMPTY, CpuSet
from kata_pin.base.documents.pools import KeptCpuset
from kata_pin.base.errors import HostError, KataPinError, reason_of
from kata_pin.base.placement import PassOutcome
from kata_pin.base.values import ContainerState, ThreadRole
from kata_pin.engine.counters import Observer
from kata_pin.engine.node import NodeWatch
from kata_pin.linux.cgroups import CpusetReader
from kata_pin.linux.files import HostRoot
from kata_pin.options.allocation.allocator import Allocator
from kata_pin.options.allocation.grants import PendingPasses
from kata_pin.options.allocation.orders import OrdersFile
from kata_pin.options.allocation.placement_files import file_text
from kata_pin.options.allocation.push import Pusher, kept_cpusets, restore_cpusets
from kata_pin.peers.cri import CriClient
from kata_pin.peers.nri.plugin import NriPlugin
from kata_pin.placement.masks import sandbox_of
from kata_pin.records.containers import Registry

log = logging.getLogger(__name__)

GUEST_S: Final = 2.0
"""Longest until a Kata container's file has its guest CPUs."""

AT_ONCE: Final = 20
"""Files written in one go, some 2 ms."""

GuestCpus = Callable[[Grant], CpuSet | None]
"""Returns the guest CPUs that a Kata container is confined to, None while that is unknown."""

RESTORE_S: Final = 5.0
"""Longest that an uninstall waits for pushes that restore all CPUs."""


class Coordinator(Observer):
    """Keeps sandboxes, overrides and the runtime in step with the allocator."""

    def __init__(
        self,
        allocator: Allocator,
        passes: PendingPasses,
        plugin: NriPlugin | None,
        *,
        node: NodeWatch,
        root: HostRoot,
        registry: Registry,
    ) -> None:
        """`plugin` may push cpusets; None: NRI is off."""
        self.pusher = Pusher(
            allocator, node.config.alloc, passes=passes, plugin=plugin, calls=root.calls
        )
        self._allocator = allocator
        self._ledger = allocator.ledger
        self._passes = passes
        self._node = node
        self._root = root
        self._registry = registry
        cri = node.config.alloc.cri
        self._cri = CriClient(cri, calls=root.calls) if cri else None
        self._doubted: set[str] = set()
        self._vms: dict[str, tuple[str, CpuSet]] = {}
        """The cgroup of each sandbox's vCPUs, and its CPUs, as the last pass saw them."""
        self._sent_again: dict[str, CpuSet] = {}
        """What a VM's cgroup allowed when too much made us send its cpusets once more."""
        self._orders = OrdersFile(node.config.alloc.orders)
        self._problems: dict[str, str] = {}

    @property
    def problems(self) -> tuple[str, ...]:
        """Why overrides or annotations could not be read."""
        return tuple(self._problems.values())

    def catch_up(self) -> None:
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

    async def ask_runtime(self) -> None:
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

    async def push(self) -> None:
        """Push pending cpusets, where there is a channel."""
        if self._allocator.on:
            await self.pusher.run()

    async def follow_orders(self) -> None:
        """Apply the administrator's overrides whenever their file changes."""
        if self._allocator.on:
            async for _ in self._orders.watch():
                self._read_orders()

    async def follow_pods(self) -> None:
        """Apply what the kubelet lists of pods now, where `alloc.pods_url` says from whom.

        If the list cannot be read, pods keep what was listed last.
        """
        alloc = self._node.config.alloc
        if not self._allocator.on or not alloc.pods_url:
            return
        from kata_pin.peers.kubelet.pods import PodList, PodsApi  # noqa: PLC0415 - few need them

        pods: PodsApi | PodList
        if alloc.pods_url.startswith(UNIX):
            pods = PodsApi(alloc.pods_url.removeprefix(UNIX), self._root.calls)
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

    # ---- what is asked for ---------------------------------------------------------------

    def audit(self) -> None:
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

    async def restore(self) -> tuple[KeptCpuset, ...]:
        """Decide nothing more, and restore all CPUs; return the containers that still wait.

        This is not stored: the next daemon decides again, if it is to. Grants stay stored as long
        as any container has its cpuset.
        """
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
        return waiting

    # ---- what containers can read --------------------------------------------------------

    async def write_placements(self, guest_cpus: GuestCpus) -> None:
        """Rewrite the files in which containers read their placement, until cancelled.

        Guests report nothing, so theirs are looked at again every GUEST_S.
        """
        files = self._allocator.placements
        while files is not None and files.on:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GUEST_S):
                    await self._ledger.woken.wait()
            self._ledger.woken.clear()
            state, topology = self._allocator.effective, self._allocator.node.topology
            for number, name in enumerate(files.containers()):
                grant = state.get(name)
                if grant is not None:
                    files.write(name, file_text(grant, topology, guest_cpus(grant)))
                elif self._ledger.knows(name) or self._allocator.state.get(name) is not None:
                    files.write(name, "")  # nothing is decided for it now
                elif self._ledger.is_connected:
                    files.remove(name)
                if number % AT_ONCE == AT_ONCE - 1:
                    await asyncio.sleep(0)  # a runtime may wait for an answer

    # ---- passes --------------------------------------------------------------------------

    def passed(self, outcome: PassOutcome) -> None:
        """See Observer: others may now have the CPUs that this sandbox left."""
        if self._passes.passed(outcome) or not self._allocator.decides:
            self._allocator.grants.left(outcome.sandbox_id)
        seen = _vcpu_cgroup(outcome)
        if self._sent_again.get(outcome.sandbox_id, EMPTY) != seen[1]:
            self._sent_again.pop(outcome.sandbox_id, None)
            self._vms[outcome.sandbox_id] = seen
        self._ledger.wake()

    def ended(self, outcome: PassOutcome) -> None:
        """See Observer: release what the sandbox had."""
        self._passes.ended(outcome.sandbox_id)
        for known in (self._vms, self._sent_again):
            known.pop(outcome.sandbox_id, None)
        self._allocator.grants.left(outcome.sandbox_id)
        self._allocator.release_sandbox(outcome.sandbox_id)
        self._ledger.wake()


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
