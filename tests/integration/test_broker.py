"""The running broker: what a daemon that was taken over could do with it, and slow reads."""

from __future__ import annotations

import asyncio
import errno
import os
import random
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

import kata_pin.broker
from kata_pin.broker.operations import MAX_READERS
from kata_pin.broker.protocol import MAX_MESSAGE, NUMBER, REQUEST, Change, render_changes
from kata_pin.config.paths import Paths
from kata_pin.config.tree import Config
from kata_pin.daemon.service.privileges import Broker, brokered
from kata_pin.errors import DaemonError
from kata_pin.host.broker_calls import BrokerCalls, BrokerGone
from kata_pin.host.measure.rings import record_switches
from kata_pin.host.process import ProcessIndex
from kata_pin.host.root import HOST, HostRoot
from kata_pin.host.tasks import list_inodes, starttime
from kata_pin.model.cpuset import CpuSet
from tests.support.specimen import specimen, two_cpus
from tests.support.waiting import wait_for

PYTHON = os.path.realpath(sys.executable)


@contextmanager
def broker(tmp_path: Path, *hypervisors: str) -> Iterator[Broker]:
    """Run a broker that knows a folder of this test only."""
    home = str(tmp_path)
    paths = Paths(vc=home, kata=home, bundle_roots=(home,), debugfs=home, kata_configs=())
    with brokered(Config(hypervisors=hypervisors, paths=paths)) as running:
        yield running


def change(tgid: int, tid: int, cpu: int, *, inode: bool = False) -> Change:
    number = list_inodes(HOST, tgid)[tid] if inode else 0
    return Change(tgid, tid, starttime(HOST, tgid, tid), number, frozenset({cpu}))


def strangers() -> list[Change]:
    """Return a change for each process of this machine that works for no sandbox."""
    index = ProcessIndex(HOST)
    index.refresh()
    found = []
    for process in index.all():
        try:
            name = os.path.basename(os.readlink(f"/proc/{process.pid}/exe"))
        except OSError:
            name = process.comm
        if not name.startswith(("qemu", "virtiofsd", "kvm-", "vhost-")):
            cpus = frozenset({min(os.sched_getaffinity(0))})
            found.append(Change(process.pid, process.pid, process.key.starttime, 0, cpus))
    return found


@pytest.mark.parametrize("inode", [False, True])
def test_threads_of_an_allowed_program_alone(tmp_path: Path, inode: bool) -> None:
    """An allowed program's threads are set; one that is listed under it is; nobody else's."""
    first, second = two_cpus()
    with specimen(2) as ours, broker(tmp_path, PYTHON) as running:
        wide = frozenset(os.sched_getaffinity(ours.pid))
        todo = [change(ours.pid, tid, second, inode=inode) for tid in ours.tids[1:]]
        stranger = Change(ours.pid, os.getppid(), 1, 0, frozenset({first}))
        late = todo[0]._replace(starttime=todo[0].starttime + 1, inode=0)
        done = running.calls.set_affinities([*todo, stranger, late], "/proc")
        assert [one.errno for one in done] == [0, 0, errno.ESRCH, errno.ESTALE]
        assert [one.after for one in done[:2]] == [{second}, {second}]
        assert running.calls.set_affinities([], "/proc") == []
        ours.end(todo[0].tid)
        back = [one._replace(cpus=wide) for one in todo]
        done = running.calls.set_affinities(back, "/proc")
        assert [one.errno for one in done] == [errno.ESRCH, 0]


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


def test_nobody_else_is_touched(tmp_path: Path) -> None:
    """Asked for every process of this machine, kernel threads too, it refuses all but itself."""
    with specimen(2) as bystander, broker(tmp_path) as running:
        mine = [bystander.pid, os.getpid()]
        before = [os.sched_getaffinity(pid) for pid in mine]
        todo = [one for one in strangers() if one.tgid != running.process.pid]
        assert {1, *mine} <= {one.tgid for one in todo}
        done = running.calls.set_affinities(todo, "/proc")
        assert {one.errno for one in done} <= {errno.EACCES, errno.ESRCH}
        assert [os.sched_getaffinity(pid) for pid in mine] == before


def test_the_broker_moves_itself_and_its_children(tmp_path: Path) -> None:
    """So it keeps off exclusive pCPUs; nothing of it can be looked at because of that."""
    _, second = two_cpus()
    with broker(tmp_path) as running:
        asyncio.run(running.calls.read_slow([(1, "cmdline", 100)], 5))
        (child,) = children(running.process.pid)
        todo = [change(pid, pid, second) for pid in (running.process.pid, child)]
        done = running.calls.set_affinities(todo, "/proc")
        assert [(one.errno, one.after) for one in done] == [(0, frozenset({second}))] * 2
        with pytest.raises(PermissionError):
            running.calls._ask(b"d", f"/proc/{running.process.pid}/fd".encode())


