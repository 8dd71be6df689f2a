"""What the scheduler counts of tasks and CPUs: schedstat, sched, status, /proc/stat.

Facts: Documentation/scheduler/sched-stats.rst, proc_pid_status(5), proc_stat(5). A process chooses
its name, which `sched` shows unescaped: it has at most 15 bytes, the shortest key used here 17.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from kata_pin.errors import ParseError
from kata_pin.model.measured.counters import CpuRun, CpuTimes, TaskMoves, TaskRun
from kata_pin.model.measured.scheduling import Scheduling
from kata_pin.wire.kernel.numbers import check_size, clipped, numbers

MAX_TASK: Final = 16 * 1024
MAX_CPUS: Final = 4 * 1024 * 1024
"""Most bytes of a text about one task, and about all CPUs: 8,192 CPUs with their domains."""

VERSIONS: Final = range(15, 18)
"""Versions of /proc/schedstat whose lines of CPUs are known: Linux 2.6.39 to 6.18."""


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


def parse_scheduling(data: bytes) -> Scheduling:
    """Read the scheduling class of a stat file, and when the thread started; raises ParseError."""
    words = data[data.rfind(b") ") + 2 :].split(None, 39)
    wanted = (words[38], words[37], words[19]) if len(words) > 38 else ()
    if not wanted or not all(one.isdigit() and len(one) <= 20 for one in wanted):
        raise ParseError("no scheduling class", source="stat", text=clipped(data))
    return Scheduling(*map(int, wanted))


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


def parse_cpu_runs(data: bytes, cpus: Collection[int]) -> dict[int, CpuRun]:
    """Read /proc/schedstat of these CPUs; an offline one is left out.

    Raises ParseError, also for a version that is not known: a number there may mean anything.
    """
    check_size(data, MAX_CPUS, "/proc/schedstat")
    head, _, rest = data.partition(b"\n")
    word, _, version = head.partition(b" ")
    if word != b"version" or not version.isdigit() or len(version) > 4:
        raise ParseError("no version", source="/proc/schedstat", text=clipped(head))
    if int(version) not in VERSIONS:
        raise ParseError(f"unknown version {int(version)}", source="/proc/schedstat")
    found = {}
    for cpu, line in _cpu_lines(rest, cpus):
        values = numbers(line, "/proc/schedstat")
        if len(values) != 9:
            raise ParseError("not nine numbers", source="/proc/schedstat", text=clipped(line))
        found[cpu] = CpuRun(*values[6:9])
    return found


def parse_cpu_times(data: bytes, cpus: Collection[int]) -> dict[int, CpuTimes]:
    """Read /proc/stat of these CPUs; an offline one is left out. Raises ParseError."""
    check_size(data, MAX_CPUS, "/proc/stat")
    found = {}
    for cpu, line in _cpu_lines(data, cpus):
        values = numbers(line, "/proc/stat")
        if len(values) < 8:
            raise ParseError("not eight numbers", source="/proc/stat", text=clipped(line))
        found[cpu] = CpuTimes(values[3] + values[4], values[5] + values[6], values[7])
    return found


def _cpu_lines(data: bytes, cpus: Collection[int]) -> list[tuple[int, bytes]]:
    """Return the lines that begin with `cpuN`, without that; the last counts if there are two."""
    found = []
    for line in data.split(b"\n"):
        if line.startswith(b"cpu"):
            number, _, rest = line[3:].partition(b" ")
            if number.isdigit() and len(number) <= 6 and int(number) in cpus:
                found.append((int(number), rest))
    return found
