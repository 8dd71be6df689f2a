"""Answers Prometheus: GET /metrics over HTTP/1.0.

The state document shows the daemon's own connections.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from kata_pin.base.config.tree import Endpoint, EndpointKind
from kata_pin.base.documents.document import Metrics, Nri
from kata_pin.base.errors import reason_of
from kata_pin.linux import sockets
from kata_pin.linux.sockets import BACKLOG, Clients, send
from kata_pin.peers.http import MAX_HEAD, Page, answer, tcp_listener
from kata_pin.peers.nri.plugin import NriPlugin

log = logging.getLogger(__name__)


# Answers Prometheus: GET /metrics over HTTP/1.0, on a unix socket or a loopback port.
#
# One request per connection, a bounded head, a deadline for each step, few connections at once, and
# a text that is reused for a moment, so that nobody can make work by asking. A port that is taken
# is tried again.

MAX_CLIENTS: Final = 8
ANSWER_S: Final = 10.0
"""Longest time that the text may take to be made, and to be taken."""
FRESH_S: Final = 0.2
"""For so long the same text is given again."""
RETRY_S: Final = 30.0
"""Between tries to have a port that is taken."""

Text = Callable[[], Awaitable[bytes]]
"""Makes what is answered."""


@dataclass
class MetricsServer:
    """Serves one endpoint until cancelled; `problem` says why it cannot, empty while it does.

    `make` returns what makes the answers; it is called beside the event loop for the first request,
    because it may have much to import. `path`, `mode` and `gid` are the unix socket's.
    """

    endpoint: Endpoint
    path: str
    make: Callable[[], Text]
    gid: int | None = None
    mode: int = 0o600
    problem: str = "not started"
    _text: Text | None = None
    _made: bytes = b""
    _made_at: float = -FRESH_S

    @property
    def address(self) -> str:
        """Where it serves, for people."""
        unix = self.endpoint.kind is EndpointKind.UNIX
        return f"unix:{self.path}" if unix else f"http://{self.endpoint}/metrics"

    async def serve(self) -> None:
        """Serve until cancelled."""
        clients = Clients("metrics client", MAX_CLIENTS, self._talk, limit=MAX_HEAD)
        path = self.path if self.endpoint.kind is EndpointKind.UNIX else ""
        while True:
            try:
                listener = self._listener()
            except OSError as error:
                self._complain(error)
                await asyncio.sleep(RETRY_S)
                continue
            async with clients.served(listener, path):
                self.problem = ""
                log.info("metrics: %s", self.address)
                await asyncio.get_running_loop().create_future()

    def _listener(self) -> socket.socket:
        if self.endpoint.kind is EndpointKind.UNIX:
            return sockets.listen(self.path, backlog=BACKLOG, mode=self.mode, gid=self.gid)
        return tcp_listener(self.endpoint.host, self.endpoint.port)

    def _complain(self, error: OSError) -> None:
        """Say once what is wrong."""
        problem = f"{self.address}: {error.strerror or reason_of(error)}"
        if error.errno == errno.EAFNOSUPPORT:
            problem += "; the service's RestrictAddressFamilies= forbids it"
        if problem != self.problem:
            log.error("metrics not served: %s", problem)
        self.problem = problem

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await send(writer, await answer(reader, {b"/metrics": self._page}), ANSWER_S)

    async def _page(self) -> Page:
        async with asyncio.timeout(ANSWER_S):
            return Page(await self._fresh_text())

    async def _fresh_text(self) -> bytes:
        if time.monotonic() - self._made_at >= FRESH_S:
            if self._text is None:
                self._text = await asyncio.to_thread(self.make)
            self._made = await self._text()
            self._made_at = time.monotonic()
        return self._made


# The daemon's own connections as the state document shows them: NRI and the metrics endpoint.


def nri_report(plugin: NriPlugin | None) -> Nri | None:
    """Return the plugin's connection; None if NRI is disabled."""
    if plugin is None:
        return None
    since = plugin.connected_at
    return Nri(
        socket=plugin.socket_path,
        runtime="" if since is None else plugin.runtime,
        connected_s=None if since is None else round(time.monotonic() - since, 3),
        problem=plugin.problem,
    )


def metrics_report(server: MetricsServer | None) -> Metrics | None:
    """Return where metrics are served; None if they are disabled."""
    return None if server is None else Metrics(server.address, server.problem)
