"""What the scheduler counts, from text that kernels 6.1, 6.12 and 6.18 wrote."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from kata_pin.base.counters import CpuRun, CpuTimes
from kata_pin.base.errors import ParseError
from kata_pin.base.threads import TaskMoves, TaskRun
from kata_pin.linux import counters, task_counters
from tests.support.recordings import DATA

KERNEL = DATA / "kernel"


def read(kernel: str, name: str) -> bytes:
    return (KERNEL / kernel / name).read_bytes()


def test_a_thread_ran_waited_and_had_slices() -> None:
    """The three numbers of schedstat in their order."""
    found = task_counters.parse_task_run(read("6.12", "task-schedstat"))
    assert found == TaskRun(ran_ns=534439249, waited_ns=4622344874, slices=44)


@pytest.mark.parametrize(
    "data", [b"", b"1 2\n", b"1 2 3 4\n", b"1 -2 3\n", b"1 2 x\n", b"1 2 " + b"9" * 21, b"\xb2 1 2"]
)
def test_another_schedstat_is_refused(data: bytes) -> None:
    """Nothing is guessed."""
    with pytest.raises(ParseError, match="schedstat"):
        task_counters.parse_task_run(data)


@pytest.mark.parametrize(
    ("kernel", "moves"),
    [("6.1", TaskMoves(47, 0)), ("6.12", TaskMoves(44, 0)), ("6.18", TaskMoves(17, 1))],
)
def test_preemptions_and_migrations(kernel: str, moves: TaskMoves) -> None:
    """`sched` has both; `status`, which was read a moment before, has no migrations."""
    assert task_counters.parse_sched(read(kernel, "task-sched")) == moves
    status = task_counters.parse_switches(read(kernel, "task-status"))
    assert status.migrations is None
    assert 0 < (status.preemptions or 0) <= (moves.preemptions or 0)


def test_a_name_cannot_pass_for_a_count() -> None:
    """`sched` shows a name as it is; the longest one with a newline does not reach a key."""
    real = read("6.12", "task-sched")
    for name in (b"x\nse.nr_migrati", b"\nse.nr_migrat:9", b"\nnr_involuntar:"):
        assert len(name) <= 15
        assert task_counters.parse_sched(name + real[2:]) == task_counters.parse_sched(real)


def test_the_kernel_s_own_text_of_a_thread_with_a_hostile_name() -> None:
    """A thread of this process that calls itself like a key is read right."""
    ready, done = threading.Event(), threading.Event()
    tid = 0

    def run() -> None:
        nonlocal tid
        tid = threading.get_native_id()
        Path(f"/proc/self/task/{tid}/comm").write_bytes(b"\nse.nr_migrat:9")
        ready.set()
        done.wait(10)

    thread = threading.Thread(target=run)
    thread.start()
    ready.wait(10)
    text = Path(f"/proc/{os.getpid()}/task/{tid}/sched").read_bytes()
    status = Path(f"/proc/{os.getpid()}/task/{tid}/status").read_bytes()
    done.set()
    thread.join()
    found = task_counters.parse_sched(text)
    assert found.migrations is not None
    assert found.migrations < 9 or b"se.nr_migrations" in text
    assert task_counters.parse_switches(status) == TaskMoves(found.preemptions, None)


@pytest.mark.parametrize(
    "data", [b"", b"\nse.nr_migrations : 1\n", b"\nnr_involuntary_switches : x\n", b"a" * 20000]
)
def test_another_sched_is_refused(data: bytes) -> None:
    """A missing or odd number is no zero."""
    with pytest.raises(ParseError):
        task_counters.parse_sched(data)


@pytest.mark.parametrize(
    ("kernel", "last"),
    [
        ("6.1", CpuRun(ran_ns=1765658365, waited_ns=223352911, slices=369)),
        ("6.12", CpuRun(ran_ns=3083077213, waited_ns=1847191664, slices=552)),
    ],
)
def test_cpus_of_proc_schedstat(kernel: str, last: CpuRun) -> None:
    """Versions 15 and 16: the last three numbers of a CPU's line."""
    data = read(kernel, "schedstat")
    found = counters.parse_cpu_runs(data, {0, 3, 900})
    assert found[0] == last
    assert sorted(found) == [0, 3]


def test_an_unknown_version_of_proc_schedstat_is_refused() -> None:
    """Numbers of a version to come may mean anything."""
    data = read("6.12", "schedstat").replace(b"version 16", b"version 18")
    with pytest.raises(ParseError, match="unknown version 18"):
        counters.parse_cpu_runs(data, {0})


def test_version_17_has_names_of_domains() -> None:
    """Linux 6.14 writes the name of a domain behind its number; lines of CPUs are as before."""
    data = b"version 17\ntimestamp 1\ncpu1 0 0 9 4 5 5 70 80 90\ndomain0 SMT 00000003 0 0\n"
    assert counters.parse_cpu_runs(data, {1}) == {1: CpuRun(70, 80, 90)}


def test_idle_and_stolen_time_of_cpus() -> None:
    """Waiting for a disk is idle too."""
    data = (
        b"cpu  9 9 9 9 9 9 9 9 0 0\ncpu0 1 2 3 40 5 6 7 8 0 0\ncpu1 1 2 3 4 5 6 7 8 0 0\nintr 1\n"
    )
    assert counters.parse_cpu_times(data, {0}) == {0: CpuTimes(idle=45, interrupts=13, steal=8)}
    for kernel in ("6.1", "6.12", "6.18"):
        assert sorted(counters.parse_cpu_times(read(kernel, "stat"), {0, 1})) == [0, 1]


@pytest.mark.parametrize("data", [b"cpu0 1 2 3\n", b"cpu0 1 2 3 4 5 6 7 -8\n"])
def test_another_stat_is_refused(data: bytes) -> None:
    """Nothing is guessed."""
    with pytest.raises(ParseError, match="/proc/stat"):
        counters.parse_cpu_times(data, {0})
