"""What asyncio reports by itself is one line, and connections are served again afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from kata_pin.base.json_text import Fields
from kata_pin.service.commands import ControlServer
from kata_pin.service.process import LoopErrors


@contextlib.contextmanager
def no_more_descriptors() -> Iterator[None]:
    """Let accept(2) fail with EMFILE: every number below the limit is taken."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def _ping(_request: Fields) -> bytes:
    return b"{}"


async def test_out_of_descriptors_is_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Clients wait in the queue; one line, without traceback or number; then they are answered."""
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(LoopErrors())
    path = str(tmp_path / "c.sock")
    async with ControlServer(path, {"ping": _ping}).serving():
        clients = [socket.socket(socket.AF_UNIX) for _ in range(3)]
        with no_more_descriptors():
            for client in clients:
                client.setblocking(False)
                client.connect(path)
            await asyncio.sleep(1.2)  # asyncio tries again after a second
        for client in clients:
            await loop.sock_sendall(client, b'{"verb": "ping"}\n')
        async with asyncio.timeout(10):
            answers = [await loop.sock_recv(client, 4096) for client in clients]
        for client in clients:
            client.close()
    assert all(b'"error"' not in answer for answer in answers)
    (line,) = [one for one in caplog.records if one.levelno >= logging.WARNING]
    assert line.getMessage() == (
        f"cannot accept connections on {path}: Too many open files; retrying"
    )
    assert "Traceback" not in caplog.text


async def test_other_reports_are_one_line_too(caplog: pytest.LogCaptureFixture) -> None:
    """An error of a callback, and a message without an error."""
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(LoopErrors())

    def fail() -> None:
        raise OSError(errno.EIO, "Input/output error", "/run/x")

    loop.call_soon(fail)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    loop.call_exception_handler({"message": "odd"})
    first, second = [one for one in caplog.records if one.levelno >= logging.WARNING]
    assert first.getMessage().startswith("unexpected: Exception in callback")
    assert first.getMessage().endswith(": /run/x: Input/output error")
    assert second.getMessage() == "unexpected: odd: "
    assert first.exc_info is None
