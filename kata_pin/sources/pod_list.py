"""Asking the kubelet for its pods, to see which annotations running pods have now.

NRI reports a pod's annotations when a container is created and never again. The kubelet has them
from the API server and answers `GET /pods` on port 10250 (https, with a credential that may `get`
`nodes/proxy`) or, where it is still open, on 10255 (http, no credential). Source: Kubernetes'
documentation, Kubelet authentication and authorization.

Each call makes one request in a thread, which the daemon's end does not wait for, within one
deadline. After it the connection is cut, so that the thread ends too. Only a name lookup cannot be
cut; until it ends no further request starts, so there is at most one thread. The token is read each
time, because it is replaced while it is valid.

A long list hardly delays the event loop: 600 pods of 50 KiB by 23 ms at most, in 0.4 s.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit, urlunsplit

from kata_pin.errors import ParseError, StateError
from kata_pin.owned_file import FileRefused, read_owned
from kata_pin.wire.kube.pod_list import MAX_BYTES, Annotations, parse_pods

log = logging.getLogger(__name__)

DEADLINE_S: Final = 5.0
THREAD: Final = "pod list"  # the thread's name
MAX_TOKEN: Final = 16 * 1024
_CHUNK: Final = 256 * 1024


@dataclass
class PodList:
    """Where to ask: `url` with its path, and files with a token and with certificate authorities.

    Without `ca` the host's authorities count; without `token` the request has no credential.
    """

    url: str
    token: str = ""
    ca: str = ""
    deadline_s: float = DEADLINE_S
    _pending: bool = field(default=False, init=False)
    _connected: http.client.HTTPConnection | None = field(default=None, init=False)

    async def read(self) -> Annotations:
        """Return the pods' annotations about CPUs; raises StateError with the reason."""
        if self._pending:
            raise StateError(f"{self.url}: the previous request has not ended yet")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Annotations] = loop.create_future()

        def done(outcome: Annotations | Exception) -> None:
            loop.call_soon_threadsafe(self._settle, answer, outcome)

        self._pending = True
        threading.Thread(target=self._ask, args=(done,), name=THREAD, daemon=True).start()
        try:
            async with asyncio.timeout(self.deadline_s + 1):
                return await answer
        except TimeoutError as error:
            raise StateError(f"{self.url}: no answer within {self.deadline_s:g} s") from error
        finally:
            self._cut()

    def _ask(self, done: Callable[[Annotations | Exception], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            try:
                done(self._read())
            except StateError as error:  # raised by the caller of read()
                done(error)

    def _settle(
        self, answer: asyncio.Future[Annotations], outcome: Annotations | Exception
    ) -> None:
        """Give the outcome to the caller, if it still waits."""
        self._pending = False
        if answer.done():
            return
        if isinstance(outcome, Exception):
            answer.set_exception(outcome)
        else:
            answer.set_result(outcome)

    def _cut(self) -> None:
        """Shut down a connection that is still open, so that the thread's read fails."""
        connected = self._connected  # the thread may set it to None at any time
        sock = None if connected is None else connected.sock
        if sock is not None:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(sock, socket.SHUT_RDWR)

    def _read(self) -> Annotations:
        try:
            pods = parse_pods(self._get())
        except (ParseError, FileRefused) as error:
            raise StateError(f"{self.url}: {error}") from error
        except ssl.SSLError as error:
            raise StateError(f"{self.url}: TLS: {error.reason or error}") from error
        except http.client.HTTPException as error:
            raise StateError(f"{self.url}: not HTTP: {type(error).__name__}") from error
        except TimeoutError as error:
            raise StateError(f"{self.url}: no answer within {self.deadline_s:g} s") from error
        except OSError as error:
            raise StateError(f"{self.url}: {error.strerror or error}") from error
        except ValueError as error:  # a host that is no name, a port that is no number
            raise StateError(f"{self.url}: not a valid URL: {error}") from error
        for problem in pods.problems:
            log.debug("%s: pod skipped: %s", self.url, problem)
        return pods.annotations

    def _get(self) -> bytes:
        deadline = time.monotonic() + self.deadline_s
        parts = urlsplit(self.url)
        connection = self._connection(parts.scheme, parts.hostname or "", parts.port)
        self._connected = connection
        try:
            path = parts._replace(scheme="", netloc="", path=parts.path or "/pods", fragment="")
            connection.request("GET", urlunsplit(path), headers=self._headers())
            with connection.getresponse() as response:
                return self._body(response, deadline)
        finally:
            self._connected = None
            connection.close()

    def _body(self, response: http.client.HTTPResponse, deadline: float) -> bytes:
        if response.status != http.client.OK:
            raise StateError(f"{self.url}: the kubelet answered HTTP {response.status}")
        body = bytearray()
        while chunk := response.read1(_CHUNK):
            body += chunk
            if len(body) > MAX_BYTES:
                raise StateError(f"{self.url}: longer than {MAX_BYTES} bytes")
            if time.monotonic() > deadline:
                raise TimeoutError
        return bytes(body)

    def _connection(self, scheme: str, host: str, port: int | None) -> http.client.HTTPConnection:
        if scheme != "https":
            return http.client.HTTPConnection(host, port, timeout=self.deadline_s)
        trusted = ssl.create_default_context(cafile=self.ca or None)
        return http.client.HTTPSConnection(host, port, timeout=self.deadline_s, context=trusted)

    def _headers(self) -> dict[str, str]:
        if not self.token:
            return {}
        token = read_owned(self.token, MAX_TOKEN).decode("ascii", "replace").strip()
        if not token.isprintable() or not token.isascii() or not token:
            raise StateError(f"{self.token}: does not hold a token")
        return {"Authorization": f"Bearer {token}"}
