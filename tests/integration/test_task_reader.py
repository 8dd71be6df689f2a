"""Threads that are known are not read again, and yet every change of them is seen."""

from __future__ import annotations

import os

import pytest

from kata_pin.base.cpuset import CpuSet
from kata_pin.base.sandbox import Task
from kata_pin.base.steps import finish
from kata_pin.linux import tasks
from kata_pin.linux.cgroups import CpusetReader
from kata_pin.linux.files import HOST
from kata_pin.linux.tasks import CROWD, TaskReader
from tests.support.specimen import Specimen, cpuset_cgroup, specimen, two_cpus


@pytest.fixture(autouse=True)
def old_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let threads be known from their birth on."""
    monkeypatch.setattr(tasks, "NAMED_AFTER_S", -1.0)


def _read(reader: TaskReader, process: Specimen) -> dict[int, Task]:
    found = finish(reader.read(HOST, process.pid, CpusetReader(HOST)))
    return {task.key.tid: task for task in found}


def test_what_did_not_change_is_the_same_object() -> None:
    """A thread with another affinity is another object, and one that exited is left out."""
    first, _ = two_cpus()
    with specimen(CROWD + 2) as process:
        reader = TaskReader()
        before = _read(reader, process)
        moved, ended, *others = process.tids[1:]
        os.sched_setaffinity(moved, {first})
        process.end(ended)
        (new,) = process.grow(1)
        after = _read(reader, process)
    assert after[moved].affinity == CpuSet([first])
    assert after.keys() == before.keys() - {ended} | {new}
    assert all(after[tid] is before[tid] for tid in others)


@pytest.mark.root
def test_a_single_thread_in_another_cgroup() -> None:
    """A known thread that alone is moved to another cgroup has that one's cpuset."""
    first, second = two_cpus()
    with (
        cpuset_cgroup(f"{first},{second}") as whole,
        cpuset_cgroup(str(first)) as part,
        specimen(CROWD + 2) as process,
    ):
        if not os.path.exists(f"{part.folder}/tasks"):
            pytest.skip("threads of one process are in several cgroups with version 1 only")
        whole.take(process.pid)
        reader, (*others, moved) = TaskReader(), process.tids
        assert _read(reader, process)[moved].cgroup == whole.path
        with open(f"{part.folder}/tasks", "w", encoding="ascii") as file:
            file.write(str(moved))
        for _ in range(2):
            found = _read(reader, process)
            assert (found[moved].cgroup, found[moved].cpuset) == (part.path, CpuSet([first]))
            assert {found[tid].cgroup for tid in others} == {whole.path}
