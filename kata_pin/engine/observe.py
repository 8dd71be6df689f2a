"""What a pass observes.

It finds the processes of the node, the sandbox's VMM, and every thread that works for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from msgspec import Struct
from msgspec import field as msgspec_field
from msgspec.structs import replace

from kata_pin.base.errors import TaskGone, VmmError, reason_of
from kata_pin.base.placement import Note
from kata_pin.base.sandbox import Container, Process, Role, Thread, Vmm
from kata_pin.base.steps import Steps
from kata_pin.base.values import NoteLevel, listed
from kata_pin.engine.counters import Slices
from kata_pin.engine.node import NodeWatch
from kata_pin.engine.sandbox_cache import SandboxCache
from kata_pin.linux.cgroups import CpusetReader
from kata_pin.linux.files import HostRoot
from kata_pin.linux.process import ProcessIndex, is_alive
from kata_pin.linux.tasks import list_tids
from kata_pin.records.history import PROCESS_HUNG, VMM_CLAIMED, about
from kata_pin.records.pins import AcceptedVmms
from kata_pin.vmm.checks import SlowFacts, started_by
from kata_pin.vmm.claims import SHIM_COMMS, Shims, Strength
from kata_pin.vmm.find import Helper, VmmFinder, find_helpers
from kata_pin.vmm.role_cache import shared
from kata_pin.vmm.roles import identify
from kata_pin.vmm.state_files import HostAccess, KataPaths, state_stamp

log = logging.getLogger(__name__)


PATIENCE_S: Final = 0.1
"""How long a pass waits for processes that nothing names."""

SHOWN: Final = 4
"""Processes with locked memory that a note names; the metric counts all."""


@dataclass
class Survey:
    """Reads what passes and scans need of processes, before they run: nothing there waits for one.

    A pass waits for the few processes that a hook or Kata's files name for its sandbox. All
    others, which anybody can make, are read beside it; only a pass without a named VMM waits
    for them a moment.

    Everything runs in the event loop's thread.
    """

    _index: ProcessIndex
    _finder: VmmFinder
    _facts: SlowFacts
    complete: bool = field(default=False, init=False)
    """Whether every process was looked at once: from then on it is known who claims what."""

    _look: asyncio.Task[None] | None = field(default=None, init=False)
    _due: bool = field(default=False, init=False)

    async def all(self, *, patience_s: float | None = None) -> bool:
        """Read what is new of every process; wait at most so long. Return whether it has ended."""
        _, pending = await asyncio.wait({self.begin()}, timeout=patience_s)
        return not pending

    def afterwards(self, then: Callable[[], None]) -> None:
        """Call this when the reading that goes on has ended; not if none goes on."""
        if self._look is not None and not self._look.done():
            self._look.add_done_callback(lambda _: then())

    def begin(self) -> asyncio.Task[None]:
        """Read what is new, again if that goes on already; return what does it."""
        self._due = True
        if self._look is None or self._look.done():
            self._look = asyncio.create_task(self._read_all())
            self._look.add_done_callback(_log_failure)
        return self._look

    async def before_pass(self, sandbox_id: str, hints: Mapping[int, int]) -> None:
        """Read what a pass over a sandbox without a known VMM needs."""
        self._index.refresh()
        wanted = self._finder.named(sandbox_id, hints)
        parents = [one for own in wanted if (one := self._process(own.ppid)) is not None]
        beside = [child for one in parents for child in self._index.children(one.pid)]
        await self._facts.read([*wanted, *parents, *beside])
        if not any(self._finder.runs_vmm(one.pid) for one in wanted):
            await self.all(patience_s=PATIENCE_S)

    async def claims_to_be(self, sandbox_id: str, hints: Mapping[int, int]) -> bool:
        """Whether a process that a hook named claims to be the sandbox's VMM, accepted or not.

        No other process is read: on a full node listing them takes longer than all the rest.
        """
        await self._facts.read(self._finder.named(sandbox_id, hints))
        return self._finder.is_claimed(sandbox_id, hints)

    @property
    def has_wanted(self) -> bool:
        """Whether a pass asked for something in vain."""
        return self._facts.has_wanted

    async def read_wanted(self) -> bool:
        """Read what the last pass asked for in vain; return whether another pass may find more.

        Somebody else may have read it meanwhile.
        """
        wanted = self._facts.take_wanted()
        await self._facts.read(wanted)
        if not any(map(self._facts.knows, wanted)):
            return False
        self._index.note_change()
        return True

    def is_due(self) -> bool:
        """Whether processes wait to be read; then that begins now."""
        due = any(map(self._facts.lacks, self._finder.claims.unread.values()))
        if due:
            self.begin()
        return due

    @property
    def retry_s(self) -> float | None:
        """In how many seconds to look again at processes that did not answer; None for none."""
        return self._facts.retry_s(self._finder.claims.unread)

    async def run(self) -> None:
        """Wait until cancelled; then what still looks at processes is cancelled too."""
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            if self._look is not None:
                self._look.cancel()

    @property
    def notes(self) -> tuple[Note, ...]:
        """What the operator should know of processes whose memory is locked."""
        hung = self._facts.hung
        if not hung:
            return ()
        names = listed([f"pid {one.process.pid} ({one.process.comm})" for one in hung], SHOWN)
        text = (
            f"{names}: memory is locked, so the command line cannot be read; a VMM among them"
            " cannot be identified until that ends (hung storage, or a hostile process)"
        )
        return (Note("memory-locked", text, NoteLevel.WARNING),)

    @property
    def locked(self) -> int:
        """How many processes have their memory locked."""
        return len(self._facts.hung)

    async def _read_all(self) -> None:
        while self._due:
            self._due = False
            await self._read_new()
        self.complete = True

    async def _read_new(self) -> None:
        slices = Slices()
        await slices.run(self._index.refresh_in_steps())
        claims = self._finder.claims
        alive = {process.key for process in self._index.all()}
        self._facts.forget_ended(alive)
        self._finder.shims.forget_ended(alive)
        await slices.run(claims.look())
        unread = sorted(claims.unread.values(), key=self._is_strange)
        if await self._facts.read(unread):
            await slices.run(claims.look())
            self._index.note_change()

    def _is_strange(self, process: Process) -> bool:
        """Whether neither it nor its parent looks like a shim: those come last."""
        parent = self._index.get(process.ppid)
        return process.comm not in SHIM_COMMS and (parent is None or parent.comm not in SHIM_COMMS)

    def _process(self, pid: int) -> Process | None:
        found = self._index.get(pid) if pid > 1 else None
        return None if found is None or found.kernel else found


def _log_failure(look: asyncio.Task[None]) -> None:
    error = None if look.cancelled() else look.exception()
    if error is not None:
        log.error("cannot read all processes now: %s", reason_of(error))


def log_locked(process: Process) -> None:
    """Log a process whose memory is locked, once."""
    log.warning(
        "process %d (%s): its memory is locked: its command line cannot be read; retrying later",
        process.pid,
        process.comm,
        extra=about(PROCESS_HUNG),
    )


MAX_READ: Final = 8192
"""Threads of one sandbox that are looked at; each takes some 3 KiB. Those beyond keep the affinity
that they inherited from the thread that made them."""


class ThreadFinder(Struct, frozen=True):
    """Finds every thread that works for a sandbox, with its role: the VMM's own and its helpers'.

    What is known of threads and helpers is in the sandbox's cache, and makes finding them
    cheaper. The caller refreshes the process table that `host` has.
    """

    node: NodeWatch
    host: HostAccess
    kata: KataPaths
    shims: Shims

    def find(self, sandbox_id: str, vmm: Vmm, cache: SandboxCache) -> Steps[list[Thread]]:
        """Return the threads, those of the VMM first; raises TaskGone when the VMM is gone."""
        cpusets = CpusetReader(self.host.root, self.node.cgroup_mounts)
        cache.tasks.expire(cache.processes)
        cache.tasks.left_out = 0
        answers, asked = cache.qmp, cache.asked  # later ones may be about younger threads
        tasks = yield from cache.tasks.read(self.host.root, vmm.process.pid, cpusets, most=MAX_READ)
        roles = yield from identify(self.host, vmm, tasks, cache.roles, answers, asked=asked)
        threads = [Thread(task, roles[task.key]) for task in tasks if task.key in roles]
        for helper in self._helpers(sandbox_id, vmm, cache):
            role = shared(Role(helper.role, helper.source))
            room = MAX_READ - len(threads)
            if room <= 0:
                cache.tasks.left_out += 1
                continue
            try:
                helpers = yield from cache.tasks.read(
                    self.host.root, helper.process.pid, cpusets, most=room
                )
            except TaskGone:
                continue
            if is_alive(self.host.root, helper.process):
                threads += [Thread(task, role) for task in helpers]
        return threads

    def _helpers(self, sandbox_id: str, vmm: Vmm, cache: SandboxCache) -> tuple[Helper, ...]:
        """Return the sandbox's helpers, found again where a process or Kata's state changed."""
        if cache.same_processes and cache.helpers is not None:
            return cache.helpers[1]
        own = cache.roles.keys
        inputs = (
            self.host.processes.version,
            vmm,
            own,
            state_stamp(self.host.root, self.kata, sandbox_id),
        )
        if cache.helpers is None or cache.helpers[0] != inputs:
            cache.helpers = (
                inputs,
                find_helpers(self.host, vmm, sandbox_id, own, self.shims, paths=self.kata),
            )
        return cache.helpers[1]

    def saw_all(self, sandbox_id: str, cache: SandboxCache) -> bool:
        """Whether the last pass saw every thread and helper that there is now, as `has_all`."""
        vmm, report, before = cache.vmm, cache.report, cache.helpers
        if vmm is None or report is None or before is None or cache.same_processes:
            return False
        helpers = self._helpers(sandbox_id, vmm, cache)
        return helpers == before[1] and self.has_all(report.threads, vmm)

    def has_all(self, threads: Sequence[Thread], vmm: Vmm) -> bool:
        """Whether no process has a thread that is not among these; TaskGone for the VMM.

        Threads born while masks were set inherited what their creator had at that moment. A helper
        that is gone has no new threads, and says nothing about the VMM.
        """
        seen: dict[int, set[int]] = {vmm.process.pid: set()}
        for thread in threads:
            key = thread.task.key
            seen.setdefault(key.tgid, set()).add(key.tid)
        return all(tids.issuperset(self._tids(tgid, vmm)) for tgid, tids in seen.items())

    def _tids(self, tgid: int, vmm: Vmm) -> list[int]:
        try:
            return list_tids(self.host.root, tgid)
        except TaskGone:
            if tgid == vmm.process.pid:
                raise
            return []


class VmmSearch(Struct, frozen=True):
    """Which process is a sandbox's VMM: the known one while it lives, else who is believed.

    What was accepted is stored, so that it is not replaced by less (D24).

    The caller refreshes `index`, the process table that `finder` has.

    After a start, an accepted VMM that is confirmed again is believed before other processes
    were looked at; once they were, `find` compares it with those that claim the same sandbox.
    """

    root: HostRoot
    index: ProcessIndex
    finder: VmmFinder
    vmms: AcceptedVmms
    survey: Survey
    _uncompared: set[str] = msgspec_field(default_factory=set)
    _without: set[str] = msgspec_field(default_factory=set)
    """Sandboxes of which `prepare` found that no VMM runs their containers."""

    def was_accepted(self, sandbox_id: str) -> bool:
        """Whether the VMM that was accepted for a sandbox before still runs."""
        before = self.vmms.of(sandbox_id)
        return before is not None and before.strength > 0 and is_alive(self.root, before.process)

    async def prepare(
        self, sandbox_id: str, containers: Iterable[Container], known: Vmm | None
    ) -> None:
        """Read what `find` needs of processes, where it has to look for the VMM at all."""
        hints = _hints(containers)
        self._without.discard(sandbox_id)
        if known is None and await self._is_other_runtimes(sandbox_id, hints):
            self._without.add(sandbox_id)
        elif known is None or not is_alive(self.root, known.process):
            await self.survey.before_pass(sandbox_id, hints)

    async def _is_other_runtimes(self, sandbox_id: str, hints: Mapping[int, int]) -> bool:
        """Whether another runtime than Kata runs a sandbox, and nothing says otherwise.

        Only the processes that its hooks named are looked at. One that claims to be the VMM is
        searched as such, so that the administrator sees why it is refused.
        """
        if self.vmms.of(sandbox_id) is not None or self.finder.is_named(sandbox_id):
            return False
        if not self._runs_without_vmm(hints):
            return False
        return not await self.survey.claims_to_be(sandbox_id, hints)

    def find(
        self, sandbox_id: str, containers: Iterable[Container], known: Vmm | None
    ) -> tuple[Vmm | None, str]:
        """Return the VMM as of now, or why there is none; `known` is the one found last."""
        if known is None and self.is_without(sandbox_id):
            return None, "its containers run without a VM"
        hints, orphan = _hints(containers), False
        if known is not None and not is_alive(self.root, known.process):
            known = None
        if not self.survey.complete and known is None:
            known = self.finder.confirm(sandbox_id, hints)
            if known is not None:
                self._uncompared.add(sandbox_id)
        if known is not None:
            process = self.index.get(known.process.pid)
            orphan = process is not None and process.ppid != known.parent
            due = self.survey.complete and sandbox_id in self._uncompared
            if due:
                self._uncompared.discard(sandbox_id)
            if not due and not orphan:
                if not _confirms_more(known, process, hints):
                    return known, ""
                named = self.finder.confirm(sandbox_id, hints)
                if named is not None:
                    self.vmms.keep(sandbox_id, named)
                    return named, ""
        try:
            vmm = self.finder.find(sandbox_id, hints)
        except VmmError as error:
            if known is None:
                return None, str(error)
            # It was accepted, and is the same process.
            return replace(known, orphan=known.orphan or orphan), ""
        self.vmms.keep(sandbox_id, vmm)
        for other in vmm.refused:
            claimed = about(VMM_CLAIMED)
            log.warning("sandbox %s: not accepted as its VMM: %s", sandbox_id, other, extra=claimed)
        return vmm, ""

    def forget(self, sandbox_id: str) -> None:
        """Note that a sandbox has ended."""
        self._uncompared.discard(sandbox_id)
        self._without.discard(sandbox_id)
        self.vmms.ended(sandbox_id)

    def is_without(self, sandbox_id: str) -> bool:
        """Whether `prepare` found, for the pass under way, that the sandbox has no VMM."""
        return sandbox_id in self._without

    def runs_without_vmm(self, containers: Iterable[Container]) -> bool:
        """Whether the hooks' pids show that another runtime than Kata runs these containers.

        Kata's hooks report the VMM's pid or a thread of its shim (with both runtimes); those of
        runc and crun the container's first process. False if those processes are gone.
        """
        return self._runs_without_vmm(_hints(containers))

    def _runs_without_vmm(self, hints: Iterable[int]) -> bool:
        answers = [self.finder.is_kata(pid) for pid in hints]
        return bool(answers) and all(answer is False for answer in answers)

    def is_claimed(self, sandbox_id: str, containers: Iterable[Container]) -> bool:
        """Whether a process says that it is the sandbox's VMM, although it is not accepted.

        The one that was accepted before a restart may be one that cannot be verified now.
        """
        before = self.vmms.of(sandbox_id)
        if before is not None and is_alive(self.root, before.process):
            return True
        return self.finder.is_claimed(sandbox_id, _hints(containers))


def _confirms_more(known: Vmm, process: Process | None, hints: Mapping[int, int]) -> bool:
    """Whether a hook has named a VMM since it was found by less."""
    stamp_ns = hints.get(known.process.pid)
    named = stamp_ns is not None and process is not None and started_by(process, stamp_ns)
    return named and known.strength < Strength.HOOK


def _hints(containers: Iterable[Container]) -> dict[int, int]:
    """Return the pids that hooks reported, each with the time of its first message."""
    hints: dict[int, int] = {}
    for one in containers:
        if one.pid_hint:
            known = hints.get(one.pid_hint, one.recorded_ns)
            hints[one.pid_hint] = min(known, one.recorded_ns)
    return hints
