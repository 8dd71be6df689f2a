"""Process events where they are late, too many, refused or not to be had."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kata_pin.base.errors import HostError
from kata_pin.linux.events import (
    MAX_PENDING,
    Event,
    NewProcess,
    NewProgram,
    NewThread,
    Overrun,
    ProcEvents,
    TaskExit,
)
from kata_pin.rights.broker.libc import process_events
from tests.support.fakeconnector import EXEC, EXIT, FORK, FakeConnector, acknowledgement
from tests.support.specimen import specimen

REPOSITORY = Path(__file__).parents[2]
DEADLINE_S = 20.0

STORM = """
import sys, threading
for _ in range(int(sys.argv[1])):
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()
"""


def storm(threads: int) -> subprocess.Popen[bytes]:
    """Start a process that makes and ends threads as fast as it can."""
    return subprocess.Popen([sys.executable, "-I", "-S", "-c", STORM, str(threads)])


async def opened(events: ProcEvents) -> ProcEvents:
    try:
        await events.open()
    except HostError as error:
        pytest.skip(str(error))
    return events


async def until(events: ProcEvents, wanted: Event) -> list[Event]:
    seen: list[Event] = []
    async with asyncio.timeout(DEADLINE_S):
        while wanted not in seen:
            seen += await anext(events)
    return seen


@asynccontextmanager
async def listening(fake: FakeConnector, **options: Any) -> AsyncIterator[ProcEvents]:
    """Open events of process 500 on a kernel that is played."""
    events = ProcEvents({500}, connect=fake.connect, **options)
    try:
        await events.open()
        yield events
    finally:
        events.close()
        fake.close()


@contextmanager
def same_descriptors() -> Iterator[None]:
    """Check that no descriptor is left open."""
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) == before


async def test_storm_elsewhere_is_cheap() -> None:
    """20,000 threads of a stranger cost some microseconds each and tell the consumer nothing."""
    wakes = 0

    class Counting(ProcEvents):
        def _wake(self) -> None:
            nonlocal wakes
            wakes += 1
            super()._wake()

    events = await opened(Counting({os.getpid()}))
    consumer = asyncio.create_task(anext(events))
    start = time.process_time()
    child = storm(20_000)
    assert await asyncio.wait_for(asyncio.to_thread(child.wait), DEADLINE_S * 2) == 0
    cost_us = (time.process_time() - start) / 40_000 * 1e6
    print(f"\n40,000 events of a stranger: {cost_us:.1f} us of CPU an event, {wakes} wakes")
    events.close()
    with suppress(StopAsyncIteration):
        # Our own child and thread, and kernel threads, are the events that may come.
        kinds = NewThread | NewProcess | TaskExit
        assert all(isinstance(event, kinds) for event in await consumer)
    assert cost_us < 30
    assert wakes < 10_000, "events are read one by one"


async def test_overflow_in_the_kernel() -> None:
    """ENOBUFS is told as an Overrun, and the same socket goes on afterwards."""

    def narrow(token: int, *, execs: bool) -> socket.socket:
        sock = process_events(token, execs=execs)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        return sock

    with specimen() as ours, same_descriptors():
        events = await opened(ProcEvents({ours.pid}, connect=narrow))
        for tid in ours.grow(100):
            ours.end(tid)
        assert (await asyncio.wait_for(anext(events), DEADLINE_S))[0] == Overrun()
        (tid,) = ours.grow(1)
        await until(events, NewThread(ours.pid, tid))
        events.close()


async def test_tracked_storm_stays_bounded() -> None:
    """A consumer that does not keep up gets one Overrun instead of ever more events."""
    async with listening(fake := FakeConnector()) as events:
        for tid in range(1000, 1000 + MAX_PENDING + 10):
            fake.born(tid, 500)
            if tid % 50 == 0:
                await until_read(fake)
        await until_read(fake)
        assert await anext(events) == (Overrun(),)
        fake.born(9000, 500)
        assert await asyncio.wait_for(anext(events), DEADLINE_S) == (NewThread(500, 9000),)


async def until_read(fake: FakeConnector) -> None:
    """Wait until the listener took all that was sent (SIOCOUTQ counts what it did not)."""
    import fcntl
    import struct
    import termios

    assert fake._sock is not None
    async with asyncio.timeout(DEADLINE_S):
        while struct.unpack("i", fcntl.ioctl(fake._sock, termios.TIOCOUTQ, b"\0" * 4))[0]:
            await asyncio.sleep(0)


async def test_which_births_are_told() -> None:
    """Kernel threads and forks only where wanted; a thread's parent fields are not believed."""
    async with listening(fake := FakeConnector()) as events:
        fake.send(b"x")  # damaged messages are no events and no error
        fake.send(b"\xff" * 200)
        fake.born(700, 700, parent=2)
        fake.born(701, 701, parent=500)
        fake.born(702, 702, parent=600)
        fake.born(703, 600, parent=500)
        fake.born(704, 500, parent=600)
        fake.exited(703, 600)
        told = [NewProcess(700, 2), NewProcess(701, 500), NewThread(500, 704)]
        assert await until(events, NewThread(500, 704)) == told


