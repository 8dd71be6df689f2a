"""Pushes pending cpusets to the runtime; and all CPUs, when the allocator is switched off."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from typing import Final, Literal

from msgspec import Struct
from msgspec.structs import replace

from kata_pin.base.allocation import AllocState, Grant
from kata_pin.base.config.alloc import Alloc, Push
from kata_pin.base.cpuset import EMPTY, CpuSet, HostTopology
from kata_pin.base.documents.pools import KeptCpuset
from kata_pin.base.errors import KataPinError, reason_of
from kata_pin.options.allocation.allocator import Allocator
from kata_pin.options.allocation.grants import PendingPasses
from kata_pin.options.allocation.ledger import NO_FAILURE, NOTHING, RetryState, cpuset_for
from kata_pin.options.allocation.policy import other_owner
from kata_pin.peers.cri import ContainerUnknown, CriClient, Updater, UpdateRefused
from kata_pin.peers.nri.plugin import NriPlugin
from kata_pin.peers.nri.replies import Cpuset
from kata_pin.placement.masks import sandbox_of
from kata_pin.records.containers import Registry

log = logging.getLogger(__name__)


# Pushes pending cpusets to the runtime between two of its calls.
#
# By NRI's unsolicited updates where the runtime is known to handle them (peers/nri/messages.py),
# else by CRI where the configuration names a socket, else not at all: then the next answer carries
# them. One container per call, so that each failure is known. A VM's cpuset is narrowed after a
# pass over its sandbox has ended: its threads are off the old CPUs then.
#
# A short grace lets an answer that is on its way carry everything. While there is no runtime
# nothing is tried. Nothing is ever sent from within an event of the runtime: this is a task of its
# own.
#
# Lifetime: the daemon's.

GRACE_S: Final = 0.02
"""How long an answer to the runtime has to carry everything: a few times what one takes."""

PASS_S: Final = 5.0
"""Longest wait for a pass over a sandbox; its guest may be asked on the way."""

NRI: Final = "nri"
CRI: Final = "cri"
NO_CHANNEL: Final = ""


class Channel(Struct, frozen=True):
    """How cpusets are pushed now: `name` is empty for not at all, then `problem` says why."""

    name: Literal["nri", "cri", ""]
    updater: Updater | None = None
    problem: str = ""


class Pusher:
    """Pushes what the ledger says is due; everything runs in the event loop's thread."""

    def __init__(
        self,
        allocator: Allocator,
        settings: Alloc,
        *,
        passes: PendingPasses,
        plugin: NriPlugin | None = None,
        cri: CriClient | None = None,
    ) -> None:
        """`plugin` is the NRI plugin, which connects and disconnects by itself; None: no NRI."""
        self.sent: Counter[tuple[str, bool]] = Counter()
        """Pushes by channel, and whether they succeeded."""
        self.allocator = allocator
        self._ledger = allocator.ledger
        self._passes = passes
        self._enabled = settings.push is Push.AUTO
        self._cri = cri
        self._plugin = plugin
        self._runtime = NO_FAILURE
        self._next_at: float | None = None
        self._logged = ""

    async def run(self) -> None:
        """Push whenever something is due, until cancelled."""
        if self._enabled and self._cri is not None and self._cri.problem:
            log.warning("allocator: the setting alloc.cri has no effect: %s", self._cri.problem)
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._retry_in()):
                    await self._ledger.changed.wait()
            await asyncio.sleep(GRACE_S)
            self._ledger.changed.clear()
            try:
                await self._push_all()
            except Exception as error:  # nothing here ends the daemon
                log.error("allocator: cpusets not sent: %s", reason_of(error))
                log.debug("allocator: cpusets not sent", exc_info=True)
                self._runtime = self._failed_again(reason_of(error))
                self._next_at = self._runtime.not_before
            if not self._ledger.changed.is_set():
                self._ledger.tried.set()

    @property
    def channel(self) -> Channel:
        """How cpusets are pushed now."""
        if not self._enabled:
            return Channel(NO_CHANNEL, problem="the setting alloc.push is no")
        unsafe = "NRI is not connected" if self._plugin is None else self._plugin.updates_problem
        if not unsafe and self._plugin is not None:
            return Channel(NRI, self._plugin)
        if self._cri is None:
            return Channel(NO_CHANNEL, problem=f"{unsafe}; the setting alloc.cri names no socket")
        if self._cri.problem:
            return Channel(NO_CHANNEL, problem=f"{unsafe}; {self._cri.problem}")
        return Channel(CRI, self._cri, unsafe)

    @property
    def problem(self) -> str:
        """Why the runtime cannot be asked, empty if it can."""
        return self._runtime.problem

    async def _push_all(self) -> None:
        """Push one container after the other, each as it is wanted then, until nothing is due."""
        while (channel := self.channel).updater is not None:
            due, self._next_at = self._ledger.due(
                self.allocator.effective, not_before=self._runtime.not_before
            )
            if self._next_at is None:
                self._runtime = NO_FAILURE
            if due is None:
                return
            await self._push(channel, channel.updater, *due)
        self._runtime, self._next_at = NO_FAILURE, None
        self._ledger.forget_failures()

    async def _push(
        self, channel: Channel, updater: Updater, container_id: str, cpuset: Cpuset
    ) -> None:
        """Push one cpuset, and record the result and how long it took."""
        began = time.monotonic()
        try:
            if not await self._vacated(container_id, cpuset):
                return
            with self._ledger.pushing(container_id, cpuset):
                await updater.update(container_id, cpuset)
            again = self._reported_otherwise(container_id, cpuset)
        except ContainerUnknown as error:
            log.debug("allocator: container %s: %s", container_id, error)
            self._ledger.failed(container_id, cpuset)
        except UpdateRefused as error:
            self.sent[channel.name, False] += 1
            level = logging.DEBUG if container_id in self._ledger.problems else logging.WARNING
            log.log(level, "allocator: container %s keeps its cpuset: %s", container_id, error)
            self._ledger.failed(container_id, cpuset, str(error))
        except KataPinError as error:
            self.sent[channel.name, False] += 1
            self._ledger.failed(container_id, cpuset)
            self._unreachable(channel, str(error))
        except Exception:
            self._ledger.failed(container_id, cpuset)
            raise
        else:
            log.debug("allocator: container %s: cpuset %s sent", container_id, cpuset.cpus)
            self.sent[channel.name, True] += 1
            if self._logged:
                log.info("allocator: cpusets are sent by %s again", channel.name)
            self._logged, self._runtime = "", NO_FAILURE
            if again:
                self._ledger.failed(container_id, cpuset)
        self._ledger.took(container_id, time.monotonic() - began)

    async def _vacated(self, container_id: str, cpuset: Cpuset) -> bool:
        """Return when a VM's threads are off the CPUs it loses; False if it is no longer wanted."""
        grant = self.allocator.state.get(container_id)
        if grant is None or not grant.request.pod.kata:
            return True
        if self._ledger.widens(container_id, cpuset):
            return True
        try:
            async with asyncio.timeout(PASS_S):
                await self._passes.another(sandbox_of(grant.request.pod))
        except TimeoutError as error:
            raise UpdateRefused(f"no pass over its sandbox within {PASS_S:g} s") from error
        return self._is_wanted(container_id, cpuset)

    def _reported_otherwise(self, container_id: str, cpuset: Cpuset) -> bool:
        """Whether the runtime reported another cpuset while this one was pushed.

        Raises UpdateRefused unless that is the first failure: an earlier event may come late once.
        """
        otherwise = self._is_wanted(container_id, cpuset)
        entry = self._ledger.get(container_id)
        if otherwise and entry is not None and entry.retry.tries:
            raise UpdateRefused("the runtime accepted it, but reports another cpuset")
        return otherwise

    def _is_wanted(self, container_id: str, cpuset: Cpuset) -> bool:
        return self._ledger.pending(self.allocator.effective).get(container_id) == cpuset

    def _unreachable(self, channel: Channel, problem: str) -> None:
        level = logging.WARNING if problem != self._logged else logging.DEBUG
        log.log(level, "allocator: cpusets wait for the runtime: %s: %s", channel.name, problem)
        self._logged = problem
        self._runtime = self._failed_again(problem)

    def _failed_again(self, problem: str) -> RetryState:
        return self._runtime.failed(problem, NOTHING, time.monotonic())

    def _retry_in(self) -> float | None:
        """Return the seconds until the next try, None for none."""
        return None if self._next_at is None else max(0.0, self._next_at - time.monotonic())


