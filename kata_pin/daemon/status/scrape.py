"""Answering Prometheus: GET /metrics over HTTP/1.0, on a unix socket or a loopback port.

No more of HTTP than a scrape needs: one request a connection, a bounded head, a deadline on each
step, few connections at once, and what was made a moment ago is given to whoever asks next, so that
nobody can make us work by asking. A port that cannot be had is tried again; the daemon goes on.

    server = MetricsServer(endpoint, path="/run/kata-pin/metrics.sock", text=metrics.text)
    await server.serve()      # until cancelled
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import time
from collections.abc import Awaitable, Callable
from typing import Final

from kata_pin.config.metrics import Endpoint, EndpointKind
from kata_pin.sources import unix_socket

log = logging.getLogger(__name__)

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
BACKLOG: Final = 16
MAX_CLIENTS: Final = 8
MAX_HEAD: Final = 8192
"""Longest request line and headers."""
HEAD_S: Final = 5.0
ANSWER_S: Final = 10.0
"""Longest time that the text may take to be made, and to be taken."""
FRESH_S: Final = 0.2
"""For so long the same text is given again."""
RETRY_S: Final = 30.0
"""Between tries to have a port that is taken."""

_PHRASES: Final = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    431: "Request Header Fields Too Large",
}


class MetricsServer:
    """Serves one endpoint until cancelled; `problem` says why it cannot, empty while it does."""

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        path: str,
        text: Callable[[], Awaitable[bytes]],
        readers: tuple[int | None, int] = (None, 0o600),
    ) -> None:
        """`text` makes what is answered; `path` and `readers`, group and mode, are the socket's."""
        self.problem = "not started"
        self._endpoint = endpoint
        self._path = path
        self._text = text
        self._gid, self._mode = readers
        self._clients: set[asyncio.Task[None]] = set()
        self._made = b""
        self._made_at = -FRESH_S

    @property
    def address(self) -> str:
        """Where it serves, for people."""
        unix = self._endpoint.kind is EndpointKind.UNIX
        return f"unix:{self._path}" if unix else f"http://{self._endpoint}/metrics"

    async def serve(self) -> None:
        """Serve until cancelled."""
        while True:
            try:
                server = await self._listen()
            except OSError as error:
                self._complain(error)
                await asyncio.sleep(RETRY_S)
                continue
            self.problem = ""
            log.info("metrics: %s", self.address)
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                await self._end(server)

    async def _listen(self) -> asyncio.Server:
        if self._endpoint.kind is EndpointKind.TCP:
            return await asyncio.start_server(
                self._client, self._endpoint.host, self._endpoint.port,
                backlog=BACKLOG, limit=MAX_HEAD,
            )  # fmt: skip
        listener = unix_socket.listen(self._path, backlog=BACKLOG, mode=self._mode, gid=self._gid)
        try:
            return await asyncio.start_unix_server(
                self._client, sock=listener, backlog=BACKLOG, limit=MAX_HEAD
            )
        except BaseException:  # cancelled as the daemon ends: nobody else knows of the socket
            listener.close()
            self._unlink()
            raise

    async def _end(self, server: asyncio.Server) -> None:
        server.close()
        for task in self._clients:
            task.cancel()
        await asyncio.gather(*self._clients, return_exceptions=True)
        if self._endpoint.kind is EndpointKind.UNIX:
            self._unlink()

    def _unlink(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)

    def _complain(self, error: OSError) -> None:
        """Say once what is wrong."""
        problem = f"{self.address}: {error.strerror or error}"
        if error.errno == errno.EAFNOSUPPORT:
            problem += "; the service's RestrictAddressFamilies= forbids it"
        if problem != self.problem:
            log.error("metrics not served: %s", problem)
        self.problem = problem

    # ---- clients -------------------------------------------------------------------------

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._clients.add(task)
        try:
            if len(self._clients) > MAX_CLIENTS:
                raise ConnectionAbortedError("too many clients")
            await _send(writer, await self._answer_to(reader))
        except (OSError, asyncio.IncompleteReadError) as error:  # TimeoutError is an OSError
            log.debug("metrics client dropped: %s", str(error) or "too slow")
            writer.transport.abort()
        except Exception as error:  # the fault barrier of one client
            log.error("metrics client failed: %s", error)
            log.debug("metrics client failed", exc_info=True)
            writer.transport.abort()
        finally:
            await _hang_up(writer)
            self._clients.discard(task)

    async def _answer_to(self, reader: asyncio.StreamReader) -> bytes:
        """Read a request and return the answer."""
        try:
            async with asyncio.timeout(HEAD_S):
                head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            return _answer(431, b"request too long\n")
        words = head.split(b"\r\n", 1)[0].split(b" ")
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            return _answer(400, b"not an HTTP request\n")
        method, target, _ = words
        if method not in {b"GET", b"HEAD"}:
            return _answer(405, b"only GET\n", "Allow: GET, HEAD\r\n")
        if target.partition(b"?")[0] != b"/metrics":
            return _answer(404, b"metrics are at /metrics\n")
        async with asyncio.timeout(ANSWER_S):
            text = await self._fresh_text()
        answer = _answer(200, text)
        return answer if method == b"GET" else answer[: -len(text)]

    async def _fresh_text(self) -> bytes:
        if time.monotonic() - self._made_at >= FRESH_S:
            self._made = await self._text()
            self._made_at = time.monotonic()
        return self._made


def _answer(status: int, body: bytes, headers: str = "") -> bytes:
    kind = CONTENT_TYPE if status == 200 else "text/plain; charset=utf-8"
    head = (
        f"HTTP/1.0 {status} {_PHRASES[status]}\r\nContent-Type: {kind}\r\n"
        f"Content-Length: {len(body)}\r\n{headers}Connection: close\r\n\r\n"
    )
    return head.encode() + body


async def _send(writer: asyncio.StreamWriter, answer: bytes) -> None:
    writer.write(answer)
    async with asyncio.timeout(ANSWER_S):
        await writer.drain()


async def _hang_up(writer: asyncio.StreamWriter) -> None:
    """Close once everything was taken, or after a while."""
    writer.close()
    try:
        async with asyncio.timeout(ANSWER_S):
            await writer.wait_closed()
    except OSError as error:  # TimeoutError is one
        log.debug("metrics client gone: %s", str(error) or "too slow")
    finally:
        writer.transport.abort()
