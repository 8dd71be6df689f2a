"""Processes as psutil shows them in `who`: real ones, vanished ones, a command line of 1 GiB."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.waiting import wait_for
from tests.unit.cli import documents as docs
from tests.unit.conftest import Commands

MAX_COMMAND = 200
"""Characters that are shown of a command line."""

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


@pytest.fixture(autouse=True)
def node(commands: Commands) -> None:
    """This host's CPUs, and no sandboxes."""
    commands.state = docs.state(cpus=max(os.sched_getaffinity(0)) + 1, kubelet=None)


def described(commands: Commands, pid: int) -> dict[str, Any]:
    """Return a process as `who` shows it."""
    cpu = min(os.sched_getaffinity(pid))
    (found,) = (one for one in commands.json("who", str(cpu))["processes"] if one["pid"] == pid)
    return dict(found)


def test_this_process(commands: Commands) -> None:
    """User, command line, age and CPU time are those of the process."""
    found, mine = described(commands, os.getpid()), psutil.Process()
    assert found["user"] == mine.username()
    assert found["command"].removesuffix("...") in " ".join(mine.cmdline())
    assert 0 <= found["age_s"] < 86400
    assert found["cpu_s"] > 0


def test_a_process_that_has_exited(commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is gone is left out; what can no longer be read of one is empty."""
    with subprocess.Popen(["true"]) as process:
        process.wait()
    monkeypatch.setattr(psutil, "pids", lambda: [process.pid, os.getpid()])
    cpu = min(os.sched_getaffinity(0))
    assert [one["pid"] for one in commands.json("who", str(cpu))["processes"]] == [os.getpid()]

    def gone(one: psutil.Process, _: object) -> None:
        raise psutil.NoSuchProcess(one.pid)

    monkeypatch.setattr(psutil.Process, "as_dict", gone)
    found = described(commands, os.getpid())
    assert (found["user"], found["age_s"], found["cpu_s"]) == ("", None, None)
    assert found["comm"]


@pytest.mark.parametrize("error", [psutil.AccessDenied(1), psutil.ZombieProcess(1)])
def test_what_is_denied_is_empty(
    commands: Commands, error: psutil.Error, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A single fact that may not be read takes no other with it."""

    def refuse(_: psutil.Process) -> str:
        raise error

    monkeypatch.setattr(psutil.Process, "username", refuse)
    found = described(commands, os.getpid())
    assert found["user"] == ""
    assert found["cpu_s"] is not None


def test_a_zombie(commands: Commands) -> None:
    """A process that nobody has waited for has a name and no command line."""
    with subprocess.Popen(["true"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        found = described(commands, process.pid)
        assert (found["comm"], found["command"]) == ("true", "")


def test_a_command_line_without_end_is_cut(commands: Commands, endless: int) -> None:
    """Any user can make one; it is not read to its end, and the report is short."""
    assert len(described(commands, endless)["command"]) <= MAX_COMMAND


def test_a_long_command_line_is_cut(commands: Commands) -> None:
    """The end says that there is more."""
    with subprocess.Popen(["sleep", "60", *["0" * 100] * 3]) as process:
        comm = Path(f"/proc/{process.pid}/comm")
        wait_for(lambda: comm.read_text() == "sleep\n", "the program")
        command = described(commands, process.pid)["command"]
        process.kill()
    assert len(command) == MAX_COMMAND
    assert command.startswith("sleep 60 000")
    assert command.endswith("0...")


def test_how_busy_a_cpu_is(commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    """psutil lists online pCPUs in order; a list of another length says nothing."""
    commands.state = docs.state(cpus=6, kubelet=None, online="3,5")
    for loads, busy in (([10.0, 20.0], [10.0, 20.0]), ([10.0], [None, None])):
        monkeypatch.setattr(psutil, "cpu_percent", lambda *_, loads=loads, **__: loads)
        pcpus = commands.json("who", "3,5")["pcpus"]
        assert [one["busy_percent"] for one in pcpus] == busy
