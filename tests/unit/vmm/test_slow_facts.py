"""What of a process is read with a deadline, kept, and answered from memory."""

from __future__ import annotations

import errno
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from kata_pin.base.errors import HostError, NotRead, TaskGone
from kata_pin.base.sandbox import Process, ProcessKey
from kata_pin.linux.files import HostRoot
from kata_pin.rights.calls import Calls
from kata_pin.vmm import checks
from kata_pin.vmm.checks import SlowFacts

EXE = b"1 2 0 100755\n/usr/bin/x"


class Readers(Calls):
    """Answers from tables, and counts what was asked for."""

    def __init__(self) -> None:
        self.lines: dict[int, bytes] = {}
        self.hang: set[int] = set()
        self.errors: dict[str, int] = {}
        """The errno of each file that cannot be read."""
        self.batches: list[int] = []

    async def read_slow(
        self, requests: Sequence[tuple[int, str, int]], deadline_s: float
    ) -> Mapping[tuple[int, str], bytes | OSError]:
        self.batches.append(len(requests))
        return {(pid, file): self._answer(pid, file) for pid, file, _ in requests}

    def _answer(self, pid: int, file: str) -> bytes | OSError:
        if pid in self.hang:
            return TimeoutError(110, "timed out")
        if file in self.errors:
            return OSError(self.errors[file], "cannot be read")
        return EXE if file == "exe" else self.lines.get(pid, b"x\0")


class Host:
    """Processes by pid."""

    def __init__(self, *pids: int) -> None:
        self.processes = {pid: Process(ProcessKey(pid, 1), 1, "x", 0) for pid in pids}
        self.calls = Readers()
        self.hung: list[int] = []
        root = HostRoot(calls=self.calls)
        self.facts = SlowFacts(root, self.read, lambda one: self.hung.append(one.pid))

    def read(self, pid: int) -> Process:
        if pid not in self.processes:
            raise TaskGone("read", f"process {pid}")
        return self.processes[pid]

    async def look(self) -> int:
        return await self.facts.read(self.processes.values())


async def test_what_was_read_is_not_read_again() -> None:
    """Once per identity; a pid that is another process's now is not known."""
    host = Host(1, 2)
    with pytest.raises(NotRead, match="command line of process 1 was not read yet"):
        host.facts.cmdline(1)
    assert [one.pid for one in host.facts.take_wanted()] == [1]
    assert await host.look() == 2
    assert await host.look() == 0
    assert host.facts.cmdline(1) == ("x",)
    assert host.facts.exe_file(1).path == "/usr/bin/x"
    host.processes[1] = Process(ProcessKey(1, 9), 1, "x", 0)
    with pytest.raises(NotRead):
        host.facts.cmdline(1)
    with pytest.raises(TaskGone):
        host.facts.cmdline(3)


async def test_the_young_are_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between fork and exec a process shows its parent's arguments."""
    host = Host(1)
    monkeypatch.setattr("kata_pin.vmm.checks.is_young", lambda _: True)
    assert [await host.look(), await host.look()] == [1, 1]
    monkeypatch.setattr("kata_pin.vmm.checks.is_young", lambda _: False)
    assert [await host.look(), await host.look()] == [1, 0]


async def test_after_an_exec_the_parents_arguments_do_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A child that was read between its fork and its exec, and has its program's name now."""
    host = Host(1)
    monkeypatch.setattr("kata_pin.vmm.checks.is_young", lambda _: True)
    host.calls.lines[1] = b"shim\0-id\0p1\0"
    await host.look()
    assert host.facts.cmdline(1) == ("shim", "-id", "p1")
    host.processes[1] = replace(host.processes[1], comm="firecracker")
    host.calls.lines[1] = b"/firecracker\0"
    with pytest.raises(NotRead):
        host.facts.cmdline(1)
    assert host.facts.take_wanted() == [host.processes[1]]
    await host.facts.read([replace(host.processes[1], comm="shim")])  # as the table still has it
    assert host.facts.cmdline(1) == ("/firecracker",)