# Containers get all CPUs and their own limits again when the allocator is switched off.
#
# NRI cannot remove a cpuset, only replace it by a longer list. A cpuset is ours if this daemon set
# it or, if an earlier one did, if it is the one stored in the grant. Any other was set by another
# program. The same holds for limits: CFS values and the memory limit.
#
# Pure but for the ledger's last cpusets.


def restore_cpusets(allocator: Allocator, *, sure: bool = False) -> None:
    """Send all CPUs and first limits to containers, as soon as the runtime can be asked.

    `sure`: this daemon has decided until now, so every container with a grant has one. Not under
    the kubelet's static policy: it sets every cpuset of the node itself.
    """
    state, node, ledger = allocator.state, allocator.node, allocator.ledger
    if other_owner(node.kubelet) is not None:
        return
    count = 0
    for grant in allocator.grants.containers():
        ours, entry = cpuset_for(grant, state), ledger.get(grant.container_id)
        has = NOTHING if entry is None or entry.confirmed is None else entry.confirmed
        final = NOTHING
        if ours.confines and has.cpus and (sure or has.cpus == ours.cpus):
            final = unconfined(state, node.topology, mems=bool(ours.mems))
        if ours.limits and (sure or ours.limits.over(has.limits) == has.limits):
            final = replace(final, limits=grant.request.limits.where_set(ours.limits))
        if final:
            ledger.restore(grant.container_id, final)
            count += 1
    if count:
        log.info("allocator: switched off: restoring CPUs and limits of %d containers", count)


