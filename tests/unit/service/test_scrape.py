"""Whoever asks for metrics is answered in bounds, whatever it sends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kata_pin.base.config.tree import Endpoint, EndpointKind
from kata_pin.peers import pages
from kata_pin.peers.pages import MAX_HEAD
from kata_pin.service import assembly
from kata_pin.service.assembly import MAX_CLIENTS, MetricsServer

GET = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"


class Source:
    """What makes the text: it counts how often it was asked."""

    def __init__(self) -> None:
        self.made = 0
        self.error: Exception | None = None

    async def __call__(self) -> bytes:
        self.made += 1
        if self.error is not None:
            raise self.error
        return b"kata_pin_sandboxes %d\n" % self.made


@pytest.fixture
def source() -> Source:
    """Return a source."""
    return Source()


@contextlib.asynccontextmanager
async def _serving(server: MetricsServer) -> AsyncIterator[None]:
    task = asyncio.create_task(server.serve())
    try:
        async with asyncio.timeout(5):
            while server.problem == "not started":
                await asyncio.sleep(0)
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@pytest.fixture
async def path(source: Source, tmp_path: Path) -> AsyncIterator[str]:
    """Yield a unix socket that is served."""
    path = str(tmp_path / "m.sock")
    async with _serving(MetricsServer(Endpoint(), path=path, make=lambda: source)):
        yield path
    assert not os.path.exists(path)


@pytest.mark.parametrize("turns", range(4))
async def test_an_end_while_it_starts(source: Source, tmp_path: Path, turns: int) -> None:
    """However early it is cancelled, no socket stays behind."""
    path = tmp_path / "m.sock"
    task = asyncio.create_task(
        MetricsServer(Endpoint(), path=str(path), make=lambda: source).serve()
    )
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert list(tmp_path.iterdir()) == []


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    await writer.wait_closed()


async def _ask(path: str, request: bytes) -> tuple[str, bytes]:
    """Send bytes; return the status line's rest and the body."""
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(request)
    async with asyncio.timeout(5):
        answer = await reader.read()
    await _close(writer)
    head, _, body = answer.partition(b"\r\n\r\n")
    status, _, headers = head.decode().partition("\r\n")
    if body:
        assert f"Content-Length: {len(body)}\r\n" in headers
    return status.removeprefix("HTTP/1.0 "), body


async def test_a_scrape_is_answered(path: str) -> None:
    """GET gives the text with its length and type, HEAD the head alone, a query is none of ours."""
    assert await _ask(path, GET) == ("200 OK", b"kata_pin_sandboxes 1\n")
    assert await _ask(path, GET.replace(b"GET", b"HEAD")) == ("200 OK", b"")
    status, _ = await _ask(path, GET.replace(b"/metrics", b"/metrics?x=1"))
    assert status == "200 OK"


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET / HTTP/1.0\r\n\r\n", "404 Not Found"),
        (b"GET /metrics/../state HTTP/1.0\r\n\r\n", "404 Not Found"),
        (b"POST /metrics HTTP/1.1\r\n\r\n", "405 Method Not Allowed"),
        (b"GET /metrics\r\n\r\n", "400 Bad Request"),
        (b"\x16\x03\x01\x02\r\n\r\n", "400 Bad Request"),
        (b"GET /metrics HTTP/9\r\n\r\n", "400 Bad Request"),
        (b"GET /" + b"a" * (2 * MAX_HEAD) + b" HTTP/1.1\r\n\r\n", "431 Request Header Fields"),
        (b"x" * (4 * MAX_HEAD), "431 Request Header Fields"),
    ],
)
async def test_anything_else_is_refused(
    path: str, source: Source, request_bytes: bytes, status: str
) -> None:
    """Each refusal says why; nothing is made for it."""
    said, body = await _ask(path, request_bytes)
    assert said.startswith(status)
    assert body
    assert source.made == 0
    assert (await _ask(path, GET))[0] == "200 OK"


async def test_one_who_says_nothing_is_dropped(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that stalls is hung up on, and one that hangs up itself disturbs nobody."""
    monkeypatch.setattr(pages, "HEAD_S", 0.05)
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(b"GET /met")
    async with asyncio.timeout(5):
        assert await reader.read() == b""
    await _close(writer)
    _, writer = await asyncio.open_unix_connection(path)
    await _close(writer)
    assert (await _ask(path, GET))[0] == "200 OK"


async def test_more_than_a_few_at_once_are_turned_away(path: str) -> None:
    """Beyond the bound a client is hung up on; the others are served afterwards."""
    waiting = [await asyncio.open_unix_connection(path) for _ in range(MAX_CLIENTS)]
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        assert await _ask(path, GET) == ("", b"")
    for reader, writer in waiting:
        writer.write(GET)
        assert (await reader.read()).startswith(b"HTTP/1.0 200")
        await _close(writer)
    assert (await _ask(path, GET))[0] == "200 OK"


async def test_asking_often_makes_no_work(path: str, source: Source) -> None:
    """Within a moment everybody gets the same text."""
    for _ in range(20):
        await _ask(path, GET)
    assert source.made < 20


async def test_a_text_that_cannot_be_made_ends_one_client(path: str, source: Source) -> None:
    """The error is that client's; the next one is served."""
    source.error = ValueError("broken")
    assert await _ask(path, GET) == ("", b"")
    source.error = None
    assert (await _ask(path, GET))[0] == "200 OK"


async def test_a_port_of_the_loopback_device(source: Source) -> None:
    """The same over TCP, and on no other address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    endpoint = Endpoint(EndpointKind.TCP, "127.0.0.1", port)
    server = MetricsServer(endpoint, path="/nonexistent", make=lambda: source)
    async with _serving(server):
        assert server.address == f"http://127.0.0.1:{port}/metrics"
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET)
        assert (await reader.read()).endswith(b"kata_pin_sandboxes 1\n")
        await _close(writer)
        with socket.socket() as other, pytest.raises(OSError, match="refused"):
            other.connect(("127.0.0.2", port))


async def test_a_port_that_is_taken_is_tried_again(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon goes on, says what is wrong, and serves once the port is free."""
    monkeypatch.setattr(assembly, "RETRY_S", 0.01)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        endpoint = Endpoint(EndpointKind.TCP, "127.0.0.1", port)
        server = MetricsServer(endpoint, path="/nonexistent", make=lambda: source)
        serving = _serving(server)
        await serving.__aenter__()
        assert "in use" in server.problem
    async with asyncio.timeout(5):
        while server.problem:
            await asyncio.sleep(0.005)
    await serving.__aexit__(None, None, None)
