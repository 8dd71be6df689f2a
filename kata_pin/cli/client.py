"""Gets documents from the daemon's sockets, or makes them in this process without a daemon (D19).

Verbs that change something fail if a daemon is running but does not answer: two writers must not
race. Every wait has a deadline. One request per connection.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Literal, Protocol, TypeVar

from msgspec.structs import replace

from kata_pin.base.errors import DaemonError
from kata_pin.service.exchange import DaemonAway, DaemonSilent
from kata_pin.service.protocol import ask

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kata_pin.base.config.tree import Config
    from kata_pin.base.documents.answers import (
        Applied,
        BindDocument,
        Explanation,
        HistoryDocument,
        SandboxName,
    )
    from kata_pin.base.documents.state import State

Document = TypeVar("Document")

READ_S: Final = 2.0
"""Longest wait for an answer to a reading verb; the daemon answers in milliseconds."""

AGAIN_S: Final = 30.0
"""How long a daemon that hangs is not asked again: `top` would wait READ_S for each sample."""

WRITE_S: Final = 35.0
"""Longest wait for affinities to be set; a little longer than the daemon's own deadline."""

_SOCKETS: Final = {True: ("status.sock", "control.sock"), False: ("control.sock",)}


class ClientSettings(Protocol):
    """What a Provider needs to know; the configuration only without a daemon."""

    @property
    def runtime_dir(self) -> str:
        """The daemon's directory."""

    @property
    def config(self) -> Config:
        """The configuration; raises ConfigError."""


