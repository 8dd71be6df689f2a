"""The lab's agent inside a machine: runs commands that arrive on virtio-serial ports.

Runs as root in the guest from its image (standard library and tests.lab.frames only). It exists
because the guest has no network, and because a login over ssh costs seconds under emulation: here
a command costs one fork and exec. One thread serves one port, one command at a time; what a port
started is ended when the host's side closes or says hello anew.

Lifetime: until the machine ends. Out of scope: authentication; the ports are unix sockets in a
folder of the lab on the host.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from tests.lab import frames

PORTS: Final = Path("/dev/virtio-ports")
IDLE_S: Final = 0.5
"""Pause between looks at a port whose host side is closed: poll(2) then returns at once."""
INPUT_LIMIT: Final = 256 * 1024
"""Input kept for a command that does not read it before the port is no longer read."""


class Port:
    """One port, given as an open descriptor; reads do not block, writes wait for the host."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self._decoder = frames.Decoder()

    def read(self) -> list[tuple[bytes, bytes]]:
        """Return the frames that are there."""
        try:
            return self._decoder.feed(os.read(self.fd, 65536))
        except BlockingIOError:
            return []

    def closed(self) -> bool:
        """Tell whether the host's side is closed."""
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        return any(event & select.POLLHUP for _, event in poll.poll(0))

    def write(self, kind: bytes, payload: bytes = b"") -> None:
        """Send one frame; dropped when the host's side is closed."""
        data = memoryview(frames.encode(kind, payload))
        while data:
            try:
                data = data[os.write(self.fd, data) :]
            except BlockingIOError:
                if self.closed():
                    return
                select.select([], [self.fd], [], IDLE_S)


class Command:
    """One running command and its pipes or terminal."""

    def __init__(self, request: dict[str, Any]) -> None:
        argv: list[str] = request["argv"]
        self._input = bytearray()
        self._input_ended = False
        if request.get("pty"):
            self._terminal, theirs = pty.openpty()
            resize(self._terminal, request["pty"])
            argv = ["setsid", "--ctty", *argv]
            ends = (theirs, theirs, theirs)
            self.stdin: int | None = os.dup(self._terminal)
            self.outputs = {self._terminal: frames.OUTPUT}
        else:
            self._terminal = -1
            theirs, self.stdin = os.pipe()
            output, output_end = os.pipe()
            errors, errors_end = os.pipe()
            ends = (theirs, output_end, errors_end)
            self.outputs = {output: frames.OUTPUT, errors: frames.ERRORS}
        try:
            self.child = subprocess.Popen(
                argv,
                stdin=ends[0],
                stdout=ends[1],
                stderr=ends[2],
                env={**os.environ, **request.get("env", {})},
                cwd=request.get("cwd") or "/root",
                start_new_session=not request.get("pty"),
            )
        except BaseException:
            for fd in (self.stdin, *self.outputs):
                os.close(fd)
            raise
        finally:
            for fd in set(ends):
                os.close(fd)
        for fd in (self.stdin, *self.outputs):
            os.set_blocking(fd, False)
        self.pidfd = os.pidfd_open(self.child.pid)

    def take_input(self, data: bytes, *, last: bool = False) -> None:
        """Queue input for the command; `last` closes its input when all is written."""
        self._input += data
        self._input_ended |= last
        self.write_input()

    def write_input(self) -> None:
        """Write what the command takes now."""
        if self.stdin is None:
            return
        try:
            while self._input:
                del self._input[: os.write(self.stdin, self._input)]
        except BlockingIOError:
            return
        except OSError:  # it closed its input, which is its right
            self._input.clear()
            self._input_ended = True
        if self._input_ended and self._terminal < 0:
            os.close(self.stdin)
            self.stdin = None

    @property
    def input_waits(self) -> bool:
        """There is input that the command has not taken."""
        return bool(self._input) and self.stdin is not None

    @property
    def input_full(self) -> bool:
        """No more input should be read for now."""
        return len(self._input) > INPUT_LIMIT

    def read_output(self, fd: int) -> bytes:
        """Return output that is there; empty at its end (a closed terminal gives EIO)."""
        try:
            return os.read(fd, frames.MAX_PAYLOAD)
        except BlockingIOError:
            return b""
        except OSError:
            return b""

    def resize(self, payload: bytes) -> None:
        """Set the size of the terminal, if there is one."""
        if self._terminal >= 0:
            resize(self._terminal, json.loads(payload))

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Signal the whole session of the command."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.pid, number)

    def close(self) -> int:
        """Close everything; return the exit code, 128 + n for signal n."""
        for fd in (*self.outputs, self.pidfd, *(() if self.stdin is None else (self.stdin,))):
            os.close(fd)
        code: int = self.child.wait()
        return 128 - code if code < 0 else code


