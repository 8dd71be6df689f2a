"""Cpusets that are pending sent at once, without waiting for the runtime's next call.

    pushing = Pushing(allocator, delivery, settings, settled=...)
    pushing.connected(plugin)      # NRI, when there is one
    await pushing.run()            # until cancelled; `wake` after whatever may have decided

By NRI's updates unasked where the runtime is known to stand them (versions.py), else by CRI
where the configuration names a socket, else not at all: then the next answer has them. One
container a call, so that each failure is known; owners leave CPUs before others come (delivery.py),
and a VM's cpuset is narrowed after a pass over its sandbox has ended: its threads have left then.

A short grace lets an answer that is on its way take everything along. What fails is tried again,
later each time, and after all others; who is slow, rarely (slowness.py): a VM that hangs holds
nobody up for long. While there is no runtime nothing is tried for anybody, and then the others
first. Nothing is ever sent from within an event of the runtime's: this is a task of its own.

Lifetime: the daemon's. Out of scope: what is to be sent (delivery.py), and the calls (sources).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from kata_pin.config.alloc import Alloc, Push
from kata_pin.daemon.allocation.allocator import Allocator
from kata_pin.daemon.allocation.delivery import Delivery
from kata_pin.daemon.allocation.slowness import Slowness
from kata_pin.errors import KataPinError
from kata_pin.policy.alloc.allotment import sandbox_of
from kata_pin.sources.cri import CriClient
from kata_pin.sources.nri import NriPlugin
from kata_pin.sources.updater import ContainerUnknown, Updater, UpdateRefused
from kata_pin.wire.nri.replies import Cpuset

log = logging.getLogger(__name__)

GRACE_S: Final = 0.02
"""So long an answer to the runtime has to take everything along: a few times what one takes."""

RETRY_S: Final = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""After so many seconds it is tried again, the last for ever."""

PASS_S: Final = 5.0
"""Longest that a pass over a sandbox is awaited; its guest may be asked on the way."""

NRI, CRI, NO_WAY = "nri", "cri", ""

_NOTHING: Final = Cpuset()


@dataclass(frozen=True)
class Way:
    """How cpusets are sent now: `name` is empty for not at all, then `problem` says why not."""

    name: str
    updater: Updater | None = None
    problem: str = ""


@dataclass(frozen=True)
class Trouble:
    """Something failed so many times in a row, and is tried again at a time.monotonic().

    The message is empty for a container that is only put off: the runtime does not know it, so that
    it is about to be over, there was no runtime, or it has told of another cpuset meanwhile.
    """

    message: str
    again_at: float
    times: int
    cpuset: Cpuset


