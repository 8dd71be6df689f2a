"""When passes run: one at a time, and first those that a hook or a request waits for."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from errno import ESRCH
from functools import partial
from typing import Final

from kata_pin.base.config.tree import LiveConfig
from kata_pin.base.errors import HostError, reason_of
from kata_pin.base.placement import Binding, Cause, Report, outcome_of
from kata_pin.base.sandbox import Container, ProcessKey, Sandbox, Vmm
from kata_pin.engine.counters import Observer, Slices
from kata_pin.engine.passes import Engine
from kata_pin.engine.sandbox_cache import SandboxCache
from kata_pin.engine.sandboxes import RETRY_S, PassResult, PassVerdict, SandboxEntry, Sandboxes
from kata_pin.linux.files import HostRoot
from kata_pin.linux.process import is_alive
from kata_pin.records.containers import Registry
from kata_pin.records.history import SANDBOX_OVER, about
from kata_pin.records.pins import Pins

log = logging.getLogger(__name__)


# A pass holds the event loop for milliseconds; between any two passes, hooks and the container
# runtime are answered. A hook or a StartContainer keeps a workload from starting, so its pass goes
# first, but the pass that has waited longest is not delayed for ever. A long pass pauses after each
# slice, and goes on once those that waited had their turn: passes over several sandboxes may be
# under way, but never two over one.

MOST_PASSED_OVER: Final = 8
"""Passes in a row that may run before the one that has waited longest."""


class Turn(Slices):
    """The turn of one pass; work that is run in it pauses for others."""

    def __init__(self, scheduler: PassScheduler, sandbox_id: str) -> None:
        super().__init__()
        self.sandbox_id = sandbox_id
        self.held = False
        """Whether it is this one's turn: not before it began, nor while it pauses for others."""
        self.begun = False
        self._scheduler = scheduler

    async def _pause(self) -> None:
        await self._scheduler.let_others(self)


class PassScheduler:
    """Gives turns; `awaited` says whether something waits for a sandbox's pass."""

    def __init__(self, awaited: Callable[[str], bool]) -> None:
        self._awaited = awaited
        self._taken = False
        self.begun: set[str] = set()
        """Sandboxes with a pass under way, whose turn it may be or not."""
        self._waiting: dict[asyncio.Future[None], Turn] = {}
        self._passed_over = 0

    @contextlib.asynccontextmanager
    async def turn(self, sandbox_id: str) -> AsyncIterator[Turn]:
        """Wait for a turn; it lasts until the end of the block."""
        turn = Turn(self, sandbox_id)
        await self._take(turn)
        self.begun.add(sandbox_id)
        turn.begun = True
        try:
            turn.restart_clock()
            yield turn
        finally:
            self.begun.discard(sandbox_id)
            self._give_back(turn)

    async def let_others(self, turn: Turn) -> None:
        """Let the event loop run, and the passes that wait; return when it is this turn again."""
        if not self._ready():
            await asyncio.sleep(0)
            return
        waiting = self._queue(turn)
        self._give_back(turn)
        await self._given(waiting)

    async def _take(self, turn: Turn) -> None:
        if not self._taken:
            self._taken = turn.held = True
            return
        try:
            await self._given(self._queue(turn))
        except asyncio.CancelledError:
            self._give_back(turn)  # it was given in this very moment
            raise

    def _queue(self, turn: Turn) -> asyncio.Future[None]:
        waiting = asyncio.get_running_loop().create_future()
        self._waiting[waiting] = turn
        return waiting

    async def _given(self, waiting: asyncio.Future[None]) -> None:
        try:
            await waiting
        finally:
            self._waiting.pop(waiting, None)

    def _give_back(self, turn: Turn) -> None:
        """Give the turn to the next, if any waits and this one has it."""
        if not turn.held:
            return
        turn.held = False
        ready = self._ready()
        if not ready:
            self._taken = False
            return
        oldest = chosen = ready[0]
        if self._passed_over < MOST_PASSED_OVER:
            awaited = (one for one in ready if self._awaited(self._waiting[one].sandbox_id))
            chosen = next(awaited, oldest)
        self._passed_over = 0 if chosen is oldest else self._passed_over + 1
        self._waiting.pop(chosen).held = True
        chosen.set_result(None)

    def _ready(self) -> list[asyncio.Future[None]]:
        """Return what may have the turn, oldest first: never a second pass over one sandbox.

        A cancelled one is listed until its task runs again. It must not be chosen: setting its
        result would raise.
        """
        return [
            waiting
            for waiting, turn in self._waiting.items()
            if not waiting.done() and (turn.begun or turn.sandbox_id not in self.begun)
        ]


# Noticing that a process exits, without polling and without mistaking it for a later one.
#
# A thread would need PIDFD_THREAD of Linux 6.9, and its exit code only a parent may ask:
# pidfd_open(2).


