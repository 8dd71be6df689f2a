"""QMP without being in Kata's way: real QEMU, a shim that holds the socket, hostile servers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest

from kata_pin.base.errors import QmpUnavailable
from kata_pin.base.json_text import check_bounds
from kata_pin.follow.hooks import MAX_VALUES, SESSION_S, is_held, query
from kata_pin.rights.broker import files
from kata_pin.rights.broker.files import open_path
from kata_pin.rights.broker.threads import MAX_REPLY, converse
from kata_pin.rights.calls import DIRECT, Calls
from tests.support.katalike import KataDirs, KataSandbox
from tests.support.qemu import Accelerator
from tests.support.vmmhost import Bystander, lookalike
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.qemu, pytest.mark.root]

P1 = f"p{os.getpid()}"
"""Sandbox ids of this run: other runs on the machine have their own."""

BLIND = "/nonexistent"
"""A /proc that hides who holds a socket, as if the holder came between the look and the connect."""

LATE_S = 1.0
"""What a deadline of some ten milliseconds may take on a loaded machine."""

PATIENT_S = 10.0
"""Deadlines of what has to be answered, however loaded the machine is."""


class AsTheBroker(Calls):
    """Talks to QEMU as the broker's child does, which is killed when it is not wanted any more."""

    async def vcpu_list(self, path: str, greeting_s: float, session_s: float) -> bytes:
        """See Calls."""
        folder, name = os.path.split(path)
        with files.connected(open_path(folder, [name])) as end:
            return await asyncio.to_thread(converse, end, greeting_s, session_s)


@pytest.fixture(params=[DIRECT, AsTheBroker()], ids=["qemu.qmp", "broker"])
def calls(request: pytest.FixtureRequest) -> Calls:
    """Both ways to talk to QEMU: they have to answer alike."""
    calls: Calls = request.param
    return calls


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A private directory with a short path."""
    root = Path(tempfile.mkdtemp(prefix="kp"))
    yield root
    shutil.rmtree(root)


@pytest.fixture
def kata(scratch: Path) -> Iterator[KataSandbox]:
    """A sandbox whose shim holds qmp.sock, with Kata's debug monitor beside it."""
    dirs = KataDirs.below(scratch)
    with KataSandbox(
        dirs, P1, accelerator=Accelerator.TCG, shim_process=False, extra_monitor=True
    ) as one:
        yield one


@pytest.fixture(autouse=True)
def bystander() -> Iterator[Bystander]:
    """A process that looks alike and stays as it is."""
    with lookalike("-name", f"sandbox-{P1}") as process:
        one = Bystander(process.pid)
        yield one
        one.check()


def _free(kata: KataSandbox) -> str:
    """Open the window: the shim lets go, and QEMU has noticed."""
    path = str(kata.qmp_path)
    kata.shim.let_go()
    wait_for(lambda: not is_held(path), "socket to be free")
    return path


async def test_the_window(kata: KataSandbox, calls: Calls) -> None:
    """A free socket answers at once, and is free again for the shim afterwards."""
    path = _free(kata)
    answers = await query(
        path, pid=kata.pid, greeting_s=PATIENT_S, session_s=PATIENT_S, calls=calls
    )
    kata.shim.hold()
    assert {cpu.index: cpu.thread_id for cpu in answers.cpus} == kata.vcpus()
    assert {one.id: one.thread_id for one in answers.iothreads} == kata.iothreads()


async def test_the_extra_monitor_answers_any_time(kata: KataSandbox, calls: Calls) -> None:
    """Kata's debug monitor answers while the shim holds the main socket."""
    answers = await query(
        str(kata.extra_monitor_path), greeting_s=PATIENT_S, session_s=PATIENT_S, calls=calls
    )
    assert {cpu.index: cpu.thread_id for cpu in answers.cpus} == kata.vcpus()


async def test_a_held_socket_is_not_connected(kata: KataSandbox, calls: Calls) -> None:
    """While the shim holds it, nothing of ours ever shows up on the socket."""
    path = str(kata.qmp_path)
    before = _connections(path)
    with pytest.raises(QmpUnavailable, match="another client holds it"):
        await query(path, pid=kata.pid, calls=calls)
    assert _connections(path) == before == 1


async def test_a_waiting_client_counts_as_held(kata: KataSandbox, calls: Calls) -> None:
    """Somebody queueing for the slot is next: we do not queue behind him either."""
    path = _free(kata)
    with (
        closing(socket.socket(socket.AF_UNIX)) as first,
        closing(socket.socket(socket.AF_UNIX)) as second,
    ):
        first.connect(path)
        second.connect(path)
        first.close()
        with pytest.raises(QmpUnavailable, match="another client holds it"):
            await query(path, calls=calls)


