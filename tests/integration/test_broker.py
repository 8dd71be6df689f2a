"""The running broker: what a daemon that was taken over could do with it, and slow reads."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from kata_pin.base.config.alloc import Resctrl
from kata_pin.base.config.tree import Config, Paths, Rt
from kata_pin.base.errors import DaemonError
from kata_pin.base.settings import MemoryMode
from kata_pin.linux.files import HOST
from kata_pin.linux.tasks import list_inodes, starttime
from kata_pin.rights.broker.protocol import ANSWER, MAX_MESSAGE, AffinityChange, Settings
from kata_pin.rights.broker.threads import ThreadCall
from kata_pin.rights.client import BrokerCalls, BrokerGone
from kata_pin.service.privileges import Broker, brokered
from tests.support.specimen import specimen, two_cpus
from tests.support.waiting import wait_for

PYTHON = os.path.realpath(sys.executable)


@contextmanager
def broker(tmp_path: Path, *hypervisors: str) -> Iterator[Broker]:
    """Run a broker that knows a folder of this test only."""
    home = str(tmp_path)
    paths = Paths(vc=home, kata=home, bundle_roots=(home,), debugfs=home, kata_configs=())
    config = Config(
        hypervisors=hypervisors,
        paths=paths,
        resctrl=Resctrl(enabled=True),
        rt=Rt("fifo:1"),
        memory=MemoryMode.MIGRATE,
    )
    with brokered(config) as running:
        yield running


def change(tgid: int, tid: int, cpu: int, *, inode: bool = False) -> AffinityChange:
    number = list_inodes(HOST, tgid)[tid] if inode else 0
    return AffinityChange(tgid, tid, starttime(HOST, tgid, tid), number, frozenset({cpu}))


def test_many_threads_in_one_call(tmp_path: Path) -> None:
    """More threads than a message holds, with more sets than fit, are split and put together."""
    with specimen(1) as ours, broker(tmp_path, PYTHON) as running:
        one = change(ours.pid, ours.tids[0], 0)
        sets = [frozenset({0, *range(8191 - number, 8192)}) for number in range(64)]
        done = running.calls.set_affinities(
            [one._replace(cpus=sets[number % 64]) for number in range(1500)], "/proc"
        )
        assert len(done) == 1500
        assert {(each.errno, each.after) for each in done} == {(0, frozenset({0}))}


async def test_a_long_command_line(tmp_path: Path) -> None:
    """What is longer than a message comes as a file in memory, cut at the limit."""
    argument = "x" * 120_000
    with (
        subprocess.Popen([sys.executable, "-c", "input()", argument], stdin=subprocess.PIPE) as one,
        broker(tmp_path) as running,
    ):
        found = await running.calls.read_slow([(one.pid, "cmdline", 1 << 17)], 5)
        text = found[one.pid, "cmdline"]
        assert isinstance(text, bytes)
        assert argument.encode() in text
        cut = await running.calls.read_slow([(one.pid, "cmdline", 100)], 5)
        assert cut[one.pid, "cmdline"] == text[:100]
        one.communicate(b"\n")


def children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def test_a_read_that_hangs(tmp_path: Path) -> None:
    """It is given up after its deadline, its reader is killed, and the rest of the batch is read.

    Affinities are set meanwhile.
    """
    with specimen(1) as ours, broker(tmp_path, PYTHON) as running:
        calls, pid = running.calls, ours.pid
        await calls.read_slow([(pid, "cmdline", 10)], 5)
        (reader,) = children(running.process.pid)
        os.kill(reader, signal.SIGSTOP)  # as one that waits in the kernel
        began = time.monotonic()
        batch = [(one, "cmdline", 10) for one in (pid, os.getpid(), 1)]
        reading = asyncio.create_task(calls.read_slow(batch, 0.5))
        await asyncio.sleep(0.1)
        done = calls.set_affinities([change(pid, ours.tids[0], two_cpus()[1])], "/proc")
        assert done[0].errno == 0
        assert time.monotonic() - began < 0.4
        found = await reading
        assert isinstance(found[pid, "cmdline"], TimeoutError)
        assert isinstance(found[os.getpid(), "cmdline"], bytes)
        wait_for(lambda: not os.path.exists(f"/proc/{reader}"), "the reader to end")
        assert len(children(running.process.pid)) == 1


async def test_a_cancelled_batch(tmp_path: Path) -> None:
    """Answers of a batch that nobody waits for never reach another one."""
    with specimen() as ours, broker(tmp_path) as running:
        await running.calls.read_slow([(ours.pid, "cmdline", 10)], 5)
        (reader,) = children(running.process.pid)
        os.kill(reader, signal.SIGSTOP)
        reading = asyncio.create_task(running.calls.read_slow([(1, "cmdline", 10)], 60))
        await asyncio.sleep(0.05)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        found = await running.calls.read_slow([(ours.pid, "cmdline", 1000)], 5)
        assert found[ours.pid, "cmdline"] == Path(f"/proc/{ours.pid}/cmdline").read_bytes()


def test_system_calls_of_threads(tmp_path: Path) -> None:
    """They are read of sandboxes' processes only, and one that hangs is not asked again."""
    with specimen(1) as ours, broker(tmp_path, PYTHON) as running:
        calls, process, tids = running.calls, f"/proc/{ours.pid}", ours.tids[:1]
        text = Path(f"{process}/task/{tids[0]}/syscall").read_text().strip()
        assert calls.system_calls(process, [*tids, 1]) == [ThreadCall(text), ThreadCall("")]
        (reader,) = children(running.process.pid)
        os.kill(reader, signal.SIGSTOP)
        with pytest.raises(TimeoutError):
            calls.system_calls(process, tids)
        wait_for(lambda: not os.path.exists(f"/proc/{reader}"), "the reader to end")
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            calls.system_calls(process, tids)
        assert time.monotonic() - began < 0.05, "it is not asked again"
    with specimen(1) as ours, broker(tmp_path) as running, pytest.raises(PermissionError):
        running.calls.system_calls(f"/proc/{ours.pid}", ours.tids[:1])


