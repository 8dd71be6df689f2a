"""A runtime's CRI service, played by a test: it answers UpdateContainerResources as it is told.

with CriServer(path) as server:
    server.answer = (grpc.StatusCode.NOT_FOUND, "no such container")
    ...
    assert server.asked == [("c1", "0-1")]
"""

from __future__ import annotations

import threading
from concurrent import futures
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc

from kata_pin.peers.proto import crirequest_pb2
from tests.support.proto import cri_pb2 as pb

METHOD = "/runtime.v1.RuntimeService/UpdateContainerResources"
LIST = "/runtime.v1.RuntimeService/ListContainers"


class CriServer:
    """Serves at a path; `answer` is a status code with its text, or None for success."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.answer: tuple[Any, str] | None = None
        self.listed = b""
        """The answer to ListContainers."""
        self.states: dict[str, int] | None = None
        """CRI's numbers of states by container; None: it knows any, and lists `listed`."""
        self.lists = 0
        self.asked: list[tuple[str, str]] = []
        self.authorities: set[str] = set()
        self.silent = threading.Event()
        """While it is set, nobody is answered."""
        self._resume = threading.Event()

    def __enter__(self) -> Self:
        self._server = grpc.server(futures.ThreadPoolExecutor(max_workers=4))
        self._server.add_generic_rpc_handlers((_Handler(self),))
        self._server.add_insecure_port(f"unix:{self.path}")
        self._server.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._resume.set()
        self._server.stop(0).wait()

    def update(self, payload: bytes, context: Any) -> bytes:
        """Serve one call."""
        request = pb.UpdateContainerResourcesRequest()
        request.ParseFromString(payload)
        self.asked.append((request.container_id, request.linux.cpuset_cpus))
        if self.silent.is_set():
            self._resume.wait(60)
        if self.answer is not None:
            context.abort(*self.answer)
        if self.states is not None and request.container_id not in self.states:
            context.abort(grpc.StatusCode.NOT_FOUND, "failed to find container")
        return b""

    def list(self, payload: bytes, context: Any) -> bytes:
        """Serve a call of ListContainers."""
        assert payload == b""
        self.lists += 1
        if self.answer is not None:
            context.abort(*self.answer)
        return self.listed if self.states is None else b"".join(map(_listed, self.states.items()))


def _listed(container: tuple[str, int]) -> bytes:
    """Return a container as a field of ListContainers' answer."""
    name, state = container
    message: bytes = crirequest_pb2.Container(id=name, state=state).SerializeToString()
    return b"\x0a" + bytes([len(message)]) + message


class _Handler(grpc.GenericRpcHandler):  # type: ignore[misc] # grpc has no types
    def __init__(self, server: CriServer) -> None:
        self._server = server

    def service(self, details: Any) -> Any:
        if details.method == LIST:
            return grpc.unary_unary_rpc_method_handler(self._server.list)
        if details.method != METHOD:
            return None
        return grpc.unary_unary_rpc_method_handler(self._server.update)