async def test_programs_are_told_where_wanted() -> None:
    """Of all processes that run another program only the chosen ones, and none without a choice."""
    asked: list[int] = []

    def wanted(pid: int) -> bool:
        asked.append(pid)
        return pid == 801

    async with listening(fake := FakeConnector(), wanted=wanted) as events:
        fake.executed(800)
        fake.executed(801)
        fake.born(704, 500)
        assert await until(events, NewThread(500, 704)) == [NewProgram(801), NewThread(500, 704)]
        assert asked == [800, 801]
        assert fake.mask == FORK | EXEC | EXIT


@pytest.mark.root
async def test_a_real_program_is_told_of_by_its_new_name() -> None:
    """The kernel names the process after the program before it tells of it."""
    names: dict[int, str] = {}

    def wanted(pid: int) -> bool:
        with suppress(OSError):
            names[pid] = Path(f"/proc/{pid}/comm").read_text().strip()
        return names.get(pid) == "sleep"

    events = await opened(ProcEvents(frozenset(), wanted=wanted))
    with subprocess.Popen(["/bin/sleep", "60"]) as process:
        await until(events, NewProgram(process.pid))
        process.kill()
    events.close()


async def test_subscribes_plainly_and_then_narrows() -> None:
    """4 bytes first, because only those are acknowledged; then the filter; at the end, off."""
    async with listening(fake := FakeConnector()) as events:
        await until_read(fake)
        fake.born(501, 500)
        await until(events, NewThread(500, 501))
        assert fake.mask == FORK | EXIT
        events.close()
        async with asyncio.timeout(DEADLINE_S):
            while len(fake.requests) < 3:
                await asyncio.sleep(0)
        assert [len(request) for request in fake.requests] == [4, 8, 4]


async def test_kernel_without_filters() -> None:
    """Before Linux 6.6 the filter is ignored: everything comes, and only what counts is told."""
    async with listening(fake := FakeConnector(filters=False)) as events:
        fake.named(500, 500)
        fake.born(501, 500)
        assert await until(events, NewThread(500, 501)) == [NewThread(500, 501)]
        assert fake.mask == 0xFFFF_FFFF


class Eager(FakeConnector):
    """An event overtakes the acknowledgement."""

    def _answer(self) -> None:
        if not self.requests:
            self.mask = FORK
            self.born(501, 500)
        super()._answer()


async def test_event_before_the_acknowledgement() -> None:
    """An event that overtakes the acknowledgement is neither lost nor taken for it."""
    async with listening(Eager()) as events:
        assert await asyncio.wait_for(anext(events), DEADLINE_S) == (NewThread(500, 501),)


class Mute(FakeConnector):
    """No acknowledgement, though other listeners' events arrive, and their acknowledgements."""

    def _answer(self) -> None:
        super()._answer()
        self.send(acknowledgement(12345))
        self.mask = 0xFFFF_FFFF
        for tid in range(501, 600):
            self.born(tid, 500)


class Endless(socket.socket):
    """A socket with another event always ready."""

    def recv_into(self, buffer: Any, *_: Any) -> int:
        """Give an event of nobody."""
        buffer[:76] = bytes(76)
        return 76


