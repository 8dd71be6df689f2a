"""What the shim asks of the guest's agent: containers made, started, updated, removed.

Kata keeps one connection; here each request has its own, which is the same to the agent. The
messages are written by hand (numbers of agent.proto and oci.proto): minikata has the standard
library only. Out of scope: the agent's answers' content; only their status counts.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Mapping
from typing import Any, Final

PORT: Final = 1024
REQUEST: Final = 1
_HEADER: Final = struct.Struct(">IIBB")


class AgentError(RuntimeError):
    """The agent refused, or there is none."""


class Agent:
    """The agent of one guest; without a `cid` there is none, and everything is done at once."""

    def __init__(self, cid: int, wait_s: float) -> None:
        self._cid = cid
        self._wait_s = wait_s

    def create(self, container: str, arguments: list[str]) -> None:
        """Make a container that will run a program of the guest."""
        process = b"".join(_field(4, argument.encode()) for argument in arguments)
        self._ask("CreateContainer", _named(container) + _field(6, _field(2, process)))

    def start(self, container: str) -> None:
        """Start its program."""
        self._ask("StartContainer", _named(container))

    def update(self, container: str, cpu: Mapping[str, Any]) -> None:
        """Pass an update on, without its cpuset: Kata leaves that out."""
        numbers = {1: "shares", 2: "quota", 3: "period"}
        limits = b"".join(
            _varint(which << 3) + _varint(int(cpu[name]))
            for which, name in numbers.items()
            if int(cpu.get(name) or 0) > 0
        )
        self._ask("UpdateContainer", _named(container) + _field(2, _field(3, limits)))

    def remove(self, container: str) -> None:
        """End and remove it."""
        self._ask("RemoveContainer", _named(container))

    def _ask(self, method: str, payload: bytes) -> None:
        """Make one call; an agent that is just starting is waited for."""
        if not self._cid:
            return
        request = _field(1, b"grpc.AgentService") + _field(2, method.encode()) + _field(3, payload)
        until = time.monotonic() + self._wait_s
        with contextlib.closing(self._connect(until)) as connection:
            connection.settimeout(self._wait_s)
            connection.sendall(_HEADER.pack(len(request), 1, REQUEST, 0) + request)
            size = _HEADER.unpack(_receive(connection, _HEADER.size))[0]
            answer = _receive(connection, size)
        if answer.startswith(b"\x0a"):  # field 1 is a status; success has none
            raise AgentError(f"agent: {method}: {answer!r}")

    def _connect(self, until: float) -> socket.socket:
        while True:
            connection = socket.socket(socket.AF_VSOCK)
            try:
                connection.settimeout(self._wait_s)
                connection.connect((self._cid, PORT))
            except OSError as error:
                connection.close()
                if time.monotonic() > until:
                    raise AgentError(f"agent: {error}") from error
                time.sleep(0.1)
            else:
                return connection


def _receive(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise AgentError("agent: it closed the connection")
        data += part
    return data


def _named(container: str) -> bytes:
    return _field(1, container.encode())


def _field(which: int, data: bytes) -> bytes:
    return _varint(which << 3 | 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*out, value))
