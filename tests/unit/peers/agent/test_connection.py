"""The connection to an agent that does whatever it likes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import shutil
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from kata_pin.base.cpuset import CpuSet
from kata_pin.base.errors import (
    AgentDenied,
    AgentFailed,
    AgentUnavailable,
    AgentUnsupported,
    GuestError,
)
from kata_pin.base.json_text import MAX_SHOWN
from kata_pin.peers import ttrpc
from kata_pin.peers.agent.client import (
    MAX_METRICS,
    SMALL,
    AgentClient,
    HybridVsockAddress,
    VsockAddress,
)
from kata_pin.peers.proto import agent_pb2 as pb
from kata_pin.peers.ttrpc import Code, Response
from tests.support.agentdouble import AgentDouble, HonestAgent, Twist

CALL_S = 0.3
SLACK_S = 5.0
"""What a busy machine may add to a deadline."""


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="ag"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
async def agent(folder: Path) -> AsyncIterator[AgentDouble]:
    async with HonestAgent(folder / "s") as agent:
        yield agent


async def _ask(agent: AgentDouble, twist: Twist) -> GuestError:
    """Return what a call to an agent ends with that answers StatsContainer with a twist."""
    agent.twist = twist
    async with AgentClient(agent.address, connect_s=5, call_s=CALL_S) as client:
        began = time.monotonic()
        with pytest.raises(GuestError) as caught:
            await client.usage("app")
        assert time.monotonic() - began < CALL_S + SLACK_S
        if "code" not in str(caught.value):
            with pytest.raises(AgentUnavailable, match="closed"):
                await client.usage("app")
    return caught.value


async def _silent(writer: asyncio.StreamWriter, stream: int, frame: bytes) -> None:
    pass


async def _drip(writer: asyncio.StreamWriter, stream: int, frame: bytes) -> None:
    for byte in frame + bytes(1000):
        writer.write(bytes([byte]))
        await asyncio.sleep(0.04)
        if writer.is_closing():
            return


async def _later(writer: asyncio.StreamWriter, stream: int, frame: bytes) -> None:
    await asyncio.sleep(0.05)
    writer.write(frame)


async def _half(writer: asyncio.StreamWriter, stream: int, frame: bytes) -> None:
    writer.write(frame[:-1])
    writer.write_eof()


async def _end(writer: asyncio.StreamWriter, stream: int, frame: bytes) -> None:
    writer.transport.abort()


async def _other_stream(writer: asyncio.StreamWriter, stream: int, frame: bytes) -> None:
    writer.write(ttrpc.encode_response(stream + 2, Response()))
    writer.write(frame)


async def _request(writer: asyncio.StreamWriter, stream: int, frame: bytes) -> None:
    body = frame[ttrpc.HEADER.size :]
    writer.write(ttrpc.HEADER.pack(len(body), stream, ttrpc.REQUEST, 0) + body)


async def _garbage(writer: asyncio.StreamWriter, stream: int, frame: bytes) -> None:
    writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 50)


async def _bad_envelope(writer: asyncio.StreamWriter, stream: int, frame: bytes) -> None:
    writer.write(ttrpc.HEADER.pack(3, stream, ttrpc.RESPONSE, 0) + b"\xff\xff\xff")


async def _too_long(writer: asyncio.StreamWriter, stream: int, frame: bytes) -> None:
    writer.write(ttrpc.HEADER.pack(SMALL + 1000, stream, ttrpc.RESPONSE, 0))


async def _endless(writer: asyncio.StreamWriter, stream: int, frame: bytes) -> None:
    with contextlib.suppress(OSError):
        while True:
            writer.write(ttrpc.encode_response(stream + 2, Response(bytes(60_000))))
            await writer.drain()


@pytest.mark.parametrize(
    ("twist", "kind"),
    [
        (_silent, AgentUnavailable),
        (_drip, AgentUnavailable),
        (_half, AgentUnavailable),
        (_end, AgentUnavailable),
        (_other_stream, AgentFailed),
        (_request, AgentFailed),
        (_garbage, AgentFailed),
        (_bad_envelope, AgentFailed),
        (_too_long, AgentFailed),
        (_endless, AgentFailed),
    ],
)
async def test_an_agent_that_breaks_the_protocol(
    agent: AgentDouble, twist: Twist, kind: type[GuestError]
) -> None:
    """Whatever comes instead of the answer ends the call in time, and the connection with it."""
    assert isinstance(await _ask(agent, twist), kind)


async def test_a_late_answer_is_not_the_next_ones(agent: AgentDouble) -> None:
    """After a deadline the connection is gone; a new one gets the new answer."""
    late: list[tuple[asyncio.StreamWriter, bytes]] = []

    async def keep(writer: asyncio.StreamWriter, stream: int, frame: bytes) -> None:
        late.append((writer, frame))

    agent.twist = keep
    client = AgentClient(agent.address, connect_s=5, call_s=CALL_S)
    await client.connect()
    with pytest.raises(AgentUnavailable, match=r"no answer within 0\.3 s"):
        await client.metrics()
    agent.twist = None
    for writer, frame in late:
        writer.write(frame)
    await client.connect()
    assert await client.metrics()
    await client.close()


async def test_memory_is_bounded(agent: AgentDouble) -> None:
    """An agent that announces 4 GiB, and sends as fast as it can, costs no memory."""

    async def flood(writer: asyncio.StreamWriter, stream: int, frame: bytes) -> None:
        with contextlib.suppress(OSError):
            writer.write(ttrpc.HEADER.pack(0xFFFFFFFF, stream, ttrpc.RESPONSE, 0))
            while True:
                writer.write(bytes(1 << 20))
                await writer.drain()

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(5):
        assert isinstance(await _ask(agent, flood), AgentFailed)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 * 1024  # KiB


async def test_the_loop_is_never_held(agent: AgentDouble) -> None:
    """While an agent floods or hangs, other tasks run on time."""
    gaps: list[float] = []

    async def tick() -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(0.01)
            gaps.append(time.monotonic() - began)

    ticking = asyncio.create_task(tick())
    for twist in (_silent, _drip, _endless):
        await _ask(agent, twist)
    ticking.cancel()
    assert max(gaps) < 0.25


async def test_long_answers_have_their_own_limit(agent: AgentDouble) -> None:
    """Metrics may be longer than other answers, and are refused beyond their limit."""
    async with AgentClient(agent.address, connect_s=5, call_s=5) as client:
        agent.answer("GetMetrics", pb.Metrics(metrics="x" * (MAX_METRICS - 8)))
        assert len(await client.metrics()) == MAX_METRICS - 8
        agent.answer("GetMetrics", pb.Metrics(metrics="x" * (MAX_METRICS + 1000)))
        with pytest.raises(AgentFailed, match="longer than"):
            await client.metrics()


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (Code.UNIMPLEMENTED, "method GetMetrics"),
        (Code.NOT_FOUND, "/grpc.AgentService/GetMetrics is not supported"),
        (Code.INVALID_ARGUMENT, "/grpc.AgentService/GetMetrics does not exist"),
        (Code.INVALID_ARGUMENT, "grpc.AgentService service does not exist"),
    ],
)
async def test_an_agent_without_the_request(agent: AgentDouble, code: int, text: str) -> None:
    """Go's and Rust's ttrpc, old and new, say in their own ways that they do not know it."""
    agent.answer("GetMetrics", Response(b"", code, text))
    async with AgentClient(agent.address, connect_s=5, call_s=5) as client:
        with pytest.raises(AgentUnsupported):
            await client.metrics()


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (Code.PERMISSION_DENIED, AgentDenied),
        (Code.INTERNAL, AgentDenied),
        (Code.DEADLINE_EXCEEDED, AgentUnavailable),
    ],
)
async def test_refusals_by_code_and_text(
    agent: AgentDouble, code: int, kind: type[GuestError]
) -> None:
    """A denial is known by its code or by the agent's words, a deadline of the agent's by its code.

    The connection goes on: it was the agent's own answer.
    """
    words = "" if kind is AgentUnavailable else '"GetMetricsRequest is blocked by policy: "'
    agent.answer("GetMetrics", Response(b"", code, words))
    async with AgentClient(agent.address, connect_s=5, call_s=5) as client:
        with pytest.raises(kind):
            await client.metrics()
        assert (await client.usage("app")).total_ns


async def test_words_of_a_guest_are_made_safe(agent: AgentDouble) -> None:
    """An error text is clipped, and nothing in it can steer a terminal or a log."""
    evil = "\x1b[2Jx\n2026-01-01 root: ok\u202e" + "y" * 50_000
    agent.answer("GetMetrics", Response(b"", Code.INTERNAL, evil))
    async with AgentClient(agent.address, connect_s=5, call_s=5) as client:
        with pytest.raises(AgentFailed) as caught:
            await client.metrics()
    assert caught.value.message.isprintable()
    assert len(caught.value.message) < MAX_SHOWN + 200


async def test_the_deadline_goes_along(agent: AgentDouble) -> None:
    """The request has the time that we wait for its answer."""
    async with AgentClient(agent.address, connect_s=5, call_s=2.5) as client:
        await client.set_cpus("app", CpuSet.parse("1"))
    assert agent.deadlines_ns == [2_500_000_000]
    assert agent.connects == [b"CONNECT 1024\n"]


# ---- connecting ------------------------------------------------------------------------------


@pytest.mark.parametrize("greeting", [b"", b"NO\n", b"OK", b"OK " + b"1" * 100, b"\n", b"x" * 1000])
async def test_a_vmm_that_does_not_pass_us_on(folder: Path, greeting: bytes) -> None:
    """Anything but OK, or nothing in time, is an agent that is not there."""
    async with AgentDouble(folder / "s", greeting=greeting) as agent:
        began = time.monotonic()
        with pytest.raises(AgentUnavailable):
            await AgentClient(agent.address, connect_s=CALL_S, call_s=5).connect()
        assert time.monotonic() - began < CALL_S + SLACK_S


async def test_a_greeting_without_an_end(folder: Path) -> None:
    """More than a greeting is long is not read to its end."""
    async with AgentDouble(folder / "s", greeting=b"OK " + b"1" * 100) as agent:
        with pytest.raises(AgentUnavailable, match="CONNECT"):
            await AgentClient(agent.address, connect_s=60, call_s=5).connect()


async def test_nobody_there(folder: Path) -> None:
    """No socket, and one without a listener."""
    with pytest.raises(AgentUnavailable, match="No such file"):
        await AgentClient(HybridVsockAddress(f"{folder}/s"), connect_s=5, call_s=5).connect()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(f"{folder}/s")
    with pytest.raises(AgentUnavailable, match="refused"):
        await AgentClient(HybridVsockAddress(f"{folder}/s"), connect_s=5, call_s=5).connect()


async def test_no_guest_with_that_cid() -> None:
    """A vsock address without a guest, or a host without vsock, fails in time as well."""
    began = time.monotonic()
    with pytest.raises(AgentUnavailable):
        await AgentClient(VsockAddress(0x7FFFFFF0), connect_s=CALL_S, call_s=5).connect()
    assert time.monotonic() - began < CALL_S + SLACK_S


async def test_connections_that_come_too_late_leave_nothing(folder: Path) -> None:
    """Deadlines of any length, some at the very moment of the greeting: no descriptor stays."""
    async with HonestAgent(folder / "s") as agent:
        before = len(os.listdir("/proc/self/fd"))
        for step in range(60):
            client = AgentClient(agent.address, connect_s=step * 2e-5, call_s=5)
            with contextlib.suppress(AgentUnavailable):
                await client.connect()
            await client.close()
        async with asyncio.timeout(5):  # the double may still be taking some of them in
            while len(os.listdir("/proc/self/fd")) > before:
                await asyncio.sleep(0)


async def test_nothing_is_left_open(agent: AgentDouble) -> None:
    """Cancelled, failed or done: the other end sees the connection closed."""
    agent.twist = _silent
    client = AgentClient(agent.address, connect_s=5, call_s=60)
    await client.connect()
    asking = asyncio.create_task(client.metrics())
    while not agent.asked["GetMetrics"]:
        await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    async with asyncio.timeout(5):
        while agent.connected:
            await asyncio.sleep(0)
    await client.close()


# ---- programs --------------------------------------------------------------------------------


async def test_a_program_that_hangs_is_killed(agent: AgentDouble) -> None:
    """Given up after the deadline; the kill comes on a connection of its own, by its exec id."""
    hang = {"ReadStdout"}

    async def twist(writer: asyncio.StreamWriter, stream: int, frame: bytes) -> None:
        if list(agent.asked)[-1] not in hang:
            writer.write(frame)

    agent.twist = twist
    async with AgentClient(agent.address, connect_s=5, call_s=CALL_S) as client:
        with pytest.raises(AgentUnavailable):
            await client.read_cpus("app")
    started = pb.ExecProcessRequest.FromString(agent.asked["ExecProcess"][0])
    killed = pb.SignalProcessRequest.FromString(agent.asked["SignalProcess"][0])
    assert killed.exec_id == started.exec_id != ""
    assert (killed.container_id, killed.signal) == ("app", 9)
    assert len(agent.connects) == 2


async def test_a_program_that_was_not_started_is_not_killed(agent: AgentDouble) -> None:
    """A denial is the end of it: one connection, no signal."""
    async with AgentClient(agent.address, connect_s=5, call_s=5) as client:
        with pytest.raises(AgentDenied):
            await client.read_cpus("sealed")
    assert not agent.asked["SignalProcess"]
    assert len(agent.connects) == 1


async def test_output_without_an_end(agent: AgentDouble) -> None:
    """Output is taken up to its limit, then the program is killed."""
    agent.answer("ReadStdout", pb.ReadStreamResponse(data=b"x" * 30_000))
    async with AgentClient(agent.address, connect_s=5, call_s=5) as client:
        with pytest.raises(AgentFailed, match="over 65536 bytes"):
            await client.read_cpus("app")
    assert len(agent.asked["ReadStdout"]) == 3
    assert agent.asked["SignalProcess"]


async def test_output_byte_by_byte(agent: AgentDouble) -> None:
    """An agent that answers each read with a byte, for ever, is given up at the deadline."""
    agent.answer("ReadStdout", pb.ReadStreamResponse(data=b"x"))
    agent.twist = _later
    async with AgentClient(agent.address, connect_s=5, call_s=CALL_S) as client:
        began = time.monotonic()
        with pytest.raises(GuestError):
            await client.read_cpus("app")
        assert time.monotonic() - began < 3 * CALL_S + SLACK_S


async def test_the_end_as_older_agents_say_it(agent: AgentDouble) -> None:
    """Before, the end of the output was an error."""
    pieces = [b"Cpus_allowed_list:\t2\n"]

    def read(_: bytes) -> Response | pb.ReadStreamResponse:
        if pieces:
            return pb.ReadStreamResponse(data=pieces.pop())
        return Response(b"", Code.INTERNAL, '"read meet eof"')

    agent.answer("ReadStdout", read)
    async with AgentClient(agent.address, connect_s=5, call_s=5) as client:
        assert await client.read_cpus("app") == CpuSet.parse("2")


async def test_a_program_that_fails(agent: AgentDouble) -> None:
    """A status other than 0 makes its output worthless."""
    agent.answer("WaitProcess", pb.WaitProcessResponse(status=1))
    async with AgentClient(agent.address, connect_s=5, call_s=5) as client:
        with pytest.raises(AgentFailed, match="status 1"):
            await client.read_cpus("app")
    assert not agent.asked["SignalProcess"]


async def test_answers_that_make_no_sense(agent: AgentDouble) -> None:
    """A payload that is no message, and text that is no status, are the agent's failure."""
    agent.answer("StatsContainer", Response(b"\xff\xff"))
    pieces = [b"", b"nonsense"]
    agent.answer("ReadStdout", lambda _: pb.ReadStreamResponse(data=pieces.pop()))
    async with AgentClient(agent.address, connect_s=5, call_s=5) as client:
        with pytest.raises(AgentFailed, match="StatsContainer"):
            await client.usage("app")
        with pytest.raises(AgentFailed, match="Cpus_allowed_list"):
            await client.read_cpus("app")


async def test_two_calls_at_once_take_turns(agent: AgentDouble) -> None:
    """Each gets its own answer, over the one connection."""
    agent.twist = _later
    async with AgentClient(agent.address, connect_s=5, call_s=5) as client:
        first, second = await asyncio.gather(client.metrics(), client.metrics())
    assert first == second
