"""Gets documents from the daemon's sockets, or makes them in this process without a daemon (D19).

Verbs that change something fail if a daemon is running but does not answer: two writers must not
race. Every wait has a deadline. One request per connection.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Literal, Protocol, TypeVar

from kata_pin.errors import DaemonError, KataPinError, RemoteProtocolError
from kata_pin.wire.control import MAX_REPLY, LineDecoder, encode_request, parse_reply

if TYPE_CHECKING:
    from kata_pin.config import Config
    from kata_pin.model.reports.applied import Applied
    from kata_pin.model.reports.explain import Explanation
    from kata_pin.model.reports.history import HistoryDocument
    from kata_pin.model.reports.names import SandboxName
    from kata_pin.model.reports.state import State

Document = TypeVar("Document")

READ_S: Final = 5.0
"""Longest wait for an answer to a reading verb; the daemon answers in milliseconds."""

WRITE_S: Final = 35.0
"""Longest wait for affinities to be set; a little longer than the daemon's own deadline."""

CHUNK: Final = 256 * 1024

_SOCKETS: Final = {True: ("status.sock", "control.sock"), False: ("control.sock",)}


class DaemonAway(DaemonError):  # noqa: N818 - a state of the world
    """No daemon is listening."""


class DaemonSilent(DaemonError):  # noqa: N818 - as above
    """A daemon is listening but does not answer in time."""


class Settings(Protocol):
    """What a Provider needs to know; the configuration only without a daemon."""

    @property
    def runtime_dir(self) -> str:
        """The daemon's directory."""

    @property
    def config(self) -> Config:
        """The configuration; raises ConfigError."""


class Provider:
    """Gets documents for one command; once the daemon was found away, it is not asked again."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._offline: State | None = None

    def chosen(self, name: str | None) -> str:
        """Return the id of the sandbox that a name means, nothing for None; raises KataPinError."""
        if name is None:
            return ""
        from kata_pin.cli.reports.selection import choose

        return choose(self.names(), name).id

    def names(self) -> tuple[SandboxName, ...]:
        """Return the names of all sandboxes; raises KataPinError."""
        from kata_pin.model.reports.names import Names, SandboxName

        try:
            return self._ask(Names, "names", reading=True).sandboxes
        except (DaemonAway, DaemonSilent) as error:
            state = self._without_daemon(error)
            return tuple(SandboxName(one.id, one.pod) for one in state.sandboxes)

    def state(self, sandbox_id: str = "") -> State:
        """Return the state document, of one sandbox if one is named; raises KataPinError."""
        from kata_pin.model.reports.state import State

        try:
            return self._ask(State, "state", reading=True, sandbox=sandbox_id or None)
        except (DaemonAway, DaemonSilent) as error:
            state = self._without_daemon(error)
            chosen = (one for one in state.sandboxes if sandbox_id in {"", one.id})
            return replace(state, sandboxes=tuple(chosen))

    def explain(self, sandbox_id: str) -> Explanation:
        """Return the `explain` document of one sandbox; raises KataPinError."""
        from kata_pin.model.reports.explain import Explanation

        try:
            return self._ask(Explanation, "explain", reading=True, sandbox=sandbox_id)
        except (DaemonAway, DaemonSilent):
            from kata_pin.daemon.service import offline

            return offline.explain(self._settings.config, sandbox_id)

    def history(self, name: str, *, since_s: int | None, limit: int) -> HistoryDocument:
        """Return the `history` document: of all, or of the sandboxes that a name means."""
        from kata_pin.model.reports.history import HistoryDocument

        asked = {"sandbox": name, "since_s": since_s, "limit": limit}
        try:
            return self._ask(HistoryDocument, "history", reading=True, **asked)
        except (DaemonAway, DaemonSilent):
            from kata_pin.daemon.service import offline

            return offline.history(self._settings.config, name, since_s=since_s, limit=limit)

    def change(self, verb: Literal["pin", "unpin"], sandbox_id: str) -> Applied:
        """Set the affinities of one sandbox, or of all, now; or restore the original ones."""
        from kata_pin.model.reports.applied import Applied

        try:
            return self._ask(Applied, verb, reading=False, sandbox=sandbox_id or None)
        except DaemonAway:
            from kata_pin.daemon.service import offline

            act = offline.pin if verb == "pin" else offline.unpin
            return act(self._settings.config, sandbox_id or None)

    def _without_daemon(self, error: KataPinError) -> State:
        if self._offline is None:
            from kata_pin.daemon.service import offline
            from kata_pin.model.reports.daemon import Daemon

            found = offline.state(self._settings.config)
            self._offline = replace(found, daemon=Daemon(running=False, reason=error.message))
        return self._offline

    def _ask(
        self, kind: type[Document], verb: str, *, reading: bool, **given: str | int | None
    ) -> Document:
        from kata_pin.wire import reports

        if self._offline is not None:
            raise DaemonAway("no daemon is listening")
        arguments = {name: value for name, value in given.items() if value is not None}
        deadline_s = READ_S if reading else WRITE_S
        away: DaemonAway | None = None
        for name in _SOCKETS[reading]:
            try:
                path = os.path.join(self._settings.runtime_dir, name)
                return reports.decode(ask(path, verb, arguments, deadline_s), kind)
            except DaemonAway as error:
                away = away or error
        assert away is not None
        raise away


def ask(path: str, verb: str, arguments: Mapping[str, object], deadline_s: float) -> bytes:
    """Send one request to a socket and return the reply's encoded document.

    Raises DaemonAway, DaemonSilent, DaemonError (refused, or no right to connect) and
    RemoteProtocolError.
    """
    deadline = time.monotonic() + deadline_s
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as peer:
            peer.settimeout(deadline_s)
            peer.connect(path)
            peer.sendall(encode_request(verb, arguments))
            line = _line(peer, deadline)
    except (FileNotFoundError, ConnectionRefusedError) as error:
        raise DaemonAway(f"no daemon is listening on {path}") from error
    except PermissionError as error:
        raise DaemonError(
            f"no permission to connect to {path}",
            hint="run as root, or join group kata-pin for read-only access",
        ) from error
    except (TimeoutError, BlockingIOError) as error:
        raise DaemonSilent(
            f"the daemon did not answer on {path} within {deadline_s:g} s",
            hint="see its log: journalctl -u kata-pin",
        ) from error
    except OSError as error:
        raise DaemonError(f"cannot talk to {path}: {error.strerror or error}") from error
    return parse_reply(line)


def _line(peer: socket.socket, deadline: float) -> bytes:
    decoder = LineDecoder(MAX_REPLY)
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        peer.settimeout(left)
        data = peer.recv(CHUNK)
        if not data:
            raise RemoteProtocolError("the daemon closed the connection before it answered")
        lines = decoder.feed(data)
        if lines:
            return lines[0]
