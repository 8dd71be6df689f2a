"""What the kernel counts of threads: how long each ran and waited, how often it was moved."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from errno import EACCES, EMFILE, ENFILE, ENOENT, EPERM, ESRCH
from typing import Final

from msgspec import Struct, field

from kata_pin.base.errors import ParseError, reason_of
from kata_pin.base.threads import TaskMoves, TaskRun, TaskSample, ThreadKey
from kata_pin.linux.files import GONE_ERRNOS, HostRoot, read_once
from kata_pin.linux.kernel_text import check_size, clipped, parse_starttime

# Facts are in Documentation/scheduler/sched-stats.rst and proc_pid_status(5). A process chooses its
# name, which `sched` shows unescaped: it has at most 15 bytes, the shortest key used here 17.

MAX_TASK: Final = 16 * 1024
"""Most bytes of a text about one task."""


def parse_task_run(data: bytes) -> TaskRun:
    """Read /proc/<pid>/task/<tid>/schedstat: three numbers; raises ParseError."""
    words = data.split(None, 3)
    if len(data) > MAX_TASK or len(words) != 3 or not b"".join(words).isdigit():
        raise ParseError("not three numbers", source="schedstat", text=clipped(data))
    if max(map(len, words)) > 20:
        raise ParseError("a number is too long", source="schedstat", text=clipped(data))
    return TaskRun(int(words[0]), int(words[1]), int(words[2]))


def parse_ready(data: bytes) -> bool:
    """Read only the state of a stat file: whether the thread runs or waits for a CPU."""
    end = data.rfind(b") ")
    if end < 0 or end + 3 >= len(data):
        raise ParseError("no state", source="stat", text=clipped(data))
    return data[end + 2 : end + 4] == b"R "


def parse_last_cpu(data: bytes) -> int:
    """Read only the CPU of a stat file that the thread ran on last; raises ParseError."""
    words = data[data.rfind(b") ") + 2 :].split(None, 37)
    if len(words) < 37 or not words[36].isdigit() or len(words[36]) > 9:
        raise ParseError("no CPU", source="stat", text=clipped(data))
    return int(words[36])


def parse_sched(data: bytes) -> TaskMoves:
    """Read /proc/<pid>/task/<tid>/sched (CONFIG_SCHED_DEBUG before 6.15); raises ParseError."""
    return TaskMoves(
        _after(data, b"\nnr_involuntary_switches", b":", "sched"),
        _after(data, b"\nse.nr_migrations", b":", "sched"),
    )


def parse_switches(data: bytes) -> TaskMoves:
    """Read the preemptions of /proc/<pid>/task/<tid>/status, which has no migrations.

    Raises ParseError.
    """
    return TaskMoves(_after(data, b"\nnonvoluntary_ctxt_switches", b":", "status"), None)


def _after(data: bytes, key: bytes, mark: bytes, source: str) -> int:
    """Return the number behind the key and the mark on one line."""
    check_size(data, MAX_TASK, source)
    start = data.find(key) + 1
    line = data[start : data.find(b"\n", start)] if start else b""
    name, found, value = line.partition(mark)
    value = value.strip()
    if not found or name.strip() != key[1:] or not value.isdigit() or len(value) > 20:
        raise ParseError(f"no {key[1:].decode()}", source=source, text=clipped(line))
    return int(value)


def task_runs(root: HostRoot, threads: Iterable[tuple[int, int]]) -> dict[int, TaskRun]:
    """Return the counters by tid; `threads` are pairs of process and thread. No rights are needed.

    A thread that is gone is left out, and so is every one where the kernel has no schedstat
    (CONFIG_SCHED_INFO).
    """
    found = {}
    for tgid, tid in threads:
        try:
            found[tid] = parse_task_run(read_once(root.proc(tgid, "task", tid, "schedstat")))
        except (OSError, ParseError):
            continue
    return found


def migrations(root: HostRoot, threads: Iterable[tuple[int, int]]) -> dict[int, int]:
    """Return by tid how often threads were moved to another CPU; the others as in `task_runs`.

    Kernels before 6.15 have it with CONFIG_SCHED_DEBUG alone.
    """
    found = {}
    for tgid, tid in threads:
        try:
            moves = parse_sched(read_once(root.proc(tgid, "task", tid, "sched"), MAX_TASK))
        except (OSError, ParseError):
            continue
        if moves.migrations is not None:
            found[tid] = moves.migrations
    return found


def over(
    before: Mapping[int, TaskRun], after: Mapping[int, TaskRun]
) -> dict[int, tuple[TaskRun, TaskRun]]:
    """Return both readings of each thread that has two; counters of one thread never shrink."""
    return {
        tid: (one, after[tid])
        for tid, one in before.items()
        if tid in after and all(a >= b for a, b in zip(after[tid], one, strict=True))
    }


# What threads ran, waited and moved, read again and again.
#
# Descriptors are kept open: a read with pread then costs a fifth of open, read and close, and fails
# once the thread has ended, even if its number is in use again. Files that cost more (stat, sched)
# are read where they can have changed: a thread that did not run was neither preempted nor moved.
# Whether one that slept has been starving since is asked in turns: its wait shows once it runs.

RUN_BYTES: Final = 128
STAT_BYTES: Final = 1024

TURNS: Final = 4
"""In one of so many samples a sleeping overhead thread is asked whether it is ready now."""


class _Task(Struct):
    """A thread that is read again and again: its open files by name, and its last sample."""

    files: dict[str, int] = field(default_factory=dict)
    last: TaskSample | None = None
    text: bytes = b""
    """Its schedstat in the last sample: most threads sleep, and have the same in the next."""


class TaskSampler:
    """Reads the same threads repeatedly; close it in the end.

    `room` is how many descriptors may stay open; files beyond are opened for each read.
    """

    def __init__(self, root: HostRoot, room: int) -> None:
        self._root = root
        self._room = room
        self._tasks: dict[ThreadKey, _Task] = {}
        self._moves_file = "sched"
        self._turn = 0
        self.denied = 0
        """Threads of the last sample that may not be read."""
        self.problems: dict[str, str] = {}
        """Why a file of threads cannot be read on this node, by its name."""

    def close(self) -> None:
        """Close every descriptor."""
        for key in list(self._tasks):
            self._forget(key)

    def sample(
        self, keys: Iterable[ThreadKey], detailed: Collection[ThreadKey]
    ) -> dict[ThreadKey, TaskSample]:
        """Return the threads as of now; those that ended are left out.

        Preemptions, migrations and the last CPU are read of the threads in `detailed` only.
        """
        known, self._tasks = self._tasks, {}
        self.denied = 0
        self._turn += 1
        found = {}
        for number, key in enumerate(dict.fromkeys(keys), start=self._turn):
            task = self._tasks[key] = known.pop(key) if key in known else _Task()
            try:
                in_turn = number % TURNS == 0
                task.last = found[key] = self._sample(
                    key, task, detailed=key in detailed, in_turn=in_turn
                )
            except OSError as error:
                self._note(key, error)
                self._forget(key)
            except ParseError as error:
                self.problems["task/schedstat"] = str(error)
        for task in known.values():
            self._close(task)
        return found

    def runs(self, keys: Iterable[ThreadKey]) -> dict[ThreadKey, TaskRun]:
        """Return only what threads of the last sample ran and waited; ended ones are left out."""
        found = {}
        for key in keys:
            task = self._tasks.get(key)
            try:
                if task is not None:
                    data = self._read(key, task, "schedstat", RUN_BYTES)
                    found[key] = parse_task_run(data)
            except (OSError, ParseError):
                continue
        return found

    def _sample(self, key: ThreadKey, task: _Task, *, detailed: bool, in_turn: bool) -> TaskSample:
        last = task.last
        text = self._read(key, task, "schedstat", RUN_BYTES)
        run = last.run if last is not None and text == task.text else parse_task_run(text)
        task.text = text
        if last is None or not task.files:
            self._prove(key, task)
        ran = last is None or last.run != run
        ready, cpu, moves = ran, None, None
        if detailed or (last is not None and not ran and (last.ready or in_turn)):
            stat = self._read(key, task, "stat", STAT_BYTES)
            ready = parse_ready(stat)
            if detailed:
                known = last is not None and not ran and last.last_cpu is not None
                cpu = last.last_cpu if last is not None and known else parse_last_cpu(stat)
        if detailed:
            moves = last.moves if last is not None and not ran else None
            moves = moves or self._moves(key, task)
        return TaskSample(run, moves, cpu, ready)

    def _prove(self, key: ThreadKey, task: _Task) -> None:
        """Raise ProcessLookupError unless this is the thread that is meant."""
        if parse_starttime(self._read(key, task, "stat", STAT_BYTES)) != key.starttime:
            raise ProcessLookupError(ESRCH, os.strerror(ESRCH))

    def _moves(self, key: ThreadKey, task: _Task) -> TaskMoves | None:
        """Return the moves of a thread; kernels without `sched` tell preemptions alone."""
        try:
            data = self._read(key, task, self._moves_file, MAX_TASK)
            return parse_sched(data) if self._moves_file == "sched" else parse_switches(data)
        except ParseError as error:
            self.problems[f"task/{self._moves_file}"] = error.message
        except OSError as error:
            if error.errno not in {ENOENT, EACCES, EPERM} or self._moves_file != "sched":
                raise
            self._prove(key, task)  # raises for a thread that has ended
            absent = "this kernel has no /proc/PID/sched (CONFIG_SCHED_DEBUG)"
            denied = f"cannot read /proc/PID/sched: {error.strerror}"
            self.problems["task/sched"] = absent if error.errno == ENOENT else denied
            self._moves_file = "status"
            return self._moves(key, task)
        return None

    def _read(self, key: ThreadKey, task: _Task, name: str, size: int) -> bytes:
        fd = task.files.get(name)
        if fd is not None:
            return os.pread(fd, size, 0)
        path = f"{self._root.proc()}/{key.tgid}/task/{key.tid}/{name}"
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            data = os.pread(fd, size, 0)
        except BaseException:
            os.close(fd)
            raise
        if self._room > 0:
            self._room -= 1
            task.files[name] = fd
        else:
            os.close(fd)
        return data

    def _note(self, key: ThreadKey, error: OSError) -> None:
        """Count a thread that may not be read; one that has ended is no problem."""
        if error.errno in {EACCES, EPERM}:
            self.denied += 1
        elif error.errno in {EMFILE, ENFILE}:
            self._room = 0
        elif error.errno not in GONE_ERRNOS:
            self.problems["task/schedstat"] = f"cannot read it: {reason_of(error)}"
        elif self._lacks_schedstat(key):
            self.problems["task/schedstat"] = "this kernel has none (CONFIG_SCHED_INFO)"

    def _lacks_schedstat(self, key: ThreadKey) -> bool:
        """Whether a thread is there and its schedstat is not."""
        folder = self._root.proc(key.tgid, "task", key.tid)
        there = os.path.exists(f"{folder}/stat")
        return there and not os.path.exists(f"{folder}/schedstat")

    def _forget(self, key: ThreadKey) -> None:
        self._close(self._tasks.pop(key))

    def _close(self, task: _Task) -> None:
        for fd in task.files.values():
            os.close(fd)
            self._room += 1
        task.files.clear()