def unconfined(state: AllocState, topology: HostTopology, *, mems: bool = False) -> Cpuset:
    """Return the most a container can have: CPUs that are not isolated, and those we granted.

    Online CPUs only: cgroup v1 accepts no others. With `mems` all memory nodes too.
    """
    ordinary = topology.online - topology.isolated
    given = state.cpus | state.reserved | state.housekeeping
    nodes = CpuSet(topology.nodes) if mems else EMPTY
    return Cpuset((ordinary | given) & topology.online, nodes)


def kept_cpusets(allocator: Allocator, registry: Registry) -> tuple[KeptCpuset, ...]:
    """Return the containers whose cpuset is still kata-pin's.

    If no runtime is connected, a Kata container's record says what it has; other containers are
    known only because a runtime reported them.
    """
    state = allocator.state
    return tuple(
        KeptCpuset(grant.container_id, grant.request.pod.title, grant.request.name, str(ours.cpus))
        for grant in allocator.grants.containers()
        if (ours := cpuset_for(grant, state)).confines and _keeps(grant, ours, allocator, registry)
    )


def _keeps(grant: Grant, ours: Cpuset, allocator: Allocator, registry: Registry) -> bool:
    name = grant.container_id
    if grant.request.ended_in:
        return False
    if allocator.ledger.knows(name):
        return allocator.ledger.is_restoring(name)
    if not grant.request.pod.kata:
        return True
    record = registry.container(name)
    return record is not None and record.cpus == ours.cpus
