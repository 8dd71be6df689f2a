"""Whoever asks for metrics is answered in bounds, whatever it sends."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.boundary.node import Node

GET = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
CLIENTS = 8
"""As many are served at once."""
HEAD = 8192
"""Longest request line and headers."""

Address = tuple[str, int]


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    """A daemon; nothing of its socket is left after it."""
    async with Node(tmp_path) as one:
        yield one
    assert not (one.runtime_dir / "metrics.sock").exists()


async def _client(node: Node) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_unix_connection(str(node.runtime_dir / "metrics.sock"))


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        await writer.wait_closed()


async def _ask(node: Node, request: bytes = GET) -> tuple[str, bytes]:
    """Send bytes; return the status line's rest and the body."""
    reader, writer = await _client(node)
    writer.write(request)
    async with asyncio.timeout(5):
        answer = await reader.read()
    await _close(writer)
    head, _, body = answer.partition(b"\r\n\r\n")
    status, _, headers = head.decode().partition("\r\n")
    if body:
        assert f"Content-Length: {len(body)}\r\n" in headers
    return status.removeprefix("HTTP/1.0 "), body


async def test_a_scrape_is_answered(node: Node) -> None:
    """GET gives the text with its length and type, HEAD the head alone, a query is none of ours."""
    status, text = await _ask(node)
    assert (status, b"\nkata_pin_sandboxes 0" in text) == ("200 OK", True)
    assert await _ask(node, GET.replace(b"GET", b"HEAD")) == ("200 OK", b"")
    assert (await _ask(node, GET.replace(b"/metrics", b"/metrics?x=1")))[0] == "200 OK"


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET / HTTP/1.0\r\n\r\n", "404 Not Found"),
        (b"GET /metrics/../state HTTP/1.0\r\n\r\n", "404 Not Found"),
        (b"POST /metrics HTTP/1.1\r\n\r\n", "405 Method Not Allowed"),
        (b"GET /metrics\r\n\r\n", "400 Bad Request"),
        (b"\x16\x03\x01\x02\r\n\r\n", "400 Bad Request"),
        (b"GET /metrics HTTP/9\r\n\r\n", "400 Bad Request"),
        (b"GET /" + b"a" * (2 * HEAD) + b" HTTP/1.1\r\n\r\n", "431 Request Header Fields"),
        (b"x" * (4 * HEAD), "431 Request Header Fields"),
    ],
)
async def test_anything_else_is_refused(node: Node, request_bytes: bytes, status: str) -> None:
    """Each refusal says why."""
    said, body = await _ask(node, request_bytes)
    assert said.startswith(status)
    assert 0 < len(body) < 100
    assert (await _ask(node))[0] == "200 OK"


async def test_one_who_says_nothing_is_dropped(node: Node) -> None:
    """A client that stalls is hung up on, and one that hangs up itself disturbs nobody."""
    reader, writer = await _client(node)
    writer.write(b"GET /met")
    await node.pause()
    await node.clock.move(6)
    async with asyncio.timeout(5):
        assert await reader.read() == b""
    await _close(writer)
    _, writer = await _client(node)
    await _close(writer)
    assert (await _ask(node))[0] == "200 OK"


async def test_more_than_a_few_at_once_are_turned_away(node: Node) -> None:
    """Beyond the bound a client is hung up on; the others are served afterwards."""
    waiting = [await _client(node) for _ in range(CLIENTS)]
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        assert await _ask(node) == ("", b"")
    for reader, writer in waiting:
        writer.write(GET)
        assert (await reader.read()).startswith(b"HTTP/1.0 200")
        await _close(writer)
    assert (await _ask(node))[0] == "200 OK"


async def test_asking_often_makes_no_work(node: Node) -> None:
    """Within a moment everybody gets the same text, whatever has happened."""
    before = await _ask(node)
    with node.clock.paused():
        await node.create(node.vm("p1"), "c1", "4")
    assert await _ask(node) == before
    await node.clock.move(1)
    assert b"\nkata_pin_sandboxes 1" in (await _ask(node))[1]


def _listen(end: socket.socket) -> Address:
    end.bind(("127.0.0.1", 0))
    end.listen()
    address: Address = end.getsockname()
    return address


async def test_a_port_of_the_loopback_device(tmp_path: Path) -> None:
    """The same over TCP, and on no other address; one that is taken is tried again."""
    with socket.socket() as taken:
        _, port = _listen(taken)
        node = Node(tmp_path, metrics={"listen": f"127.0.0.1:{port}"})
        await node.__aenter__()
        metrics = (await node.ask("state"))["daemon"]["metrics"]
        assert "in use" in metrics["problem"]
    assert metrics["address"] == f"http://127.0.0.1:{port}/metrics"

    async def problem() -> str:
        return str((await node.ask("state"))["daemon"]["metrics"]["problem"])

    for _ in range(100):
        if not await problem():
            break
        await node.clock.move(31)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(GET)
    assert b"\nkata_pin_sandboxes 0" in await reader.read()
    await _close(writer)
    with socket.socket() as other, pytest.raises(OSError, match="refused"):
        other.connect(("127.0.0.2", port))
    await node.__aexit__(None, None, None)
