"""A kubelet's list of pods, played over real HTTP.

    with playing_kubelet() as kubelet:
        kubelet.pods["uid-1"] = {"cpu-policy.kata-pin.io": "share"}
        kubelet.url("/open")

`/pods` is for who shows TOKEN, `/open` for everybody; `/slow` drips, `/drip` in its
headers, `/long` does not end, `/forbidden` is for nobody.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN = "a.b.c"


class Kubelet(ThreadingHTTPServer):
    """The server; `pods` are the annotations by uid, `specs` what else is specified of some."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.pods: dict[str, dict[str, str]] = {"u1": {}}
        self.specs: dict[str, object] = {}

    def url(self, path: str = "/pods", scheme: str = "http") -> str:
        """Return the address of a path."""
        return f"{scheme}://localhost:{self.server_address[1]}{path}"

    def document(self) -> bytes:
        """Return the list."""
        items = [
            {
                "metadata": {"uid": uid, "annotations": annotations},
                "spec": self.specs.get(uid, {}),
            }
            for uid, annotations in self.pods.items()
        ]
        return json.dumps({"kind": "PodList", "items": items}).encode()


class _Handler(BaseHTTPRequestHandler):
    """One request."""

    def do_GET(self) -> None:
        """Answer."""
        assert isinstance(self.server, Kubelet)
        allowed = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if self.path == "/pods" and not allowed:
            self.send_error(401)
            return
        if self.path == "/forbidden":
            self.send_error(403)
            return
        if self.path == "/drip":
            self._drip()
            return
        self.send_response(200)
        self.end_headers()
        with contextlib.suppress(OSError):
            if self.path == "/slow":
                for _ in range(200):
                    self.wfile.write(b" ")
                    time.sleep(0.02)
            elif self.path == "/long":
                for _ in range(40):
                    self.wfile.write(b" " * (1 << 20))
            self.wfile.write(self.server.document())

    def _drip(self) -> None:
        """Send headers for half a minute."""
        with contextlib.suppress(OSError):
            self.wfile.write(b"HTTP/1.0 200 OK\r\nX-Drip: ")
            for _ in range(1500):
                self.wfile.write(b".")
                time.sleep(0.02)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base's name
        """Say nothing."""


@contextlib.contextmanager
def playing_kubelet() -> Iterator[Kubelet]:
    """Serve meanwhile."""
    server = Kubelet()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()
