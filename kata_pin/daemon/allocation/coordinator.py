"""The allocator together with what it depends on: overrides, annotations, passes, pushes.

    coordinator = Coordinator(allocator, passes, plugin, node=..., root=..., registry=...)
    coordinator.catch_up()                # before the first pass
    await coordinator.follow_orders()     # until cancelled; follow_pods and push beside it

Everything is off, and costs nothing, with alloc.policy none. Lifetime: the daemon's. Out of scope:
how a sandbox's threads follow (engine.py), and NRI's events (nri_decider.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Final

from kata_pin.config.tree import NriEnabled
from kata_pin.daemon.allocation.allocator import Allocator
from kata_pin.daemon.allocation.pending_passes import PendingPasses
from kata_pin.daemon.allocation.push import Pusher
from kata_pin.daemon.allocation.restore import kept_cpusets, restore_cpusets
from kata_pin.daemon.reconcile.node import NodeWatch
from kata_pin.daemon.reconcile.ports import Observer
from kata_pin.daemon.store.containers import Registry
from kata_pin.errors import HostError, KataPinError
from kata_pin.host.cpuset import CpusetReader
from kata_pin.host.root import HostRoot
from kata_pin.model.alloc import Grant
from kata_pin.model.cpuset import EMPTY, CpuSet
from kata_pin.model.pass_outcome import PassOutcome
from kata_pin.model.reports.pools import KeptCpuset
from kata_pin.sources.nri import NriPlugin
from kata_pin.sources.orders import OrdersFile

log = logging.getLogger(__name__)

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
        self.pusher = Pusher(allocator, node.config.alloc, passes=passes, plugin=plugin)
        self._allocator = allocator
        self._ledger = allocator.ledger
        self._passes = passes
        self._node = node
        self._root = root
        self._registry = registry
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
            log.error("allocator: not reconciled with what runs: %s", error)
            log.debug("allocator: start", exc_info=True)

    def _release_ended(self) -> None:
        """Release grants of an earlier daemon, and those whose containers' end was missed."""
        ended = [one.container_id for one in self._allocator.containers() if self._has_ended(one)]
        self._allocator.release(ended, "container no longer exists")

    def _has_ended(self, grant: Grant) -> bool:
        """Whether nothing reports a container any more, nor ever will."""
        if not grant.request.pod.kata:
            return self._node.config.nri.enabled is NriEnabled.NO
        record = self._registry.container(grant.container_id)
        return record is None or not record.state.counts

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
        """Apply the annotations that running pods have now, where `alloc.pods_url` says from whom.

        If the list cannot be read, pods keep their annotations.
        """
        alloc = self._node.config.alloc
        if not self._allocator.on or not alloc.pods_url:
            return
        from kata_pin.sources.pod_list import PodList  # noqa: PLC0415 - TLS, rarely used

        pods = PodList(alloc.pods_url, alloc.pods_token, alloc.pods_ca)
        while True:
            try:
                self._allocator.set_annotations(await pods.read())
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
        if str(error) != self._problems.get(source):
            log.warning("allocator: %s not applied: %s", source, error)
        self._problems[source] = str(error)

    # ---- what is asked for ---------------------------------------------------------------

    def audit(self) -> None:
        """Compare the cgroups of other runtimes' containers with the cpusets that were sent."""
        if not self._allocator.on:
            return
        self._allocator.follow_host()
        self._release_ended()
        if self._allocator.decides:
            for container_id in self._ledger.misplaced(self._allocator.now, self._cgroup_of):
                log.warning(
                    "allocator: container %s may run on CPUs that it was not given", container_id
                )
        self._ledger.wake()

    def _cgroup_of(self, pid: int) -> tuple[str, CpuSet]:
        reader = CpusetReader(self._root, self._node.cgroup_mounts)
        try:
            return reader.of(pid, pid)
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
            self._allocator.forget()
        return waiting

    # ---- passes --------------------------------------------------------------------------

    def passed(self, outcome: PassOutcome) -> None:
        """See Observer: others may now have the CPUs that this sandbox left."""
        if self._passes.passed(outcome) or not self._allocator.decides:
            self._allocator.left(outcome.sandbox_id)
        self._ledger.wake()

    def ended(self, outcome: PassOutcome) -> None:
        """See Observer: release what the sandbox had."""
        self._passes.ended(outcome.sandbox_id)
        self._allocator.left(outcome.sandbox_id)
        self._allocator.release_sandbox(outcome.sandbox_id)
        self._ledger.wake()
