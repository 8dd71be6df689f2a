"""An API server that answers as it is told, over real HTTP: for answers a real one cannot be made
to give (tests/cluster has the real one).

    with api_double() as api:
        api.answers += [(429, b"", {"Retry-After": "7"})]
        api.requests          # method and path of each request, and its body
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = tuple[int, bytes, Mapping[str, str]]

OK: Answer = (200, b"{}", {})


class ApiDouble(ThreadingHTTPServer):
    """The server; `answers` are given in their order, then `OK`."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers: list[Answer] = []
        self.requests: list[tuple[str, str, dict[str, Any]]] = []
        self.types: list[str] = []
        self.delay_s = 0.0
        self.ended = threading.Event()

    @property
    def url(self) -> str:
        """Return its address."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of clients that hung up."""


class _Handler(BaseHTTPRequestHandler):
    def _answer(self) -> None:
        server = self.server
        assert isinstance(server, ApiDouble)
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        server.requests.append((self.command, self.path, json.loads(body or b"null")))
        server.types.append(self.headers.get("Content-Type", ""))
        status, answer, headers = server.answers.pop(0) if server.answers else OK
        if server.delay_s:
            server.ended.wait(server.delay_s)
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_PATCH = do_POST = do_GET = _answer  # noqa: N815 - the base class's names

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextlib.contextmanager
def api_double() -> Iterator[ApiDouble]:
    """Run one for the block."""
    server = ApiDouble()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield server
    finally:
        server.ended.set()
        server.shutdown()
        thread.join()
        server.server_close()
