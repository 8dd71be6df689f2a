"""Asking a runtime by CRI: what is sent, and what each kind of trouble is."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from kata_pin.base.cpuset import CpuSet
from kata_pin.base.errors import ParseError
from kata_pin.peers import cri
from kata_pin.peers.cri import ContainerUnknown, CriClient, RuntimeUnavailable, UpdateRefused
from kata_pin.peers.nri.replies import Cpuset
from kata_pin.peers.proto import crirequest_pb2
from tests.support.criserver import CriServer

CPUS = Cpuset(CpuSet.parse("0-1"))


@pytest.fixture
def path() -> Iterator[Path]:
    folder = tempfile.mkdtemp(prefix="kp")
    yield Path(folder) / "c.sock"
    shutil.rmtree(folder)


@pytest.fixture
def server(path: Path) -> Iterator[CriServer]:
    with CriServer(path) as one:
        yield one


async def test_a_cpuset_is_sent(server: CriServer, path: Path) -> None:
    """The runtime gets the container and its CPUs, with each call again."""
    client = CriClient(str(path))
    assert client.problem == ""
    for container in ("c1", "c2"):
        await client.update(container, CPUS)
    assert server.asked == [("c1", "0-1"), ("c2", "0-1")]


async def test_states_are_listed(server: CriServer, path: Path) -> None:
    """By id, whatever else the runtime sends of each; one that is unknown may run."""
    states = enumerate(("created", "running", "exited", "unknown", "later"))
    listed = [
        crirequest_pb2.Container(id=f"c-{name}", state=number).SerializeToString()
        + b"\x12\x04more"  # pod_sandbox_id
        for number, name in states
    ]
    server.listed = b"".join(b"\x0a" + bytes([len(one)]) + one for one in listed)
    found = await CriClient(str(path)).containers()
    assert {name: state.value for name, state in found.items()} == {
        "c-created": "created",
        "c-running": "running",
        "c-exited": "stopped",
        "c-unknown": "running",
        "c-later": "running",
    }
    for wrong in (b"\xff", b"\x0a\x05\x0a\x03../"):
        server.listed = wrong
        with pytest.raises(ParseError):
            await CriClient(str(path)).containers()
    server.answer = (grpc.StatusCode.PERMISSION_DENIED, "no")
    with pytest.raises(UpdateRefused):
        await CriClient(str(path)).containers()


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.NOT_FOUND, ContainerUnknown),
        (grpc.StatusCode.UNKNOWN, UpdateRefused),
        (grpc.StatusCode.INVALID_ARGUMENT, UpdateRefused),
        (grpc.StatusCode.UNAVAILABLE, UpdateRefused),
        (grpc.StatusCode.UNIMPLEMENTED, UpdateRefused),
        (grpc.StatusCode.PERMISSION_DENIED, UpdateRefused),
        (grpc.StatusCode.INTERNAL, UpdateRefused),
    ],
)
async def test_a_runtime_says_no(
    server: CriServer, path: Path, code: grpc.StatusCode, kind: type[Exception]
) -> None:
    """Whatever status a runtime gives, it is the container's: its guest may have chosen it."""
    server.answer = (code, "so\nit is " + "x" * 500)
    with pytest.raises(kind, match=r"so it is x+") as caught:
        await CriClient(str(path)).update("c1", CPUS)
    assert type(caught.value) is kind
    assert len(str(caught.value)) < 400
    server.answer = None
    await CriClient(str(path)).update("c1", CPUS)


async def test_a_runtime_that_hangs(server: CriServer, path: Path) -> None:
    """The deadline ends a call; the loop goes on turning meanwhile."""
    server.silent.set()
    began = time.monotonic()
    ticks = asyncio.create_task(_count())
    with pytest.raises(UpdateRefused, match=r"no answer from the runtime within 0\.3 s"):
        await CriClient(str(path), deadline_s=0.3).update("c1", CPUS)
    assert time.monotonic() - began < 3
    assert ticks.cancel()
    assert server.asked == [("c1", "0-1")]


async def _count() -> None:
    while True:
        await asyncio.sleep(0.01)


async def test_a_call_is_given_up_at_once(server: CriServer, path: Path) -> None:
    """Who is cancelled, as when the daemon stops, does not wait for the runtime."""
    server.silent.set()
    task = asyncio.create_task(CriClient(str(path), deadline_s=50).update("c1", CPUS))
    async with asyncio.timeout(10):
        while not server.asked:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_there_is_no_runtime(path: Path) -> None:
    """No socket, one without a server, or a file: the call fails at once, a later one works."""
    client = CriClient(str(path))
    with pytest.raises(RuntimeUnavailable, match="No such file"):
        await client.update("c1", CPUS)
    path.touch()
    with pytest.raises(RuntimeUnavailable, match="not a socket"):
        await client.update("c1", CPUS)
    path.unlink()
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(path))
    dead.close()
    with pytest.raises(RuntimeUnavailable, match="Connection refused"):
        await client.update("c1", CPUS)
    path.unlink()
    with CriServer(path) as server:
        await client.update("c1", CPUS)
    assert len(server.asked) == 1


async def test_a_server_that_speaks_something_else(path: Path) -> None:
    """Bytes that are no HTTP/2 are the runtime's trouble, and end in the deadline at the latest."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 100)
        writer.close()

    async with await asyncio.start_unix_server(talk, path):
        with pytest.raises((RuntimeUnavailable, UpdateRefused)):
            await CriClient(str(path), deadline_s=1).update("c1", CPUS)
        await asyncio.sleep(0.1)  # whether it is served was tried at last


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
async def test_somebody_elses_socket(server: CriServer, path: Path) -> None:
    """A socket that neither root nor we have made is not spoken to."""
    os.chown(path, 65534, 65534)
    with pytest.raises(RuntimeUnavailable, match="is owned by uid 65534"):
        await CriClient(str(path)).update("c1", CPUS)
    assert server.asked == []


async def test_the_library_is_missing(
    server: CriServer, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the extra, the error says how to install it."""
    monkeypatch.setattr(cri, "LIBRARY", "grpc_is_not_here")
    client = CriClient(str(path))
    assert "kata-pin[cri]" in client.problem
    with pytest.raises(RuntimeUnavailable, match=r"kata-pin\[cri\]"):
        await client.update("c1", CPUS)


def test_the_library_waits_until_it_is_used() -> None:
    """Making a client loads no gRPC: it costs 20 MiB."""
    code = (
        "import sys; from kata_pin.peers.cri import CriClient; "
        "assert CriClient('/x').problem == ''; assert 'grpc' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
