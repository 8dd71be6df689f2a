"""Asking the kubelet for its pods: what annotations running pods have now.

NRI tells a pod's annotations when a container is made and never again; the kubelet, which has them
from the API server, answers `GET /pods` on its port 10250 (https, with a credential that may `get`
`nodes/proxy`) or, where it is still open, on 10255 (http, no credential). Source: Kubernetes'
documentation, Kubelet authentication and authorization.

One request a call, in a thread of its own that no end of the daemon waits for, with a deadline for
all of it. Past that its connection is cut, so that the thread ends too. What cannot be cut is a
name that is looked up: until that ends nothing more is asked, so that there is one thread at most.
The token is read each time, because it is replaced while it is valid.

A long list does not hold up the event loop: 600 pods of 50 KiB by 23 ms at most, in 0.4 s.
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
from urllib.parse import urlsplit

from kata_pin.errors import ParseError, StateError
from kata_pin.owned_file import FileRefused, read_owned
from kata_pin.wire.kube.pod_list import MAX_BYTES, Annotations, parse_pods

log = logging.getLogger(__name__)

DEADLINE_S: Final = 5.0
THREAD: Final = "pod list"
"""What the thread is called."""

MAX_TOKEN: Final = 16 * 1024
_CHUNK: Final = 256 * 1024


@dataclass
class PodList:
    """Where to ask: `url` with its path, files of a token and of certificate authorities.

    Without `ca` the host's authorities count; without `token` nothing is shown to the kubelet.
    """

    url: str
    token: str = ""
    ca: str = ""
    deadline_s: float = DEADLINE_S
    _under_way: bool = field(default=False, init=False)
    _connected: http.client.HTTPConnection | None = field(default=None, init=False)

    async def read(self) -> Annotations:
        """Return the pods' annotations about CPUs; StateError says what is wrong."""
        if self._under_way:
            raise StateError(f"{self.url}: what was asked before has not ended yet")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Annotations] = loop.create_future()

        def tell(outcome: Annotations | Exception) -> None:
            loop.call_soon_threadsafe(self._told, answer, outcome)

        self._under_way = True
        threading.Thread(target=self._ask, args=(tell,), name=THREAD, daemon=True).start()
        try:
            async with asyncio.timeout(self.deadline_s + 1):
                return await answer
        except TimeoutError as error:
            raise StateError(f"{self.url}: no answer within {self.deadline_s:g} s") from error
        finally:
            self._cut()

    def _ask(self, tell: Callable[[Annotations | Exception], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            try:
                tell(self._read())
            except Exception as error:  # noqa: BLE001 - whoever waits raises it
                tell(error)

    def _told(self, answer: asyncio.Future[Annotations], outcome: Annotations | Exception) -> None:
        """Give an outcome to whoever waits for it still."""
        self._under_way = False
        if answer.done():
            return
        if isinstance(outcome, Exception):
            answer.set_exception(outcome)
        else:
            answer.set_result(outcome)

    def _cut(self) -> None:
        """End a connection that is still there: whoever reads from it gets an error."""
        sock = None if self._connected is None else self._connected.sock
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
            raise StateError(f"{self.url}: not an address: {error}") from error
        for problem in pods.problems:
            log.debug("%s: a pod is left out: %s", self.url, problem)
        return pods.annotations

    def _get(self) -> bytes:
        deadline = time.monotonic() + self.deadline_s
        parts = urlsplit(self.url)
        connection = self._connection(parts.scheme, parts.hostname or "", parts.port)
        self._connected = connection
        try:
            path = (
                f"{parts.path or '/pods'}?{parts.query}" if parts.query else parts.path or "/pods"
            )
            connection.request("GET", path, headers=self._headers())
            with connection.getresponse() as response:
                return self._body(response, deadline)
        finally:
            self._connected = None
            connection.close()

    def _body(self, response: http.client.HTTPResponse, deadline: float) -> bytes:
        if response.status != http.client.OK:
            raise StateError(f"{self.url}: the kubelet answers {response.status}")
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
            raise StateError(f"{self.token}: not a token")
        return {"Authorization": f"Bearer {token}"}