async def test_never_waits_behind_another_client(
    kata: KataSandbox, caplog: pytest.LogCaptureFixture, calls: Calls
) -> None:
    """Connected by a race all the same, it is off the socket within the greeting's deadline.

    The shim can then drop its connection and take a new one at once: no waiter has its slot.
    """
    path = str(kata.qmp_path)
    started = time.monotonic()
    with pytest.raises(QmpUnavailable, match="no answer in time"):
        await query(path, proc=BLIND, session_s=30, calls=calls)
    assert time.monotonic() - started < LATE_S
    assert _connections(path) <= 2  # the shim's, and what QEMU has yet to sweep up
    for _ in range(5):
        kata.shim.let_go()
        kata.shim.hold()
        assert kata.vcpus()
    assert not caplog.records


async def test_a_reconnecting_shim_gets_its_slot(kata: KataSandbox) -> None:
    """Kata drops and takes its connection while we keep asking: it is served each time."""
    path = str(kata.qmp_path)

    async def ask() -> None:
        while True:
            try:
                await query(path)
            except QmpUnavailable:
                await asyncio.sleep(0)

    asking = asyncio.create_task(ask())
    for _ in range(30):
        await asyncio.to_thread(kata.shim.let_go)
        await asyncio.to_thread(kata.shim.hold)
        assert await asyncio.to_thread(kata.vcpus)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking


async def test_cancelled_it_closes_at_once(kata: KataSandbox) -> None:
    """When the hook goes, so does the session: the slot is free before the cancel is over."""
    path = _free(kata)
    before = _sockets()
    os.kill(kata.pid, signal.SIGSTOP)  # so that the session is caught in the middle
    try:
        session = asyncio.create_task(query(path, greeting_s=30, session_s=30))
        while not is_held(path):
            await asyncio.sleep(0)
        session.cancel()
        with pytest.raises(asyncio.CancelledError):
            await session
        assert _sockets() == before
    finally:
        os.kill(kata.pid, signal.SIGCONT)
    kata.shim.hold()
    assert kata.vcpus()


async def test_cancelled_twice_it_still_leaves(scratch: Path) -> None:
    """The peer sees the end although the closing itself was cancelled."""
    ended = asyncio.Event()

    async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.set()
        await reader.read()
        ended.set()
        writer.close()

    connected = asyncio.Event()
    path = str(scratch / "qmp.sock")
    async with await asyncio.start_unix_server(mute, path):
        session = asyncio.create_task(query(path, greeting_s=30, session_s=30))
        await connected.wait()
        session.cancel()
        await asyncio.sleep(0)
        session.cancel()
        with pytest.raises(asyncio.CancelledError):
            await session
        async with asyncio.timeout(LATE_S):
            await ended.wait()


async def test_a_stopped_qemu_costs_no_more_than_the_session(
    kata: KataSandbox, calls: Calls
) -> None:
    """QEMU that does not run at all ends in the same error, in time."""
    path = _free(kata)
    os.kill(kata.pid, signal.SIGSTOP)
    started = time.monotonic()
    try:
        with pytest.raises(QmpUnavailable, match="no answer in time"):
            await query(path, calls=calls)
    finally:
        os.kill(kata.pid, signal.SIGCONT)
    assert time.monotonic() - started < SESSION_S + LATE_S


async def test_no_socket(scratch: Path, calls: Calls) -> None:
    """A path without a listener is an ordinary state with its reason."""
    with pytest.raises(QmpUnavailable, match="No such file"):
        await query(str(scratch / "qmp.sock"), calls=calls)


# ---- hostile servers ---------------------------------------------------------------------

GREETING = b'{"QMP": {"version": {"qemu": {"micro": 0}}, "capabilities": []}}\r\n'


TWICE = """[{"cpu-index": 0, "id": "a", "thread-id": 1},
 {"cpu-index": 0, "id": "b", "thread-id": 2}]""".replace("\n", "")


