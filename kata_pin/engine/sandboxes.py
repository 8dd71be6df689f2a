"""The table of sandboxes: the supervisor of each, and what the others have exclusively (D28)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Collection
from enum import Enum, auto
from typing import Final

from msgspec import Struct, field

from kata_pin.base.cpuset import EMPTY, CpuSet, union
from kata_pin.base.errors import reason_of
from kata_pin.base.placement import Cause, Node, PassOutcome, Report
from kata_pin.base.sandbox import ProcessKey, Sandbox, Vmm
from kata_pin.engine.counters import Observer
from kata_pin.engine.sandbox_cache import SandboxCache
from kata_pin.placement.exclusive import lacks_cpuset
from kata_pin.placement.masks import resolve_cpusets, sandbox_mask
from kata_pin.placement.place import ON_REQUEST
from kata_pin.records.containers import Registry
from kata_pin.records.history import PASS_FAILED, about

log = logging.getLogger(__name__)


# One sandbox's supervisor: runs a pass whenever something may have changed, one at a time.
#
# Level-triggered (D1): events only mark the sandbox, so lost, doubled and reordered ones do no
# harm. The loop is a fault barrier (D16): a pass that fails is logged, counted and tried again;
# other sandboxes are not affected.
#
# Lifetime: from the first message about a sandbox until it is gone; owned by the app's TaskGroup.

RETRY_S: Final = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 15.0)
"""Waits between tries while a sandbox has no VMM (Firecracker's hooks run before the VM starts) or
a pass fails; about half a minute in all."""

BORN_S: Final = 0.001
"""How long a pass waits that was asked for by a birth alone, where the thread may be a vCPU: one
enters KVM some 1 to 3 ms after its birth, and a pass before that finds nothing."""

YOUNG_S: Final = (0.0, 0.001, 0.002, 0.004, 0.008, 0.03, 0.1, 0.3, 0.6, 1.2)
"""Waits between passes while a thread is too young to be identified; about two seconds in all. The
first is 0 because any shorter than a millisecond takes one: epoll counts in those."""

BORN: Final = "thread born"
THREADS: Final = frozenset({BORN, "thread exited"})
"""Reasons for a pass for which no process of the node need be looked at."""

LONG_S: Final = 0.02
REST: Final = 4.0
MOST_REST_S: Final = 5.0
"""A pass that worked longer than LONG_S is followed by a rest of REST times as long, at most
MOST_REST_S: a VMM that makes threads by the thousand gets a fifth of the daemon. What waits for the
next pass ends the rest."""


class Wakeup:
    """An asyncio.Event without its deque, which takes 0.7 KiB: each sandbox has several."""

    __slots__ = ("_is_set", "_waiters")

    def __init__(self) -> None:
        self._is_set = False
        self._waiters: tuple[asyncio.Future[None], ...] = ()

    def set(self) -> None:
        """Wake everything that waits, now and until `clear`."""
        self._is_set = True
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    def clear(self) -> None:
        """Let later waits wait; those that were woken return nevertheless."""
        self._is_set = False

    async def wait(self) -> None:
        """Return at once if it is set, else when it is."""
        if self._is_set:
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiters = (*self._waiters, waiter)
        try:
            await waiter
        finally:
            self._waiters = tuple(one for one in self._waiters if one is not waiter)


class PassVerdict(Enum):
    """What is due after a pass."""

    SETTLED = auto()  # nothing more to do until something changes
    YOUNG = auto()  # settled, but a thread may turn out to be a vCPU in a moment
    RETRY = auto()  # try again soon: no VMM yet, or some thread was refused
    GONE = auto()  # the sandbox ended: forget it


class PassResult(Struct, frozen=True):
    """A pass's report and its verdict; `worked_s` is how long it took without its pauses.

    `may_grow`: whether a thread that is born next may be a vCPU.
    """

    report: Report
    verdict: PassVerdict
    worked_s: float = 0.0
    may_grow: bool = False


_WAITS_S: Final[dict[PassVerdict, tuple[float, ...]]] = {
    PassVerdict.SETTLED: (),
    PassVerdict.YOUNG: YOUNG_S,
    PassVerdict.RETRY: RETRY_S,
}


class Supervisor:
    """Runs a pass over one sandbox whenever `mark` was called; `wait_for_pass` waits for it."""

    def __init__(self, sandbox_id: str) -> None:
        self.sandbox_id = sandbox_id
        self.has_failed = False
        """Whether the last pass failed."""
        self.report: Report | None = None
        self.cause = Cause()
        self.threads_only = False
        """Whether nothing but THREADS, or a young thread, asked for the pass under way."""
        self.as_of = 0.0
        """What the pass under way has to see happened before this (CLOCK_MONOTONIC)."""
        self.began = 0
        """The newest ticket that was given before the last pass began."""
        self._wanted = 0
        self._done = 0
        self._awaiting = 0
        self._awaited = 0  # the newest ticket that was waited for
        self._hurry = Wakeup()
        self._dirty = Wakeup()
        self._finished = Wakeup()
        """Set and cleared when a pass has ended, and for good when the sandbox has."""
        self._reasons: dict[str, None] = {}
        self._marked = 0.0
        self._newest = 0.0
        self._repeats = False  # whether the pass under way was asked for by nothing new
        self._may_grow = False  # as the last pass saw it
        self._ended = False

    def mark(self, reason: str, since: float | None = None) -> int:
        """Ask for a pass; return a ticket for `wait_for_pass`. Cheap, never blocks.

        `since` is when the reason was heard of, now if not given.
        """
        self._wanted += 1
        now = time.monotonic()
        self._newest = max(self._newest, now if since is None else since)
        if not self._reasons:
            self._marked = now
        self._reasons[reason] = None
        self._dirty.set()
        return self._wanted

    def saw_all_marks(self) -> None:
        """Count what was marked since the pass under way began among its causes.

        The pass calls it when it reads the records. Another one runs all the same.
        """
        if self._reasons:
            before = Cause((), self._marked) if self._repeats else self.cause
            reasons = dict.fromkeys((*before.reasons, *self._reasons))
            self.cause = Cause(tuple(reasons), before.since)
            self.as_of = max(self.as_of, self._newest)

    async def wait_for_pass(self, ticket: int) -> Report | None:
        """Wait until a pass that began after `mark` gave `ticket` has ended; the caller's deadline.

        Returns the last report, None if the pass failed or the sandbox ended meanwhile.
        """
        self._awaiting += 1
        self._awaited = max(self._awaited, ticket)
        self._hurry.set()
        try:
            while self._done < ticket and not self._ended:
                await self._finished.wait()
        finally:
            self._awaiting -= 1
        return self.report

    def is_awaited(self) -> bool:
        """Whether a hook or a request waits for a pass."""
        return self._awaiting > 0

    def is_due(self) -> bool:
        """Whether a pass was asked for that has not ended."""
        return self._done < self._wanted

    async def run(self, pass_: Callable[[str], Awaitable[PassResult]]) -> None:
        """Run passes until the sandbox has ended; whatever `pass_` awaits has a deadline."""
        tries, last = 0, PassVerdict.SETTLED
        try:
            while True:
                verdict = await self._one_pass(pass_)
                if verdict is PassVerdict.GONE:
                    return
                if verdict is not last:
                    tries, last = 0, verdict
                waits = _WAITS_S[verdict]
                if tries == len(waits):
                    await self._dirty.wait()
                elif await self._nothing_for(waits[tries]):
                    tries += 1
                elif verdict is PassVerdict.YOUNG:  # perhaps another thread was born
                    tries = 0
        finally:
            self._ended = True
            self._finished.set()

    async def _nothing_for(self, seconds: float) -> bool:
        """Wait so long, then ask for a pass; return False at once when something changed."""
        try:
            async with asyncio.timeout(seconds):
                await self._dirty.wait()
        except TimeoutError:
            self._dirty.set()
            return True
        return False

    async def _one_pass(self, pass_: Callable[[str], Awaitable[PassResult]]) -> PassVerdict:
        await self._dirty.wait()
        if self._may_grow and self._reasons.keys() == {BORN}:
            await self._rest(BORN_S)
        self._dirty.clear()
        ticket = self.began = self._wanted
        self.threads_only = not self.has_failed and self._reasons.keys() <= THREADS
        self._repeats = not self._reasons
        self.as_of = time.monotonic() if self._repeats else self._newest
        if self._reasons:
            self.cause = Cause(tuple(self._reasons), self._marked)
            self._reasons = {}
        worked_s = 0.0
        try:
            result = await pass_(self.sandbox_id)
        except Exception as error:  # the fault barrier of one sandbox
            self.has_failed, self.report = True, None
            why = about(PASS_FAILED, source=", ".join(self.cause.reasons))
            log.error("sandbox %s: pass failed: %s", self.sandbox_id, reason_of(error), extra=why)
            log.debug("sandbox %s: after %s", self.sandbox_id, self.cause.reasons, exc_info=True)
            verdict = PassVerdict.RETRY
        else:
            self.has_failed, self.report = False, result.report
            verdict, worked_s = result.verdict, result.worked_s
            self._may_grow = result.may_grow
        self._done = max(self._done, ticket)
        self._finished.set()
        self._finished.clear()
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


class SandboxEntry(Struct, frozen=True):
    """One sandbox of the table; `since` is when it was entered (CLOCK_MONOTONIC, seconds)."""

    supervisor: Supervisor
    cache: SandboxCache = field(default_factory=SandboxCache)
    since: float = field(default_factory=time.monotonic)


class Sandboxes:
    """The table of sandboxes: each one's supervisor, its cache, and the processes that work for it.

    A sandbox is marked here when something changed; runner.py runs the passes. Lifetime: the
    daemon's; used in the event loop's thread only.
    """

    def __init__(self) -> None:
        self._entries: dict[str, SandboxEntry] = {}
        self._owners: dict[int, str] = {}
        self.entered: asyncio.Queue[Supervisor] = asyncio.Queue()
        """Supervisors that do not run yet."""
        self.tracked: set[int] = set()
        """Pids whose threads and children the process connector reports; shared with it."""

    def enter(self, sandbox_id: str) -> SandboxEntry:
        """Return a sandbox's entry; a new sandbox gets one."""
        entry = self._entries.get(sandbox_id)
        if entry is None:
            entry = self._entries[sandbox_id] = SandboxEntry(Supervisor(sandbox_id))
            self.entered.put_nowait(entry.supervisor)
        return entry

    def mark(
        self, sandbox_id: str, reason: str, *, event: bool = True, since: float | None = None
    ) -> int:
        """Ask for a pass over a sandbox, new or known; return a ticket for `wait_for_pass`.

        `event`: something happened to the sandbox, so backing off from another writer ends (D13).
        `since` is when that was heard of, now if not given.
        """
        entry = self.enter(sandbox_id)
        if event:
            entry.cache.other_writers.forget()
        return entry.supervisor.mark(reason, since)

    def mark_process(self, tgid: int, reason: str) -> None:
        """Ask for a pass over the sandbox that a process works for, if any."""
        sandbox_id = self._owners.get(tgid)
        if sandbox_id is not None:
            self.mark(sandbox_id, reason, event=False)

    def resting(self, tgid: int) -> SandboxCache | None:
        """Return the cache of the sandbox that a process works for; None while a pass is due."""
        entry = self._entries.get(self._owners.get(tgid, ""))
        if entry is None or entry.cache.passing or entry.supervisor.is_due():
            return None
        return entry.cache

    def mark_all(self, reason: str, *, event: bool = False) -> None:
        """Ask for a pass over every sandbox."""
        for sandbox_id in list(self._entries):
            self.mark(sandbox_id, reason, event=event)

    async def wait_for_pass(self, sandbox_id: str, ticket: int) -> Report | None:
        """Wait for the pass that answers a ticket; None if it failed or the sandbox has ended."""
        entry = self._entries.get(sandbox_id)
        return None if entry is None else await entry.supervisor.wait_for_pass(ticket)

    def is_awaited(self, sandbox_id: str) -> bool:
        """Whether a hook or a request waits for a pass over a sandbox."""
        entry = self._entries.get(sandbox_id)
        return entry is not None and entry.supervisor.is_awaited()

    @property
    def any_awaited(self) -> bool:
        """Whether a hook or a request waits for any pass."""
        return any(entry.supervisor.is_awaited() for entry in self._entries.values())

    @property
    def any_due(self) -> bool:
        """Whether any pass was asked for that has not ended."""
        return any(entry.supervisor.is_due() for entry in self._entries.values())

    def began(self, sandbox_id: str) -> int:
        """Return the newest ticket that was given before the last pass over a sandbox began."""
        entry = self._entries.get(sandbox_id)
        return 0 if entry is None else entry.supervisor.began

    @property
    def ids(self) -> list[str]:
        """The sandboxes that have a supervisor."""
        return sorted(self._entries)

    @property
    def vmms(self) -> dict[str, ProcessKey]:
        """The accepted VMM of each sandbox that has one."""
        return {
            one: entry.cache.vmm.process
            for one, entry in self._entries.items()
            if entry.cache.vmm is not None
        }

    def mark_unfinished(self) -> None:
        """Ask for a pass over those without an accepted VMM, and those whose last pass failed."""
        for sandbox_id, entry in list(self._entries.items()):
            if entry.cache.vmm is None:
                self.mark(sandbox_id, "still without a VMM", event=False)
            if entry.supervisor.has_failed:
                self.mark(sandbox_id, "the last pass failed", event=False)

    def entry(self, sandbox_id: str) -> SandboxEntry:
        """Return a sandbox's entry; raises KeyError for a sandbox that is not in the table."""
        return self._entries[sandbox_id]

    def cache(self, sandbox_id: str) -> SandboxCache | None:
        """Return a sandbox's cache, None for a sandbox that is not in the table."""
        entry = self._entries.get(sandbox_id)
        return None if entry is None else entry.cache

    def known_vmm(self, sandbox_id: str) -> Vmm | None:
        """Return the VMM that the last pass over a sandbox found."""
        entry = self._entries.get(sandbox_id)
        return None if entry is None else entry.cache.vmm

    def drop(self, sandbox_id: str) -> None:
        """Remove a sandbox that has ended."""
        self._entries.pop(sandbox_id, None)
        self.track(sandbox_id, frozenset())

    def track(self, sandbox_id: str, pids: Collection[int]) -> bool:
        """Follow the threads, children and exits of a sandbox's processes, and of no others.

        Return whether one of them was not followed before: what it did until now is unknown.
        """
        owned = [pid for pid, owner in self._owners.items() if owner == sandbox_id]
        for pid in [pid for pid in owned if pid not in pids]:
            del self._owners[pid]
            self.tracked.discard(pid)
        new = [pid for pid in pids if pid not in self.tracked]
        self.tracked.update(new)
        self._owners.update(dict.fromkeys(new, sandbox_id))
        return bool(new)


class Neighbours(Observer):
    """What other sandboxes have exclusively: a VM without a cpuset keeps off it (D28).

    It is what the last pass over each of them decided, or what its records say until one has
    run. A pass that changes it asks for passes over the sandboxes that go by it. Lifetime: the
    daemon's; used in the event loop's thread only.

    Without a daemon records alone are known.
    """

    def __init__(self, registry: Registry, sandboxes: Sandboxes) -> None:
        self._registry = registry
        self._sandboxes = sandboxes
        self._version = -1
        self._recorded: list[str] = []
        self._decided: dict[str, CpuSet] = {}

    def exclusive(self, sandbox_id: str, node: Node) -> CpuSet:
        """Return the CPUs that sandboxes other than this one have exclusively."""
        if self._version != self._registry.version:
            self._version, self._recorded = self._registry.version, self._registry.sandboxes()
        others = {*self._recorded, *self._decided} - {sandbox_id}
        return union(self._of(one, node) for one in others)

    def _of(self, sandbox_id: str, node: Node) -> CpuSet:
        decided = self._decided.get(sandbox_id)
        if decided is not None:
            return decided
        records = self._registry.containers(sandbox_id)
        containers = resolve_cpusets(records, kubelet=node.kubelet, configured=EMPTY)
        return sandbox_mask(Sandbox(sandbox_id, containers), node).exclusive

    def passed(self, outcome: PassOutcome) -> None:
        """See Observer. An undo takes nothing from the containers, so it is no news."""
        placement = outcome.report.placement
        if placement is not None and placement.mask.origin != ON_REQUEST:
            self._take(outcome.sandbox_id, placement.mask.exclusive)

    def ended(self, outcome: PassOutcome) -> None:
        """See Observer."""
        self._take(outcome.sandbox_id, None)

    def _take(self, sandbox_id: str, exclusive: CpuSet | None) -> None:
        """Take what a pass decided, None for a sandbox that has ended."""
        before = self._decided.get(sandbox_id, EMPTY)
        if exclusive is None:
            self._decided.pop(sandbox_id, None)
        else:
            self._decided[sandbox_id] = exclusive
        if (exclusive or EMPTY) == before:
            return
        for other in self._sandboxes.ids:
            cache = self._sandboxes.cache(other)
            placement = cache.report.placement if cache is not None and cache.report else None
            if other != sandbox_id and (placement is None or lacks_cpuset(placement.mask)):
                self._sandboxes.mark(other, "exclusive pCPUs of another sandbox", event=False)
