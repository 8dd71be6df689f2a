"""What of a process can take for ever to read: its command line, and its executable's file.

Reading a command line takes the lock of the process's memory map. Who maps a file of a file system
that does not answer, and has a writer wait for the lock, makes every reader wait too, without end
(a VMM on hung storage does so unwillingly). So both are read beforehand, with a deadline, by
`Calls.read_slow`, and answered from memory here: NotRead says that they were not read, or hung.

A process that hung is left alone for a while, longer each time. What is kept is bounded in bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from kata_pin.errors import HostError, NotRead, ParseError, TaskGone
from kata_pin.model.thread import Process, ProcessKey
from kata_pin.vmm import checks
from kata_pin.vmm.host_access import HostPaths
from kata_pin.wire.proc import MAX_CMDLINE, ExeFile, parse_cmdline, parse_exe

DEADLINE_S: Final = 0.2
"""How long one read may take; others of the same call do not wait for it."""

AT_ONCE: Final = 32
"""Processes per call: a hostile command line has 128 KiB."""

MAX_KEPT: Final = 16 * 1024 * 1024
"""Bytes of command lines that are kept; Kata's QEMU has 4 KiB, a shim 300 bytes."""

MAX_HUNG: Final = 4096
"""Processes that hung which are remembered."""

RESTS_S: Final = (1.0, 2.0, 5.0, 15.0, 60.0, 300.0)
"""How long a process that hung is left alone, by how often it did."""

MAX_WANTED: Final = 64
"""Processes that were asked for in vain which are remembered until they are read."""

EXE_BYTES: Final = 8192


@dataclass(frozen=True, slots=True)
class Hung:
    """A process whose memory is locked: since when that is known, and how often it was tried.

    `since` and `retry_at` are times of CLOCK_MONOTONIC.
    """

    process: Process
    since: float
    tries: int
    retry_at: float


@dataclass(frozen=True, slots=True)
class _Facts:
    """What was read of a process; `name` is what it had before, None where exec changes no more.

    The command line is kept as bytes: split into 16,000 words it would take twelve times as much.
    """

    exe: ExeFile | HostError
    line: bytes | HostError
    name: str | None

    @property
    def size(self) -> int:
        return len(self.line) if isinstance(self.line, bytes) else 0


