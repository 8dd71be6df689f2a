"""All sandboxes of the node: their supervisors, what is held of each, when each is over.

Lifetime: the daemon's. A sandbox enters with the first record or when it is adopted, and leaves
when its VMM has exited, or when there is none: where hooks run for every container of the node
(CRI-O's `always`), those of other runtimes arrive here too and are dropped.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final

from kata_pin.daemon.guests.manager import Guests
from kata_pin.daemon.journal import SANDBOX_OVER, about
from kata_pin.daemon.reconcile.engine import Engine, SandboxCache
from kata_pin.daemon.reconcile.other_writers import writers_of
from kata_pin.daemon.reconcile.ports import Observer
from kata_pin.daemon.reconcile.scheduler import PassScheduler
from kata_pin.daemon.reconcile.supervisor import RETRY_S, PassResult, Supervisor, Verdict
from kata_pin.daemon.status.documents import SandboxFacts
from kata_pin.daemon.store.database import Registry
from kata_pin.errors import DaemonError, HostError
from kata_pin.host.exit import wait_exit
from kata_pin.host.root import HostRoot
from kata_pin.model.pass_outcome import Cause, outcome_of
from kata_pin.model.placement import Report
from kata_pin.model.sandbox import Container, Sandbox, Vmm
from kata_pin.model.thread import ProcessKey
from kata_pin.policy.explain.sandbox import explain

log = logging.getLogger(__name__)

GRACE_S: Final = sum(RETRY_S)
"""How long a sandbox may be without a VMM: Firecracker's hooks run before the VM starts."""