def test_random_requests(tmp_path: Path) -> None:
    """Nonsense and half sense are answered, one answer each, and move no bystander."""
    random.seed(12)
    first, _ = two_cpus()
    with specimen(2) as bystander, broker(tmp_path) as running:
        before = {tid: os.sched_getaffinity(tid) for tid in bystander.tids}
        own = [change(bystander.pid, tid, first) for tid in bystander.tids]
        valid = [
            (b"a", render_changes(own)),
            (b"l", f"/proc/{bystander.pid}/exe".encode()),
            (b"o", f"{tmp_path}/persist.json".encode()),
            (b"s", b"/proc/1/exe"),
            (b"d", f"{tmp_path}".encode()),
            (b"j", NUMBER.pack(bystander.pid) + f"{tmp_path}/firecracker/p1/root".encode()),
        ]
        asked = 0
        for number in range(3000):
            letter, data = random.choice(valid)
            text = bytearray(data)
            for _ in range(random.randrange(4)):
                text[random.randrange(len(text))] = random.randrange(256)
            if random.random() < 0.1:
                letter, text = random.randbytes(1), bytearray(random.randbytes(number % 99))
            if letter in {b"n", b"k", b"p"}:  # children and sockets: bounded, seen elsewhere
                continue
            try:
                running.calls._ask(letter, bytes(text))
            except BrokerGone:
                raise
            except OSError:
                pass
            asked += 1
        assert asked > 2500
        assert running.process.poll() is None
        assert {tid: os.sched_getaffinity(tid) for tid in bystander.tids} == before


def test_a_message_without_head(tmp_path: Path) -> None:
    """A message too short for its head is answered as request 0; the longest is taken whole."""
    with broker(tmp_path) as running:
        channel = running.calls._channel
        channel.send(b"a")
        assert len(channel.recv(100)) == 8
        channel.send(REQUEST.pack(b"a", 7) + bytes(MAX_MESSAGE - REQUEST.size))
        assert len(channel.recv(100)) == 8


async def test_slow_reads(tmp_path: Path) -> None:
    """Command lines and executables of many processes, in one batch; who is gone is gone."""
    with specimen() as ours, broker(tmp_path) as running:
        pids = [ours.pid, os.getpid(), 2**22 + 1]
        requests = [(pid, file, 1 << 17) for pid in pids for file in ("cmdline", "exe")]
        found = await running.calls.read_slow(requests, 5)
        assert found[ours.pid, "cmdline"] == Path(f"/proc/{ours.pid}/cmdline").read_bytes()
        status = os.stat(f"/proc/{ours.pid}/exe")
        head = f"{status.st_dev} {status.st_ino} {status.st_uid} {status.st_mode:o}\n"
        assert (
            found[ours.pid, "exe"] == head.encode() + os.readlink(f"/proc/{ours.pid}/exe").encode()
        )
        assert isinstance(found[2**22 + 1, "cmdline"], FileNotFoundError)
        environ = await running.calls.read_slow([(ours.pid, "environ", 100)], 5)
        error = environ[ours.pid, "environ"]
        assert isinstance(error, OSError)
        assert error.errno == errno.EACCES


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
        calls, path = running.calls, f"/proc/{ours.pid}/task/{ours.tids[0]}/syscall"
        assert calls.read(path, 512) == Path(path).read_bytes()
        (reader,) = children(running.process.pid)
        os.kill(reader, signal.SIGSTOP)
        with pytest.raises(TimeoutError):
            calls.read(path, 512)
        wait_for(lambda: not os.path.exists(f"/proc/{reader}"), "the reader to end")
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            calls.read(path, 512)
        assert time.monotonic() - began < 0.05, "it is not asked again"
    with specimen(1) as ours, broker(tmp_path) as running, pytest.raises(PermissionError):
        running.calls.read(f"/proc/{ours.pid}/task/{ours.tids[0]}/syscall", 512)


async def test_readers_that_get_no_cpu(tmp_path: Path) -> None:
    """On a loaded host their answers come late; that does not mean that the process hangs."""
    with specimen(1) as ours, broker(tmp_path, PYTHON) as running:
        calls, path = running.calls, f"/proc/{ours.pid}/task/{ours.tids[0]}/syscall"
        calls.read(path, 512)
        await calls.read_slow([(ours.pid, "cmdline", 10)], 5)
        with stopped_for(0.6, children(running.process.pid)):
            assert calls.read(path, 512) == Path(path).read_bytes()
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


async def test_ends_with_the_daemon(tmp_path: Path) -> None:
    """It ends, with its readers, as soon as the daemon's end is closed, and ignores SIGTERM."""
    with broker(tmp_path) as running:
        await running.calls.read_slow([(1, "cmdline", 10)], 5)
        readers = children(running.process.pid)
        assert readers
        running.process.send_signal(signal.SIGTERM)
        assert running.calls.readlink(f"/proc/{os.getpid()}/exe") == PYTHON
        running.calls.close()
        assert running.process.wait(5) == 0
        wait_for(
            lambda: not any(os.path.exists(f"/proc/{pid}") for pid in readers), "readers to end"
        )


