"""An API server that answers as it is told, over real HTTP: for answers a real one cannot be made
to give.

    with api_double() as api:
        api.answers += [(429, b"", {"Retry-After": "7"})]
        api.requests          # method and path of each request, and its body

The answers that have a name here are those of a real one (tests/contract/test_api.py).
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

Answer = tuple[int, bytes, Mapping[str, str]]

OK: Answer = (200, b"{}", {})
CREATED: Answer = (201, b"{}", {})


def refusal(status: int, message: str) -> Answer:
    """Return a refusal with the server's words."""
    return status, json.dumps({"kind": "Status", "message": message}).encode(), {}


UNAUTHORIZED: Final = refusal(401, "Unauthorized")
FORBIDDEN: Final = refusal(403, 'nodeplacements.kata-pin.io "n1" is forbidden')
MISSING: Final = refusal(404, 'nodeplacements.kata-pin.io "n1" not found')
CONFLICT: Final = refusal(409, 'Apply failed with 1 conflict: conflict with "nfd"')
CHANGED: Final = refusal(422, "the server rejected our request due to an error in our request")
UNDECLARED: Final = refusal(
    500, "failed to create typed patch object: .status.free: field not declared in schema"
)
"""An answer to a field that the installed definition does not have."""


def node(*taints: Mapping[str, str]) -> Answer:
    """Return the answer with a Node."""
    return 200, json.dumps({"kind": "Node", "spec": {"taints": taints}}).encode(), {}


def written_by(*managers: str) -> Answer:
    """Return the answer with an object whose zones these managers wrote, among other fields."""
    fields: list[dict[str, Any]] = [
        {"manager": one, "fieldsV1": {"f:zones": {}}} for one in managers
    ]
    fields.append({"manager": "kubectl", "fieldsV1": {"f:metadata": {}}})
    return 200, json.dumps({"metadata": {"managedFields": fields}}).encode(), {}


def event(count: int) -> Answer:
    """Return the answer with an Event that was reported so often."""
    return 200, json.dumps({"series": {"count": count}}).encode(), {}


def daemonset(wanted: int, updated: int, ready: int, *, seen: int = 2) -> Answer:
    """Return the answer with a DaemonSet of generation 2, whose controller has seen this one."""
    status = {
        "desiredNumberScheduled": wanted,
        "updatedNumberScheduled": updated,
        "numberReady": ready,
        "observedGeneration": seen,
    }
    document = {"metadata": {"generation": 2}, "status": status}
    return 200, json.dumps(document).encode(), {}


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
