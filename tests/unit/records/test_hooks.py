"""The hook socket: what it accepts, from which users, and that bad clients harm no others."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.hooks import (
    HookConnection,
    HookServer,
    answer_at_once,
    encode,
    gone_within,
    runtime_directory,
    serving,
)

CREATE = b"KP1 createRuntime 1 2 2\n{}"
STOP = b"KP1 poststop 3 4 2\n{}"


@pytest.fixture
def path() -> Iterator[str]:
    with runtime_directory() as directory:
        yield str(directory / "hook.sock")


async def talk(path: str, request: bytes) -> bytes:
    """Send a request and return everything that the server sends until it closes."""
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        writer.write(request)
        async with asyncio.timeout(5):
            return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


async def test_answers() -> None:
    """The lines are those of the protocol, and those for pins go only where a hook waits."""

    async def unpin(connection: HookConnection) -> None:
        await connection.recorded()
        await connection.unpinned("no\nVMM")

    async def refuse(connection: HookConnection) -> None:
        await connection.refused("not JSON")

    with runtime_directory() as directory:
        path = str(directory / "hook.sock")
        async with serving(path):
            assert await talk(path, CREATE) == b"recorded\npinned\n"
            assert await talk(path, STOP) == b"recorded\n"
        async with serving(path, unpin):
            assert await talk(path, CREATE) == b"recorded\nunpinned no?VMM\n"
            assert await talk(path, STOP) == b"recorded\n"
        async with serving(path, refuse):
            assert await talk(path, CREATE) == b"refused not JSON\n"


async def test_handler_gets_the_message(path: str) -> None:
    """The handler gets the message as it was sent, though it came byte by byte."""
    got = []

    async def keep(connection: HookConnection) -> None:
        got.append(encode(connection.message))

    async with serving(path, keep):
        reader, writer = await asyncio.open_unix_connection(path)
        for byte in CREATE:
            writer.write(bytes([byte]))
            await writer.drain()
        assert await reader.read() == b""
        writer.close()
    assert got == [CREATE]


async def test_gone(path: str) -> None:
    """`gone` is set when the hook disconnects, and an answer to it is then dropped."""
    seen = []

    async def wait_for_the_end(connection: HookConnection) -> None:
        seen.append(await gone_within(connection, 0.05))
        half_way.set()
        seen.append(await gone_within(connection, 5))
        await connection.recorded()
        await connection.pinned()
        ended.set()

    half_way, ended = asyncio.Event(), asyncio.Event()
    async with serving(path, wait_for_the_end), asyncio.timeout(5):
        _, writer = await asyncio.open_unix_connection(path)
        writer.write(CREATE)
        await half_way.wait()
        writer.close()
        await ended.wait()
    assert seen == [False, True]


@pytest.mark.parametrize(
    "request_",
    [b"", b"KP1 ", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 4096, CREATE[:-1],
     CREATE + b"x", b"KP1 createRuntime 1 2 99999999\n"],
    ids=["silent", "half-header", "http", "binary", "half-body", "surplus", "huge"],
)  # fmt: skip
async def test_bad_client_disturbs_nobody(path: str, request_: bytes) -> None:
    """Garbage, half a message and silence end that connection alone, without an answer."""
    got = []

    async def keep(connection: HookConnection) -> None:
        got.append(encode(connection.message))
        await answer_at_once(connection)

    async with serving(path, keep, connections=2), asyncio.TaskGroup() as clients:
        bad = clients.create_task(talk(path, request_))
        good = clients.create_task(talk(path, STOP))
        assert await good == b"recorded\n"
        assert await bad == b""
    assert got == [STOP]


async def test_failing_and_slow_handlers(path: str, caplog: pytest.LogCaptureFixture) -> None:
    """A handler that raises or takes too long ends its connection only; the hook spools."""

    async def misbehave(connection: HookConnection) -> None:
        if connection.message.stamp_ns == 10:
            raise ValueError("a fault in the handler")
        if connection.message.stamp_ns == 11:
            await asyncio.Event().wait()
        await answer_at_once(connection)

    requests = [b"KP1 poststop %d 1 2\n{}" % n for n in (10, 11, 12)]
    async with serving(path, misbehave, handler_s=0.1):
        answers = await asyncio.gather(*(talk(path, request) for request in requests))
    assert answers == [b"", b"", b"recorded\n"]
    assert "a fault in the handler" in caplog.text


async def test_connections_are_bounded(path: str) -> None:
    """No more than `connections` are served at once; the others wait and are served too."""
    active = most = 0

    async def count(connection: HookConnection) -> None:
        nonlocal active, most
        active += 1
        most = max(most, active)
        await gone_within(connection, 0.01)
        active -= 1
        await answer_at_once(connection)

    async with serving(path, count, connections=3):
        answers = await asyncio.gather(*(talk(path, STOP) for _ in range(20)))
    assert answers == [b"recorded\n"] * 20
    assert most == 3


async def test_stalled_clients_give_their_place_back(path: str) -> None:
    """Clients that fill every place and say nothing are out after the request's deadline."""
    async with serving(path, connections=2):
        stalled = [await asyncio.open_unix_connection(path) for _ in range(2)]
        assert await talk(path, STOP) == b"recorded\n"
        for _, writer in stalled:
            writer.close()


async def test_socket_is_for_its_owner(path: str) -> None:
    """The socket's mode is 0600 from its first moment at the path."""
    async with serving(path):
        status = os.stat(path)
    assert stat.S_ISSOCK(status.st_mode)
    assert stat.S_IMODE(status.st_mode) == 0o600


@pytest.mark.root
async def test_other_users_are_refused(path: str) -> None:
    """A peer that is neither root nor we gets no answer, even where the mode lets it in."""
    client = (
        "import socket,sys; s=socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]);"
        "s.sendall(b'KP1 poststop 1 1 2\\n{}'); print(s.recv(100))"
    )
    async with serving(path):
        os.chmod(path, 0o666)
        os.chmod(Path(path).parent, 0o755)
        as_nobody = ["setpriv", "--reuid=65534", "--clear-groups"]
        done = await asyncio.to_thread(
            subprocess.run,
            [*as_nobody, "/usr/bin/python3", "-IS", "-c", client, path],
            capture_output=True,
            timeout=10,
            check=False,
        )
    assert b"recorded" not in done.stdout


async def test_binds_over_a_dead_socket(path: str) -> None:
    """What a killed daemon left at the path is replaced."""
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
    async with serving(path):
        assert await talk(path, STOP) == b"recorded\n"


async def test_close_removes_only_its_own_socket(path: str) -> None:
    """A stopping server removes its socket, but not that of a successor."""
    first = HookServer(path, answer_at_once)
    first.bind()
    async with serving(path):
        first.close()
        assert await talk(path, STOP) == b"recorded\n"
    assert not os.path.exists(path)


async def test_stop_in_the_middle_of_a_burst(path: str) -> None:
    """A server that is stopped at any moment of a burst closes every connection it took."""
    before = len(os.listdir("/proc/self/fd"))
    for turns in range(12):
        clients = []
        async with serving(path):
            for _ in range(6):
                client = socket.socket(socket.AF_UNIX)
                client.connect(path)
                client.sendall(CREATE)
                clients.append(client)
            for _ in range(turns):
                await asyncio.sleep(0)
        for client in clients:
            client.settimeout(5)
            with contextlib.suppress(ConnectionResetError):
                while client.recv(100):
                    pass
            client.close()
    assert len(os.listdir("/proc/self/fd")) <= before  # one of an earlier test may be collected