@asynccontextmanager
async def _server(path: Path, value: str) -> AsyncIterator[str]:
    """Serve QMP: greeting and handshake as they should be, then `value` to every command."""

    serving: list[asyncio.Task[None] | None] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.append(asyncio.current_task())
        with contextlib.suppress(OSError):
            writer.write(GREETING)
            while sent := await reader.read(65536):  # one without a newline, or several lines
                for request in map(json.loads, sent.splitlines()):
                    body = "{}" if request["execute"] == "qmp_capabilities" else value
                    tail = f', "id": {json.dumps(request["id"])}' if "id" in request else ""
                    writer.write(f'{{"return": {body}{tail}}}\r\n'.encode())
                    await writer.drain()
        writer.close()

    server = await asyncio.start_unix_server(serve, str(path))
    async with server:
        yield str(path)
    await asyncio.gather(*filter(None, serving))


@pytest.mark.parametrize(
    ("value", "verdict"),
    [
        pytest.param(TWICE, "cpu-index appears twice", id="twice"),
        pytest.param('[{"cpu-index": -1, "thread-id": 1}]', "Expected `int` >= 0", id="negative"),
        pytest.param('{"no": "list"}', "Expected `array`", id="no list"),
        pytest.param("[" * 2000 + "]" * 2000, "nested too deeply|Expected `object`", id="deep"),
        pytest.param('"' + "x" * 20_000_000 + '"', "longer than any answer", id="huge"),
        pytest.param("[" + "{}," * 40_000 + "{}]", "more than 655.. values", id="many values"),
    ],
)
async def test_nonsense_is_unavailable(
    scratch: Path, value: str, verdict: str, caplog: pytest.LogCaptureFixture, calls: Calls
) -> None:
    """Answers out of shape, too deep or too long end in QmpUnavailable, without a traceback."""
    async with _server(scratch / "qmp.sock", value) as path:
        with pytest.raises(QmpUnavailable, match=f"{verdict}|Disconnected"):  # qemu.qmp's word
            await query(path, greeting_s=5, session_s=5, calls=calls)
    assert not [record for record in caplog.records if record.name != "asyncio"]


def test_the_largest_vm_is_within_the_bounds() -> None:
    """What QEMU answers about 4,096 vCPUs and as many iothreads as it may have, in one session."""
    props = {"core-id": 4095, "thread-id": 1, "socket-id": 255, "die-id": 15, "node-id": 127}
    cpu = {
        "thread-id": 4194304,
        "props": props | {"module-id": 0, "cluster-id": 0},
        "qom-path": "/machine/peripheral/cpu-4095-with-a-long-name",
        "cpu-index": 4095,
        "target": "x86_64",
    }
    io = {"poll-shrink": 0, "thread-id": 1, "poll-grow": 0, "poll-max-ns": 1, "id": "x" * 64}
    cpus = json.dumps({"return": [cpu] * 4096, "id": "__qmp#00001"}).encode()
    ios = json.dumps({"return": [io] * 1024, "id": "__qmp#00002"}).encode()
    assert (
        sum(
            check_bounds(line, source="QMP", limit=MAX_REPLY, values=MAX_VALUES)
            for line in (cpus, ios)
        )
        < MAX_VALUES
    )


async def test_a_server_that_hangs_up(scratch: Path, calls: Calls) -> None:
    """A peer that closes in the middle is an ordinary state too."""

    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(GREETING)
        writer.close()

    server = await asyncio.start_unix_server(hang_up, str(scratch / "qmp.sock"))
    async with server:
        with pytest.raises(QmpUnavailable):
            await query(str(scratch / "qmp.sock"), calls=calls)


def _connections(path: str) -> int:
    """Return how many clients a socket has, served or waiting."""
    lines = Path("/proc/net/unix").read_text().splitlines()
    fields = [line.split() for line in lines if line.endswith(f" {path}")]
    return sum(words[5] in {"02", "03"} for words in fields)


def _sockets() -> list[str]:
    """Return the sockets that this process has open."""
    links = (os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd"))
    return sorted(link for link in links if "socket:" in link)


_LISTENS = """
import socket, sys
server = socket.socket(socket.AF_UNIX)
server.bind(sys.argv[1])
server.listen(1)
client = socket.socket(socket.AF_UNIX)
client.connect(sys.argv[1])
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_socket_that_is_held_in_the_vmms_network_namespace(scratch: Path) -> None:
    """The kernel shows a unix socket in its own network namespace only, where Kata runs QEMU."""
    path = str(scratch / "s")
    argv = ["unshare", "-n", sys.executable, "-ISc", _LISTENS, path]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as vmm:
        try:
            assert vmm.stdout is not None
            assert vmm.stdout.readline() == b"ready\n"
            assert is_held(path, pid=vmm.pid)
            assert not is_held(path)
        finally:
            vmm.kill()
