"""The commands of the control socket (D18, D19; wire/control.py has the protocol)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kata_pin.config.table import as_data
from kata_pin.daemon.guests.manager import Guests
from kata_pin.daemon.live_config import LiveConfig
from kata_pin.daemon.reconcile.passes import PassRunner
from kata_pin.daemon.reconcile.sandboxes import Sandboxes
from kata_pin.daemon.service.control import Verb
from kata_pin.daemon.service.reload import Reload
from kata_pin.daemon.status.documents import history_report
from kata_pin.daemon.status.overview import Overview
from kata_pin.daemon.status.sandbox import applied
from kata_pin.daemon.store.history import MAX_SHOWN, MAX_SINCE_S, History
from kata_pin.daemon.store.node_events import NodeEvents
from kata_pin.daemon.store.pins import Pins
from kata_pin.errors import DaemonError
from kata_pin.model.reports.applied import Applied
from kata_pin.model.reports.explain import Explanation
from kata_pin.model.reports.pools import KeptCpuset
from kata_pin.model.reports.settings import ConfigDocument
from kata_pin.model.reports.watch import WatchDocument
from kata_pin.wire import reports
from kata_pin.wire.request import Request

GUESTS_S: Final = 3.0
"""Longest that an undo waits for guests, whose containers get all guest CPUs back."""


@dataclass(frozen=True)
class Commands:
    """The commands, over the daemon's objects.

    `look_around` records Kata's own state before an operator's pass. `restore_cpusets` restores the
    cpusets of containers that the allocator confined; returns those that are still pending. `watch`
    returns what was seen of exclusive pCPUs.
    """

    sandboxes: Sandboxes
    passes: PassRunner
    pins: Pins
    overview: Overview
    state: Callable[[str], Awaitable[bytes]]
    reload: Reload
    events: NodeEvents
    restore_quiet: Callable[[], Awaitable[Sequence[str]]]
    restore_cpusets: Callable[[], Awaitable[tuple[KeptCpuset, ...]]]
    live: LiveConfig
    look_around: Callable[[], Awaitable[None]]
    history: History
    guests: Guests
    watch: Callable[[], WatchDocument]

    @property
    def reading(self) -> Mapping[str, Verb]:
        """Those that change nothing; the status socket has only them."""
        return {
            "ping": self._ping,
            "names": self._names,
            "state": self._state,
            "explain": self._explain,
            "history": self._history,
            "config": self._config,
            "watch": self._watch,
        }

    @property
    def all(self) -> Mapping[str, Verb]:
        """Every command."""
        return {
            **self.reading,
            "pin": self._pin,
            "unpin": self._unpin,
            "reconcile": self._reconcile,
            "reload": self._reload,
            "release": self._release,
        }

    async def _ping(self, _request: Request) -> bytes:
        return b"{}"

    async def _names(self, _request: Request) -> bytes:
        return reports.encode(self.overview.names())

    async def _state(self, request: Request) -> bytes:
        named = request.fields.text("sandbox")
        return await self.state(self._selected(request)[0] if named else "")

    async def _explain(self, request: Request) -> bytes:
        (sandbox_id,) = self._selected(request, need=True)
        lines = self.overview.explanation(sandbox_id)
        return reports.encode(Explanation(sandbox=sandbox_id, lines=lines))

    async def _history(self, request: Request) -> bytes:
        fields = request.fields
        since_s = fields.number("since_s", 0, MAX_SINCE_S)
        limit = fields.number("limit", 1, MAX_SHOWN) or MAX_SHOWN
        sandbox = fields.text("sandbox")
        found = self.history.changes(sandbox, since_s=since_s, limit=limit)
        events = [] if sandbox else self.events.newest(limit, since_s=since_s)
        return reports.encode(history_report(found, events))

    async def _config(self, _request: Request) -> bytes:
        settings, refused = as_data(self.live.now), self.reload.refused
        return reports.encode(ConfigDocument(settings=settings, running=True, refused=refused))

    async def _watch(self, _request: Request) -> bytes:
        return reports.encode(self.watch())

    async def _pin(self, request: Request) -> bytes:
        if not self.live.acts:
            raise DaemonError("not pinned: the daemon only observes", hint="setting mode: act")
        chosen = self._selected(request)
        self.pins.set_released(chosen, released=False)
        return await self._pass_over(chosen, "pin")

    async def _reconcile(self, request: Request) -> bytes:
        return await self._pass_over(self._selected(request), "reconcile")

    async def _unpin(self, request: Request) -> bytes:
        return await self._release_now(self._selected(request), remember=True)

    async def _release(self, _request: Request) -> bytes:
        """Restore every affinity, and set none until the daemon is restarted (uninstall).

        Unlike unpin this is not remembered: the next daemon, if there is one, pins again.
        """
        self.live.stop_acting()
        kept = await self.restore_cpusets()
        noisy = await self.restore_quiet()
        return await self._release_now(self.sandboxes.ids, kept, noisy, remember=False)

    async def _reload(self, _request: Request) -> bytes:
        problem = self.reload()
        if problem:
            raise DaemonError(f"configuration not reloaded: {problem}")
        return b"{}"

    async def _release_now(
        self,
        chosen: Sequence[str],
        kept: Sequence[KeptCpuset] = (),
        quiet: Sequence[str] = (),
        *,
        remember: bool,
    ) -> bytes:
        for sandbox_id in chosen:
            await self.passes.release(sandbox_id, remember=remember)
        await self.guests.settled(chosen, GUESTS_S)
        return self._applied("unpin", chosen, kept, quiet)

    async def _pass_over(self, chosen: Sequence[str], verb: str) -> bytes:
        await self.look_around()
        tickets = [(one, self.sandboxes.mark(one, verb)) for one in chosen]
        for sandbox_id, ticket in tickets:
            if await self.sandboxes.settled(sandbox_id, ticket) is None:
                raise DaemonError(f"the pass over sandbox {sandbox_id} failed", hint="see the log")
        return self._applied(verb, chosen)

    def _applied(
        self,
        verb: str,
        chosen: Sequence[str],
        kept: Sequence[KeptCpuset] = (),
        quiet: Sequence[str] = (),
    ) -> bytes:
        done = applied(self.overview.facts(chosen))
        document = Applied(
            kind=verb, sandboxes=done, cpusets_kept=tuple(kept), quiet_kept=tuple(quiet)
        )
        return reports.encode(document)

    def _selected(self, request: Request, *, need: bool = False) -> list[str]:
        """Return the sandbox that a request names by its id; all where it names none."""
        sandbox_id = request.fields.text("sandbox")
        if not sandbox_id and not need:
            return self.sandboxes.ids
        if sandbox_id not in self.sandboxes.ids:
            raise DaemonError(f"no sandbox {sandbox_id!r}", hint="kata-pin show lists them")
        return [sandbox_id]
