"""The host's side of the lab's channel: run a command in a machine and move its input and output.

A machine has a few ports; a channel holds one (by flock) from connect to close, so that several
commands, an interactive one among them, can run at once. Each wait has a deadline.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import secrets
import select
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, Self

from tests.lab import frames
from tests.lab.errors import DeadlineError, GoneError, LabError

PORTS: Final = 4
_CHUNK: Final = 16 * 1024
_BACKLOG: Final = 128 * 1024
"""Bytes waiting to be sent above which no more input is read."""
_GRACE_S: Final = 5
_HELLO_S: Final = 1.5

Sink = Callable[[bytes], object]


def socket_name(port: int) -> str:
    """Return the file name of a port's socket in the machine's folder."""
    return f"agent{port}.sock"


@dataclass(frozen=True, slots=True)
class Finished:
    """A command that ended by itself."""

    code: int
    stdout: bytes
    stderr: bytes


class Channel:
    """One port of one machine, connected and in step with its agent."""

    def __init__(self, connection: socket.socket, lock: int) -> None:
        self._socket = connection
        self._lock = lock
        self._decoder = frames.Decoder()
        self._out = bytearray()

    @classmethod
    def connect(cls, folder: Path, *, deadline_s: float) -> Self:
        """Take a free port of the machine in `folder` and wait for its agent.

        Raises LabError when no port is free or the machine is gone, DeadlineError when the agent
        does not answer in time.
        """
        for port in range(PORTS):
            lock = os.open(folder / f"{socket_name(port)}.lock", os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                channel = cls(_connect(folder, socket_name(port)), lock)
            except BlockingIOError:
                os.close(lock)
                continue
            except OSError as error:
                os.close(lock)
                raise LabError(f"{folder / socket_name(port)}: {error.strerror}") from error
            try:
                channel.greet(deadline_s)
            except BaseException:
                channel.close()
                raise
            return channel
        raise LabError(f"all {PORTS} ports of the machine are in use")

    def close(self) -> None:
        """Let the port go; the agent ends what it still runs for it."""
        self._socket.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self,
        argv: Sequence[str],
        *,
        deadline_s: float,
        stdin: IO[bytes] | None = None,
        stdout: Sink | None = None,
        stderr: Sink | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str = "",
    ) -> Finished:
        """Run `argv` in the machine until it ends; output goes to the sinks, else is returned.

        Raises DeadlineError after `deadline_s` (the command is then killed), LabError when the
        machine goes away.
        """
        kept_out, kept_err = io.BytesIO(), io.BytesIO()
        sinks = {frames.OUTPUT: stdout or kept_out.write, frames.ERRORS: stderr or kept_err.write}
        request = {"argv": list(argv), "env": dict(env or {}), "cwd": cwd}
        self._send(frames.RUN, json.dumps(request).encode())
        source = stdin
        if source is None:
            self._send(frames.INPUT_END)
        limit = time.monotonic() + deadline_s
        while True:
            if source is not None and len(self._out) < _BACKLOG:
                data = source.read(_CHUNK)
                self._send(frames.INPUT if data else frames.INPUT_END, data)
                source = source if data else None
            busy = source is not None and len(self._out) < _BACKLOG
            for kind, payload in self._step(0 if busy else min(1.0, limit - time.monotonic())):
                if kind == frames.EXIT:
                    return _finished(argv, payload, kept_out, kept_err)
                if kind in sinks:
                    sinks[kind](payload)
            if time.monotonic() >= limit:
                self._kill()
                raise DeadlineError(f"{argv[0]} in the machine took over {deadline_s:.0f} s")

    def interact(self, argv: Sequence[str], terminal: int, size: Callable[[], list[int]]) -> int:
        """Run `argv` on a terminal in the machine joined to ours (in raw mode); return its code."""
        shape = size()
        request = {
            "argv": list(argv),
            "pty": shape,
            "env": {"TERM": os.environ.get("TERM", "vt100")},
        }
        self._send(frames.RUN, json.dumps(request).encode())
        while True:
            for kind, payload in self._step(0.25, also=terminal):
                if kind == frames.EXIT:
                    return int(json.loads(payload)["code"])
                if kind == frames.OUTPUT:
                    os.write(1, payload)
            if select.select([terminal], [], [], 0)[0]:
                data = os.read(terminal, _CHUNK)
                if not data:
                    return 0
                self._send(frames.INPUT, data)
            if size() != shape:
                shape = size()
                self._send(frames.WINDOW, json.dumps(shape).encode())

    def greet(self, deadline_s: float) -> None:
        """Say hello until the agent echoes it; drops what an earlier client left in the port.

        More than once, because the guest may read a hello before it hears that the port was opened,
        and then can not answer. All of them are before anything else in the stream.
        """
        nonce = secrets.token_hex(8).encode()
        limit = time.monotonic() + deadline_s
        while time.monotonic() < limit:
            self._send(frames.HELLO, nonce)
            again = min(time.monotonic() + _HELLO_S, limit)
            while time.monotonic() < again:
                if (frames.HELLO, nonce) in self._step(again - time.monotonic()):
                    return
        raise DeadlineError(f"the agent in the machine did not answer in {deadline_s:.0f} s")

    def _send(self, kind: bytes, payload: bytes = b"") -> None:
        self._out += frames.encode(kind, payload)

    def _step(self, timeout_s: float, also: int | None = None) -> list[tuple[bytes, bytes]]:
        """Move bytes both ways once; return the frames that arrived."""
        readers = [self._socket.fileno(), *([] if also is None else [also])]
        writers = [self._socket.fileno()] if self._out else []
        ready, writable, _ = select.select(readers, writers, [], max(0.0, timeout_s))
        try:
            if writable:
                del self._out[: self._socket.send(self._out)]
            if self._socket.fileno() in ready:
                data = self._socket.recv(256 * 1024)
                if not data:
                    raise GoneError("the machine went away")
                return self._decoder.feed(data)
        except (BrokenPipeError, ConnectionResetError):
            raise GoneError("the machine went away") from None
        except BlockingIOError:
            pass
        return []

    def _kill(self) -> None:
        """Kill the running command and wait a moment for its end."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            self._send(frames.KILL, str(int(number)).encode())
            limit = time.monotonic() + _GRACE_S
            while time.monotonic() < limit:
                if any(kind == frames.EXIT for kind, _ in self._step(0.5)):
                    return


def _connect(folder: Path, name: str) -> socket.socket:
    """Connect to a socket by a short path: sockaddr_un has room for 107 characters only."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    directory = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        connection.connect(f"/proc/self/fd/{directory}/{name}")
        connection.setblocking(False)
    except BaseException:
        connection.close()
        raise
    finally:
        with contextlib.suppress(OSError):
            os.close(directory)
    return connection


def _finished(
    argv: Sequence[str], payload: bytes, stdout: io.BytesIO, stderr: io.BytesIO
) -> Finished:
    answer = json.loads(payload)
    if answer["error"]:
        raise LabError(f"{argv[0]} could not be started in the machine: {answer['error']}")
    return Finished(int(answer["code"]), stdout.getvalue(), stderr.getvalue())