@pytest.mark.parametrize("setup", [b"", b"x/usr/bin/none"], ids=["nothing", "rules"])
def test_a_daemon_that_is_killed_while_it_starts(setup: bytes) -> None:
    """A broker that nobody waits for any more ends, and complains of nothing."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        if setup:
            ours.send(setup)
        ours.close()
        program = str(Path(kata_pin.broker.__file__).with_name("__main__.py"))
        command = [sys.executable, "-IS", program, str(theirs.fileno())]
        done = subprocess.run(
            command, pass_fds=[theirs.fileno()], capture_output=True, timeout=20, check=False
        )
    assert (done.returncode, done.stderr) == (0, b"")


async def test_its_end_is_an_error(tmp_path: Path) -> None:
    """A daemon without its broker ends, and says how that ended."""
    with broker(tmp_path) as running:
        running.process.kill()
        with pytest.raises(DaemonError, match=r"privileged broker \(pid \d+\) ended by signal 9"):
            await asyncio.wait_for(running.watch(), 5)
        with pytest.raises(BrokerGone):
            running.calls.readlink("/proc/1/exe")


def test_rights_of_the_broker(tmp_path: Path) -> None:
    """It keeps five capabilities, of those that it had, and can gain none."""
    with broker(tmp_path) as running:
        text = Path(f"/proc/{running.process.pid}/status").read_text()
        status = dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)
        kept = int(status["CapEff"], 16)
        assert kept & ~(1 << 2 | 1 << 12 | 1 << 19 | 1 << 23 | 1 << 38) == 0
        assert int(status["CapPrm"], 16) == kept
        assert int(status["CapInh"], 16) == 0
        assert int(status["CapAmb"], 16) == 0
        assert status["NoNewPrivs"] == "1"


def test_too_many_stuck_readers(tmp_path: Path) -> None:
    """There is a limit to children that are stuck; then reads fail and all else goes on."""
    with broker(tmp_path) as running:
        calls: BrokerCalls = running.calls
        readers = [calls._new_child() for _ in range(MAX_READERS)]
        with pytest.raises(OSError, match="Too many open files"):
            calls._new_child()
        assert calls.readlink(f"/proc/{os.getpid()}/exe") == PYTHON
        for one in readers:
            calls._kill(one)
        wait_for(lambda: not children(running.process.pid), "children to end")
        calls._kill(calls._new_child())


def test_task_switches_of_a_cpu_and_nothing_else(tmp_path: Path) -> None:
    """A descriptor of an event comes over the socket; the daemon enables and reads it itself."""
    with broker(tmp_path) as running:
        root = HostRoot(calls=running.calls)
        cpu = min(os.sched_getaffinity(0))
        found = record_switches(root, CpuSet([cpu]), 0.6)
        window = found.cpus[cpu]
        ran_ns = sum(one.ran_ns for one in window.tasks)
        assert ran_ns + window.unknown_ns == window.length_ns
        with pytest.raises(OSError, match=r"Invalid argument|No such device"):
            running.calls.switches(8191)


def test_groups_of_resctrl(tmp_path: Path) -> None:
    """Over the socket: names, classes and threads are checked; the rest is the kernel's answer.

    This machine may have no resctrl: then its folder is missing, or nobody can make one there.
    """
    absent = {errno.ENOENT, errno.EPERM, errno.EACCES, errno.EROFS}
    with specimen(1) as ours, broker(tmp_path, PYTHON) as running:
        calls = running.calls
        for class_name, name in (("", "../x"), ("..", "x"), ("", "")):
            with pytest.raises(OSError, match=r"Invalid argument|Permission denied"):
                calls.make_group(class_name, name)
            with pytest.raises(OSError, match="Invalid argument"):
                calls.remove_group(class_name, name)
        with pytest.raises(PermissionError):
            calls.make_group("of-nobody", "x")
        stranger = Change(os.getppid(), os.getppid(), 1, 0, frozenset())
        (refused,) = calls.join_group("", "x", [stranger])
        assert refused.errno == errno.EACCES
        calls.remove_group("", "never-made")
        if os.path.exists("/sys/fs/resctrl/schemata"):
            calls.make_group("", "kata-pin-test")
            (joined,) = calls.join_group("", "kata-pin-test", [change(ours.pid, ours.tids[1], 0)])
            calls.remove_group("", "kata-pin-test")
            assert joined.errno == 0
        else:
            with pytest.raises(OSError, match=r".") as missing:
                calls.make_group("", "kata-pin-test")
            assert missing.value.errno in absent
            (joined,) = calls.join_group("", "kata-pin-test", [change(ours.pid, ours.tids[1], 0)])
            assert joined.errno in absent
