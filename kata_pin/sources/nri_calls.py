"""Our own calls on an NRI connection: RegisterPlugin and UpdateContainers of the service Runtime.

Streams are odd and increase (ttrpc's PROTOCOL.md). An answer that no caller waits for any more is
dropped. Lives as long as its connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kata_pin.errors import RemoteProtocolError
from kata_pin.wire import ttrpc
from kata_pin.wire.nri import messages as nri
from kata_pin.wire.ttrpc import Frame, Request, Response


class RuntimeCalls:
    """Calls the runtime; `send` writes a frame to the connection."""

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send = send
        self._next = 1
        self._waiting: dict[int, asyncio.Future[Response]] = {}
        self._ended: Exception | None = None

    async def call(self, method: str, payload: bytes, *, deadline_s: float) -> Response:
        """Return the answer, whatever its status; raises the error of `end`, or TimeoutError."""
        if self._ended is not None:
            raise self._ended
        stream, self._next = self._next, self._next + 2
        answer: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        self._waiting[stream] = answer
        request = Request(nri.RUNTIME_SERVICE, method, payload, timeout_ns=int(deadline_s * 1e9))
        try:
            self._send(ttrpc.encode_request(stream, request))
            async with asyncio.timeout(deadline_s):
                return await answer
        finally:
            del self._waiting[stream]

    def take(self, frame: Frame) -> None:
        """Take an answer; raises ParseError or RemoteProtocolError for an unusable one."""
        answer = self._waiting.get(frame.stream)
        if answer is None or answer.done():
            return
        if frame.data is None:
            raise RemoteProtocolError("the runtime's answer is too long")
        answer.set_result(ttrpc.parse_response(frame.data))

    def end(self, error: Exception) -> None:
        """Fail every call, later ones too: the connection has ended."""
        self._ended = error
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(error)
