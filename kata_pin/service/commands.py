"""The control socket: who may ask, and the commands that it takes (D18, D19)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, Final

from msgspec import Struct
from msgspec import field as msgspec_field
from msgspec.structs import replace

from kata_pin.base.config.table import as_data
from kata_pin.base.documents.answers import Applied, AppliedKind, ConfigDocument, Explanation
from kata_pin.base.documents.check import Findings
from kata_pin.base.documents.measured import WatchDocument
from kata_pin.base.errors import DaemonError, KataPinError, ParseError, RemoteProtocolError
from kata_pin.base.json_text import Fields, load
from kata_pin.base.placement import Report
from kata_pin.engine.runner import PassRunner
from kata_pin.guest.manager import Guests
from kata_pin.linux import sockets
from kata_pin.linux.sockets import BACKLOG, Clients, Peer, send
from kata_pin.records.history import MAX_SHOWN, MAX_SINCE_S, History
from kata_pin.service import protocol
from kata_pin.service.audits import Reload
from kata_pin.service.bindings import Bindings
from kata_pin.service.documents import Overview, history_report, utc
from kata_pin.service.exchange import MAX_REQUEST
from kata_pin.service.options import Core
from kata_pin.service.protocol import check_version, encode_error, encode_reply
from kata_pin.service.sandbox_document import applied

log = logging.getLogger(__name__)


# What members of the daemon's group may ask of the status socket, and how often.
#
# They only read, but making a document takes time of the event loop that hooks need too. So one
# user has few connections and one request in work at a time, at a bounded rate; equal requests
# within a moment get the same answer; and the loop makes documents for all of them a quarter of the
# time at most. Root and the daemon's own user are not limited.

MOST_CONNECTIONS: Final = 8
"""Connections of one user at a time."""

PER_SECOND: Final = 10.0
BURST: Final = 20.0
"""Requests of one user: so many per second, after so many at once."""

FRESH_S: Final = 0.2
"""For so long the same request gets the same answer."""

REST: Final = 3.0
"""After an answer was made, no other is made for this many times as long."""

MAX_ANSWERS: Final = 8
"""Answers that are kept; the largest takes some 3 MiB."""


@dataclass
class _User:
    """One user that is connected, or that was a moment ago."""

    connections: int = 0
    requests: sockets.Credit = field(default_factory=lambda: sockets.Credit(PER_SECOND, BURST))
    asking: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is lost by forgetting the user."""
        return not self.connections and self.requests.is_full