class SlowFacts:
    """See the module; one lives as long as the daemon, or one command.

    `on_hung` is called for a process that hangs for the first time.
    """

    def __init__(
        self,
        root: HostPaths,
        read_process: Callable[[int], Process],
        on_hung: Callable[[Process], None] = lambda _: None,
    ) -> None:
        self._root = root
        self._read_process = read_process
        self._on_hung = on_hung
        self._facts: dict[ProcessKey, _Facts] = {}
        self._size = 0
        self._hung: dict[ProcessKey, Hung] = {}
        self._wanted: dict[ProcessKey, Process] = {}

    # ---- answers -------------------------------------------------------------------------

    def cmdline(self, pid: int) -> Sequence[str]:
        """Return a process's arguments; raises TaskGone and NotRead."""
        line = self._of(pid, "command line").line
        if isinstance(line, HostError):
            raise line
        return parse_cmdline(line)

    def exe_file(self, pid: int) -> ExeFile:
        """Return the file that a process executes; raises HostError, NotRead among them."""
        exe = self._of(pid, "executable").exe
        if isinstance(exe, HostError):
            raise exe
        return exe

    @property
    def hung(self) -> tuple[Hung, ...]:
        """The processes that did not answer when they were asked last, the newest last."""
        return tuple(self._hung.values())

    def _of(self, pid: int, what: str) -> _Facts:
        process = self._read_process(pid)
        key = process.key
        if key in self._hung:
            raise NotRead(f"{what} of process {pid}", hung=True)
        facts = self._facts.get(key)
        if facts is not None and facts.name not in {None, process.comm}:
            self.drop(key)
            facts = None
        if facts is None:
            if len(self._wanted) < MAX_WANTED:
                self._wanted[key] = process
            raise NotRead(f"{what} of process {pid}", hung=False)
        self._facts[key] = self._facts.pop(key)  # the one used last is dropped last
        return facts

    def take_wanted(self) -> list[Process]:
        """Return the processes that were asked for in vain since the last call."""
        wanted, self._wanted = list(self._wanted.values()), {}
        return wanted

    # ---- reading -------------------------------------------------------------------------

    def lacks(self, process: Process) -> bool:
        """Whether a process should be read now: not known, young, or due again after it hung."""
        hung = self._hung.get(process.key)
        if hung is not None:
            return time.monotonic() >= hung.retry_at
        facts = self._facts.get(process.key)
        return facts is None or facts.name is not None

    def knows(self, process: Process) -> bool:
        """Whether a process was read."""
        return process.key in self._facts

    def retry_s(self, keys: Iterable[ProcessKey]) -> float | None:
        """Return in how many seconds the first of these that hung is due again, None for none."""
        due = [self._hung[key].retry_at for key in keys if key in self._hung]
        return max(0.0, min(due) - time.monotonic()) if due else None

    async def read(self, processes: Iterable[Process]) -> int:
        """Read those that lack it; return how many were asked. Raises nothing for single ones."""
        wanted = iter({one.key: one for one in processes if self.lacks(one)}.values())
        asked = 0
        while batch := list(islice(wanted, AT_ONCE)):
            asked += len(batch)
            await self._read(batch)
        return asked

    async def _read(self, batch: Sequence[Process]) -> None:
        young = {one.key: self._name_of(one) for one in batch if checks.is_young(one)}
        requests = [
            request
            for one in batch
            for request in ((one.pid, "exe", EXE_BYTES), (one.pid, "cmdline", MAX_CMDLINE))
        ]
        answers = await self._root.calls.read_slow(requests, DEADLINE_S)
        for one in batch:
            exe, data = answers[one.pid, "exe"], answers[one.pid, "cmdline"]
            if isinstance(exe, TimeoutError) or isinstance(data, TimeoutError):
                self._hangs(one)
                continue
            self._hung.pop(one.key, None)
            try:
                if self._read_process(one.pid).key != one.key:
                    continue
            except HostError:
                continue
            self._keep(one.key, _Facts(_exe(one, exe), _line(one, data), young.get(one.key)))

    def _name_of(self, process: Process) -> str:
        try:
            return self._read_process(process.pid).comm
        except HostError:
            return ""

    def _hangs(self, process: Process) -> None:
        now = time.monotonic()
        before = self._hung.pop(process.key, None)
        if before is None:
            self._on_hung(process)
            if len(self._hung) >= MAX_HUNG:
                del self._hung[next(iter(self._hung))]
        tries = before.tries + 1 if before else 1
        rest_s = RESTS_S[min(tries, len(RESTS_S)) - 1]
        since = before.since if before else now
        self._hung[process.key] = Hung(process, since, tries, now + rest_s)
        self.drop(process.key)

    def _keep(self, key: ProcessKey, facts: _Facts) -> None:
        self.drop(key)
        self._facts[key] = facts
        self._size += facts.size
        for oldest in self._oldest():
            self.drop(oldest)

    def _oldest(self) -> Iterator[ProcessKey]:
        """Yield what to drop until the rest is small enough."""
        while self._size > MAX_KEPT:
            yield next(iter(self._facts))

    def drop(self, key: ProcessKey) -> None:
        """Forget what was read of a process."""
        facts = self._facts.pop(key, None)
        if facts is not None:
            self._size -= facts.size

    def forget_ended(self, alive: Iterable[ProcessKey]) -> None:
        """Forget all processes but these."""
        living = set(alive)
        for key in [key for key in self._facts if key not in living]:
            self.drop(key)
        for key in [key for key in self._hung if key not in living]:
            del self._hung[key]


def _exe(process: Process, answer: bytes | OSError) -> ExeFile | HostError:
    subject = f"process {process.pid}"
    if isinstance(answer, OSError):
        return HostError("look at the executable of", subject, answer.errno or 0)
    try:
        return parse_exe(answer)
    except ParseError as error:
        return HostError(str(error), subject)


def _line(process: Process, answer: bytes | OSError) -> bytes | HostError:
    if isinstance(answer, OSError):
        return TaskGone("read cmdline of", f"process {process.pid}", answer.errno or 0)
    return answer
