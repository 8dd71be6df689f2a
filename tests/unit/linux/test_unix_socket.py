"""A socket replaces another at once, with its mode, and its peer is known."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
import stat
from pathlib import Path

import pytest

from kata_pin.linux.sockets import PIECE, Clients, Peer, listen, peer, send


class Answer(bytes):
    """Bytes that say when they are freed."""

    freed = asyncio.Event()

    def __del__(self) -> None:
        self.freed.set()


def test_it_takes_the_place_of_a_dead_one(tmp_path: Path) -> None:
    """What a killed process left at the path, and half made beside it, is replaced."""
    path = str(tmp_path / "s")
    listen(path, backlog=1).close()
    (tmp_path / "s.new").touch()
    with listen(path, backlog=1, mode=0o660, gid=os.getgid()):
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o660
        assert os.listdir(tmp_path) == ["s"]
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(path)  # it listens from the first moment


def test_it_appears_when_it_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it has its path it has its mode and listens, so nobody is turned away."""
    rename, path = os.rename, str(tmp_path / "s")

    def appears(fresh: str, name: str) -> None:
        assert stat.S_IMODE(os.stat(fresh).st_mode) == 0o620
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(fresh)
        rename(fresh, name)

    monkeypatch.setattr(os, "rename", appears)
    with listen(path, backlog=1, mode=0o620):
        assert os.listdir(tmp_path) == ["s"]


def test_the_kernel_tells_who_is_there() -> None:
    """The other end's process and user; root and we are trusted, others are not."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert peer(ours) == (os.getpid(), os.geteuid())
        assert peer(ours).trusted
    assert not Peer(1, os.geteuid() + 4711).trusted


async def test_what_a_client_left_behind_is_not_kept(tmp_path: Path) -> None:
    """Its answer may be megabytes, and cycles are rarely collected."""
    answers, gone = [Answer(3 * PIECE)], asyncio.Event()

    async def talk(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await gone.wait()
        await send(writer, answers.pop(), 10.0)

    path = str(tmp_path / "s")
    clients = Clients("client", 1, talk, limit=64)
    gc.disable()
    try:
        async with clients.served(listen(path, backlog=1)):
            (await asyncio.open_unix_connection(path))[1].close()
            gone.set()
            async with asyncio.timeout(10):
                await Answer.freed.wait()
    finally:
        gc.enable()


async def test_an_error_ends_one_client(tmp_path: Path) -> None:
    """Whatever it is; the next one is served."""
    errors = [ValueError("broken")]

    async def talk(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if errors:
            raise errors.pop()
        writer.write(b"yes")

    path = str(tmp_path / "s")
    async with Clients("client", 1, talk, limit=64).served(listen(path, backlog=1), path):
        for answer in (b"", b"yes"):
            reader, writer = await asyncio.open_unix_connection(path)
            async with asyncio.timeout(10):
                assert await reader.read() == answer
            writer.close()
            await writer.wait_closed()


@pytest.mark.parametrize("turns", range(4))
async def test_an_end_while_it_starts(tmp_path: Path, turns: int) -> None:
    """However early it is cancelled, no socket stays behind."""
    path = str(tmp_path / "s")

    async def talk(_reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        """Say nothing."""

    async def serve() -> None:
        async with Clients("client", 1, talk, limit=64).served(listen(path, backlog=1), path):
            await asyncio.sleep(60)

    task = asyncio.create_task(serve())
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert list(tmp_path.iterdir()) == []
