"""HTTP: one request at a time to a server of Kubernetes."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from email.message import Message
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit, urlunsplit

from msgspec import Struct

from kata_pin.base.errors import ParseError, StateError, reason_of
from kata_pin.linux.owned_files import FileRefused, read_projected

# > client = HttpClient("https://127.0.0.1:10250", token="/path/token", ca="/path/ca.crt")
# > answer = await client.ask("GET", "/pods", HttpClient.whole)
#
# Each call makes one request in a thread, which the daemon's end does not wait for, within one
# deadline. After it the connection is cut, so that the thread ends too. Only a name lookup cannot
# be cut; until it ends no further request starts, so there is at most one thread. Token and
# certificates are read each time, because they are replaced while they are valid. The standard
# library is enough: a client library for Kubernetes would bring 9 to 100 MB for three kinds of
# requests.

T = TypeVar("T")

DEADLINE_S: Final = 5.0
MAX_BYTES: Final = 16 * 1024 * 1024
MAX_TOKEN: Final = 16 * 1024
MAX_FILE: Final = 1024 * 1024  # of certificates

_OTHER_NAME: Final = frozenset({62, 64})
"""verify_code where another name, or another address, was expected (x509_vfy.h)."""

_CHUNK: Final = 256 * 1024
_MOST_AFTER_S: Final = 300.0


class HttpAnswer(Struct, frozen=True):
    """What a server answered; `retry_after_s` is what it asks for with 429 or 503, else 0."""

    status: int
    body: bytearray
    retry_after_s: float = 0.0


class Hints(Struct, frozen=True):
    """What to do about a certificate that is not accepted: unknown authority, another name."""

    authority: str = ""
    name: str = ""


@dataclass
class HttpClient:
    """Where to ask: `url`, and files with a token and with certificate authorities.

    Without `ca` the host's authorities count. `name` is the one that the server's certificate must
    have, empty for the one in `url`; `$NAME` names an environment variable. `certificate` is a file
    with a client certificate and its key. Without that and `token` the request has no credential.
    `thread` names the thread, `most` bounds an answer in bytes.
    """

    url: str
    token: str = ""
    ca: str = ""
    name: str = ""
    certificate: str = ""
    deadline_s: float = DEADLINE_S
    most: int = MAX_BYTES
    hints: Hints = field(default_factory=Hints)
    thread: str = "http request"
    name_setting: str = "name"
    _pending: bool = field(default=False, init=False)
    _connected: http.client.HTTPConnection | None = field(default=None, init=False)

    async def ask(
        self,
        method: str,
        path: str,
        use: Callable[[HttpAnswer], T],
        *,
        body: bytes | None = None,
        kind: str = "",
    ) -> T:
        """Send a request, and return what `use`, which runs in the thread, makes of the answer.

        `path` is appended to the URL's own; `kind` is the type of `body`. Raises StateError with
        the reason, also for a ParseError of `use`.
        """
        if self._pending:
            raise StateError(f"{self.url}: the previous request has not ended yet")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def done(outcome: T | None, error: StateError | None) -> None:
            loop.call_soon_threadsafe(self._settle, answer, outcome, error)

        def work() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                try:
                    done(self._checked(lambda: use(self._send(method, path, body, kind))), None)
                except StateError as error:  # raised by the caller of ask()
                    done(None, error)

        self._pending = True
        threading.Thread(target=work, name=self.thread, daemon=True).start()
        try:
            async with asyncio.timeout(self.deadline_s + 1):
                return await answer
        except TimeoutError as error:
            raise StateError(f"{self.url}: no answer within {self.deadline_s:g} s") from error
        finally:
            self._cut()

    @staticmethod
    def whole(answer: HttpAnswer) -> HttpAnswer:
        """Return the answer as it is."""
        return answer

    def _settle(
        self, answer: asyncio.Future[Any], outcome: object, error: StateError | None
    ) -> None:
        """Give the outcome to the caller, if it still waits."""
        self._pending = False
        if answer.done():
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(outcome)

    def _cut(self) -> None:
        """Shut down a connection that is still open, so that the thread's read fails."""
        connected = self._connected  # the thread may set it to None at any time
        sock = None if connected is None else connected.sock
        if sock is not None:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(sock, socket.SHUT_RDWR)

    def _checked(self, made: Callable[[], T]) -> T:
        try:
            return made()
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

    def _send(self, method: str, path: str, body: bytes | None, kind: str) -> HttpAnswer:
        deadline = time.monotonic() + self.deadline_s
        parts = urlsplit(self.url + path)
        connection = self._connection(parts.scheme, parts.hostname or "", parts.port)
        self._connected = connection
        try:
            target = parts._replace(scheme="", netloc="", path=parts.path or "/", fragment="")
            headers = self._headers()
            if kind:
                headers["Content-Type"] = kind
            connection.request(method, urlunsplit(target), body=body, headers=headers)
            with connection.getresponse() as response:
                asked = _after_s(response.headers)
                return HttpAnswer(response.status, self._body(response, deadline), asked)
        finally:
            self._connected = None
            connection.close()

    def _body(self, response: http.client.HTTPResponse, deadline: float) -> bytearray:
        body = bytearray()
        while chunk := response.read1(_CHUNK):
            body += chunk
            if len(body) > self.most:
                raise StateError(f"{self.url}: longer than {self.most} bytes")
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
            setting = self.name_setting
            raise StateError(f"{setting}: environment variable {self.name[1:]} is not set")
        return name

    def _not_verified(self, error: ssl.SSLCertVerificationError) -> StateError:
        """Return the error for a certificate that is not the expected server's."""
        other = error.verify_code in _OTHER_NAME
        text = f"{self.url}: TLS: certificate not accepted: {error.verify_message}"
        return StateError(text, hint=self.hints.name if other else self.hints.authority)

    def _headers(self) -> dict[str, str]:
        if not self.token:
            return {}
        token = read_projected(self.token, MAX_TOKEN).decode("ascii", "replace").strip()
        if not token.isprintable() or not token.isascii() or not token:
            raise StateError(f"{self.token}: does not hold a token")
        return {"Authorization": f"Bearer {token}"}


def _after_s(headers: Message) -> float:
    """Return how many seconds the server wants us to wait, bounded; 0 where it names no number."""
    text = headers.get("Retry-After", "")
    return min(_MOST_AFTER_S, float(text)) if text.isascii() and text.isdigit() else 0.0


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