class Readers:
    """The users of one socket; used in the event loop's thread only."""

    def __init__(self) -> None:
        self._users: dict[int, _User] = {}
        self._answers: dict[bytes, tuple[float, bytes]] = {}
        self._making = asyncio.Lock()
        self._not_before = 0.0

    @contextlib.contextmanager
    def connected(self, uid: int) -> Iterator[bool]:
        """Count a connection within the block; yield whether the user may have it."""
        for known in [one for one, user in self._users.items() if user.is_idle]:
            del self._users[known]
        user = self._users.setdefault(uid, _User())
        user.connections += 1
        try:
            yield user.connections <= MOST_CONNECTIONS
        finally:
            user.connections -= 1

    async def answer(self, uid: int, line: bytes, make: Callable[[], Awaitable[bytes]]) -> bytes:
        """Return the answer to a request line of a connected user, made now or a moment ago."""
        user = self._users[uid]
        async with user.asking:
            await asyncio.sleep(user.requests.wait_after(1))
            fresh = self._fresh(line)
            if fresh is not None:
                return fresh
            async with self._turn():
                return self._fresh(line) or self._kept(line, await make())

    @contextlib.asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Wait until an answer may be made; the block makes it."""
        async with self._making:
            await asyncio.sleep(max(0.0, self._not_before - time.monotonic()))
            began = time.monotonic()
            try:
                yield
            finally:
                now = time.monotonic()
                self._not_before = now + (now - began) * REST

    def _fresh(self, line: bytes) -> bytes | None:
        made_at, answer = self._answers.get(line, (0.0, b""))
        return answer if answer and time.monotonic() - made_at < FRESH_S else None

    def _kept(self, line: bytes, answer: bytes) -> bytes:
        now = time.monotonic()
        self._answers = {
            key: known for key, known in self._answers.items() if now - known[0] < FRESH_S
        }
        while len(self._answers) >= MAX_ANSWERS:
            del self._answers[next(iter(self._answers))]
        self._answers[line] = now, answer
        return answer


# The control socket: what the command line asks of the daemon.
#
# control.sock (0600) takes every verb, status.sock (0660 and a group) only those that read. The
# kernel identifies the client (SO_PEERCRED); group members are limited (commands.py).

MAX_CLIENTS: Final = 32
REQUEST_S: Final = 5.0
"""Longest a client may take to send a request, and to take the reply."""
VERB_S: Final = 30.0

Verb = Callable[[Fields], Awaitable[bytes]]
"""Takes the arguments of a request, returns the encoded document; raises KataPinError to refuse."""


class ControlServer(Struct, frozen=True):
    """Serves one socket; `gid` owns it, and its members may connect where `mode` lets them."""

    path: str
    verbs: Mapping[str, Verb]
    mode: int = 0o600
    gid: int | None = None
    _readers: Readers = msgspec_field(default_factory=Readers)

    def serving(self) -> AbstractAsyncContextManager[None]:
        """Serve within the block, in place of what a dead daemon left; raises OSError."""
        full = encode_error("too many clients", "try again in a moment")
        clients = Clients("control client", MAX_CLIENTS, self._talk, limit=MAX_REQUEST, full=full)
        listener = sockets.listen(self.path, backlog=BACKLOG, mode=self.mode, gid=self.gid)
        return clients.served(listener, self.path)

    def _admitted(self, peer: Peer) -> bool:
        """Whether the peer may talk: root, the person who started us, or the socket's group.

        The file's mode keeps others out already; this also refuses a descriptor that was handed
        on, except for group members: the kernel does not report their groups.
        """
        if peer.trusted or self.mode & 0o060:
            return True
        log.warning("control client refused: pid %d, uid %d", peer.pid, peer.uid)
        return False

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = sockets.peer(writer.get_extra_info("socket"))
        if not self._admitted(peer):
            return
        if peer.trusted:
            await _converse(reader, writer, self._answer)
            return
        with self._readers.connected(peer.uid) as may_ask:
            if may_ask:
                await _converse(reader, writer, partial(self._answer_reader, peer.uid))
            else:
                full = f"user {peer.uid} has {MOST_CONNECTIONS} connections already"
                await send(writer, encode_error(full, "close one of them"), REQUEST_S)

    async def _answer_reader(self, uid: int, line: bytes) -> bytes:
        return await self._readers.answer(uid, line, partial(self._answer, line))

    async def _answer(self, line: bytes) -> bytes:
        name, arguments = parse_request(line)
        verb = self.verbs.get(name)
        if verb is None:
            known = ", ".join(sorted(self.verbs))
            return encode_error(f"unknown verb {name!r}", f"this socket knows {known}")
        try:
            async with asyncio.timeout(VERB_S):
                return encode_reply(await verb(arguments))
        except KataPinError as error:
            return encode_error(error.message, error.hint)
        except TimeoutError:
            return encode_error(f"{name} took longer than {VERB_S:.0f} s")


def parse_request(line: bytes) -> tuple[str, Fields]:
    """Return the verb and the arguments of a request line, with or without its newline.

    It comes from any member of the daemon's group, so it is bounded like other JSON from outside
    (base/json_text.py). Raises RemoteProtocolError; the getters of the arguments a ParseError.
    """
    try:
        value = load(line, source="request", limit=MAX_REQUEST, values=MAX_REQUEST)
        fields = Fields(value, source="request")
        version = fields.need("version").number("version", 0, 1 << 31)
        verb = fields.need("verb").text("verb", limit=64)
    except ParseError as error:
        raise RemoteProtocolError(str(error)) from error
    check_version("request", version or 0)
    return verb, Fields(value, source=f"request {verb}")


async def _converse(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    answer: Callable[[bytes], Awaitable[bytes]],
) -> None:
    """Answer one request line after the other until the client hangs up."""
    while True:
        try:
            async with asyncio.timeout(REQUEST_S):
                line = await reader.readuntil(b"\n")
        except asyncio.IncompleteReadError:
            return
        except asyncio.LimitOverrunError as error:
            raise RemoteProtocolError(f"line longer than {MAX_REQUEST} bytes") from error
        await send(writer, await answer(line), REQUEST_S)


GUESTS_S: Final = 3.0
"""Longest that an undo waits for guests, whose containers get all guest CPUs back."""


class Commands(Struct, frozen=True):
    """The commands, over the daemon's objects.

    `look_around` records Kata's own state before an operator's pass.
    """

    core: Core
    passes: PassRunner
    overview: Overview
    state: Callable[[str], Awaitable[bytes]]
    reload: Reload
    look_around: Callable[[], Awaitable[None]]
    history: History
    guests: Guests
    bindings: Bindings

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
            "findings": self._findings,
            "option": self._option,
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
            "bind": self.bindings.bind,
        }

    async def _ping(self, _arguments: Fields) -> bytes:
        return b"{}"

    async def _names(self, _arguments: Fields) -> bytes:
        return protocol.encode(self.overview.names())

    async def _state(self, arguments: Fields) -> bytes:
        named = arguments.text("sandbox")
        return await self.state(self._selected(arguments)[0] if named else "")

    async def _explain(self, arguments: Fields) -> bytes:
        (sandbox_id,) = self._selected(arguments, need=True)
        lines = self.overview.explanation(sandbox_id)
        return protocol.encode(Explanation(sandbox=sandbox_id, lines=lines))

    async def _history(self, arguments: Fields) -> bytes:
        since_s = arguments.number("since_s", 0, MAX_SINCE_S)
        limit = arguments.number("limit", 1, MAX_SHOWN) or MAX_SHOWN
        name = arguments.text("sandbox")
        return protocol.encode(
            history_report(self.history, self.core.events, name, since_s=since_s, limit=limit)
        )

    async def _config(self, _arguments: Fields) -> bytes:
        settings, refused = as_data(self.core.live.now), self.reload.refused
        return protocol.encode(ConfigDocument(settings=settings, running=True, refused=refused))

    async def _watch(self, _arguments: Fields) -> bytes:
        make = self.core.options.verbs().get("watch")
        if make is not None:
            return protocol.encode(make())
        limit = self.core.live.now.isolation.max_foreign
        return protocol.encode(
            WatchDocument(time=utc(time.time()), max_foreign_percent=limit, problem="", pcpus=())
        )

    async def _findings(self, _arguments: Fields) -> bytes:
        return protocol.encode(Findings(findings=tuple(self.core.options.findings())))

    async def _option(self, arguments: Fields) -> bytes:
        """Return the document that an option of another package answers to a verb of its own."""
        name = arguments.text("name")
        make = self.core.options.verbs().get(name)
        if make is None:
            raise DaemonError(f"no option answers {name!r}", hint="its section switches it on")
        return protocol.encode(make())

    async def _pin(self, arguments: Fields) -> bytes:
        if not self.core.live.acts:
            raise DaemonError("not pinned: the daemon only observes", hint="setting mode: act")
        chosen = self._selected(arguments)
        self.core.pins.set_released(chosen, released=False)
        return await self._pass_over(chosen, "pin")

    async def _reconcile(self, arguments: Fields) -> bytes:
        return await self._pass_over(self._selected(arguments), "reconcile")

    async def _unpin(self, arguments: Fields) -> bytes:
        return await self._release_now(self._selected(arguments), remember=True)

    async def _release(self, _arguments: Fields) -> bytes:
        """Restore every affinity, and set none until the daemon is restarted (uninstall).

        Unlike unpin this is not remembered: the next daemon, if there is one, pins again.
        """
        self.core.live.stop_acting()
        kept = await self.core.options.give_back()
        return await self._release_now(self.core.sandboxes.ids, kept, remember=False)

    async def _reload(self, _arguments: Fields) -> bytes:
        problem = self.reload()
        if problem:
            raise DaemonError(f"configuration not reloaded: {problem}")
        return b"{}"

    async def _release_now(
        self,
        chosen: Sequence[str],
        kept: Mapping[str, Any] = MappingProxyType({}),
        *,
        remember: bool,
    ) -> bytes:
        found = {one: await self.passes.release(one, remember=remember) for one in chosen}
        await self.guests.wait_idle(chosen, GUESTS_S)
        return self._applied("unpin", chosen, kept, found)

    async def _pass_over(self, chosen: Sequence[str], verb: AppliedKind) -> bytes:
        await self.look_around()
        tickets = [(one, self.core.sandboxes.mark(one, verb)) for one in chosen]
        for sandbox_id, ticket in tickets:
            if await self.core.sandboxes.wait_for_pass(sandbox_id, ticket) is None:
                raise DaemonError(f"the pass over sandbox {sandbox_id} failed", hint="see the log")
        return self._applied(verb, chosen)

    def _applied(
        self,
        verb: AppliedKind,
        chosen: Sequence[str],
        kept: Mapping[str, Any] = MappingProxyType({}),
        reports_of: Mapping[str, Report | None] = MappingProxyType({}),
    ) -> bytes:
        """Return the document; `reports_of` are reports that later passes may have replaced."""
        every = self.overview.facts(chosen)
        done = applied(
            replace(one, report=reports_of.get(one.sandbox.id) or one.report) for one in every
        )
        return protocol.encode(Applied(kind=verb, sandboxes=done, **kept))

    def _selected(self, arguments: Fields, *, need: bool = False) -> list[str]:
        """Return the sandbox that a request names by id or pod; all where it names none."""
        name = arguments.text("sandbox")
        ids = self.core.sandboxes.ids
        if not name and not need:
            return ids
        if name in ids:
            return [name]
        found = [one.id for one in self.overview.names().sandboxes if one.pod == name]
        if len(found) != 1:
            raise DaemonError(f"no sandbox {name!r}", hint="kata-pin show lists them")
        return found
