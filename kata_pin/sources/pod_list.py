"""Asking the kubelet for its pods, to see which annotations running pods have now.

NRI reports a pod's annotations when a container is created and never again, and never which
containers are init containers. The kubelet has both from the API server and answers `GET /pods` on
port 10250 (https, with a credential that may `get` `nodes/pods`, before Kubernetes 1.33
`nodes/proxy`) or, where it is still open, on 10255 (http, no credential). Source: Kubernetes'
documentation, Kubelet authentication and authorization.

A kubelet's own certificate, unless the administrator gave it one, is signed by itself and names the
node alone, not its addresses.

Each call makes one request in a thread, which the daemon's end does not wait for, within one
deadline. After it the connection is cut, so that the thread ends too. Only a name lookup cannot be
cut; until it ends no further request starts, so there is at most one thread. Token and certificates
are read each time, because they are replaced while they are valid.

A long list hardly delays the event loop: 600 pods of 50 KiB by 23 ms at most, in 0.4 s.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import logging
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit, urlunsplit

from kata_pin.errors import ParseError, StateError, reason_of
from kata_pin.model.alloc import PodSpec
from kata_pin.owned_file import FileRefused, read_projected
from kata_pin.wire.kube.pod_list import MAX_BYTES, parse_pods

log = logging.getLogger(__name__)

DEADLINE_S: Final = 5.0
THREAD: Final = "pod list"  # the thread's name
MAX_TOKEN: Final = 16 * 1024
MAX_FILE: Final = 1024 * 1024  # of certificates

_OTHER_NAME: Final = frozenset({62, 64})
"""verify_code where another name, or another address, was expected (x509_vfy.h)."""

_HINTS: Final = {
    http.client.UNAUTHORIZED: "its token or client certificate is not accepted, or has expired",
    http.client.FORBIDDEN: "it needs `get` on nodes/pods, before Kubernetes 1.33 on nodes/proxy",
}
"""What to do about an answer's status."""

_CHUNK: Final = 256 * 1024

Specs = Mapping[str, PodSpec]
"""Pods by uid."""


@dataclass
class PodList:
    """Where to ask: `url` with its path, and files with a token and with certificate authorities.

    Without `ca` the host's authorities count. `name` is the one that the kubelet's certificate must
    have, empty for the one in `url`; `$NAME` names an environment variable. `certificate` is a file
    with a client certificate and its key. Without that and `token` the request has no credential.
    """

    url: str
    token: str = ""
    ca: str = ""
    name: str = ""
    certificate: str = ""
    deadline_s: float = DEADLINE_S
    _pending: bool = field(default=False, init=False)
    _connected: http.client.HTTPConnection | None = field(default=None, init=False)

    async def read(self) -> Specs:
        """Return what is listed of each pod; raises StateError with the reason."""
        if self._pending:
            raise StateError(f"{self.url}: the previous request has not ended yet")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Specs] = loop.create_future()

        def done(outcome: Specs | Exception) -> None:
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

    def _ask(self, done: Callable[[Specs | Exception], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            try:
                done(self._read())
            except StateError as error:  # raised by the caller of read()
                done(error)

    def _settle(self, answer: asyncio.Future[Specs], outcome: Specs | Exception) -> None:
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

    def _read(self) -> Specs:
        try:
            pods = parse_pods(self._get())
        except (ParseError, FileRefused) as error:
            raise StateError(f"{self.url}: {error}") from error
        except ssl.SSLCertVerificationError as error:
            raise self._not_verified(error) from error
        except ssl.SSLError as error:
            raise StateError(f"{self.url}: TLS: {error.reason or reason_of(error)}") from error
        except http.client.HTTPException as error:
            raise StateError(f"{self.url}: not HTTP: {type(error).__name__}") from error
        except TimeoutError as error:
            raise StateError(f"{self.url}: no answer within {self.deadline_s:g} s") from error
        except OSError as error:
            file = f"{error.filename}: " if error.filename else ""
            why = error.strerror or reason_of(error)
            raise StateError(f"{self.url}: {file}{why}") from error
        except ValueError as error:  # a host that is no name, a port that is no number
            raise StateError(f"{self.url}: not a valid URL: {error}") from error
        for problem in pods.problems:
            log.debug("%s: pod skipped: %s", self.url, problem)
        return pods.specs

    def _get(self) -> bytearray:
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

    def _body(self, response: http.client.HTTPResponse, deadline: float) -> bytearray:
        if response.status != http.client.OK:
            hint = _HINTS.get(response.status, "")
            raise StateError(f"{self.url}: the kubelet answered HTTP {response.status}", hint=hint)
        body = bytearray()
        while chunk := response.read1(_CHUNK):
            body += chunk
            if len(body) > MAX_BYTES:
                raise StateError(f"{self.url}: longer than {MAX_BYTES} bytes")
            if time.monotonic() > deadline:
                raise TimeoutError
        return body

    def _connection(self, scheme: str, host: str, port: int | None) -> http.client.HTTPConnection:
        if scheme != "https":
            return http.client.HTTPConnection(host, port, timeout=self.deadline_s)
        context = ssl.create_default_context(cadata=self._authorities())
        if self.certificate:
            read_projected(self.certificate, MAX_FILE)  # whose it is
            try:
                context.load_cert_chain(self.certificate)
            except ssl.SSLError as error:
                why = error.reason or reason_of(error)
                text = f"{self.certificate}: not a certificate with its key: {why}"
                raise StateError(text) from error
        return _NamedConnection(host, port, self._expected_name() or host, context, self.deadline_s)

    def _authorities(self) -> str | None:
        """Return the certificates of `ca`, None for the host's."""
        if not self.ca:
            return None
        text = read_projected(self.ca, MAX_FILE).decode("ascii", "replace")
        if "-----BEGIN CERTIFICATE-----" not in text:
            raise StateError(f"{self.ca}: does not hold a certificate")
        return text

    def _expected_name(self) -> str:
        """Return the name that the certificate must have; empty: the one in the URL."""
        if not self.name.startswith("$"):
            return self.name
        name = os.environ.get(self.name[1:], "")
        if not name:
            raise StateError(f"alloc.pods_name: environment variable {self.name[1:]} is not set")
        return name

    def _not_verified(self, error: ssl.SSLCertVerificationError) -> StateError:
        """Return the error for a certificate that is not the expected kubelet's."""
        hint = "name its authority in alloc.pods_ca, /var/lib/kubelet/pki/kubelet.crt by default"
        if error.verify_code in _OTHER_NAME:
            hint = "set alloc.pods_name to the node's name"
        text = f"{self.url}: TLS: certificate not accepted: {error.verify_message}"
        return StateError(text, hint=hint)

    def _headers(self) -> dict[str, str]:
        if not self.token:
            return {}
        token = read_projected(self.token, MAX_TOKEN).decode("ascii", "replace").strip()
        if not token.isprintable() or not token.isascii() or not token:
            raise StateError(f"{self.token}: does not hold a token")
        return {"Authorization": f"Bearer {token}"}


class _NamedConnection(http.client.HTTPSConnection):
    """A connection to a host whose certificate has another name."""

    def __init__(
        self, host: str, port: int | None, name: str, context: ssl.SSLContext, timeout: float
    ) -> None:
        super().__init__(host, port, timeout=timeout, context=context)
        self._name = name
        self._tls = context

    def connect(self) -> None:
        """Connect, and check the certificate against the name."""
        http.client.HTTPConnection.connect(self)
        self.sock = self._tls.wrap_socket(self.sock, server_hostname=self._name)
