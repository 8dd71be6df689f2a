"""Pushes pending cpusets to the runtime between two of its calls.

By NRI's unsolicited updates where the runtime is known to handle them (versions.py), else by CRI
where the configuration names a socket, else not at all: then the next answer carries them. One
container per call, so that each failure is known. A VM's cpuset is narrowed after a pass over its
sandbox has ended: its threads are off the old CPUs then.

A short grace lets an answer that is on its way carry everything. While there is no runtime nothing
is tried. Nothing is ever sent from within an event of the runtime: this is a task of its own.

Lifetime: the daemon's. Out of scope: what is due (ledger.py), and the calls (sources).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from dataclasses import dataclass
from typing import Final

from kata_pin.calls import DIRECT, Calls
from kata_pin.config.alloc import Alloc, Push
from kata_pin.daemon.allocation.allocator import Allocator
from kata_pin.daemon.allocation.ledger import NO_FAILURE, NOTHING, RetryState
from kata_pin.daemon.allocation.pending_passes import PendingPasses
from kata_pin.errors import KataPinError, reason_of
from kata_pin.policy.alloc.allotment import sandbox_of
from kata_pin.sources.cri import CriClient
from kata_pin.sources.nri import NriPlugin
from kata_pin.sources.updater import ContainerUnknown, Updater, UpdateRefused
from kata_pin.wire.nri.replies import Cpuset

log = logging.getLogger(__name__)

GRACE_S: Final = 0.02
"""How long an answer to the runtime has to carry everything: a few times what one takes."""

PASS_S: Final = 5.0
"""Longest wait for a pass over a sandbox; its guest may be asked on the way."""

NRI, CRI, NO_CHANNEL = "nri", "cri", ""


@dataclass(frozen=True, slots=True)
class Channel:
    """How cpusets are pushed now: `name` is empty for not at all, then `problem` says why."""

    name: str
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
        calls: Calls = DIRECT,
    ) -> None:
        """`plugin` is the NRI plugin, which connects and disconnects by itself; None: no NRI."""
        self.sent: Counter[tuple[str, bool]] = Counter()
        """Pushes by channel, and whether they succeeded."""
        self._allocator = allocator
        self._ledger = allocator.ledger
        self._passes = passes
        self._enabled = settings.push is Push.AUTO
        self._cri = CriClient(settings.cri, calls=calls) if settings.cri else None
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
                self._allocator.effective, not_before=self._runtime.not_before
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
        grant = self._allocator.state.get(container_id)
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
        return self._ledger.pending(self._allocator.effective).get(container_id) == cpuset

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
