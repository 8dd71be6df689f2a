"""Group members on the status socket: however much they ask, little is made for them."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kata_pin.base.json_text import Fields
from kata_pin.service.commands import (
    BURST,
    FRESH_S,
    MAX_ANSWERS,
    MOST_CONNECTIONS,
    PER_SECOND,
    REST,
    ControlServer,
    Readers,
)

MEMBER = 4242
WORK_S = 0.03

_READING = """
import os, select, socket, sys
os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[2]))
peers = []
for _ in range(31):
    one = socket.socket(socket.AF_UNIX); one.connect(sys.argv[1]); one.setblocking(False)
    peers.append(one)
print("up", flush=True)
request = b'{"version": 1, "verb": "state"}\\n' * 50
while peers:
    readable, writable, _ = select.select(peers, peers, [], 1)
    for one in list(peers):
        try:
            if one in readable and not one.recv(1 << 20):
                raise OSError("closed")
            if one in writable:
                one.send(request)
        except BlockingIOError:
            continue
        except OSError:
            one.close(); peers.remove(one)
"""


class Documents:
    """A verb that takes a while, and how often it ran."""

    def __init__(self) -> None:
        self.made = 0

    async def state(self, _request: Fields) -> bytes:
        """Return a document, made in slices."""
        self.made += 1
        for _ in range(10):
            time.sleep(WORK_S / 10)
            await asyncio.sleep(0)
        return json.dumps({"number": self.made, "text": "x" * 300_000}).encode()


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Let 31 connections of one member ask for the state as fast as they can."""
    argv = [sys.executable, "-ISc", _READING, path, str(MEMBER)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
        try:
            yield
        finally:
            process.kill()


async def _ask(path: str) -> dict[str, object]:
    reader, writer = await asyncio.open_unix_connection(path, limit=1 << 22)
    writer.write(b'{"version": 1, "verb": "state"}\n')
    line = await reader.readline()
    writer.close()
    found: dict[str, object] = json.loads(line)
    return found


@pytest.mark.root
async def test_31_readers_leave_the_loop_to_others(tmp_path: Path) -> None:
    """Their requests in one second make a handful of documents; root is answered afresh."""
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents:
        if parent.name.startswith(("pytest", "popen")):
            parent.chmod(0o755)
    path, documents = str(tmp_path / "status.sock"), Documents()
    server = ControlServer(path, {"state": documents.state}, mode=0o660, gid=MEMBER)
    async with server.serving():
        with reading(path):
            while not documents.made:
                await asyncio.sleep(0.01)
            documents.made = 0
            await asyncio.sleep(1.0)
            assert documents.made <= 1.0 / FRESH_S + 2
            before = documents.made
            async with asyncio.timeout(10):
                for _ in range(3):
                    assert (await _ask(path))["ok"]
            assert documents.made >= before + 3


async def test_equal_requests_share_an_answer() -> None:
    """Several users that ask the same at once get one document; a moment later it is made again."""
    readers, made = Readers(), 0

    async def make() -> bytes:
        nonlocal made
        made += 1
        await asyncio.sleep(0.01)
        return b"%d" % made

    with readers.connected(1), readers.connected(2), readers.connected(3):
        answers = await asyncio.gather(*(readers.answer(uid, b"state", make) for uid in (1, 2, 3)))
        assert (set(answers), made) == ({b"1"}, 1)
        assert await readers.answer(1, b"other", make) == b"2"
        await asyncio.sleep(FRESH_S)
        assert await readers.answer(1, b"state", make) == b"3"


async def test_a_user_has_a_rate_and_others_are_not_held_up() -> None:
    """After a burst a user waits for each answer; another is answered at once."""
    readers = Readers()

    async def make() -> bytes:
        return b"x"

    with readers.connected(1), readers.connected(2):
        for _ in range(int(BURST)):
            await readers.answer(1, b"state", make)
        start = time.monotonic()
        late = asyncio.create_task(readers.answer(1, b"state", make))
        await asyncio.sleep(0)
        await readers.answer(2, b"state", make)
        assert not late.done()
        await late
        assert time.monotonic() - start >= 0.5 / PER_SECOND


async def test_making_answers_takes_a_share_of_the_time() -> None:
    """Different requests cannot be answered from what is kept, but the loop rests in between."""
    readers = Readers()

    async def make() -> bytes:
        time.sleep(WORK_S)
        return b"x"

    with readers.connected(1):
        start = time.monotonic()
        for number in range(MAX_ANSWERS + 2):
            await readers.answer(1, b"%d" % number, make)
        assert time.monotonic() - start >= (MAX_ANSWERS + 1) * WORK_S * (1 + REST) * 0.99
    assert len(readers._answers) <= MAX_ANSWERS


async def test_a_user_has_few_connections() -> None:
    """One more is told so; users that are gone are forgotten."""
    readers = Readers()
    held = [readers.connected(1) for _ in range(MOST_CONNECTIONS + 1)]
    assert [one.__enter__() for one in held] == [True] * MOST_CONNECTIONS + [False]
    with readers.connected(2) as may_ask:
        assert may_ask
    for one in held:
        one.__exit__(None, None, None)
    with readers.connected(3):
        assert set(readers._users) == {3}


async def test_an_answer_that_failed_holds_up_nobody() -> None:
    """A bug in a verb ends one connection; the next request is answered."""
    readers = Readers()

    async def broken() -> bytes:
        raise RuntimeError("a bug")

    async def make() -> bytes:
        return b"x"

    with readers.connected(1):
        with pytest.raises(RuntimeError):
            await readers.answer(1, b"state", broken)
        assert await readers.answer(1, b"state", make) == b"x"
