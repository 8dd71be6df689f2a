"""Runs the passes that the table of sandboxes is asked for, and drops sandboxes that have ended.

A sandbox enters the table with its first record or when it is adopted. It is dropped when its VMM
has exited, or when there is none: where hooks run for every container of the node (CRI-O's
`always`), those of other runtimes enter it too.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Final

from kata_pin.daemon.journal import SANDBOX_OVER, about
from kata_pin.daemon.live_config import LiveConfig
from kata_pin.daemon.reconcile.engine import Engine
from kata_pin.daemon.reconcile.ports import GuestPreparer, Observer
from kata_pin.daemon.reconcile.sandbox_cache import SandboxCache
from kata_pin.daemon.reconcile.sandboxes import Entry, Sandboxes
from kata_pin.daemon.reconcile.scheduler import PassScheduler, Turn
from kata_pin.daemon.reconcile.supervisor import RETRY_S, PassResult, Verdict
from kata_pin.daemon.store.containers import Registry
from kata_pin.daemon.store.pins import Pins
from kata_pin.errors import HostError, reason_of
from kata_pin.host.exit import wait_exit
from kata_pin.host.process import is_alive
from kata_pin.host.root import HostRoot
from kata_pin.model.pass_outcome import Cause, outcome_of
from kata_pin.model.placement import Report
from kata_pin.model.sandbox import Container, Sandbox, Vmm
from kata_pin.model.thread import ProcessKey

log = logging.getLogger(__name__)

GRACE_S: Final = sum(RETRY_S)
"""How long a sandbox may be without a VMM: Firecracker's hooks run before the VM starts."""


