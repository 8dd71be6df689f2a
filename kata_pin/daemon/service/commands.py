"""The verbs of the control socket (DESIGN D18, D19; wire/control.py has the protocol).

Reading verbs: `ping`, `state`, `explain`, `history`. Acting verbs: `pin`, `unpin`, `reconcile`,
`reload` and `release`, which gives every pin back and sets none until the daemon is restarted
(uninstall). Every reply carries its result under `document`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kata_pin.daemon.allocation.restore import KeptCpuset
from kata_pin.daemon.guests.manager import Guests
from kata_pin.daemon.live_config import LiveConfig
from kata_pin.daemon.reconcile.passes import PassRunner
from kata_pin.daemon.reconcile.sandboxes import Sandboxes
from kata_pin.daemon.service.control import Verb
from kata_pin.daemon.status.allocation import kept_documents
from kata_pin.daemon.status.documents import Json, applied_document, explanation_document
from kata_pin.daemon.status.overview import Overview
from kata_pin.daemon.store.database import Registry
from kata_pin.daemon.store.history import MAX_SHOWN, MAX_SINCE_S, History, history_document
from kata_pin.errors import DaemonError
from kata_pin.wire.control import Request

GUESTS_S: Final = 3.0
"""Longest that an undo waits for guests: their containers are given all guest CPUs back."""


@dataclass(frozen=True)
class Commands:
    """The verbs over what the daemon gives them.

    `look_around` takes in what Kata's own state tells before an operator's pass. `restore_cpusets`
    has all CPUs of containers restored that the allocator confined; returns those that still wait.
    """

    sandboxes: Sandboxes
    passes: PassRunner
    registry: Registry
    overview: Overview
    state: Callable[[], Json]
    reload: Callable[[], str]
    restore_cpusets: Callable[[], Awaitable[list[KeptCpuset]]]
    live: LiveConfig
    look_around: Callable[[], None]
    history: History
    guests: Guests

    @property
    def reading(self) -> Mapping[str, Verb]:
        """Those that change nothing; the status socket has only them."""
        return {
            "ping": self._ping,
            "state": self._state,
            "explain": self._explain,
            "history": self._history,
        }

    @property
    def all(self) -> Mapping[str, Verb]:
        """Every verb."""
        return {
            **self.reading,
            "pin": self._pin,
            "unpin": self._unpin,
            "reconcile": self._reconcile,
            "reload": self._reload,
            "release": self._release,
        }

    async def _ping(self, _request: Request) -> Json:
        return {"document": {}}

    async def _state(self, _request: Request) -> Json:
        return {"document": self.state()}

    async def _explain(self, request: Request) -> Json:
        (sandbox_id,) = self._selected(request, need=True)
        lines = self.overview.explanation(sandbox_id)
        return {"document": explanation_document(sandbox_id, lines)}

    async def _history(self, request: Request) -> Json:
        fields = request.fields
        since_s = fields.number("since_s", 0, MAX_SINCE_S)
        limit = fields.number("limit", 1, MAX_SHOWN) or MAX_SHOWN
        changes = self.history.changes(fields.text("sandbox"), since_s=since_s, limit=limit)
        return {"document": history_document(changes)}

    async def _pin(self, request: Request) -> Json:
        if not self.live.acts:
            raise DaemonError("not pinned: the daemon only observes", hint="setting mode: act")
        chosen = self._selected(request)
        self.registry.set_released(chosen, released=False)
        return await self._pass_over(chosen, "pin")

    async def _reconcile(self, request: Request) -> Json:
        return await self._pass_over(self._selected(request), "reconcile")

    async def _unpin(self, request: Request) -> Json:
        chosen = self._selected(request)
        self.registry.set_released(chosen, released=True)
        return await self._release_now(chosen)

    async def _release(self, _request: Request) -> Json:
        """Unlike unpin this is not remembered: the next daemon, if there is one, pins again."""
        self.live.stop_acting()
        waiting = kept_documents(await self.restore_cpusets())
        reply = await self._release_now(self.sandboxes.ids)
        return {"document": reply["document"] | {"cpusets_kept": waiting}}

    async def _reload(self, _request: Request) -> Json:
        problem = self.reload()
        if problem:
            raise DaemonError(f"configuration not reloaded: {problem}")
        return {"document": {}}

    async def _release_now(self, chosen: Sequence[str]) -> Json:
        for sandbox_id in chosen:
            await self.passes.release(sandbox_id)
        await self.guests.settled(chosen, GUESTS_S)
        return {"document": applied_document("unpin", self.overview.facts(chosen))}

    async def _pass_over(self, chosen: Sequence[str], verb: str) -> Json:
        self.look_around()
        tickets = [(one, self.sandboxes.mark(one, verb)) for one in chosen]
        for sandbox_id, ticket in tickets:
            if await self.sandboxes.settled(sandbox_id, ticket) is None:
                raise DaemonError(f"the pass over sandbox {sandbox_id} failed", hint="see the log")
        return {"document": applied_document(verb, self.overview.facts(chosen))}

    def _selected(self, request: Request, *, need: bool = False) -> list[str]:
        """Return the sandbox that a request names by its id; all where it names none."""
        sandbox_id = request.fields.text("sandbox")
        if not sandbox_id and not need:
            return self.sandboxes.ids
        if sandbox_id not in self.sandboxes.ids:
            raise DaemonError(f"no sandbox {sandbox_id!r}", hint="kata-pin show lists them")
        return [sandbox_id]