class ExitWatches:
    """Calls back once when a process has exited: no task per process, one descriptor."""

    def __init__(self, root: HostRoot) -> None:
        self._root = root
        self._descriptors: set[int] = set()

    def watch(self, key: ProcessKey, exited: Callable[[], object]) -> None:
        """Call `exited` once the process has exited; soon if it has, or its pid was reused.

        Raises HostError where the kernel has no pidfd_open (before Linux 5.3) or refuses one.
        """
        loop = asyncio.get_running_loop()
        try:
            fd = os.pidfd_open(key.pid)
        except OSError as error:
            if error.errno != ESRCH:
                raise HostError("watch", f"process {key.pid}", error.errno or 0) from error
            loop.call_soon(exited)
            return
        self._descriptors.add(fd)
        # The descriptor came first: if the process is ours now, the descriptor is its.
        if is_alive(self._root, key):
            loop.add_reader(fd, self._end, fd, exited)
        else:
            loop.call_soon(self._end, fd, exited)

    def close(self) -> None:
        """Watch no process any longer."""
        for fd in list(self._descriptors):
            self._close(fd)

    def _end(self, fd: int, exited: Callable[[], object]) -> None:
        if fd in self._descriptors:
            self._close(fd)
            exited()

    def _close(self, fd: int) -> None:
        self._descriptors.discard(fd)
        asyncio.get_running_loop().remove_reader(fd)
        os.close(fd)


GRACE_S: Final = sum(RETRY_S)
"""How long a sandbox may be without a VMM: Firecracker's hooks run before the VM starts."""

AGAIN_S: Final = 5.0
"""How long to wait before passes may ask again for processes that could not be read."""