class Provider:
    """Gets documents for one command; a daemon that hangs is asked, and reported, once."""

    def __init__(self, settings: ClientSettings) -> None:
        self._settings = settings
        self._offline: State | None = None
        self._silent: tuple[DaemonSilent, float] | None = None

    def chosen(self, name: str | None, namespace: str | None = None) -> str:
        """Return the id of the sandbox that a name means, nothing for None; raises KataPinError."""
        if name is None:
            return ""
        from kata_pin.cli.reports.words import choose, within

        return choose(within(self.names(), namespace), name).id

    def names(self) -> tuple[SandboxName, ...]:
        """Return the names of all sandboxes; raises KataPinError."""
        from kata_pin.base.documents.answers import Names, SandboxName

        try:
            return self._ask(Names, "names", reading=True).sandboxes
        except (DaemonAway, DaemonSilent) as error:
            self._offline = state = self._without_daemon(error)
            return tuple(SandboxName(one.id, one.pod) for one in state.sandboxes)

    def state(self, sandbox_id: str = "") -> State:
        """Return the state document, of one sandbox if one is named; raises KataPinError."""
        from kata_pin.base.documents.state import State

        try:
            return self._ask(State, "state", reading=True, sandbox=sandbox_id or None)
        except (DaemonAway, DaemonSilent) as error:
            state = self._without_daemon(error)
            chosen = (one for one in state.sandboxes if sandbox_id in {"", one.id})
            return replace(state, sandboxes=tuple(chosen))

    def state_of(self, name: str | None, namespace: str | None = None) -> State:
        """Return the state of the sandbox that a name means, of all for None.

        Mostly one request is enough: the daemon knows whole names. Raises KataPinError.
        """
        from kata_pin.base.documents.state import State

        if name and namespace is None:
            with suppress(DaemonError):
                return self._ask(State, "state", reading=True, sandbox=name)
        return self.state(self.chosen(name, namespace))

    def explain(self, sandbox_id: str) -> Explanation:
        """Return the `explain` document of one sandbox; raises KataPinError."""
        from kata_pin.base.documents.answers import Explanation

        try:
            return self._ask(Explanation, "explain", reading=True, sandbox=sandbox_id)
        except (DaemonAway, DaemonSilent):
            from kata_pin.service import offline

            _log_nowhere()
            return offline.explain(self._settings.config, sandbox_id)

    def history(self, name: str, *, since_s: int | None, limit: int) -> HistoryDocument:
        """Return the `history` document: of all, or of the sandboxes that a name means."""
        from kata_pin.base.documents.answers import HistoryDocument

        asked = {"sandbox": name, "since_s": since_s, "limit": limit}
        try:
            return self._ask(HistoryDocument, "history", reading=True, **asked)
        except (DaemonAway, DaemonSilent):
            from kata_pin.service import offline

            return offline.history(self._settings.config, name, since_s=since_s, limit=limit)

    def daemons(self, kind: type[Document], verb: str) -> Document:
        """Return what only a daemon knows; raises DaemonError, also without one."""
        return self._ask(kind, verb, reading=True)

    def option(self, kind: type[Document], verb: str) -> Document:
        """Return the document of an option of another package; raises DaemonError."""
        return self._ask(kind, "option", reading=True, name=verb)

    def reload(self) -> None:
        """Have the daemon read its configuration again; raises DaemonError if it refuses it."""
        ask(self._probed(), "reload", {}, WRITE_S, waiting=_tell_waiting)

    def change(self, verb: Literal["pin", "unpin"], name: str | None) -> Applied:
        """Set the affinities of one sandbox, or of all, now; or restore the original ones.

        A daemon that hangs is found before anything else: nothing is set beside it.
        """
        from kata_pin.base.documents.answers import Applied

        try:
            self._probed()
            chosen = self.chosen(name)
            return self._ask(Applied, verb, reading=False, sandbox=chosen or None)
        except DaemonAway:
            from kata_pin.service import offline

            _log_nowhere()
            act = offline.pin if verb == "pin" else offline.unpin
            return act(self._settings.config, self.chosen(name) or None)

    def bind(self, name: str | None, given: Mapping[str, str | int | None]) -> BindDocument:
        """Bind, try or clear what `given` says; only a daemon ends it in time."""
        from kata_pin.base.documents.answers import BindDocument

        self._probed()
        chosen = self.chosen(name)
        return self._ask(BindDocument, "bind", reading=False, sandbox=chosen or None, **given)

    def _probed(self) -> str:
        """Return the path of the control socket once the daemon has answered on it."""
        path = os.path.join(self._settings.runtime_dir, "control.sock")
        probe(path)
        return path

    def _without_daemon(self, error: DaemonAway | DaemonSilent) -> State:
        """Return the state as of now, or as of `names`, once."""
        found, self._offline = self._offline, None
        if found is not None:
            return found
        from kata_pin.base.documents.document import Daemon
        from kata_pin.service import offline

        _log_nowhere()
        silent = isinstance(error, DaemonSilent)
        daemon = Daemon(running=False, reason=error.message, silent=silent)
        return replace(offline.state(self._settings.config), daemon=daemon)

    def _ask(
        self, kind: type[Document], verb: str, *, reading: bool, **given: str | int | None
    ) -> Document:
        from kata_pin.service import protocol

        if self._silent is not None and time.monotonic() < self._silent[1]:
            raise self._silent[0]
        arguments = {name: value for name, value in given.items() if value is not None}
        deadline_s = READ_S if reading else WRITE_S
        away: DaemonAway | None = None
        for name in _SOCKETS[reading]:
            try:
                path = os.path.join(self._settings.runtime_dir, name)
                answer = ask(path, verb, arguments, deadline_s, waiting=_tell_waiting)
                return protocol.decode(answer, kind)
            except DaemonAway as error:
                away = away or error
            except DaemonSilent as error:
                self._silent = error, time.monotonic() + AGAIN_S
                if reading:
                    _tell(f"{error.message}; continuing without it\n  hint: {error.hint}")
                raise
        assert away is not None
        raise away


def _log_nowhere() -> None:
    """Keep what the daemon would log off the terminal: the documents say it; --debug shows it."""
    import logging

    logging.getLogger("kata_pin").addHandler(logging.NullHandler())


def probe(path: str) -> None:
    """Ask the daemon whether it is there, before a request that may take long.

    Raises what ask() raises; DaemonSilent after READ_S.
    """
    ask(path, "ping", {}, READ_S, waiting=_tell_waiting)


def _tell_waiting(longest_s: float) -> None:
    """Say on stderr why nothing happens."""
    _tell(f"waiting for the daemon's answer, up to {longest_s:g} s")


def _tell(text: str) -> None:
    """Write to stderr at once: a program may read stdout."""
    sys.stderr.write(f"kata-pin: {text}\n")
    sys.stderr.flush()
