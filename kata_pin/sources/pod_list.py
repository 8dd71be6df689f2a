"""Asking the kubelet for its pods, to see which annotations running pods have now.

NRI reports a pod's annotations when a container is created and never again, and never which
containers are init containers. The kubelet has both from the API server and answers `GET /pods` on
port 10250 (https, with a credential that may `get` `nodes/pods`, before Kubernetes 1.33
`nodes/proxy`) or, where it is still open, on 10255 (http, no credential). Source: Kubernetes'
documentation, Kubelet authentication and authorization.

A kubelet's own certificate, unless the administrator gave it one, is signed by itself and names the
node alone, not its addresses. How a request is bounded: http_client.py.

A long list hardly delays the event loop: 600 pods of 50 KiB by 23 ms at most, in 0.4 s.
"""

from __future__ import annotations

import http.client
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from kata_pin.errors import StateError
from kata_pin.model.alloc import PodSpec
from kata_pin.sources.http_client import DEADLINE_S, Answer, Hints, HttpClient
from kata_pin.wire.kube.pod_list import MAX_BYTES, parse_pods

log = logging.getLogger(__name__)

THREAD: Final = "pod list"  # the thread's name

_HINTS: Final = {
    http.client.UNAUTHORIZED: "its token or client certificate is not accepted, or has expired",
    http.client.FORBIDDEN: "it needs `get` on nodes/pods, before Kubernetes 1.33 on nodes/proxy",
}
"""What to do about an answer's status."""

_TLS: Final = Hints(
    authority="name its authority in alloc.pods_ca, /var/lib/kubelet/pki/kubelet.crt by default",
    name="set alloc.pods_name to the node's name",
)

Specs = Mapping[str, PodSpec]
"""Pods by uid."""


@dataclass
class PodList:
    """Where to ask: `url` with its path; the other fields are those of HttpClient."""

    url: str
    token: str = ""
    ca: str = ""
    name: str = ""
    certificate: str = ""
    deadline_s: float = DEADLINE_S

    def __post_init__(self) -> None:
        """Make the client, which knows of a request that has not ended."""
        self.client = HttpClient(
            self.url,
            token=self.token,
            ca=self.ca,
            name=self.name,
            certificate=self.certificate,
            deadline_s=self.deadline_s,
            most=MAX_BYTES,
            hints=_TLS,
            thread=THREAD,
            name_setting="alloc.pods_name",
        )

    async def read(self) -> Specs:
        """Return what is listed of each pod; raises StateError with the reason."""
        return await self.client.ask("GET", self._path(), self._specs)

    def _path(self) -> str:
        try:
            return "" if urlsplit(self.url).path else "/pods"
        except ValueError:  # reported by the request
            return ""

    def _specs(self, answer: Answer) -> Specs:
        if answer.status != http.client.OK:
            hint = _HINTS.get(answer.status, "")
            raise StateError(f"{self.url}: the kubelet answered HTTP {answer.status}", hint=hint)
        pods = parse_pods(answer.body)
        for problem in pods.problems:
            log.debug("%s: pod skipped: %s", self.url, problem)
        return pods.specs
