"""The stand-in shim as a process of its own, driven over a socket; also the program it runs.

It shows the command line of containerd-shim-kata-v2 and ends, with QEMU, when its owner goes away.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support.shim import LocalShim


class ProcessShim:
    """A Shim that lives in a child process of the caller."""

    def __init__(self, sandbox_id: str, cwd: Path) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [
                    "/usr/bin/containerd-shim-kata-v2",
                    str(Path(__file__).resolve()),
                    *("-namespace", "k8s.io", "-address", "/run/containerd/containerd.sock"),
                    *("-publish-binary", "/usr/bin/containerd", "-id", sandbox_id),
                    f"--control={theirs.fileno()}",
                ],
                executable=sys.executable,
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                cwd=cwd,
            )
        self._socket = ours
        self._stream = ours.makefile("rwb")

    @property
    def pid(self) -> int:
        """The shim's process id."""
        return self._process.pid

    def start(self, argv: list[str], qmp_path: str, log_path: str) -> int:
        """See Shim.start."""
        return int(self._call("start", argv, qmp_path, log_path))

    def hold(self) -> None:
        """See Shim.hold."""
        self._call("hold")

    def let_go(self) -> None:
        """See Shim.let_go."""
        self._call("let_go")

    def execute(self, command: str, **arguments: Any) -> Any:
        """See Shim.execute."""
        return self._call("execute", command, **arguments)

    def plug(self, count: int) -> list[str]:
        """See Shim.plug."""
        return list(self._call("plug", count))

    def unplug(self, count: int) -> list[str]:
        """See Shim.unplug."""
        return list(self._call("unplug", count))

    def spawn(self, argv: list[str]) -> int:
        """Start another child of the shim, such as virtiofsd; return its pid."""
        return int(self._call("spawn", argv))

    def stop(self) -> None:
        """See Shim.stop."""
        if self._process.poll() is None:
            with contextlib.suppress(OSError, RuntimeError):
                self._call("stop")
        self.kill()

    def kill(self) -> None:
        """See Shim.kill."""
        self._process.kill()
        self._process.wait(timeout=10)
        for end in (self._stream, self._socket):
            with contextlib.suppress(OSError):
                end.close()

    def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        request = {"method": method, "args": args, "kwargs": kwargs}
        self._stream.write(json.dumps(request).encode() + b"\n")
        self._stream.flush()
        line = self._stream.readline()
        if not line:
            raise RuntimeError("the shim is gone")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["value"]


class _Served(LocalShim):
    """The shim inside the process, with the other children that Kata's has."""

    def __init__(self) -> None:
        super().__init__()
        self._children: list[subprocess.Popen[bytes]] = []

    def spawn(self, argv: list[str]) -> int:
        """Start a child."""
        child = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._children.append(child)
        return child.pid

    def stop(self) -> None:
        """Kill QEMU and the other children."""
        super().stop()
        for child in self._children:
            child.kill()
            child.wait(timeout=10)


def _serve(control: socket.socket) -> None:
    Path("/proc/self/comm").write_text("containerd-shim")
    shim = _Served()
    stream = control.makefile("rwb")
    try:
        for line in stream:
            request = json.loads(line)
            try:
                value = getattr(shim, request["method"])(*request["args"], **request["kwargs"])
                answer = {"value": value}
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            stream.write(json.dumps(answer).encode() + b"\n")
            stream.flush()
    finally:
        shim.stop()


if __name__ == "__main__":
    os.environ.clear()
    _serve(socket.socket(fileno=int(sys.argv[-1].partition("=")[2])))
