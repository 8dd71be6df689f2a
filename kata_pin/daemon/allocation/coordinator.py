"""The allocator composed with what feeds it and what it moves: NRI, orders, passes.

    allotting = Coordinator(parts, sandboxes)
    allotting.begin()                     # before the first pass
    await allotting.follow_orders()       # until cancelled; follow_pods and push beside it
    allotting.connected(NriPlugin(..., decider=allotting.decider(intake)))

Everything is off, and costs nothing, with alloc.policy none. Lifetime: the daemon's. Out of scope:
how a sandbox's threads follow (engine.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Final

from kata_pin.config.tree import Nri, NriEnabled
from kata_pin.daemon.allocation.delivery import Delivery
from kata_pin.daemon.allocation.nri_decider import NriDecider
from kata_pin.daemon.allocation.pending_passes import Moves
from kata_pin.daemon.allocation.push import Pushing
from kata_pin.daemon.allocation.restore import give_back, kept
from kata_pin.daemon.intake.nri_events import NriIntake
from kata_pin.daemon.reconcile.ports import PassRequests
from kata_pin.daemon.service.compose import Components
from kata_pin.daemon.status.allocation import allocation_document
from kata_pin.daemon.status.documents import Json
from kata_pin.errors import HostError
from kata_pin.host.cpuset import CpusetReader
from kata_pin.model.alloc import Grant
from kata_pin.model.cpuset import EMPTY, CpuSet
from kata_pin.model.pass_outcome import PassOutcome
from kata_pin.sources.nri import NriPlugin
from kata_pin.sources.orders import OrdersFile

if TYPE_CHECKING:
    from prometheus_client.core import Metric

log = logging.getLogger(__name__)

LAST: Final = "99"
"""The last place among NRI's plugins."""

GIVE_BACK_S: Final = 5.0
"""Longest that an uninstall waits for containers to have all CPUs, where they can be pushed."""


