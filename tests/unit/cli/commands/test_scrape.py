"""`metrics` over real sockets: the daemon's answer, and every answer that is none."""

from __future__ import annotations

import itertools
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.commandline import run

LONGEST = 64 << 20
"""Most bytes that are read."""
GOOD = b"HTTP/1.0 200 OK\r\nContent-Type: text/plain\r\n\r\nkata_pin_sandboxes 2.0\n"


@contextmanager
def answering(listener: socket.socket, answer: bytes, *, close: bool = True) -> Iterator[None]:
    """Answer one request."""
    over = threading.Event()

    def serve() -> None:
        peer, _ = listener.accept()
        with peer:
            peer.recv(4096)
            peer.sendall(answer)
            if not close:
                over.wait(10)

    listener.listen()
    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        listener.close()


@contextmanager
def at_socket(folder: Path, answer: bytes, *, close: bool = True) -> Iterator[None]:
    """Answer one request at metrics.sock."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "metrics.sock"))
    with answering(listener, answer, close=close):
        yield


class Metrics:
    """Runs `kata-pin metrics` beside a folder of sockets."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self._folder = folder
        self._capsys = capsys

    def __call__(self, *arguments: str, listen: str = "unix", status: int = 0) -> str:
        """Return what it prints, or how it fails."""
        config = self._folder / "config.yaml"
        config.write_text(
            f"version: 1\nruntime_dir: {self._folder}\nmetrics: {{listen: '{listen}'}}\n"
        )
        assert run(["metrics", *arguments, "--config", str(config)]) == status
        done = self._capsys.readouterr()
        return done.err if status else done.out


@pytest.fixture
def metrics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Metrics:
    """The command."""
    return Metrics(tmp_path, capsys)


def test_metrics_are_printed(tmp_path: Path, metrics: Metrics) -> None:
    """As text, or within a document."""
    with at_socket(tmp_path, GOOD):
        assert metrics() == "kata_pin_sandboxes 2.0\n"
    (tmp_path / "metrics.sock").unlink()
    with at_socket(tmp_path, GOOD):
        assert '"text": "kata_pin_sandboxes 2.0\\n"' in metrics("--json")


def test_a_port_is_asked_too(metrics: Metrics) -> None:
    """Where metrics.listen names one."""
    listener = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    with answering(listener, GOOD):
        found = json.loads(metrics("--json", listen=address))
    assert (found["address"], found["text"]) == (
        f"http://{address}/metrics", "kata_pin_sandboxes 2.0\n"
    )  # fmt: skip


@pytest.mark.parametrize(
    "answer", [b"", b"220 smtp ready\r\n\r\n", b"HTTP/1.0 404 no\r\n\r\n", GOOD[:20]]
)
def test_what_is_no_metrics_endpoint(tmp_path: Path, metrics: Metrics, answer: bytes) -> None:
    """Another service's answer is an error that names the address."""
    with at_socket(tmp_path, answer):
        assert "metrics.sock is" in metrics(status=1)


def test_nobody_answers(tmp_path: Path, metrics: Metrics, monkeypatch: pytest.MonkeyPatch) -> None:
    """No socket, no end of the answer, or none configured: an error with a hint."""
    assert "no metrics from unix:" in metrics(status=1)
    now = time.monotonic()
    moments = itertools.count(now, 4.99)  # two looks at the clock, and nearly 10 s are over
    monkeypatch.setattr(time, "monotonic", lambda: next(moments))
    with at_socket(tmp_path, GOOD, close=False):
        said = metrics(status=1)
    assert "no metrics from unix:" in said
    assert "timed out" in said
    assert time.monotonic() >= now + 10
    assert "not served" in metrics(listen="none", status=1)


def test_more_than_metrics_ever_are(tmp_path: Path, metrics: Metrics) -> None:
    """It is an error, not a part of it."""
    with at_socket(tmp_path, GOOD + b"\n" * LONGEST):
        assert "metrics.sock: metrics longer than" in metrics(status=1)
