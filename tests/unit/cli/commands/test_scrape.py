"""`metrics` over real sockets: the daemon's answer, and every answer that is none."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kata_pin.base.config.tree import Endpoint, EndpointKind
from kata_pin.base.errors import DaemonError, RemoteProtocolError
from kata_pin.cli.commands.inspect import scrape
from kata_pin.service import exchange
from tests.support.commandline import run

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


def test_metrics_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As text, or within a document."""
    config = tmp_path / "config.yaml"
    config.write_text(f"version: 1\nruntime_dir: {tmp_path}\n")
    with at_socket(tmp_path, GOOD):
        assert run(["metrics", "--config", str(config)]) == 0
    assert capsys.readouterr().out == "kata_pin_sandboxes 2.0\n"
    (tmp_path / "metrics.sock").unlink()
    with at_socket(tmp_path, GOOD):
        assert run(["metrics", "--json", "--config", str(config)]) == 0
    assert '"text": "kata_pin_sandboxes 2.0\\n"' in capsys.readouterr().out


def test_a_port_is_asked_too() -> None:
    """Where metrics.listen names one."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    with answering(listener, GOOD):
        found = scrape(Endpoint(EndpointKind.TCP, "127.0.0.1", port), "/nowhere")
    assert found.address == f"http://127.0.0.1:{port}/metrics"
    assert found.text == "kata_pin_sandboxes 2.0\n"


@pytest.mark.parametrize(
    "answer", [b"", b"220 smtp ready\r\n\r\n", b"HTTP/1.0 404 no\r\n\r\n", GOOD[:20]]
)
def test_what_is_no_metrics_endpoint(tmp_path: Path, answer: bytes) -> None:
    """Another service's answer is an error that names the address."""
    with at_socket(tmp_path, answer), pytest.raises(RemoteProtocolError, match=r"metrics\.sock is"):
        scrape(Endpoint(), str(tmp_path))


def test_nobody_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No socket, no end of the answer, or none configured: an error with a hint."""
    with pytest.raises(DaemonError, match="no metrics from unix:"):
        scrape(Endpoint(), str(tmp_path))
    monkeypatch.setattr(exchange, "METRICS_S", 0.05)  # the wait is what is tested
    with (
        at_socket(tmp_path, GOOD, close=False),
        pytest.raises(DaemonError, match=r"no metrics from unix:.*timed out"),
    ):
        scrape(Endpoint(), str(tmp_path))
    with pytest.raises(DaemonError, match="not served"):
        scrape(Endpoint(EndpointKind.NONE), str(tmp_path))


def test_more_than_metrics_ever_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an error, not a part of it."""
    monkeypatch.setattr(exchange, "MAX_REPLY", len(GOOD) - 1)
    with (
        at_socket(tmp_path, GOOD),
        pytest.raises(RemoteProtocolError, match=r"metrics\.sock: metrics longer than"),
    ):
        scrape(Endpoint(), str(tmp_path))
