"""Processes as psutil shows them: real ones, vanished ones, and one that lies about its size."""

import os
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from kata_pin.base.cpuset import CpuSet
from kata_pin.base.sandbox import Process, ProcessKey
from kata_pin.cli.reports import who
from kata_pin.linux.files import HOST
from kata_pin.linux.process import read_process
from tests.support.waiting import wait_for

ENDLESS = """
import ctypes, mmap, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.sbrk.restype = ctypes.c_void_p
stat = open("/proc/self/stat").read().rpartition(")")[2].split()
size = 1 << 30
memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)  # NORESERVE
start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
code, data, brk, stack, env = [26, 27], [45, 46], 47, 28, [50, 51]
at = lambda n: int(stat[n - 3])
fields = [*map(at, code), *map(at, data), at(brk), libc.sbrk(0), at(stack), start, start + size]
map_ = struct.pack("11QQIi", *fields, *map(at, env), 0, 0, -1)
print(libc.prctl(35, 14, ctypes.create_string_buffer(map_), ctypes.c_ulong(len(map_)), 0))
sys.stdout.flush()
sys.stdin.read()
"""
"""PR_SET_MM with PR_SET_MM_MAP: its command line is 1 GiB from now on; needs no privilege."""


@pytest.fixture
def endless() -> Iterator[int]:
    """Run a process whose command line is 1 GiB."""
    with subprocess.Popen(
        [sys.executable, "-c", ENDLESS], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        if process.stdout.readline() != b"0\n":
            process.kill()
            pytest.skip("this kernel has no PR_SET_MM_MAP")
        yield process.pid
        process.kill()


def test_this_process() -> None:
    """User, command line, age and CPU time are those of the process."""
    found = who.described(read_process(HOST, os.getpid()))
    mine = psutil.Process()
    assert (found.pid, found.user) == (os.getpid(), mine.username())
    assert found.command.removesuffix("...") in " ".join(mine.cmdline())
    assert found.age_s is not None
    assert 0 <= found.age_s < 86400
    assert found.cpu_s is not None
    assert found.cpu_s > 0


def test_a_process_that_has_exited() -> None:
    """What can no longer be read is empty; name and pid are as they were read."""
    with subprocess.Popen(["true"]) as process:
        process.wait()
    found = who.described(Process(ProcessKey(process.pid, 1), 1, "true", 0))
    assert (found.pid, found.comm, found.user, found.command) == (process.pid, "true", "", "")
    assert (found.age_s, found.cpu_s) == (None, None)


@pytest.mark.parametrize("error", [psutil.AccessDenied(1), psutil.ZombieProcess(1)])
def test_what_is_denied_is_empty(error: psutil.Error, monkeypatch: pytest.MonkeyPatch) -> None:
    """A single fact that may not be read takes no other with it."""

    def refuse(_: psutil.Process) -> str:
        raise error

    monkeypatch.setattr(psutil.Process, "username", refuse)
    found = who.described(read_process(HOST, os.getpid()))
    assert found.user == ""
    assert found.cpu_s is not None


def test_a_zombie() -> None:
    """A process that nobody has waited for has a name and no command line."""
    with subprocess.Popen(["true"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        found = who.described(read_process(HOST, process.pid))
        assert (found.comm, found.command) == ("true", "")


def test_a_command_line_without_end_is_cut(endless: int) -> None:
    """Any user can make one; it is not read to its end, and the report is short."""
    found = who.described(read_process(HOST, endless))
    assert len(found.command) <= who.MAX_COMMAND


def test_a_long_command_line_is_cut() -> None:
    """The end says that there is more."""
    with subprocess.Popen(["sleep", "60", *["0" * 100] * 3]) as process:
        wait_for(lambda: who.command(process.pid), "the program")
        command = who.command(process.pid)
        process.kill()
    assert len(command) == who.MAX_COMMAND
    assert command.startswith("sleep 60 000")
    assert command.endswith("0...")


def test_how_busy_a_cpu_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """psutil lists online pCPUs in order; a list of another length says nothing."""
    monkeypatch.setattr(psutil, "cpu_percent", lambda *_, **__: [10.0, 20.0])
    assert who.busy_percents(CpuSet([3, 5])) == {3: 10.0, 5: 20.0}
    assert who.busy_percents(CpuSet([3, 4, 5])) == {}
