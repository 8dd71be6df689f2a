"""Answers GET over HTTP/1.0: one request per connection, a bounded head, a deadline for it.

Apart from http.py, whose imports are a MiB that a daemon without a client of HTTP does not need.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Final

from msgspec import Struct

from kata_pin.linux.sockets import BACKLOG

METRICS: Final = "text/plain; version=0.0.4; charset=utf-8"
"""Type of Prometheus' text format."""

TEXT: Final = "text/plain; charset=utf-8"

MAX_HEAD: Final = 8192
"""Longest request line and headers."""

HEAD_S: Final = 5.0


class Page(Struct, frozen=True):
    """What is answered."""

    body: bytes
    status: int = 200
    kind: str = METRICS


Pages = Mapping[bytes, Callable[[], Awaitable[Page]]]
"""What makes the page of each path."""


async def answer(reader: asyncio.StreamReader, pages: Pages) -> bytes:
    """Read a request and return the answer; raises TimeoutError."""
    try:
        async with asyncio.timeout(HEAD_S):
            head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        return _encoded(Page(b"request too long\n", 431, TEXT))
    words = head.split(b"\r\n", 1)[0].split(b" ")
    if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
        return _encoded(Page(b"not an HTTP request\n", 400, TEXT))
    method, target, _ = words
    if method not in {b"GET", b"HEAD"}:
        return _encoded(Page(b"only GET\n", 405, TEXT), "Allow: GET, HEAD\r\n")
    make = pages.get(target.partition(b"?")[0])
    if make is None:
        known = b" ".join(pages)
        return _encoded(Page(b"not here; there is %b\n" % known, 404, TEXT))
    page = await make()
    encoded = _encoded(page)
    return encoded if method == b"GET" else encoded[: len(encoded) - len(page.body)]


def tcp_listener(host: str, port: int) -> socket.socket:
    """Return a socket that listens on an address; raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=BACKLOG)


def _encoded(page: Page, headers: str = "") -> bytes:
    head = (
        f"HTTP/1.0 {page.status} {HTTPStatus(page.status).phrase}\r\n"
        f"Content-Type: {page.kind}\r\nContent-Length: {len(page.body)}\r\n"
        f"{headers}Connection: close\r\n\r\n"
    )
    return head.encode() + page.body
