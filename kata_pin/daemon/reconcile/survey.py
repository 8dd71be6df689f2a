"""Reads what passes and scans need of processes, before they run: nothing there waits for one.

A pass waits for the few processes that a hook or Kata's files name for its sandbox. All others,
which anybody can make, are read beside it; only a pass without a named VMM waits for them a moment.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from kata_pin.daemon.journal import PROCESS_HUNG, about
from kata_pin.daemon.reconcile.slices import Slices
from kata_pin.errors import reason_of
from kata_pin.host.process import ProcessIndex
from kata_pin.model.placement import Note, NoteLevel
from kata_pin.model.thread import Process
from kata_pin.vmm.find import VmmFinder
from kata_pin.vmm.shims import SHIM_COMMS
from kata_pin.vmm.slow_facts import SlowFacts

log = logging.getLogger(__name__)

PATIENCE_S: Final = 0.1
"""How long a pass waits for processes that nothing names."""

SHOWN: Final = 4
"""Processes with locked memory that a note names; the metric counts all."""


@dataclass
class Survey:
    """See the module; everything runs in the event loop's thread."""

    _index: ProcessIndex
    _finder: VmmFinder
    _facts: SlowFacts
    complete: bool = field(default=False, init=False)
    """Whether every process was looked at once: from then on it is known who claims what."""

    _look: asyncio.Task[None] | None = field(default=None, init=False)
    _due: bool = field(default=False, init=False)

    async def all(self, *, patience_s: float | None = None) -> None:
        """Read what is new of every process; wait at most so long, while it goes on."""
        await asyncio.wait({self.begin()}, timeout=patience_s)

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
        pids = self._finder.named(sandbox_id, hints)
        wanted = [one for pid in pids if (one := self._process(pid)) is not None]
        parents = [one for own in wanted if (one := self._process(own.ppid)) is not None]
        beside = [child for one in parents for child in self._index.children(one.pid)]
        await self._facts.read([*wanted, *parents, *beside])
        if not any(self._finder.runs_vmm(one.pid) for one in wanted):
            await self.all(patience_s=PATIENCE_S)

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
        names = ", ".join(f"pid {one.process.pid} ({one.process.comm})" for one in hung[:SHOWN])
        more = f" and {len(hung) - SHOWN} more" if len(hung) > SHOWN else ""
        text = (
            f"{names}{more}: memory is locked, so the command line cannot be read; a VMM among them"
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
        self._index.refresh()
        claims = self._finder.claims
        self._facts.forget_ended(one.key for one in self._index.all())
        slices = Slices()
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
        log.error("cannot look at all processes now: %s", reason_of(error))


def log_locked(process: Process) -> None:
    """Log a process whose memory is locked, once."""
    log.warning(
        "process %d (%s): its memory is locked: its command line cannot be read; retrying later",
        process.pid,
        process.comm,
        extra=about(PROCESS_HUNG),
    )
