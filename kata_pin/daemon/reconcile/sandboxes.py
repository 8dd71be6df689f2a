"""The table of sandboxes: each one's supervisor, its cache, and the processes that work for it.

A sandbox is marked here when something changed; passes.py runs the passes.
Lifetime: the daemon's; used in the event loop's thread only.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from dataclasses import dataclass, field

from kata_pin.daemon.reconcile.sandbox_cache import SandboxCache
from kata_pin.daemon.reconcile.supervisor import Supervisor
from kata_pin.model.placement import Report
from kata_pin.model.sandbox import Vmm
from kata_pin.model.thread import ProcessKey


@dataclass(frozen=True)
class Entry:
    """One sandbox of the table; `since` is when it was entered (CLOCK_MONOTONIC, seconds)."""

    supervisor: Supervisor
    cache: SandboxCache = field(default_factory=SandboxCache)
    since: float = field(default_factory=time.monotonic)


class Sandboxes:
    """See the module."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._owners: dict[int, str] = {}
        self.entered: asyncio.Queue[Supervisor] = asyncio.Queue()
        """Supervisors that do not run yet."""
        self.tracked: set[int] = set()
        """Pids whose threads and children the process connector reports; shared with it."""

    def enter(self, sandbox_id: str) -> Entry:
        """Return a sandbox's entry; a new sandbox gets one."""
        entry = self._entries.get(sandbox_id)
        if entry is None:
            entry = self._entries[sandbox_id] = Entry(Supervisor(sandbox_id))
            self.entered.put_nowait(entry.supervisor)
        return entry

    def mark(self, sandbox_id: str, reason: str, *, event: bool = True) -> int:
        """Ask for a pass over a sandbox, new or known; return a ticket for `settled`.

        `event`: something happened to the sandbox, so backing off from another writer ends (D13).
        """
        entry = self.enter(sandbox_id)
        if event:
            entry.cache.other_writers.forget()
        return entry.supervisor.mark(reason)

    def mark_process(self, tgid: int, reason: str) -> None:
        """Ask for a pass over the sandbox that a process works for, if any."""
        sandbox_id = self._owners.get(tgid)
        if sandbox_id is not None:
            self.mark(sandbox_id, reason, event=False)

    def mark_all(self, reason: str, *, event: bool = False) -> None:
        """Ask for a pass over every sandbox."""
        for sandbox_id in list(self._entries):
            self.mark(sandbox_id, reason, event=event)

    async def settled(self, sandbox_id: str, ticket: int) -> Report | None:
        """Wait for the pass that answers a ticket; None if it failed or the sandbox has ended."""
        entry = self._entries.get(sandbox_id)
        return None if entry is None else await entry.supervisor.settled(ticket)

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

    @property
    def without_vmm(self) -> list[str]:
        """The sandboxes whose VMM was not found, or not accepted, by the last pass."""
        return [one for one, entry in self._entries.items() if entry.cache.vmm is None]

    @property
    def failed(self) -> list[str]:
        """The sandboxes whose last pass failed."""
        return [one for one, entry in self._entries.items() if entry.supervisor.has_failed]

    def entry(self, sandbox_id: str) -> Entry:
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
