"""One sandbox's supervisor: runs a pass whenever something may have changed, one at a time.

Level-triggered (D1): events only mark the sandbox, so lost, doubled and reordered ones do no harm.
The loop is a fault barrier (D16): a pass that fails is logged, counted and tried again; other
sandboxes are not affected.

Lifetime: from the first message about a sandbox until it is gone; owned by the app's TaskGroup.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from kata_pin.daemon.journal import PASS_FAILED, about
from kata_pin.errors import reason_of
from kata_pin.model.pass_outcome import Cause
from kata_pin.model.placement import Report

log = logging.getLogger(__name__)

RETRY_S: Final = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 15.0)
"""Waits between tries while a sandbox has no VMM (Firecracker's hooks run before the VM starts) or
a pass fails; about half a minute in all."""

YOUNG_S: Final = (0.0002, 0.001, 0.002, 0.004, 0.008, 0.03, 0.1, 0.3, 0.6, 1.2)
"""Waits between passes while a thread is too young to be identified: a hotplugged vCPU enters KVM
some 1 to 3 ms after its birth; about two seconds in all."""

LONG_S: Final = 0.02
REST: Final = 4.0
MOST_REST_S: Final = 5.0
"""A pass that worked longer than LONG_S is followed by a rest of REST times as long, at most
MOST_REST_S: a VMM that makes threads by the thousand gets a fifth of the daemon. What waits for the
next pass ends the rest."""


class Verdict(Enum):
    """What is due after a pass."""

    SETTLED = auto()  # nothing more to do until something changes
    YOUNG = auto()  # settled, but a thread may turn out to be a vCPU in a moment
    RETRY = auto()  # try again soon: no VMM yet, or some thread was refused
    GONE = auto()  # the sandbox ended: forget it


@dataclass(frozen=True)
class PassResult:
    """A pass's report and its verdict; `worked_s` is how long it took without its pauses."""

    report: Report
    verdict: Verdict
    worked_s: float = 0.0


_WAITS_S: Final[dict[Verdict, tuple[float, ...]]] = {
    Verdict.SETTLED: (),
    Verdict.YOUNG: YOUNG_S,
    Verdict.RETRY: RETRY_S,
}


class Supervisor:
    """Runs a pass over one sandbox whenever `mark` was called; `settled` waits for it."""

    def __init__(self, sandbox_id: str) -> None:
        self.sandbox_id = sandbox_id
        self.failures = 0
        self.report: Report | None = None
        self.cause = Cause()
        self.began = 0
        """The newest ticket that was given before the last pass began."""
        self._wanted = 0
        self._done = 0
        self._awaiting = 0
        self._awaited = 0  # the newest ticket that was waited for
        self._hurry = asyncio.Event()
        self._dirty = asyncio.Event()
        self._finished = asyncio.Condition()
        self._reasons: dict[str, None] = {}
        self._marked = 0.0
        self._ended = False

    def mark(self, reason: str) -> int:
        """Ask for a pass; return a ticket that `settled` takes. Cheap, never blocks."""
        self._wanted += 1
        if not self._reasons:
            self._marked = time.monotonic()
        self._reasons[reason] = None
        self._dirty.set()
        return self._wanted

    async def settled(self, ticket: int) -> Report | None:
        """Wait until a pass that began after `mark` gave `ticket` has ended; the caller's deadline.

        Returns the last report, None if the pass failed or the sandbox ended meanwhile.
        """
        self._awaiting += 1
        self._awaited = max(self._awaited, ticket)
        self._hurry.set()
        try:
            async with self._finished:
                await self._finished.wait_for(lambda: self._done >= ticket or self._ended)
        finally:
            self._awaiting -= 1
        return self.report

    @property
    def has_failed(self) -> bool:
        """Whether the last pass failed."""
        return self.failures > 0 and self.report is None

    def is_awaited(self) -> bool:
        """Whether a hook or a request waits for a pass."""
        return self._awaiting > 0

    def is_due(self) -> bool:
        """Whether a pass was asked for that has not ended."""
        return self._done < self._wanted

    async def run(self, pass_: Callable[[str], Awaitable[PassResult]]) -> None:
        """Run passes until the sandbox has ended; whatever `pass_` awaits has a deadline."""
        tries, last = 0, Verdict.SETTLED
        try:
            while True:
                verdict = await self._one_pass(pass_)
                if verdict is Verdict.GONE:
                    return
                if verdict is not last:
                    tries, last = 0, verdict
                waits = _WAITS_S[verdict]
                if tries == len(waits):
                    await self._dirty.wait()
                elif await self._nothing_for(waits[tries]):
                    tries += 1
                elif verdict is Verdict.YOUNG:  # perhaps another thread was born
                    tries = 0
        finally:
            self._ended = True
            async with self._finished:
                self._finished.notify_all()

    async def _nothing_for(self, seconds: float) -> bool:
        """Wait so long, then ask for a pass; return False at once when something changed."""
        try:
            async with asyncio.timeout(seconds):
                await self._dirty.wait()
        except TimeoutError:
            self._dirty.set()
            return True
        return False

    async def _one_pass(self, pass_: Callable[[str], Awaitable[PassResult]]) -> Verdict:
        await self._dirty.wait()
        self._dirty.clear()
        ticket = self.began = self._wanted
        if self._reasons:
            self.cause = Cause(tuple(self._reasons), self._marked)
            self._reasons = {}
        worked_s = 0.0
        try:
            result = await pass_(self.sandbox_id)
        except Exception as error:  # the fault barrier of one sandbox
            self.failures += 1
            self.report = None
            why = about(PASS_FAILED, source=", ".join(self.cause.reasons))
            log.error("sandbox %s: pass failed: %s", self.sandbox_id, reason_of(error), extra=why)
            log.debug("sandbox %s: after %s", self.sandbox_id, self.cause.reasons, exc_info=True)
            verdict = Verdict.RETRY
        else:
            self.report = result.report
            verdict, worked_s = result.verdict, result.worked_s
        self._done = max(self._done, ticket)
        async with self._finished:
            self._finished.notify_all()
        if worked_s > LONG_S:
            await self._rest(min(worked_s * REST, MOST_REST_S))
        return verdict

    async def _rest(self, seconds: float) -> None:
        """Do nothing for so long, or until something waits for the next pass."""
        if self._awaited <= self._done:
            self._hurry.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._hurry.wait()
