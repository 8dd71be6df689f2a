"""Answers Prometheus: GET /metrics over HTTP/1.0, on a unix socket or a loopback port.

One request per connection, a bounded head, a deadline for each step, few connections at once, and
a text that is reused for a moment, so that nobody can make work by asking. A port that is taken is
tried again.
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

from kata_pin.config.metrics import Endpoint, EndpointKind
from kata_pin.errors import reason_of
from kata_pin.sources import unix_socket
from kata_pin.sources.http_server import MAX_HEAD, Page, answer, tcp_listener
from kata_pin.sources.stream_clients import BACKLOG, Clients, send

log = logging.getLogger(__name__)

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
            return unix_socket.listen(self.path, backlog=BACKLOG, mode=self.mode, gid=self.gid)
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