class Pushing:
    """Sends what is pending; everything runs in the event loop's thread."""

    def __init__(
        self,
        allocator: Allocator,
        delivery: Delivery,
        settings: Alloc,
        *,
        settled: Callable[[str], Awaitable[object]],
    ) -> None:
        """`settled` asks for a pass over a sandbox and returns when it has ended."""
        self.sent: Counter[tuple[str, bool]] = Counter()
        """Updates by way, and whether they succeeded."""
        self._allocator = allocator
        self._delivery = delivery
        self._settled = settled
        self._wanted = settings.push is Push.AUTO
        self._cri = CriClient(settings.cri) if settings.cri else None
        self._plugin: NriPlugin | None = None
        self._woken = asyncio.Event()
        self._rested = asyncio.Event()
        self._way_trouble: Trouble | None = None
        self._troubles: dict[str, Trouble] = {}
        self._slowness = Slowness()
        self._again_at: float | None = None
        self._said = ""

    def connected(self, plugin: NriPlugin) -> None:
        """Know the NRI plugin, which comes and goes by itself."""
        self._plugin = plugin

    def wake(self) -> None:
        """Look soon whether anything is to be sent."""
        self._woken.set()
        self._rested.clear()

    async def rested(self) -> None:
        """Return when all that was to be sent was tried; the caller has a deadline."""
        await self._rested.wait()

    async def run(self) -> None:
        """Send what is pending whenever there is something, until cancelled."""
        if self._wanted and self._cri is not None and self._cri.problem:
            log.warning("allocator: the setting alloc.cri has no effect: %s", self._cri.problem)
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._retry_in()):
                    await self._woken.wait()
            await asyncio.sleep(GRACE_S)
            self._woken.clear()
            try:
                await self._send_all()
            except Exception as error:  # nothing here ends the daemon
                log.error("allocator: cpusets not sent: %s", error)
                log.debug("allocator: cpusets not sent", exc_info=True)
                self._way_trouble = _later(self._way_trouble, str(error))
                self._again_at = self._way_trouble.again_at
            if not self._woken.is_set():
                self._rested.set()

    # ---- looking -------------------------------------------------------------------------

    @property
    def way(self) -> Way:
        """How cpusets are sent now."""
        if not self._wanted:
            return Way(NO_WAY, problem="the setting alloc.push is no")
        unsafe = "NRI is not connected" if self._plugin is None else self._plugin.updates_problem
        if not unsafe and self._plugin is not None:
            return Way(NRI, self._plugin)
        if self._cri is None:
            return Way(NO_WAY, problem=f"{unsafe}; the setting alloc.cri names no socket")
        if self._cri.problem:
            return Way(NO_WAY, problem=f"{unsafe}; {self._cri.problem}")
        return Way(CRI, self._cri, unsafe)

    @property
    def trouble(self) -> str:
        """What is wrong with the way, empty if nothing is."""
        return "" if self._way_trouble is None else self._way_trouble.message

    @property
    def failures(self) -> dict[str, str]:
        """Why containers could not be changed when it was last tried, by id."""
        return {one: trouble.message for one, trouble in self._troubles.items() if trouble.message}

    # ---- sending -------------------------------------------------------------------------

    def _pending(self) -> dict[str, Cpuset]:
        """Return what is to be sent, in its order."""
        return self._delivery.pending(self._allocator.effective)

    async def _send_all(self) -> None:
        """Send one after the other, each as it is to be then, until nothing is due."""
        while (way := self.way).updater is not None and (step := self._due()) is not None:
            await self._send(way, *step)
        if way.updater is None:  # nothing is to be tried again
            self._way_trouble = None
            self._troubles.clear()
            self._again_at = None

    def _due(self) -> tuple[str, Cpuset] | None:
        """Return what is to be sent now; None for nothing until `_again_at`."""
        pending = self._pending()
        self._troubles = {one: self._troubles[one] for one in self._troubles if one in pending}
        self._slowness.keep(self._delivery.knows)
        if not pending:
            self._way_trouble = None
        now = time.monotonic()
        times = {one: self._due_at(one, cpuset) for one, cpuset in pending.items()}
        self._again_at = min(times.values(), default=None)
        due = [one for one, due_at in times.items() if due_at <= now]
        if not due:
            return None
        first = min(due, key=self._precedence)
        return first, pending[first]

    def _due_at(self, container_id: str, cpuset: Cpuset) -> float:
        """Return when a cpuset may be sent, as time.monotonic(): another than has failed at once.

        But not while there is no runtime, nor while slow containers rest if it is one.
        """
        way, own = self._way_trouble, self._troubles.get(container_id)
        return max(
            0.0 if way is None else way.again_at,
            0.0 if own is None or own.cpuset != cpuset else own.again_at,
            self._slowness.until(container_id),
        )

    def _precedence(self, container_id: str) -> tuple[bool, float]:
        """Return what comes first when it is least: who was never in trouble, who is not slow."""
        trouble = self._troubles.get(container_id)
        return container_id in self._slowness, 0.0 if trouble is None else trouble.again_at

    async def _send(self, way: Way, container_id: str, cpuset: Cpuset) -> None:
        """Send one cpuset, and take note of how it went and how long it took."""
        assert way.updater is not None, "there is a way"
        began = time.monotonic()
        try:
            if not await self._left(container_id, cpuset):
                return
            with self._delivery.under_way(container_id, cpuset):
                await way.updater.update(container_id, cpuset)
            again = self._told_otherwise(container_id, cpuset)
        except ContainerUnknown as error:
            log.debug("allocator: container %s: %s", container_id, error)
            self._put_off(container_id, cpuset)
        except UpdateRefused as error:
            self.sent[way.name, False] += 1
            self._refused(container_id, cpuset, str(error))
        except KataPinError as error:
            self.sent[way.name, False] += 1
            self._put_off(container_id, cpuset)
            self._failed(way, str(error))
        except Exception:
            self._put_off(container_id, cpuset)
            raise
        else:
            log.debug("allocator: container %s: cpuset %s sent", container_id, cpuset.cpus)
            self.sent[way.name, True] += 1
            self._works_again(way)
            if again:
                self._put_off(container_id, cpuset)
        self._slowness.took(container_id, time.monotonic() - began)

    async def _left(self, container_id: str, cpuset: Cpuset) -> bool:
        """Return when a VM's threads have left what is taken; False if all is different by then."""
        grant = self._allocator.state.get(container_id)
        if grant is None or not grant.request.pod.kata:
            return True
        if self._delivery.widens(container_id, cpuset):
            return True
        try:
            async with asyncio.timeout(PASS_S):
                await self._settled(sandbox_of(grant.request.pod))
        except TimeoutError as error:
            raise UpdateRefused(f"no pass over its sandbox within {PASS_S:g} s") from error
        return self._pending().get(container_id) == cpuset

    def _told_otherwise(self, container_id: str, cpuset: Cpuset) -> bool:
        """Whether the runtime told of another cpuset while this one was sent.

        Raises UpdateRefused unless that is the first trouble: an event from before may come once.
        """
        otherwise = self._pending().get(container_id) == cpuset
        if otherwise and container_id in self._troubles:
            raise UpdateRefused("the runtime has taken it, and tells of another cpuset")
        return otherwise

    def _refused(self, container_id: str, cpuset: Cpuset, message: str) -> None:
        known = self._troubles.get(container_id)
        level = logging.WARNING if known is None or not known.message else logging.DEBUG
        log.log(level, "allocator: container %s keeps its cpuset: %s", container_id, message)
        self._put_off(container_id, cpuset, message)

    def _put_off(self, container_id: str, cpuset: Cpuset, message: str = "") -> None:
        self._troubles[container_id] = _later(self._troubles.get(container_id), message, cpuset)

    def _failed(self, way: Way, message: str) -> None:
        level = logging.WARNING if message != self._said else logging.DEBUG
        log.log(level, "allocator: cpusets wait for the runtime: %s: %s", way.name, message)
        self._said = message
        self._way_trouble = _later(self._way_trouble, message)

    def _works_again(self, way: Way) -> None:
        if self._said:
            log.info("allocator: cpusets are sent by %s again", way.name)
        self._said = ""
        self._way_trouble = None

    def _retry_in(self) -> float | None:
        """Return the seconds until something is to be tried again, None for nothing."""
        return None if self._again_at is None else max(0.0, self._again_at - time.monotonic())


def _later(known: Trouble | None, message: str, cpuset: Cpuset = _NOTHING) -> Trouble:
    """Return a trouble once more, tried again later than before."""
    times = known.times + 1 if known is not None and known.cpuset == cpuset else 1
    wait_s = RETRY_S[min(times, len(RETRY_S)) - 1]
    return Trouble(message, time.monotonic() + wait_s, times, cpuset)