@dataclass
class PassRunner:
    """See the module; everything runs in the event loop's thread.

    `start` runs a coroutine until the daemon ends. `ask` asks the VMM after a pass, and returns
    whether another pass may use the answer. `observers` get every outcome, in this order, before a
    waiting hook is answered.
    """

    _root: HostRoot
    _sandboxes: Sandboxes
    _engine: Engine
    _registry: Registry
    _pins: Pins
    _live: LiveConfig
    _start: Callable[[Coroutine[object, object, None]], object]
    _ask: Callable[[str, SandboxCache], Awaitable[bool]]
    _guests: GuestPreparer
    _observers: Sequence[Observer]

    def __post_init__(self) -> None:
        self._scheduler = PassScheduler(self._sandboxes.is_awaited)
        self._watched: dict[str, ProcessKey] = {}  # VMMs whose exit is waited for

    async def run(self) -> None:
        """Start the supervisor of each sandbox that enters the table, until cancelled."""
        while True:
            supervisor = await self._sandboxes.entered.get()
            self._start(supervisor.run(self._pass))

    async def find_vmm(self, sandbox_id: str) -> Vmm | None:
        """Return a sandbox's VMM as of now, before or between its passes."""
        containers = self._registry.containers(sandbox_id)
        cache = self._sandboxes.enter(sandbox_id).cache
        return await self._engine.find(sandbox_id, containers, cache)

    async def release(self, sandbox_id: str, *, remember: bool) -> None:
        """Restore a sandbox's affinities, in its turn; nothing for one that ended meanwhile.

        With `remember` it stays unmanaged until it is pinned again.
        """
        await self._prepare(sandbox_id)
        async with self._scheduler.turn(sandbox_id) as turn:
            await asyncio.sleep(0)
            cache = self._sandboxes.cache(sandbox_id)
            if cache is not None:
                if remember:  # not before: a pass in between would be taken for the release
                    self._pins.set_released([sandbox_id], released=True)
                await self._release(sandbox_id, cache, turn)

    async def _release(self, sandbox_id: str, cache: SandboxCache, turn: Turn) -> None:
        containers = self._registry.containers(sandbox_id)
        released = sandbox_id in self._pins.released()
        cause = Cause(("unpin" if released else "release",), time.monotonic())
        report = await turn.run(
            self._engine.steps(sandbox_id, containers, cache, act=True, release=True)
        )
        sandbox = Sandbox(sandbox_id, containers, cache.vmm)
        outcome = outcome_of(sandbox, report, cause, released=released)
        self._notify(lambda observer: observer.passed(outcome))

    async def _pass(self, sandbox_id: str) -> PassResult:
        """Run one pass, and another if the VMM itself answered questions."""
        try:
            await self._guests.before(sandbox_id, lambda: self._foreseen(sandbox_id))
            result = await self._in_turn(sandbox_id)
            if result.verdict is not Verdict.GONE and await self._ask(
                sandbox_id, self._sandboxes.entry(sandbox_id).cache
            ):
                result = await self._in_turn(sandbox_id)
        except Exception as error:
            failure = error
            self._notify(lambda observer: observer.failed("pass", failure))
            raise
        return result

    def _notify(self, notify: Callable[[Observer], None]) -> None:
        """Notify each observer; one that fails affects neither the others nor the pass."""
        for observer in self._observers:
            try:
                notify(observer)
            except Exception as error:  # a fault barrier: the observers of a pass
                log.error("an observer failed after a pass: %s", reason_of(error))
                log.debug("an observer failed after a pass", exc_info=True)

    async def _foreseen(self, sandbox_id: str) -> Report:
        """Return what a pass would decide now; sets and remembers nothing."""
        async with self._scheduler.turn(sandbox_id) as turn:
            cache = self._sandboxes.entry(sandbox_id).cache
            containers = self._registry.containers(sandbox_id)
            return await turn.run(self._engine.foresee(sandbox_id, containers, cache))

    async def _in_turn(self, sandbox_id: str) -> PassResult:
        """Run one pass when its turn has come: between any two of them hooks are answered.

        It runs again if it missed processes that could then be read.
        """
        await self._prepare(sandbox_id)
        async with self._scheduler.turn(sandbox_id) as turn:
            await asyncio.sleep(0)
            result = await self._run_pass(sandbox_id, turn)
        asked = {sandbox_id, *self._scheduler.begun}  # those that pause may have asked as well
        if await self._engine.search.survey.read_wanted():
            for one in asked.intersection(self._sandboxes.ids):
                self._sandboxes.mark(one, "processes were read", event=False)
        return result

    async def _prepare(self, sandbox_id: str) -> None:
        """Read what a pass needs of processes."""
        cache = self._sandboxes.cache(sandbox_id)
        if cache is not None:
            containers = self._registry.containers(sandbox_id)
            await self._engine.search.prepare(sandbox_id, containers, cache.vmm)

    async def _run_pass(self, sandbox_id: str, turn: Turn) -> PassResult:
        entry = self._sandboxes.entry(sandbox_id)
        cache = entry.cache
        released = sandbox_id in self._pins.released()
        had_vmm = cache.vmm is not None
        containers = self._registry.containers(sandbox_id)
        act = self._live.acts and not released
        report = await turn.run(self._engine.steps(sandbox_id, containers, cache, act=act))
        containers = self._registry.containers(sandbox_id)  # hooks may have come meanwhile
        if self._sandboxes.track(sandbox_id, cache.processes):  # events of a stranger are dropped
            self._sandboxes.mark(sandbox_id, "process born", event=False)
        if cache.vmm is not None and self._watched.get(sandbox_id) != cache.vmm.process:
            self._watched[sandbox_id] = cache.vmm.process
            self._start(self._watch_exit(sandbox_id, cache.vmm.process))
        sandbox = Sandbox(sandbox_id, containers, cache.vmm)
        if cache.vmm is None:
            verdict = self._without_vmm(sandbox_id, containers, entry, had_vmm=had_vmm)
        elif not report.settled:
            verdict = Verdict.RETRY
        else:
            verdict = Verdict.YOUNG if cache.unsure else Verdict.SETTLED
        outcome = outcome_of(sandbox, report, entry.supervisor.cause, released=released)
        if verdict is Verdict.GONE:
            self._notify(lambda observer: observer.ended(outcome))
        else:
            self._notify(lambda observer: observer.passed(outcome))
        turn.stop_clock()
        return PassResult(report, verdict, turn.worked_s)

    async def _watch_exit(self, sandbox_id: str, process: ProcessKey) -> None:
        try:
            await wait_exit(self._root, process)
        except HostError as error:
            log.warning("sandbox %s: only audits will notice its end: %s", sandbox_id, error)
            return
        if self._sandboxes.cache(sandbox_id) is not None:
            self._sandboxes.mark(sandbox_id, "VMM exited")

    def _without_vmm(
        self, sandbox_id: str, containers: Sequence[Container], entry: Entry, *, had_vmm: bool
    ) -> Verdict:
        """Return whether to look again for a VMM; drop the sandbox when it has ended."""
        age_s = time.monotonic() - entry.since
        known = self._watched.get(sandbox_id)
        if known is not None and is_alive(self._root, known):
            return Verdict.RETRY  # it runs, but could not be verified again
        if had_vmm:
            why = "its VMM has exited"
        elif not any(container.state.counts for container in containers):
            why = "all its containers have stopped"
        elif self._engine.search.is_claimed(sandbox_id, containers):
            return Verdict.RETRY  # refused, for a reason that can be remedied: its records stay
        elif self._pins.first_seen(sandbox_id):  # it was pinned before a restart
            why = "its VMM has exited"
        elif self._engine.search.runs_without_vmm(containers):
            why = "its containers run without a VMM"
        elif age_s > GRACE_S:
            why = f"no VMM was found for {age_s:.0f} s"
        else:
            return Verdict.RETRY
        log.info("sandbox %s ended: %s", sandbox_id, why, extra=about(SANDBOX_OVER))
        self.drop(sandbox_id)
        return Verdict.GONE

    def drop(self, sandbox_id: str) -> None:
        """Forget a sandbox; a later message about a container that lives enters it again."""
        with self._registry.transaction():
            self._registry.forget(sandbox_id)
            self._pins.forget(sandbox_id)
        self._sandboxes.drop(sandbox_id)
        self._watched.pop(sandbox_id, None)
        self._engine.forget(sandbox_id)
