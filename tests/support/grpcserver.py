"""A gRPC server on a unix socket, played by a test: each method has an answer, or a status.

with GrpcServer(path, {"/v1alpha1.Pods/ListPods": b"..."}) as server:
    server.answers["/x"] = (grpc.StatusCode.NOT_FOUND, "no such thing")
"""

from __future__ import annotations

from concurrent import futures
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc

Answer = bytes | tuple[Any, str]


class GrpcServer:
    """Serves at a path; a method without an answer is unknown."""

    def __init__(self, path: Path, answers: dict[str, Answer]) -> None:
        self.path = path
        self.answers = answers

    def __enter__(self) -> Self:
        self._server = grpc.server(futures.ThreadPoolExecutor(max_workers=2))
        self._server.add_generic_rpc_handlers((_Handler(self.answers),))
        self._server.add_insecure_port(f"unix:{self.path}")
        self._server.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.stop(0).wait()


class _Handler(grpc.GenericRpcHandler):  # type: ignore[misc] # grpc has no types
    def __init__(self, answers: dict[str, Answer]) -> None:
        self._answers = answers

    def service(self, details: Any) -> Any:
        if details.method not in self._answers:
            return None

        def serve(_: bytes, context: Any) -> bytes:
            answer = self._answers[details.method]
            if isinstance(answer, bytes):
                return answer
            context.abort(*answer)  # raises
            return b""

        return grpc.unary_unary_rpc_method_handler(serve)