def resize(terminal: int, size: list[int]) -> None:
    """Set rows and columns of a terminal."""
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", size[0], size[1], 0, 0))


class Server:
    """Serves one port for ever."""

    def __init__(self, port: Port) -> None:
        self._port = port
        self._command: Command | None = None

    def serve(self) -> None:
        """Take frames, run commands, send what they print."""
        while True:
            if self._port.closed():
                self._abandon()
                time.sleep(IDLE_S)
                continue
            self._wait()

    def _wait(self) -> None:
        """Do what one poll finds."""
        poll = select.poll()
        command = self._command
        if command is None or not command.input_full:
            poll.register(self._port.fd, select.POLLIN)
        else:
            poll.register(self._port.fd, 0)
        handlers: dict[int, Callable[[], None]] = {}
        if command is not None:
            for fd, kind in command.outputs.items():
                handlers[fd] = self._forward(command, fd, kind)
                poll.register(fd, select.POLLIN)
            poll.register(command.pidfd, select.POLLIN)
            handlers[command.pidfd] = lambda: self._finish(command)
            if command.input_waits and command.stdin is not None:
                handlers[command.stdin] = command.write_input
                poll.register(command.stdin, select.POLLOUT)
        ready = dict(poll.poll())
        for fd, handler in handlers.items():
            if fd in ready and self._command is command:
                handler()
        if ready.get(self._port.fd, 0) & select.POLLIN:
            for kind, payload in self._port.read():
                self._take(kind, payload)

    def _take(self, kind: bytes, payload: bytes) -> None:
        command = self._command
        if kind == frames.HELLO:
            self._abandon()
            self._port.write(frames.HELLO, payload)
        elif kind == frames.RUN:
            self._abandon()
            self._start(payload)
        elif command is None:
            return
        elif kind == frames.INPUT:
            command.take_input(payload)
        elif kind == frames.INPUT_END:
            command.take_input(b"", last=True)
        elif kind == frames.WINDOW:
            command.resize(payload)
        elif kind == frames.KILL:
            command.kill(int(payload))

    def _start(self, payload: bytes) -> None:
        try:
            self._command = Command(json.loads(payload))
        except (OSError, subprocess.SubprocessError) as error:
            self._exit(127, str(error))

    def _forward(self, command: Command, fd: int, kind: bytes) -> Callable[[], None]:
        def forward() -> None:
            data = command.read_output(fd)
            if data:
                self._port.write(kind, data)
            else:
                del command.outputs[fd]
                os.close(fd)

        return forward

    def _finish(self, command: Command) -> None:
        """Send what is still in the pipes, then the exit code.

        What the command left running keeps the pipes open, so their end is not waited for.
        """
        for fd, kind in command.outputs.items():
            while data := command.read_output(fd):
                self._port.write(kind, data)
        self._command = None
        self._exit(command.close())

    def _exit(self, code: int, error: str = "") -> None:
        self._port.write(frames.EXIT, json.dumps({"code": code, "error": error}).encode())

    def _abandon(self) -> None:
        """End the command that nobody waits for any more."""
        if self._command is not None:
            self._command.kill()
            self._command.close()
            self._command = None


def main() -> None:
    """Serve every port of the lab until the machine ends."""
    paths = sorted(PORTS.glob("kata-lab.*"))
    if not paths:
        sys.exit(f"no port kata-lab.* in {PORTS}")
    ports = [Port(os.open(path, os.O_RDWR)) for path in paths]
    servers = [threading.Thread(target=Server(port).serve) for port in ports]
    for server in servers:
        server.start()
    for server in servers:
        server.join()


if __name__ == "__main__":
    main()
