"""What the agent's client promises, over a double and over another's server.

KATA_PIN_AGENT_PEER names a program that is given the path of a unix socket, serves hybrid vsock and
the agent's protocol there with the containers of HonestAgent, and says `ready` on its stdout.
Without it only the double is there.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kata_pin.base.cpuset import CpuSet
from kata_pin.base.errors import AgentDenied, AgentFailed, GuestError
from kata_pin.peers.agent.client import AgentClient, HybridVsockAddress
from kata_pin.peers.agent.messages import parse_cpu_times
from tests.support.agentdouble import HonestAgent

PEER = os.environ.get("KATA_PIN_AGENT_PEER", "")


@pytest.fixture(params=["double", "peer"] if PEER else ["double"])
async def address(request: pytest.FixtureRequest) -> AsyncIterator[HybridVsockAddress]:
    folder = Path(tempfile.mkdtemp(prefix="ag"))
    try:
        if request.param == "double":
            async with HonestAgent(folder / "s") as agent:
                yield agent.address
        else:
            async with _peer(folder / "s") as address:
                yield address
    finally:
        shutil.rmtree(folder)


@contextlib.asynccontextmanager
async def _peer(path: Path) -> AsyncIterator[HybridVsockAddress]:
    process = await asyncio.create_subprocess_exec(PEER, path, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert await process.stdout.readline() == b"ready\n"
        yield HybridVsockAddress(str(path))
    finally:
        process.kill()
        await process.communicate()


@pytest.fixture
async def client(address: HybridVsockAddress) -> AsyncIterator[AgentClient]:
    async with AgentClient(address, connect_s=5, call_s=5) as client:
        yield client


async def test_a_cpuset_is_set_and_read_back(client: AgentClient) -> None:
    """What was set is what a program in the container may use."""
    assert await client.read_cpus("app") == CpuSet.parse("0,3")
    await client.set_cpus("app", CpuSet.parse("3"))
    assert await client.read_cpus("app") == CpuSet.parse("3")


async def test_an_empty_cpuset_is_refused_here(client: AgentClient) -> None:
    """The agent would say yes and do nothing."""
    with pytest.raises(ValueError, match="empty cpuset"):
        await client.set_cpus("app", CpuSet())


async def test_policy_denies(client: AgentClient) -> None:
    """A denial is an error of its own, and the connection goes on."""
    with pytest.raises(AgentDenied, match="blocked by policy"):
        await client.set_cpus("sealed", CpuSet.parse("3"))
    with pytest.raises(AgentDenied, match="blocked by policy"):
        await client.read_cpus("sealed")
    await client.set_cpus("app", CpuSet.parse("3"))


async def test_hidden_output_is_a_denial(client: AgentClient) -> None:
    """A policy without ReadStreamRequest answers with success and nothing."""
    with pytest.raises(AgentDenied, match="no output of"):
        await client.read_cpus("mute")


async def test_an_unknown_container(client: AgentClient) -> None:
    """The agent's own refusal keeps its words."""
    with pytest.raises(AgentFailed, match="invalid container id"):
        await client.set_cpus("other", CpuSet.parse("0"))


async def test_a_program_that_is_not_there(client: AgentClient) -> None:
    """A distroless container has no cat; that is a failure in words."""
    with pytest.raises(AgentFailed, match="ENOENT"):
        await client.exec("app", ("dog", "/etc"), limit=10)


async def test_apic_ids(client: AgentClient) -> None:
    """The guest's numbering, read where programs may run."""
    assert await client.read_apic_ids("app") == {0: 0, 3: 15}


async def test_metrics_and_usage(client: AgentClient) -> None:
    """Busy times by rank, and a container's CPU time by guest CPU."""
    times = parse_cpu_times(await client.metrics())
    assert [(one.rank, one.busy_ms) for one in times] == [(0, 1200), (1, 10100)]
    usage = await client.usage("app")
    assert (usage.total_ns, usage.per_cpu_ns) == (7_000_000, (5_000_000, 0, 0, 2_000_000))


async def test_several_clients(address: HybridVsockAddress) -> None:
    """Kata's own client keeps its connection; ours are others beside it, at once."""
    async with contextlib.AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(AgentClient(address, connect_s=5, call_s=5))
            for _ in range(4)
        ]
        used = await asyncio.gather(*(client.usage("app") for client in clients * 3))
    assert {one.total_ns for one in used} == {7_000_000}


async def test_connect_again(client: AgentClient) -> None:
    """A closed client says so, and connects anew."""
    await client.close()
    with pytest.raises(GuestError, match="not connected"):
        await client.metrics()
    await client.connect()
    assert await client.metrics()
