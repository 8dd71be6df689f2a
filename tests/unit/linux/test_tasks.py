"""Threads that are read again and again: few system calls, no stale and no other thread."""

from __future__ import annotations

import os
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

from kata_pin.base.threads import TaskMoves, TaskRun, ThreadKey
from kata_pin.linux import task_counters
from kata_pin.linux.files import HOST, HostRoot
from kata_pin.linux.task_counters import TaskSampler
from tests.support.played_threads import played
from tests.support.recordings import DATA

KERNEL = DATA / "kernel"
KEY = ThreadKey(4242, 4243, 5678)


def stat(starttime: int = 5678, state: str = "S", cpu: int = 11) -> str:
    before = " ".join(["0"] * 18)
    return f"4243 (qemu) {state} {before} {starttime} {' '.join(['0'] * 16)} {cpu} 0 0 0 0\n"


@pytest.fixture
def root(tmp_path: Path) -> HostRoot:
    """A thread in a tree, with the text of kernel 6.12."""
    folder = tmp_path / "proc/4242/task/4243"
    folder.mkdir(parents=True)
    for name in ("schedstat", "sched", "status"):
        (folder / name).write_bytes((KERNEL / "6.12" / f"task-{name}").read_bytes())
    (folder / "stat").write_text(stat())
    return HostRoot(str(tmp_path))


def write(root: HostRoot, name: str, text: str) -> None:
    Path(root.proc(KEY.tgid, "task", KEY.tid, name)).write_text(text)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the sampler's system calls."""
    counts: Counter[str] = Counter()

    class Counted:
        def __getattr__(self, name: str) -> object:
            counts.update([name] if name in {"open", "pread", "close"} else [])
            return getattr(os, name)

    monkeypatch.setattr(task_counters, "os", Counted())
    return counts


def test_a_detailed_thread(root: HostRoot) -> None:
    """Run, wait, moves, last CPU and state."""
    with closing(TaskSampler(root, 100)) as sampler:
        found = sampler.sample([KEY], {KEY})[KEY]
    assert found.run == TaskRun(534439249, 4622344874, 44)
    assert (found.moves, found.last_cpu, found.ready) == (TaskMoves(44, 0), 11, False)


def test_an_overhead_thread_costs_less(root: HostRoot) -> None:
    """Its moves are not read; whether it starves is."""
    write(root, "stat", stat(state="R"))
    with closing(TaskSampler(root, 100)) as sampler:
        sampler.sample([KEY], ())
        found = sampler.sample([KEY], ())[KEY]
    assert (found.moves, found.last_cpu, found.ready) == (None, None, True)


def test_another_thread_with_the_number_is_not_read(root: HostRoot) -> None:
    """The start time tells them apart."""
    write(root, "stat", stat(starttime=9999))
    with closing(TaskSampler(root, 100)) as sampler:
        assert sampler.sample([KEY], ()) == {}
    assert sampler.denied == 0


@pytest.mark.parametrize("room", [0, 100])
def test_changes_are_seen_with_and_without_descriptors(root: HostRoot, room: int) -> None:
    """Counters that grew, and moves that are read only then."""
    with closing(TaskSampler(root, room)) as sampler:
        sampler.sample([KEY], {KEY})
        write(root, "schedstat", "534439999 4622344874 45\n")
        write(root, "sched", "\nse.nr_migrations : 7\nnr_involuntary_switches : 50\n")
        found = sampler.sample([KEY], {KEY})[KEY]
    assert (found.run.slices, found.moves) == (45, TaskMoves(50, 7))


def test_a_kernel_without_sched_tells_preemptions(root: HostRoot) -> None:
    """CONFIG_SCHED_DEBUG is off: migrations are unknown, and it says why."""
    os.unlink(root.proc(KEY.tgid, "task", KEY.tid, "sched"))
    with closing(TaskSampler(root, 100)) as sampler:
        found = sampler.sample([KEY], {KEY})[KEY]
        assert found.moves is not None
        assert found.moves.migrations is None
        assert (found.moves.preemptions or 0) > 0
        assert list(sampler.problems) == ["task/sched"]
        assert "CONFIG_SCHED_DEBUG" in sampler.problems["task/sched"]


def test_a_kernel_without_schedstat_says_so(root: HostRoot) -> None:
    """CONFIG_SCHED_INFO is off: nothing of the thread is known, and nothing is 0."""
    os.unlink(root.proc(KEY.tgid, "task", KEY.tid, "schedstat"))
    with closing(TaskSampler(root, 100)) as sampler:
        assert sampler.sample([KEY], {KEY}) == {}
        assert "CONFIG_SCHED_INFO" in sampler.problems["task/schedstat"]


def test_a_thousand_idle_threads_cost_two_reads_each(calls: Counter[str]) -> None:
    """Real threads: descriptors stay open, and what cannot have changed is not read."""
    with played(*["sleeps"] * 1000) as process, closing(TaskSampler(HOST, 5000)) as sampler:
        keys = [process.key(number) for number in range(1000)]
        vcpus = set(keys[:200])
        assert len(sampler.sample(keys, vcpus)) == 1000
        sampler.sample(keys, vcpus)  # those that were still going to sleep
        calls.clear()
        assert len(sampler.sample(keys, vcpus)) == 1000
        assert calls["pread"] <= 2 * 1000 + 20
        assert calls["open"] == 0


def test_threads_that_end_leave_no_descriptors() -> None:
    """A read of one that has ended fails; its files are closed."""
    with closing(TaskSampler(HOST, 100)) as sampler:
        with played("sleeps", "sleeps") as process:
            keys = [process.key(0), process.key(1)]
            assert len(sampler.sample(keys, keys)) == 2
            assert sampler.runs(keys).keys() == set(keys)
        before = len(os.listdir("/proc/self/fd"))
        assert sampler.sample(keys, keys) == {}
        assert len(os.listdir("/proc/self/fd")) < before
        assert sampler.runs(keys) == {}
        assert sampler.problems == {}


def test_a_thread_that_is_named_twice_is_read_once(root: HostRoot) -> None:
    """Two sandboxes may claim one process; its descriptors are closed all the same."""
    before = len(os.listdir("/proc/self/fd"))
    with closing(TaskSampler(root, 100)) as sampler:
        assert list(sampler.sample([KEY, KEY], {KEY})) == [KEY]
    assert len(os.listdir("/proc/self/fd")) == before


def test_files_of_threads_that_are_no_longer_asked_for_are_closed() -> None:
    """The sampler follows the sandboxes."""
    with played("sleeps", "sleeps") as process, closing(TaskSampler(HOST, 100)) as sampler:
        keys = [process.key(0), process.key(1)]
        sampler.sample(keys, keys)
        before = len(os.listdir("/proc/self/fd"))
        sampler.sample(keys[:1], keys[:1])
        assert len(os.listdir("/proc/self/fd")) == before - 3