async def test_an_answer_of_a_pid_that_changed_hands_is_kept_for_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whose it is cannot be told: the process ended while it was read."""
    host = Host(1)
    asked, read_slow = host.processes[1], host.calls.read_slow

    async def then_ends(requests: Sequence[Any], deadline_s: float) -> Mapping[Any, Any]:
        answers = await read_slow(requests, deadline_s)
        host.processes[1] = replace(asked, key=ProcessKey(1, 9))
        return answers

    monkeypatch.setattr(host.calls, "read_slow", then_ends)
    assert await host.look() == 1
    assert not host.facts.knows(asked)
    assert not host.facts.knows(host.processes[1])


@pytest.mark.parametrize("file", ["cmdline", "exe"])
async def test_a_passing_error_says_nothing_about_the_process(file: str) -> None:
    """It is read again when it is asked for; one that lasts is an answer."""
    host = Host(1)
    host.calls.errors = {file: errno.EMFILE}
    assert await host.look() == 1
    with pytest.raises(NotRead):
        host.facts.cmdline(1)
    assert host.facts.take_wanted() == [host.processes[1]]
    assert host.hung == []
    host.calls.errors = {}
    assert await host.look() == 1
    assert host.facts.cmdline(1) == ("x",)
    assert host.facts.exe_file(1).path == "/usr/bin/x"
    gone = Host(2)
    gone.calls.errors = {"cmdline": errno.ESRCH}
    assert [await gone.look(), await gone.look()] == [1, 0]
    with pytest.raises(TaskGone):
        gone.facts.cmdline(2)


async def test_one_that_hangs_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer each time, reported once, and known again when it answers."""
    host, clock = Host(1, 2), itertools.count()
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    host.calls.hang = {1}
    assert await host.look() == 2
    assert host.facts.cmdline(2) == ("x",)
    with pytest.raises(NotRead, match="the process's memory is locked"):
        host.facts.cmdline(1)
    tried = []
    for _ in clock:
        now[0] += 1.0
        if await host.look():
            tried.append(now[0])
        if now[0] > 400:
            break
    assert tried == [1.0, 3.0, 8.0, 23.0, 83.0, 383.0]
    assert host.hung == [1]
    assert [(one.process.pid, one.tries) for one in host.facts.hung] == [(1, 7)]
    host.calls.hang = set()
    now[0] += 300
    assert await host.look() == 1
    assert host.facts.hung == ()
    assert host.facts.cmdline(1) == ("x",)


async def test_when_one_that_hangs_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of those that are asked about; none of them hangs: no time."""
    host = Host(1, 2, 3)
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    host.calls.hang = {1}
    await host.facts.read([host.processes[1]])
    now[0] = 0.5
    host.calls.hang = {1, 2}
    await host.look()
    keys = [host.processes[pid].key for pid in (1, 2, 3)]
    assert [host.facts.knows(host.processes[pid]) for pid in (1, 2, 3)] == [False, False, True]
    assert [host.facts.retry_s(part) for part in (keys, keys[1:], keys[2:])] == [0.5, 1.0, None]
    now[0] = 9.0
    assert host.facts.retry_s(keys) == 0.0


async def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long lines push out what was not used for longest; those of ended processes go too."""
    monkeypatch.setattr(checks, "MAX_KEPT", 1000)
    host = Host(*range(1, 101))
    host.calls.lines = dict.fromkeys(range(1, 101), b"y" * 100)
    await host.look()
    assert max(host.calls.batches) == 2 * checks.AT_ONCE
    known = [pid for pid in range(1, 101) if _knows(host, pid)]
    assert known == list(range(91, 101))
    host.facts.forget_ended([host.processes[95].key])
    assert [pid for pid in range(1, 101) if _knows(host, pid)] == [95]


def _knows(host: Host, pid: int) -> bool:
    try:
        return bool(host.facts.cmdline(pid))
    except HostError:
        return False