class EndlessConnector(FakeConnector):
    """There always is another event to read."""

    def connect(self, token: int, *, execs: bool) -> socket.socket:
        """Connect to it."""
        return Endless(fileno=super().connect(token, execs=execs).detach())


class NoConnector(FakeConnector):
    """A kernel without the connector."""

    def connect(self, token: int, *, execs: bool) -> socket.socket:
        """Refuse."""
        raise OSError(errno.EPROTONOSUPPORT, "no connector")


@pytest.mark.parametrize(
    ("fake", "reason"),
    [
        (partial(Mute, mute=True), "pid and user namespaces"),
        (partial(EndlessConnector, mute=True), "no acknowledgement"),
        (partial(FakeConnector, error=errno.EPERM), "Operation not permitted"),
        (NoConnector, "Protocol not supported"),
    ],
)
async def test_a_kernel_that_refuses(fake: Callable[[], FakeConnector], reason: str) -> None:
    """Whatever else arrives, and although it never answers: a reason within the timeout."""
    start = time.monotonic()
    kernel = fake()
    with pytest.raises(HostError, match=reason):
        await ProcEvents({500}, connect=kernel.connect).open(timeout_s=0.1)
    assert time.monotonic() - start < DEADLINE_S
    kernel.close()


class Fragile(socket.socket):
    """A socket that breaks."""

    broken = False

    def recv_into(self, *args: Any) -> int:
        """Fail, once it is broken."""
        if self.broken:
            raise OSError(errno.EIO, "broken")
        return super().recv_into(*args)


async def test_broken_socket_is_raised() -> None:
    """An error while receiving reaches the consumer; closing still works."""
    fake, socks = FakeConnector(), list[Fragile]()

    def connect(token: int, *, execs: bool) -> socket.socket:
        socks.append(Fragile(fileno=fake.connect(token, execs=execs).detach()))
        return socks[0]

    events = ProcEvents({500}, connect=connect)
    await events.open()
    socks[0].broken = True
    fake.born(501, 500)
    with pytest.raises(HostError, match="Input/output error"):
        await asyncio.wait_for(anext(events), DEADLINE_S)
    events.close()


async def test_nobody_else_can_speak() -> None:
    """A message of another process, even root's, does not reach the socket."""
    sock = process_events(7, execs=False)
    other = socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, sock.proto)
    with sock, other, pytest.raises((ConnectionRefusedError, PermissionError)):
        other.sendto(b"x" * 76, (sock.getsockname()[0], 0))


@pytest.mark.root
@pytest.mark.parametrize(
    ("namespace", "reason"),
    [
        pytest.param(["--net"], "host's network namespace", id="net"),
        pytest.param(
            ["--pid", "--fork", "--mount-proc"], "host's pid and user namespaces", id="pid"
        ),
    ],
)
async def test_namespaces_without_events(namespace: list[str], reason: str) -> None:
    """Away from the host's namespaces open() gives the reason soon, though events pour in."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs root and unshare")
    listener = await opened(ProcEvents(set()))
    noise = storm(100_000)
    program = (
        "import asyncio, time; from kata_pin.linux.events import ProcEvents\n"
        "start = time.monotonic()\n"
        "try: asyncio.run(ProcEvents(set()).open())\n"
        "except Exception as error: print(time.monotonic() - start, error)\n"
    )
    answer = await asyncio.to_thread(
        subprocess.run,
        ["unshare", *namespace, sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        timeout=DEADLINE_S,
    )
    noise.kill()
    noise.wait()
    listener.close()
    seconds, _, text = answer.stdout.partition(" ")
    assert reason in text, answer.stderr
    assert float(seconds) < 5


async def test_nothing_is_left_open() -> None:
    """Opening and closing, and giving up while opening, leave no descriptor and no task."""
    with same_descriptors():
        for _ in range(3):
            events = await opened(ProcEvents(set()))
            events.close()
        fake = FakeConnector(mute=True)
        opening = asyncio.create_task(ProcEvents(set(), connect=fake.connect).open(60))
        while not fake.requests:
            await asyncio.sleep(0)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        fake.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}