class Sandboxes:
    """Owns each sandbox's Supervisor and SandboxCache; used in the event loop's thread only."""

    def __init__(
        self,
        root: HostRoot,
        engine: Engine,
        registry: Registry,
        *,
        start: Callable[[Coroutine[object, object, None]], object],
        acts: Callable[[], bool],
        ask: Callable[[str, SandboxCache], Awaitable[bool]],
        guests: Guests,
        observers: Sequence[Observer] = (),
    ) -> None:
        """`start` runs a coroutine in the daemon's TaskGroup; `acts` says if pins may be set.

        `ask` learns more about a sandbox after a pass, and says whether another one may use it.
        `observers` are told of every pass before who waits for it, `guests` too.
        """
        self._root = root
        self._engine = engine
        self._registry = registry
        self._start = start
        self._acts = acts
        self._ask = ask
        self._guests = guests
        self._observers = (*observers, guests)
        self._caches: dict[str, SandboxCache] = {}
        self._supervisors: dict[str, Supervisor] = {}
        self._since: dict[str, float] = {}
        self._owners: dict[int, str] = {}
        self._scheduler = PassScheduler(self._is_awaited)
        self.tracked: set[int] = set()
        """Pids whose threads and children the process connector reports; shared with it."""

    # ---- marking -------------------------------------------------------------------------

    def enter(self, sandbox_id: str) -> SandboxCache:
        """Return what is held of a sandbox; start its supervisor if it is new."""
        if sandbox_id not in self._supervisors:
            supervisor = Supervisor(sandbox_id, self._pass)
            self._supervisors[sandbox_id] = supervisor
            self._caches[sandbox_id] = SandboxCache()
            self._since[sandbox_id] = time.monotonic()
            self._start(supervisor.run())
        return self._caches[sandbox_id]

    def mark(self, sandbox_id: str, reason: str, *, event: bool = True) -> int:
        """Ask for a pass over a sandbox, new or known; return a ticket for `settled`.

        `event`: something happened to the sandbox, so backing off from another writer ends (D13).
        """
        cache = self.enter(sandbox_id)
        if event:
            cache.other_writers.forget()
        return self._supervisors[sandbox_id].mark(reason)

    def mark_process(self, tgid: int, reason: str) -> None:
        """Ask for a pass over the sandbox that a process works for, if any."""
        sandbox_id = self._owners.get(tgid)
        if sandbox_id is not None:
            self.mark(sandbox_id, reason, event=False)

    def mark_all(self, reason: str, *, event: bool = False) -> None:
        """Ask for a pass over every sandbox."""
        for sandbox_id in list(self._supervisors):
            self.mark(sandbox_id, reason, event=event)

    async def settled(self, sandbox_id: str, ticket: int) -> Report | None:
        """Wait for the pass that answers a ticket; None when the sandbox is over or it failed."""
        supervisor = self._supervisors.get(sandbox_id)
        return None if supervisor is None else await supervisor.settled(ticket)

    # ---- looking -------------------------------------------------------------------------

    @property
    def ids(self) -> list[str]:
        """The sandboxes that are supervised."""
        return sorted(self._supervisors)

    @property
    def vmms(self) -> dict[str, ProcessKey]:
        """The accepted VMM of each sandbox that has one."""
        return {
            one: cache.vmm.process for one, cache in self._caches.items() if cache.vmm is not None
        }

    @property
    def without_vmm(self) -> list[str]:
        """The sandboxes whose VMM was not found, or not accepted, when last looked for."""
        return [one for one, cache in self._caches.items() if cache.vmm is None]

    @property
    def acts(self) -> bool:
        """Whether pins may be set now."""
        return self._acts()

    @property
    def released(self) -> frozenset[str]:
        """The sandboxes that an operator wants to be left alone."""
        return self._registry.released()

    def is_released(self, sandbox_id: str) -> bool:
        """Whether an operator wants a sandbox to be left alone."""
        return sandbox_id in self.released

    def cache(self, sandbox_id: str) -> SandboxCache | None:
        """Return what is held of a sandbox."""
        return self._caches.get(sandbox_id)

    def known_vmm(self, sandbox_id: str) -> Vmm | None:
        """Return the VMM that the last pass over a sandbox found."""
        cache = self._caches.get(sandbox_id)
        return None if cache is None else cache.vmm

    def vmm_of(self, sandbox_id: str) -> Vmm | None:
        """Return a sandbox's VMM as of now, before or between its passes."""
        containers = self._registry.containers(sandbox_id)
        return self._engine.find(sandbox_id, containers, self.enter(sandbox_id))

    def facts(self, ids: Iterable[str] | None = None) -> Iterator[SandboxFacts]:
        """Yield what documents show of these sandboxes, of all by default, in the order of ids."""
        released = self._registry.released()
        now = time.monotonic()
        for sandbox_id in self.ids if ids is None else ids:
            cache = self._caches.get(sandbox_id)
            if cache is None:  # it ended a moment ago
                continue
            sandbox = self._sandbox(sandbox_id, cache)
            yield SandboxFacts(
                sandbox=sandbox,
                report=cache.report,
                checked_s=now - cache.checked_at if cache.report else None,
                problem=cache.problem,
                released=sandbox_id in released,
                backed_off=frozenset(key.tid for key in cache.other_writers.backed_off(now)),
                guest=self._guests.view(sandbox, cache.report),
                writers=writers_of(cache, now),
            )

    def explanation(self, sandbox_id: str) -> tuple[str, ...]:
        """Return the lines that explain a sandbox's last pass; DaemonError before the first."""
        cache = self._caches[sandbox_id]
        if cache.report is None or cache.report.placement is None:
            raise DaemonError(f"no pass over sandbox {sandbox_id} has ended yet")
        sandbox = self._sandbox(sandbox_id, cache)
        return explain(
            sandbox,
            cache.report.threads,
            cache.report.placement,
            self._engine.node(),
            guest=self._guests.lines(sandbox, cache.report),
            now_ns=time.clock_gettime_ns(time.CLOCK_BOOTTIME),
        )

    def _sandbox(self, sandbox_id: str, cache: SandboxCache) -> Sandbox:
        """Return a sandbox as its passes go by it."""
        containers = self._registry.containers(sandbox_id)
        return Sandbox(sandbox_id, self._engine.believed(containers, cache), cache.vmm)

    # ---- undoing -------------------------------------------------------------------------

    def set_released(self, sandbox_ids: Sequence[str], *, released: bool) -> None:
        """Remember that these sandboxes are to be left alone, or no longer (DESIGN D18)."""
        self._registry.set_released(sandbox_ids, released=released)

    def release(self, sandbox_id: str) -> Report:
        """Give a sandbox's pins back now, and return what was done."""
        cache, containers = self.enter(sandbox_id), self._registry.containers(sandbox_id)
        released = self.is_released(sandbox_id)
        cause = Cause(("unpin" if released else "release",), time.monotonic())
        report = self._engine.run(sandbox_id, containers, cache, act=True, release=True)
        sandbox = Sandbox(sandbox_id, containers, cache.vmm)
        outcome = outcome_of(sandbox, report, cause, released=released)
        self._tell(lambda observer: observer.passed(outcome))
        return report

    # ---- passes --------------------------------------------------------------------------

    async def _pass(self, sandbox_id: str) -> PassResult:
        """Run one pass, and another where the VMM itself could tell more."""
        try:
            return await self._asked_pass(sandbox_id)
        except Exception as error:
            failure = error
            self._tell(lambda observer: observer.failed("pass", failure))
            raise

    def _tell(self, tell: Callable[[Observer], None]) -> None:
        """Tell each observer; one that fails keeps nothing from the others, nor from the pass."""
        for observer in self._observers:
            try:
                tell(observer)
            except Exception as error:
                log.error("an account of a pass was not kept: %s", error)
                log.debug("an account of a pass was not kept", exc_info=True)

    async def _asked_pass(self, sandbox_id: str) -> PassResult:
        await self._guests.before(sandbox_id, lambda: self._foreseen(sandbox_id))
        result = await self._in_turn(sandbox_id)
        if result.verdict is not Verdict.GONE and await self._ask(
            sandbox_id, self._caches[sandbox_id]
        ):
            result = await self._in_turn(sandbox_id)
        return result

    async def _foreseen(self, sandbox_id: str) -> Report:
        """Return what a pass would decide now; nothing is set, and nothing of it is kept."""
        async with self._scheduler.turn(sandbox_id):
            cache = replace(self._caches[sandbox_id])
            containers = self._registry.containers(sandbox_id)
            return self._engine.run(sandbox_id, containers, cache, act=False)

    async def _in_turn(self, sandbox_id: str) -> PassResult:
        """Run one pass when its turn has come: between any two of them hooks are answered."""
        async with self._scheduler.turn(sandbox_id):
            await asyncio.sleep(0)
            return self._run_pass(sandbox_id)

    def _is_awaited(self, sandbox_id: str) -> bool:
        supervisor = self._supervisors.get(sandbox_id)
        return supervisor is not None and supervisor.is_awaited()

    def _run_pass(self, sandbox_id: str) -> PassResult:
        cache = self._caches[sandbox_id]
        released = self.is_released(sandbox_id)
        had = cache.vmm
        act = self._acts() and not released
        cause = self._supervisors[sandbox_id].cause
        containers = self._registry.containers(sandbox_id)
        report = self._engine.run(sandbox_id, containers, cache, act=act)
        self._track(sandbox_id, cache)
        if cache.vmm is not None and (had is None or had.process != cache.vmm.process):
            self._start(self._watch_exit(sandbox_id, cache.vmm.process))
        sandbox = Sandbox(sandbox_id, containers, cache.vmm)
        verdict = self._verdict(sandbox, report, cache, had_vmm=had is not None)
        outcome = outcome_of(sandbox, report, cause, released=released)
        if verdict is Verdict.GONE:
            self._tell(lambda observer: observer.ended(outcome))
        else:
            self._tell(lambda observer: observer.passed(outcome))
        return PassResult(report, verdict)

    def _verdict(
        self, sandbox: Sandbox, report: Report, cache: SandboxCache, *, had_vmm: bool
    ) -> Verdict:
        if cache.vmm is None:
            return self._without_vmm(sandbox.id, sandbox.containers, had_vmm=had_vmm)
        if not report.settled:
            return Verdict.RETRY
        return Verdict.YOUNG if cache.unsure else Verdict.SETTLED

    async def _watch_exit(self, sandbox_id: str, process: ProcessKey) -> None:
        try:
            await wait_exit(self._root, process)
        except HostError as error:
            log.warning("sandbox %s: only audits will notice its end: %s", sandbox_id, error)
            return
        if sandbox_id in self._supervisors:
            self.mark(sandbox_id, "VMM exited")

    def _without_vmm(
        self, sandbox_id: str, containers: Sequence[Container], *, had_vmm: bool
    ) -> Verdict:
        """Say whether to look again for a VMM; drop the sandbox when it is over."""
        age_s = time.monotonic() - self._since[sandbox_id]
        if had_vmm:
            why = "its VMM has exited"
        elif not any(container.state.counts for container in containers):
            why = "all its containers have stopped"
        elif self._engine.is_claimed(sandbox_id, containers):
            return Verdict.RETRY  # refused, for a reason that can be remedied: its records stay
        elif self._registry.first_seen(sandbox_id):  # it was pinned before a restart
            why = "its VMM has exited"
        elif self._engine.runs_without_vmm(containers):
            why = "its containers run without a VMM"
        elif age_s > GRACE_S:
            why = f"no VMM was found for {age_s:.0f} s"
        else:
            return Verdict.RETRY
        log.info("sandbox %s is over: %s", sandbox_id, why, extra=about(SANDBOX_OVER))
        self.drop(sandbox_id)
        return Verdict.GONE

    def drop(self, sandbox_id: str) -> None:
        """Forget a sandbox; a later message about a container that lives makes it anew."""
        self._registry.forget(sandbox_id)
        self._supervisors.pop(sandbox_id, None)
        self._caches.pop(sandbox_id, None)
        self._since.pop(sandbox_id, None)
        self._engine.forget(sandbox_id)
        self._untrack(sandbox_id, keep=frozenset())

    def _track(self, sandbox_id: str, cache: SandboxCache) -> None:
        """Follow the processes that work for the sandbox: their threads, children and exits."""
        for pid in cache.processes - self.tracked:
            self.tracked.add(pid)
            self._owners[pid] = sandbox_id
        self._untrack(sandbox_id, keep=cache.processes)

    def _untrack(self, sandbox_id: str, *, keep: frozenset[int]) -> None:
        owned = [pid for pid, owner in self._owners.items() if owner == sandbox_id]
        gone = [pid for pid in owned if pid not in keep]
        for pid in gone:
            del self._owners[pid]
            self.tracked.discard(pid)
