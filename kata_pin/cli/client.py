"""Where documents come from: the daemon's sockets, or this process when there is no daemon.

Reading verbs fall back to offline.py (DESIGN D19), and the document then says so. Writing
verbs do too when no daemon runs; but with one that is there and does not answer they fail, for two
writers must not race. Every wait has a deadline. One request a connection; nothing is kept.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, cast

from kata_pin.cli.reports.shape import VERSION, Json, State
from kata_pin.config import Config
from kata_pin.errors import DaemonError, RemoteProtocolError
from kata_pin.wire.control import MAX_REPLY, LineDecoder, encode_request, parse_reply

READ_S: Final = 5.0
"""Longest wait for an answer to a question; the daemon answers in milliseconds."""

WRITE_S: Final = 35.0
"""Longest wait for pins to be set; a little longer than the daemon's own deadline."""

CHUNK: Final = 256 * 1024

_SOCKETS: Final = {True: ("status.sock", "control.sock"), False: ("control.sock",)}


class DaemonAway(DaemonError):  # noqa: N818 - a state of the world
    """No daemon listens."""


class DaemonSilent(DaemonError):  # noqa: N818 - as above
    """A daemon is there and does not answer in time."""


@dataclass(frozen=True)
class Provider:
    """Asks for documents on behalf of one command."""

    config: Config

    def state(self) -> State:
        """Return the state document; raises KataPinError."""
        try:
            document = self._ask("state", reading=True)
        except (DaemonAway, DaemonSilent) as error:
            from kata_pin.daemon.service import offline

            document = offline.state(self.config)
            document["daemon"] = {"running": False, "reason": error.message}
        return cast("State", _checked(document))

    def explain(self, sandbox_id: str) -> Json:
        """Return the `explain` document of one sandbox; raises KataPinError."""
        try:
            return _checked(self._ask("explain", reading=True, sandbox=sandbox_id))
        except (DaemonAway, DaemonSilent):
            from kata_pin.daemon.service import offline

            return _checked(offline.explain(self.config, sandbox_id))

    def history(self, name: str, *, since_s: int | None, limit: int) -> Json:
        """Return the `history` document: of all, or of the sandboxes that a name means."""
        asked = {"sandbox": name, "since_s": since_s, "limit": limit}
        try:
            return _checked(self._ask("history", reading=True, **asked))
        except (DaemonAway, DaemonSilent):
            from kata_pin.daemon.service import offline

            return _checked(offline.history(self.config, name, since_s=since_s, limit=limit))

    def pin(self, sandbox_id: str | None) -> Json:
        """Have the pins of one sandbox or of all set now; return the report's document."""
        try:
            return _checked(self._ask("pin", reading=False, sandbox=sandbox_id))
        except DaemonAway:
            from kata_pin.daemon.service import offline

            return _checked(offline.pin(self.config, sandbox_id))

    def unpin(self, sandbox_id: str | None) -> Json:
        """Have the pins of one sandbox or of all given back; return the report's document."""
        try:
            return _checked(self._ask("unpin", reading=False, sandbox=sandbox_id))
        except DaemonAway:
            from kata_pin.daemon.service import offline

            return _checked(offline.unpin(self.config, sandbox_id))

    def _ask(self, verb: str, *, reading: bool, **given: str | int | None) -> Json:
        arguments = {name: value for name, value in given.items() if value is not None}
        deadline_s = READ_S if reading else WRITE_S
        away: DaemonAway | None = None
        for name in _SOCKETS[reading]:
            try:
                path = os.path.join(self.config.runtime_dir, name)
                return ask(path, verb, arguments, deadline_s)
            except DaemonAway as error:
                away = away or error
        assert away is not None
        raise away


def ask(path: str, verb: str, arguments: Mapping[str, object], deadline_s: float) -> Json:
    """Send one request to a socket and return the document of the reply.

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
        raise DaemonAway(f"nothing listens on {path}") from error
    except PermissionError as error:
        raise DaemonError(
            f"no permission to connect to {path}",
            hint="be root, or for reading a member of the daemon's group",
        ) from error
    except (TimeoutError, BlockingIOError) as error:
        raise DaemonSilent(
            f"the daemon did not answer on {path} within {deadline_s:g} s",
            hint="see its log: journalctl -u kata-pin",
        ) from error
    except OSError as error:
        raise DaemonError(f"talk to {path}: {error.strerror or error}") from error
    document = parse_reply(line).get("document")
    if not isinstance(document, dict):
        raise RemoteProtocolError(f"the daemon's answer to {verb} has no document")
    return document


def _line(peer: socket.socket, deadline: float) -> bytes:
    decoder = LineDecoder(MAX_REPLY)
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        peer.settimeout(left)
        data = peer.recv(CHUNK)
        if not data:
            raise RemoteProtocolError("the daemon hung up before it answered")
        lines = decoder.feed(data)
        if lines:
            return lines[0]


def _checked(document: Json) -> Json:
    """Return the document; DaemonError if it is of another version than this program's."""
    version = document.get("version")
    if version != VERSION:
        raise DaemonError(
            f"the daemon's document is of version {version}, this is version {VERSION}",
            hint="restart the daemon after an upgrade",
        )
    return document