async def test_readers_that_get_no_cpu(tmp_path: Path) -> None:
    """On a loaded host their answers come late; that does not mean that the process hangs."""
    with specimen(1) as ours, broker(tmp_path, PYTHON) as running:
        calls, process, tids = running.calls, f"/proc/{ours.pid}", ours.tids[:1]
        before = calls.system_calls(process, tids)
        await calls.read_slow([(ours.pid, "cmdline", 10)], 5)
        with stopped_for(0.6, children(running.process.pid)):
            assert calls.system_calls(process, tids) == before
        with stopped_for(0.6, children(running.process.pid)):
            found = await calls.read_slow([(ours.pid, "cmdline", 10)], 0.2)
        assert found[ours.pid, "cmdline"] == Path(f"/proc/{ours.pid}/cmdline").read_bytes()[:10]


@contextmanager
def stopped_for(seconds: float, pids: Sequence[int]) -> Iterator[None]:
    """Stop processes, and let them go on after a while, at the latest when this ends."""

    def resume() -> None:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)

    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    timer = threading.Timer(seconds, resume)
    timer.start()
    try:
        yield
    finally:
        timer.join()


async def test_an_answer_that_comes_with_the_deadline(tmp_path: Path) -> None:
    """A daemon that got no CPU finds both at once; the process did not hang."""
    with specimen(1) as ours, broker(tmp_path, PYTHON) as running:
        calls = running.calls
        await calls.read_slow([(ours.pid, "exe", 10)], 5)
        reading = asyncio.create_task(calls.read_slow([(ours.pid, "cmdline", 10)], 0.2))
        await asyncio.sleep(0)
        time.sleep(0.5)  # the loop must not run while the answer comes
        found = await reading
        assert found[ours.pid, "cmdline"] == Path(f"/proc/{ours.pid}/cmdline").read_bytes()[:10]


async def test_its_end_is_an_error(tmp_path: Path) -> None:
    """A daemon without its broker ends, and says how that ended."""
    with broker(tmp_path) as running:
        running.process.kill()
        with pytest.raises(DaemonError, match=r"privileged broker \(pid \d+\) ended by signal 9"):
            await asyncio.wait_for(running.watch(), 5)
        with pytest.raises(BrokerGone):
            running.calls.executable(1)


async def test_a_late_answer_ends_the_daemon(tmp_path: Path) -> None:
    """It could be taken for that of another request; the next broker's answers are right."""
    with broker(tmp_path) as running:
        calls, pid = running.calls, os.getpid()
        calls._channel.settimeout(0.3)
        watching = asyncio.create_task(running.watch())
        await asyncio.sleep(0)
        os.kill(running.process.pid, signal.SIGSTOP)
        with pytest.raises(BrokerGone, match="did not answer"):
            calls.executable(pid)
        os.kill(running.process.pid, signal.SIGCONT)
        with pytest.raises(DaemonError):
            await asyncio.wait_for(watching, 2)
        for _ in range(3):
            with pytest.raises(BrokerGone):
                calls.executable(pid)
        assert running.process.wait(5) == 0
    with broker(tmp_path) as running:
        assert running.calls.executable(pid)[1] == PYTHON


async def test_a_broker_that_stays_stopped(tmp_path: Path) -> None:
    """The daemon does not wait for it."""
    with broker(tmp_path) as running:
        running.calls._channel.settimeout(0.3)
        watching = asyncio.create_task(running.watch())
        await asyncio.sleep(0)
        os.kill(running.process.pid, signal.SIGSTOP)
        with pytest.raises(BrokerGone):
            running.calls.executable(1)
        with pytest.raises(DaemonError, match="does not answer"):
            await asyncio.wait_for(watching, 2)
        os.kill(running.process.pid, signal.SIGCONT)


def test_an_answer_out_of_step() -> None:
    """It ends the channel: no later answer is believed, and a failure is no answer of a file."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        calls = BrokerCalls(ours, Settings())
        theirs.send(ANSWER.pack(7, 0))
        with pytest.raises(BrokerGone, match="another request"):
            calls.executable(1)
        assert calls.ended.is_set()
        assert theirs.recv(MAX_MESSAGE)
        assert theirs.recv(MAX_MESSAGE) == b"", "the broker sees the end"
    assert not issubclass(BrokerGone, OSError)
