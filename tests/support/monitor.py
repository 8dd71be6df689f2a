"""A small synchronous QMP client, for the stand-in shim and for tests that ask QEMU for the truth.

One command at a time, a deadline on every wait; independent of what is under test: the
monitor.py of the broker.
"""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import Any


class MonitorError(Exception):
    """QEMU refused a command, closed the socket, or did not answer in time."""


class Monitor:
    """One QMP session; it holds QEMU's only client slot of that socket until closed."""

    def __init__(self, path: Path | str, timeout_s: float = 10.0) -> None:
        self._timeout_s = timeout_s
        self._buffer = b""
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.settimeout(timeout_s)
            self._socket.connect(str(path))
            self._read(time.monotonic() + timeout_s)  # the greeting
            self.execute("qmp_capabilities")
        except BaseException:
            self._socket.close()
            raise

    def execute(self, command: str, **arguments: Any) -> Any:
        """Run one command and return its answer; events that arrive meanwhile are dropped."""
        request = {"execute": command, "arguments": arguments}
        deadline = time.monotonic() + self._timeout_s
        self._socket.sendall(json.dumps(request).encode() + b"\n")
        while True:
            message = self._read(deadline)
            if "return" in message:
                return message["return"]
            if "error" in message:
                raise MonitorError(f"{command}: {message['error'].get('desc')}")

    def close(self) -> None:
        """Give the slot up."""
        self._socket.close()

    def _read(self, deadline: float) -> dict[str, Any]:
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0:
                raise MonitorError("QEMU did not answer in time")
            self._socket.settimeout(left)
            try:
                chunk = self._socket.recv(65536)
            except TimeoutError as error:
                raise MonitorError("QEMU did not answer in time") from error
            if not chunk:
                raise MonitorError("QEMU closed the socket")
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message
