"""Marks sandboxes when their threads appear or end, and confines new threads at once (D1)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from kata_pin.base.config.tree import LiveConfig, NewThreads
from kata_pin.base.errors import HostError, StateError, TaskGone
from kata_pin.base.placement import Action
from kata_pin.base.threads import ThreadKey
from kata_pin.base.values import Outcome
from kata_pin.engine.counters import Counters
from kata_pin.engine.node import NodeWatch
from kata_pin.engine.sandbox_cache import SandboxCache
from kata_pin.engine.sandboxes import BORN, Sandboxes
from kata_pin.linux.affinity import apply_all
from kata_pin.linux.events import (
    Event,
    NewProcess,
    NewProgram,
    NewThread,
    Overrun,
    ProcEvents,
    TaskExit,
)
from kata_pin.linux.files import HostRoot
from kata_pin.linux.process import ProcessIndex, read_process
from kata_pin.linux.tasks import get_affinity, starttime
from kata_pin.records.pins import Pins
from kata_pin.vmm.find import served_by

log = logging.getLogger(__name__)


# Sets new threads of a VMM before a pass knows what they are.
#
# A thread inherits the affinity of the one that made it. If no thread of the sandbox should have
# that, whatever its role, it gets what the main thread should have: to a pass, a thread that no
# source names is an emulator thread too. The pass that its birth asks for corrects that if need be.


def confine(root: HostRoot, cache: SandboxCache, tgid: int, tids: Iterable[int]) -> None:
    """Set those new threads of a process that inherited what suits no role; raises HostError.

    Nothing is set for another process than the VMM, nor where the last pass confined nothing. What
    cannot be set is left to the next pass.
    """
    report = cache.report
    if cache.vmm is None or report is None:
        return
    placement = report.placement  # with the VMM's main thread, which no other process has
    main = placement.desired.get(ThreadKey(tgid, *cache.vmm.process)) if placement else None
    if placement is None or placement.mask.mask is None or main is None or main.release:
        return
    suitable = {one.applied for one in placement.desired.values()}
    actions = []
    for tid in tids:
        try:
            affinity = get_affinity(tid, root)
            if affinity not in suitable:
                key = ThreadKey(tgid, tid, starttime(root, tgid, tid))
                actions.append(Action(key, main.applied, affinity, main.reason))
        except TaskGone:
            continue
    if actions:
        done = apply_all(root, actions)
        cache.confined += (one for one in done if one.outcome is Outcome.DONE)


# Marks sandboxes when their threads and processes appear or end, and hears of new VMMs (D1).
#
# Without the kernel's reports audits find what is new, and passes know that (D11).

KTHREADD: Final = 2
"""The pid of the parent of all kernel threads."""

EVENTS_RETRY_S: Final = 30.0
"""Between tries to subscribe to process events where that failed."""

KERNEL_THREAD_LOOKS_S: Final = (0.005, 0.05, 0.5)
"""Further looks at a new kernel thread: a vhost worker of Linux 6.1 gets its name and its creator's
cgroup, which resets its affinity, only after it was created, without an event."""

MAX_LOOKS: Final = 1000
"""Most processes that are looked at within a second: each takes 20 us, and anybody can start
programs. The audit finds what is left out."""


@dataclass
class ThreadEvents:
    """Follows process events until cancelled.

    `may_serve` says of the pid of a process whether it may be a VMM or a file server, and `look` is
    called when such a one has started: Kata records a sandbox only when its guest has booted, and
    nothing else reports it before. `index` is told of every program that a process starts.
    """

    _root: HostRoot
    _live_config: LiveConfig
    _node: NodeWatch
    _pins: Pins
    _sandboxes: Sandboxes
    _counters: Counters
    _index: ProcessIndex
    _may_serve: Callable[[int], bool]
    _look: Callable[[], None]
    _live: bool | None = None
    _looked_at: int = 0
    _second: int = 0

    async def follow(self) -> None:
        """Mark sandboxes as their threads appear; without events the audit finds them.

        Raises HostError when the events are not available and `new_threads` is `events`.
        """
        if self._node.config.new_threads is NewThreads.AUDIT:
            self._set_live(live=False, why="setting new_threads")
            return
        while True:
            events = ProcEvents(
                self._sandboxes.tracked,
                wanted=self._is_wanted,
                connect=self._root.calls.process_events,
            )
            try:
                await events.open()
                self._set_live(live=True)
                async for batch in events:
                    self._confine_new(batch)
                    for event in batch:
                        self._take(event)
            except HostError as error:
                if self._node.config.new_threads is NewThreads.EVENTS:
                    raise
                self._set_live(live=False, why=str(error))
            finally:
                events.close()
            await asyncio.sleep(EVENTS_RETRY_S)

    def _set_live(self, *, live: bool, why: str = "") -> None:
        if self._live is live:
            return
        self._live = live
        if live:
            log.info("process events are available: new threads are pinned at once")
        else:
            log.warning("new threads are pinned only at the next audit: %s", why)
        if self._node.live_threads != live:
            self._node.live_threads = live
            try:
                self._pins.set_live_threads(live=live)
            except StateError as error:  # only needed by commands without a daemon
                log.error("cannot record whether new threads are reported: %s", error)
            self._sandboxes.mark_all("process events")

    def _take(self, event: Event) -> None:
        match event:
            case NewThread(tgid, _):
                self._sandboxes.mark_process(tgid, BORN)
            case TaskExit(tgid, _):
                self._sandboxes.mark_process(tgid, "thread exited")
            case NewProcess(pid, ppid):
                self._mark_born(pid, ppid)
                for wait_s in KERNEL_THREAD_LOOKS_S if ppid == KTHREADD else ():
                    asyncio.get_running_loop().call_later(wait_s, self._mark_born, pid, ppid)
            case NewProgram(pid):
                self._look()
                self._mark_started(pid)
            case Overrun():
                self._counters.overruns += 1
                self._look()  # a VMM's start may be among them
                self._sandboxes.mark_all("process events were lost")

    def _confine_new(self, batch: Iterable[Event]) -> None:
        """Set new threads that inherited a wrong affinity, before the passes that find them."""
        born: dict[int, list[int]] = {}
        for event in batch:
            if isinstance(event, NewThread):
                born.setdefault(event.tgid, []).append(event.tid)
        for tgid, tids in born.items() if self._live_config.acts else ():
            cache = self._sandboxes.resting(tgid)
            if cache is not None:
                with contextlib.suppress(HostError):  # the pass meets it again, and reports it
                    confine(self._root, cache, tgid, tids)

    def _is_wanted(self, pid: int) -> bool:
        """Whether a process that runs a new program may serve a sandbox; not every one is asked."""
        self._index.note_exec(pid)
        second = int(time.monotonic())
        if second != self._second:
            self._second, self._looked_at = second, 0
        self._looked_at += 1
        return self._looked_at <= MAX_LOOKS and self._may_serve(pid)

    def _mark_started(self, pid: int) -> None:
        """Mark the sandbox whose shim started a program: at its fork it was not known as that."""
        with contextlib.suppress(TaskGone):
            ppid = read_process(self._root, pid).ppid
            self._sandboxes.mark_process(ppid, "process born")

    def _mark_born(self, pid: int, ppid: int) -> None:
        self._sandboxes.mark_process(works_for(self._root, pid, ppid), "process born")


def works_for(root: HostRoot, pid: int, ppid: int) -> int:
    """Return the process that a new process works for: its parent, or a kernel worker's VMM.

    Before Linux 6.4 vhost workers are kernel threads (vmm/find.py).
    """
    if ppid != KTHREADD:
        return ppid
    try:
        name = read_process(root, pid).comm
    except TaskGone:
        return ppid
    return served_by(root, name) or ppid
