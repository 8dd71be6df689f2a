"""The test guest's agent, its protocol part run here: our client and minikata's understand it."""

from __future__ import annotations

import asyncio
import shutil
import socket
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from kata_pin.base.cpuset import CpuSet
from kata_pin.base.errors import AgentDenied, AgentFailed, AgentUnavailable
from kata_pin.peers.agent.client import AgentClient, HybridVsockAddress
from kata_pin.peers.agent.messages import parse_cpu_times
from tests.e2e.guest import agent as program
from tests.e2e.minikata import agent as shim


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="ga"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def agent(folder: Path, monkeypatch: pytest.MonkeyPatch) -> program.Agent:
    """The agent with a folder in place of its cgroups, and one container that stays."""
    monkeypatch.setattr(program, "CGROUPS", str(folder))
    home = folder / "app"
    home.mkdir()
    for name, text in {"cpuset.cpus": "", "cgroup.procs": "", "cpu.stat": "usage_usec 7\n"}.items():
        (home / name).write_text(text)
    return program.Agent()


@pytest.fixture
async def client(agent: program.Agent, folder: Path) -> AsyncIterator[AgentClient]:
    """A client whose connection a thread serves with the agent's code."""

    def serve(connection: socket.socket) -> None:
        assert connection.recv(100) == b"CONNECT 1024\n"
        connection.sendall(b"OK 1\n")
        program.serve_calls(agent, connection)

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/s")
        listener.listen()
        accepting = threading.Thread(target=accept, daemon=True)
        accepting.start()
        address = HybridVsockAddress(f"{folder}/s")
        async with AgentClient(address, connect_s=5, call_s=1) as client:
            yield client
        listener.shutdown(socket.SHUT_RDWR)
        await asyncio.to_thread(accepting.join)


async def test_it_is_an_agent(client: AgentClient) -> None:
    """Metrics and stats of this machine in place of a guest."""
    assert len(parse_cpu_times(await client.metrics())) >= 1
    assert (await client.usage("app")).total_ns == 7000


async def test_an_update_writes_the_cpuset(client: AgentClient, folder: Path) -> None:
    """And nothing else; of a container that is not there nothing is said but that."""
    await client.set_cpus("app", CpuSet.parse("1,3"))
    assert (folder / "app/cpuset.cpus").read_text() == "1,3"
    with pytest.raises(AgentFailed, match="invalid container id"):
        await client.set_cpus("other", CpuSet.parse("0"))


async def test_what_the_kernel_refuses_raises_nothing(client: AgentClient, folder: Path) -> None:
    """As Kata's agent, it only says so in its log."""
    (folder / "app/cpuset.cpus").unlink()
    await client.set_cpus("app", CpuSet.parse("1"))


async def test_programs_run(client: AgentClient) -> None:
    """What `cat` prints comes back in pieces, with its status; there is no dog."""
    assert await client.exec("app", ("cat", "/proc/cpuinfo"), limit=1 << 20)
    assert await client.read_cpus("app")
    with pytest.raises(AgentFailed, match="status 1"):
        await client.exec("app", ("cat", "/nothing"), limit=10)
    with pytest.raises(AgentFailed, match="ENOENT"):
        await client.exec("app", ("dog",), limit=10)


async def test_modes(client: AgentClient, agent: program.Agent, folder: Path) -> None:
    """It lies, refuses and hangs as told."""
    agent.answer("mode lie")
    await client.set_cpus("app", CpuSet.parse("1"))
    assert (folder / "app/cpuset.cpus").read_text() == ""
    agent.answer("mode refuse")
    with pytest.raises(AgentDenied, match="UpdateContainerRequest is blocked by policy"):
        await client.set_cpus("app", CpuSet.parse("1"))
    agent.answer("mode hang")
    with pytest.raises(AgentUnavailable, match="no answer"):
        await client.metrics()
    agent.answer("mode honest")
    await client.connect()
    assert await client.metrics()


def test_what_the_shim_asks(agent: program.Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    """Minikata's own requests are understood: a container with its arguments, and an update."""
    asked: list[tuple[str, bytes]] = []

    def take(self: shim.Agent, method: str, payload: bytes) -> None:
        asked.append((method, payload))

    monkeypatch.setattr(shim.Agent, "_ask", take)
    link = shim.Agent(3, 1)
    link.create("new", ["sh", "-c", "true"])
    link.update("app", {"quota": 200_000, "period": 100_000, "cpus": "1"})
    assert agent.call(*asked[0]) == b""
    assert agent.arguments["new"] == ["sh", "-c", "true"]
    cpu = program.Message(asked[1][1]).inner(2).inner(3)
    assert (cpu.number(2), cpu.number(3), cpu.text(6)) == (200_000, 100_000, "")
    assert agent.call(*asked[1]) == b""