class Coordinator:
    """Keeps sandboxes, orders and the runtime in step with the allocator."""

    def __init__(self, parts: Components, sandboxes: PassRequests) -> None:
        """`sandboxes` gives a pass to those whose CPUs change."""
        self._parts = parts
        self._allocator = parts.allocator
        self._delivery = Delivery(lambda: parts.node.current().topology.online)
        self._moves = Moves(sandboxes)
        self._pushing = Pushing(
            parts.allocator,
            self._delivery,
            parts.node.config.alloc,
            settled=self._moves.pass_over,
        )
        self._orders = OrdersFile(parts.node.config.alloc.orders)
        self._orders_problem = ""
        self._pods_problem = ""

    def begin(self) -> None:
        """Start deciding."""
        if not self._allocator.on:
            return
        self._read_orders()
        try:
            self._allocator.begin(self._moved)
            self._sweep()
        except Exception as error:  # nothing here keeps the daemon from starting
            log.error("allocator: not brought in line with what runs: %s", error)
            log.debug("allocator: start", exc_info=True)

    def _sweep(self) -> None:
        """Take back what nobody has any more: of an earlier daemon, or an end that was missed."""
        over = [one.container_id for one in self._allocator.containers() if self._is_over(one)]
        self._allocator.release(over, "nobody tells of it any more")

    def _is_over(self, grant: Grant) -> bool:
        """Whether a grant of an earlier daemon is nobody's: no record, or nobody will ever tell."""
        if not grant.request.pod.kata:
            return self._parts.node.config.nri.enabled is NriEnabled.NO
        record = self._parts.registry.container(grant.container_id)
        return record is None or not record.state.counts

    def decider(self, intake: NriIntake) -> NriDecider | None:
        """Return who answers NRI, None while kata-pin only observes there.

        What an earlier daemon gave, that had another configuration, is given back by one too.
        """
        if not self._allocator.on and next(self._allocator.containers(), None) is None:
            return None
        return NriDecider(
            intake,
            self._allocator,
            self._delivery,
            self._parts.registry,
            self._moves,
            wake=self._pushing.wake,
        )

    def connected(self, plugin: NriPlugin) -> None:
        """Know the NRI plugin: it may change containers between two calls of the runtime."""
        self._pushing.connected(plugin)

    async def push(self) -> None:
        """Send cpusets that are pending, where there is a way to."""
        if self._allocator.on:
            await self._pushing.run()

    def plugin_index(self, chosen: str) -> str:
        """Return our place among NRI's plugins; `chosen` is the setting.

        Who decides is called last unless the setting says otherwise: so it sees what others set.
        """
        return LAST if self._allocator.on and chosen == Nri().index else chosen

    async def follow_orders(self) -> None:
        """Take the administrator's orders in whenever their file changes."""
        if self._allocator.on:
            async for _ in self._orders.watch():
                self._read_orders()

    async def follow_pods(self) -> None:
        """Take in what annotations running pods have now, where the configuration says from whom.

        A list that cannot be had changes nothing: pods keep the annotations they had.
        """
        alloc = self._parts.node.config.alloc
        if not self._allocator.on or not alloc.pods_url:
            return
        from kata_pin.sources.pod_list import PodList  # noqa: PLC0415 - TLS, for few

        pods = PodList(alloc.pods_url, alloc.pods_token, alloc.pods_ca)
        while True:
            try:
                self._allocator.set_annotations(await pods.read())
                self._pods_problem = ""
                self._pushing.wake()
            except Exception as error:  # this list, or what a policy makes of it
                if str(error) != self._pods_problem:
                    log.warning("annotations not followed: %s", error)
                    log.debug("annotations not followed", exc_info=True)
                self._pods_problem = str(error)
            await asyncio.sleep(alloc.pods_s)

    def audit(self) -> None:
        """Look whether containers of other runtimes have the cpusets that they were given."""
        if not self._allocator.on:
            return
        self._allocator.follow_host()
        self._sweep()
        if self._allocator.decides:
            for container_id in self._delivery.verify(self._allocator.now, self._cgroup_of):
                log.warning(
                    "allocator: container %s may run on other CPUs than its own", container_id
                )
        self._pushing.wake()

    async def give_back(self) -> list[Json]:
        """Decide nothing more, and give containers all CPUs; return those that wait for that.

        This is not remembered: the next daemon decides again, if it is to. What was given is, as
        long as anybody has it.
        """
        give_back(self._allocator, self._delivery, sure=self._allocator.decides)
        self._allocator.stop("everything was given back, until kata-pin is restarted")
        self._pushing.wake()
        if self._allocator.on:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GIVE_BACK_S):
                    await self._pushing.rested()
        waiting = kept(self._allocator, self._delivery, self._parts.registry)
        if not waiting:
            self._allocator.forget()
        return waiting

    def _cgroup_of(self, pid: int) -> tuple[str, CpuSet]:
        reader = CpusetReader(self._parts.root, self._parts.node.cgroup_mounts)
        try:
            return reader.of(pid, pid)
        except HostError:  # TaskGone is one
            return "", EMPTY

    def metrics(self) -> Iterator[Metric]:
        """Yield the allocator's metrics; their library is loaded where somebody is answered."""
        from kata_pin.daemon.status.allocation_metrics import alloc_metrics  # noqa: PLC0415 - 40 ms, 3 MiB

        return alloc_metrics(self._allocator, self._delivery, self._pushing)

    def document(self) -> Json | None:
        """Return the state document's part about allocation."""
        problems = tuple(one for one in (self._orders_problem, self._pods_problem) if one)
        return allocation_document(self._allocator, self._delivery, problems, self._pushing)

    def _read_orders(self) -> None:
        try:
            self._allocator.set_orders(self._orders.read())
            self._orders_problem = ""
            self._pushing.wake()
        except Exception as error:  # those read before stay in force
            if str(error) != self._orders_problem:
                log.warning("orders not taken: %s", error)
                log.debug("orders not taken", exc_info=True)
            self._orders_problem = str(error)

    def _moved(self, sandbox_ids: Collection[str], why: str) -> None:
        for sandbox_id in self._moves.ask(sandbox_ids, why):
            self._allocator.left(sandbox_id)

    # ---- what passes tell ----------------------------------------------------------------

    def passed(self, outcome: PassOutcome) -> None:
        """Take a pass: others may now have the CPUs that this sandbox gave up."""
        self._moves.ended(outcome.sandbox_id)
        if not self._allocator.decides or self._moves.has_left(outcome):
            self._allocator.left(outcome.sandbox_id)
        self._pushing.wake()

    def ended(self, outcome: PassOutcome) -> None:
        """Take back what a sandbox had that is over."""
        self._moves.over(outcome.sandbox_id)
        self._allocator.left(outcome.sandbox_id)
        self._allocator.release_sandbox(outcome.sandbox_id)
        self._pushing.wake()

    def failed(self, operation: str, error: Exception) -> None:
        """Take a pass that broke off: the next one settles it."""
