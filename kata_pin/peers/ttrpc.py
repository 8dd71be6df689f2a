"""ttrpc, containerd's small RPC, and NRI's multiplexer, which carries several streams over one."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import TYPE_CHECKING, Final, TypeVar

from msgspec import Struct

from kata_pin.base.errors import ParseError, RemoteProtocolError
from kata_pin.peers import proto

if TYPE_CHECKING:
    from google.protobuf.message import Message


# ttrpc, containerd's small RPC: frames over a byte stream, envelopes in the frames.
#
# > frame    data length u32 | stream u32 | type u8 | flags u8 | data      (big-endian)
#
# A call is one request frame and one response frame with the same stream number; clients number
# streams 1, 3, 5... Source: github.com/containerd/ttrpc, PROTOCOL.md, channel.go, services.go.
# Neither NRI nor the kata-agent uses streaming (type 3), so it is missing here.

MAX_DATA: Final = 4 << 20  # longest data of one frame; Go's ttrpc refuses to send and to take more
HEADER: Final = struct.Struct(">IIBB")
REQUEST: Final = 1
RESPONSE: Final = 2


M = TypeVar("M", bound="Message")


class Code(IntEnum):
    """gRPC status codes, those that are used."""

    OK = 0
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    UNIMPLEMENTED = 12
    INTERNAL = 13


class Frame(Struct, frozen=True):
    """One frame; `data` is None if it was too long and has been discarded."""

    stream: int
    kind: int
    data: bytes | None


class FrameDecoder:
    """Takes a connection's bytes in any pieces; holds at most one frame.

    The data of a frame longer than `limit` is skipped, so the connection stays usable; the frame is
    yielded at once without data, for the caller to refuse.
    """

    def __init__(self, limit: int = MAX_DATA) -> None:
        self._limit = limit
        self._buffer = bytearray()
        self._skip = 0

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Take more bytes; yield every complete frame. Must be run to its end."""
        if self._skip:
            dropped = min(self._skip, len(data))
            self._skip -= dropped
            data = data[dropped:]
        self._buffer += data
        while len(self._buffer) >= HEADER.size:
            length, stream, kind, _flags = HEADER.unpack_from(self._buffer)
            if length > self._limit:
                self._discard(HEADER.size + length)
                yield Frame(stream, kind, None)
                continue
            end = HEADER.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[HEADER.size : end])
            del self._buffer[:end]
            yield Frame(stream, kind, body)

    def _discard(self, size: int) -> None:
        """Drop the next `size` bytes, received or still to come."""
        here = min(size, len(self._buffer))
        del self._buffer[:here]
        self._skip = size - here


class TtrpcRequest(Struct, frozen=True):
    """A call: `payload` is the encoded message of `method`; `timeout_ns` 0 means no timeout."""

    service: str
    method: str
    payload: bytes = b""
    timeout_ns: int = 0


class Response(Struct, frozen=True):
    """An answer: `payload` if `code` is 0, else `message` says what failed."""

    payload: bytes = b""
    code: int = Code.OK
    message: str = ""


def parse_request(data: bytes) -> TtrpcRequest:
    """Read the data of a request frame; raises ParseError."""
    envelope = parsed(proto.ttrpc_pb2.Request(), data, "ttrpc request")
    return TtrpcRequest(envelope.service, envelope.method, envelope.payload, envelope.timeout_nano)


def parse_response(data: bytes) -> Response:
    """Read the data of a response frame; raises ParseError."""
    envelope = parsed(proto.ttrpc_pb2.Response(), data, "ttrpc response")
    return Response(envelope.payload, envelope.status.code, envelope.status.message)


def encode_request(stream: int, request: TtrpcRequest) -> bytes:
    """Return the frame of a call; ValueError beyond MAX_DATA."""
    envelope = proto.ttrpc_pb2.Request(
        service=request.service,
        method=request.method,
        payload=request.payload,
        timeout_nano=request.timeout_ns,
    )
    return _frame(stream, REQUEST, encoded(envelope))


def encode_response(stream: int, response: Response) -> bytes:
    """Return the frame of an answer; a success has no status. ValueError beyond MAX_DATA."""
    envelope = proto.ttrpc_pb2.Response(payload=response.payload)
    if response.code != Code.OK:
        envelope.status.code = response.code
        envelope.status.message = response.message
    return _frame(stream, RESPONSE, encoded(envelope))


def _frame(stream: int, kind: int, data: bytes) -> bytes:
    if len(data) > MAX_DATA:
        raise ValueError(f"{len(data)} bytes do not fit into a ttrpc frame")
    return HEADER.pack(len(data), stream, kind, 0) + data


def encoded(message: Message) -> bytes:
    """Return the bytes of a protobuf message."""
    return bytes(message.SerializeToString())


def parsed(message: M, data: bytes, source: str) -> M:
    """Return a protobuf message filled from bytes; ParseError names `source`."""
    from google.protobuf.message import DecodeError  # noqa: PLC0415 - see peers/proto

    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise ParseError(str(error), source=source) from error
    return message


# NRI's multiplexer: several ttrpc connections over one stream.
#
# > frame    connection u32 | payload length u32 | payload      (big-endian)
#
# There are two fixed connections, 1 for the plugin's service (the runtime calls), 2 for the
# runtime's (the plugin calls). Source: github.com/containerd/nri, pkg/net/multiplex/mux.go and
# ttrpc.go.
#
# Received frames may cut a connection's byte stream anywhere. Sent frames are cut at `MAX_SENT`:
# Go's side reads a connection through a buffer of 4096 bytes and fails with ENOMEM on a frame that
# does not fit (containerd/nri, conn.Read).

PLUGIN: Final = 1  # the connection on which the runtime calls the plugin
RUNTIME: Final = 2  # the connection on which the plugin calls the runtime
MAX_SENT: Final = 4096  # longest payload of a frame that is sent

MAX_TAKEN: Final = MAX_DATA + HEADER.size
"""Longest payload of a frame that is accepted: the most that Go's side sends."""

MUX_HEADER: Final = struct.Struct(">II")


class MuxDecoder:
    """Takes the trunk's bytes in any pieces; holds less than one header."""

    def __init__(self) -> None:
        self._header = bytearray()
        self._connection = 0
        self._left = 0

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Take more bytes; yield (connection, its bytes). Must be run to its end.

        RemoteProtocolError for a frame longer than MAX_TAKEN; the trunk is unusable after it.
        """
        view = memoryview(data)
        while view:
            if not self._left:
                view = self._take_header(view)
                continue
            piece = view[: self._left]
            self._left -= len(piece)
            view = view[len(piece) :]
            yield self._connection, bytes(piece)

    def _take_header(self, view: memoryview) -> memoryview:
        missing = MUX_HEADER.size - len(self._header)
        self._header += view[:missing]
        if len(self._header) == MUX_HEADER.size:
            self._connection, self._left = MUX_HEADER.unpack(self._header)
            self._header.clear()
            if self._left > MAX_TAKEN:
                raise RemoteProtocolError(f"NRI frame of {self._left} bytes")
        return view[missing:]


def encode(connection: int, message: bytes) -> bytes:
    """Return the trunk's bytes of one ttrpc message."""
    parts: list[bytes] = []
    for start in range(0, len(message), MAX_SENT):
        piece = message[start : start + MAX_SENT]
        parts += (MUX_HEADER.pack(connection, len(piece)), piece)
    return b"".join(parts)
