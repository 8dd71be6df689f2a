"""The runtime's side of NRI 0.12: containerd's own Go library, as a program (nriadaptation/)."""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Self

SOURCES = Path(__file__).with_name("nriadaptation")


def program() -> Path:
    """Return where scripts/nri-runtime puts the program made of these sources."""
    content = b"".join((SOURCES / name).read_bytes() for name in ("main.go", "go.mod", "go.sum"))
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "kata-pin/nri-runtime" / hashlib.sha256(content).hexdigest()[:12]


def why_not() -> str:
    """Return why it cannot be had here, empty if it can."""
    return "" if program().exists() else "not built: scripts/nri-runtime does, with Go (minutes)"


class Adaptation:
    """One such runtime, with so many pods, listening on a socket."""

    def __init__(self, socket: Path, pods: int = 0) -> None:
        self._arguments = [str(program()), str(socket), str(pods)]
        self._log = socket.parent / "adaptation.log"
        self._process: subprocess.Popen[str] | None = None

    def line(self) -> str:
        """Return what it says next, without the end of the line."""
        assert self._process is not None
        assert self._process.stdout is not None
        return self._process.stdout.readline().rstrip("\n")

    def call(self, event: str, pod: str, container: str = "-", cpus: str = "") -> str:
        """Call the plugins; return how that ended."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(f"{event} {pod} {container} {cpus}\n")
        self._process.stdin.flush()
        return self.line()

    def __enter__(self) -> Self:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._arguments,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        try:
            assert self.line() == "listening", self._log.read_text()
        except AssertionError:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    def _end(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait(10)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
