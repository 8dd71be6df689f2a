"""Asking the kubelet for its pods: what annotations running pods have now.

NRI tells a pod's annotations when a container is made and never again; the kubelet, which has them
from the API server, answers `GET /pods` on its port 10250 (https, with a credential that may `get`
`nodes/proxy`) or, where it is still open, on 10255 (http, no credential). Source: Kubernetes'
documentation, Kubelet authentication and authorization.

One request a call, in a thread of its own, with a deadline for all of it; nothing is kept but the
settings. The token is read each time, because it is replaced while it is valid.
"""

from __future__ import annotations

import asyncio
import http.client
import logging
import ssl
import time
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from kata_pin.errors import ParseError, StateError
from kata_pin.sources.ownedfile import FileRefused, read_owned
from kata_pin.wire.podlist import MAX_BYTES, Annotations, parse_pods

log = logging.getLogger(__name__)

DEADLINE_S: Final = 5.0
MAX_TOKEN: Final = 16 * 1024
_CHUNK: Final = 256 * 1024


@dataclass(frozen=True)
class PodList:
    """Where to ask: `url` with its path, files of a token and of certificate authorities.

    Without `ca` the host's authorities count; without `token` nothing is shown to the kubelet.
    """

    url: str
    token: str = ""
    ca: str = ""
    deadline_s: float = DEADLINE_S

    async def read(self) -> Annotations:
        """Return the pods' annotations about CPUs; StateError says what is wrong."""
        try:
            async with asyncio.timeout(self.deadline_s + 1):
                return await asyncio.to_thread(self._read)
        except TimeoutError as error:
            raise StateError(f"{self.url}: no answer within {self.deadline_s:g} s") from error

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
        try:
            path = (
                f"{parts.path or '/pods'}?{parts.query}" if parts.query else parts.path or "/pods"
            )
            connection.request("GET", path, headers=self._headers())
            response = connection.getresponse()
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
        finally:
            connection.close()

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