@dataclass
class PassRunner:
    """Runs the passes that sandboxes are marked for, and drops sandboxes that have ended.

    A sandbox enters the table with its first record or when it is adopted. It is dropped when
    its VMM has exited, or when there is none: where hooks run for every container of the node
    (CRI-O's `always`), those of other runtimes enter it too.

    Everything runs in the event loop's thread.

    `start` runs a coroutine until the daemon ends. `ask` asks the VMM after a pass, and returns
    whether another pass may use the answer. `prepare_guest` returns when a sandbox's pass may run;
    it may call what returns what that would decide. `observers` get every outcome, in this order,
    before a waiting hook is answered.
    """

    _root: HostRoot
    _sandboxes: Sandboxes
    _engine: Engine
    _registry: Registry
    _pins: Pins
    _live: LiveConfig
    _start: Callable[[Coroutine[object, object, None]], object]
    _ask: Callable[[str, SandboxCache], Awaitable[bool]]
    _prepare_guest: Callable[[str, Callable[[], Awaitable[Report]]], Awaitable[None]]
    _observers: Sequence[Observer]

    def __post_init__(self) -> None:
        self._scheduler = PassScheduler(self._sandboxes.is_awaited)
        self._watched: dict[str, ProcessKey] = {}  # VMMs whose exit is reported
        self._exits = ExitWatches(self._root)

    async def run(self) -> None:
        """Start the supervisor of each sandbox that enters the table, until cancelled."""
        with contextlib.closing(self._exits):
            while True:
                supervisor = await self._sandboxes.entered.get()
                self._start(supervisor.run(self._pass))

    async def find_vmm(self, sandbox_id: str) -> Vmm | None:
        """Return a sandbox's VMM as of now, before or between its passes."""
        containers = self._registry.containers(sandbox_id)
        cache = self._sandboxes.enter(sandbox_id).cache
        return await self._engine.find(sandbox_id, containers, cache)

    async def release(self, sandbox_id: str, *, remember: bool) -> Report | None:
        """Restore a sandbox's affinities, in its turn; None for one that ended meanwhile.

        With `remember` it stays unmanaged until it is pinned again.
        """
        await self._prepare(sandbox_id)
        async with self._scheduler.turn(sandbox_id) as turn:
            await asyncio.sleep(0)
            cache = self._sandboxes.cache(sandbox_id)
            if cache is None:
                return None
            if remember:  # not before: a pass in between would be taken for the release
                self._pins.set_released([sandbox_id], released=True)
            return await self._release(sandbox_id, cache, turn)

    async def _release(self, sandbox_id: str, cache: SandboxCache, turn: Turn) -> Report:
        containers = self._registry.containers(sandbox_id)
        released = sandbox_id in self._pins.released()
        cause = Cause(("unpin" if released else "release",), time.monotonic())
        report = await turn.run(
            self._engine.steps(sandbox_id, containers, cache, act=True, release=True)
        )
        sandbox = Sandbox(sandbox_id, containers, cache.vmm)
        outcome = outcome_of(sandbox, report, cause, released=released)
        self._notify(lambda observer: observer.passed(outcome))
        return report

    async def _pass(self, sandbox_id: str) -> PassResult:
        """Run one pass, and another if the VMM itself answered questions."""
        try:
            await self._prepare_guest(sandbox_id, lambda: self.foreseen(sandbox_id))
            result = await self._in_turn(sandbox_id)
            if result.verdict is not PassVerdict.GONE and await self._ask(
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

    async def foreseen(self, sandbox_id: str, trial: Binding | None = None) -> Report:
        """Return what a pass would decide now, by `trial`; sets and remembers nothing."""
        async with self._scheduler.turn(sandbox_id) as turn:
            cache = self._sandboxes.entry(sandbox_id).cache
            containers = self._registry.containers(sandbox_id)
            return await turn.run(self._engine.foresee(sandbox_id, containers, cache, trial))

    async def _in_turn(self, sandbox_id: str) -> PassResult:
        """Run one pass when its turn has come: between any two of them hooks are answered.

        It runs again if it missed processes that could then be read.
        """
        await self._prepare(sandbox_id)
        async with self._scheduler.turn(sandbox_id) as turn:
            await asyncio.sleep(0)
            result = await self._run_pass(sandbox_id, turn)
        if self._engine.search.survey.has_wanted:
            # those that pause may have asked as well
            self._start(self._read_wanted({sandbox_id, *self._scheduler.begun}))
        return result

    async def _read_wanted(self, asked: set[str]) -> None:
        """Read what passes asked for in vain, once hooks that waited for them were answered."""
        await asyncio.sleep(0)
        try:
            more = await self._engine.search.survey.read_wanted()
        except Exception as error:  # a fault barrier
            log.error("cannot read processes now: %s", reason_of(error))
            log.debug("cannot read processes now", exc_info=True)
            await asyncio.sleep(AGAIN_S)
            more = True  # the next passes ask again
        for one in asked.intersection(self._sandboxes.ids) if more else ():
            self._sandboxes.mark(one, "processes were read", event=False)

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
        entry.supervisor.saw_all_marks()
        containers = self._registry.containers(sandbox_id)
        act = self._live.acts and not released
        asked = entry.supervisor
        steps = self._engine.steps(
            *(sandbox_id, containers, cache),
            act=act,
            threads_only=asked.threads_only,
            as_of=asked.as_of,
        )
        report = await turn.run(steps)
        containers = self._registry.containers(sandbox_id)  # hooks may have come meanwhile
        new = self._sandboxes.track(sandbox_id, cache.processes)
        if new and not self._engine.saw_all(sandbox_id, cache):  # a stranger's events were dropped
            self._sandboxes.mark(sandbox_id, "process born", event=False)
        if cache.vmm is not None and self._watched.get(sandbox_id) != cache.vmm.process:
            self._watched[sandbox_id] = cache.vmm.process
            self._watch_exit(sandbox_id, cache.vmm.process)
        sandbox = Sandbox(sandbox_id, containers, cache.vmm)
        if cache.vmm is None:
            verdict = self._without_vmm(sandbox_id, containers, entry, had_vmm=had_vmm)
        elif not report.all_placed:
            verdict = PassVerdict.RETRY
        else:
            verdict = PassVerdict.YOUNG if cache.unsure else PassVerdict.SETTLED
        outcome = outcome_of(sandbox, report, entry.supervisor.cause, released=released)
        if verdict is PassVerdict.GONE:
            self._notify(lambda observer: observer.ended(outcome))
        else:
            self._notify(lambda observer: observer.passed(outcome))
        turn.stop_clock()
        return PassResult(report, verdict, turn.worked_s, cache.may_grow)

    def _watch_exit(self, sandbox_id: str, process: ProcessKey) -> None:
        try:
            self._exits.watch(process, partial(self._exited, sandbox_id))
        except HostError as error:
            log.warning("sandbox %s: only audits will notice its end: %s", sandbox_id, error)

    def _exited(self, sandbox_id: str) -> None:
        if self._sandboxes.cache(sandbox_id) is not None:
            self._sandboxes.mark(sandbox_id, "VMM exited")

    def _without_vmm(
        self,
        sandbox_id: str,
        containers: Sequence[Container],
        entry: SandboxEntry,
        *,
        had_vmm: bool,
    ) -> PassVerdict:
        """Return whether to look again for a VMM; drop the sandbox when it has ended."""
        age_s = time.monotonic() - entry.since
        known = self._watched.get(sandbox_id)
        if known is not None and is_alive(self._root, known):
            return PassVerdict.RETRY  # it runs, but could not be verified again
        if had_vmm:
            why = "its VMM has exited"
        elif not any(container.state.counts for container in containers):
            why = "all its containers have stopped"
        elif self._engine.search.is_without(sandbox_id):
            why = "its containers run without a VMM"
        elif self._engine.search.is_claimed(sandbox_id, containers):
            return PassVerdict.RETRY  # refused, for a reason that can be remedied: its records stay
        elif self._pins.first_seen(sandbox_id):  # it was pinned before a restart
            why = "its VMM has exited"
        elif self._engine.search.runs_without_vmm(containers):
            why = "its containers run without a VMM"
        elif age_s > GRACE_S:
            why = f"no VMM was found for {age_s:.0f} s"
        else:
            return PassVerdict.RETRY
        log.info("sandbox %s ended: %s", sandbox_id, why, extra=about(SANDBOX_OVER))
        self.drop(sandbox_id)
        return PassVerdict.GONE

    def drop(self, sandbox_id: str) -> None:
        """Forget a sandbox; a later message about a container that lives enters it again."""
        with self._registry.transaction():
            self._registry.forget(sandbox_id)
            self._pins.forget(sandbox_id)
        self._sandboxes.drop(sandbox_id)
        self._watched.pop(sandbox_id, None)
        self._engine.forget(sandbox_id)
