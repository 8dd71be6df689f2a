"""The host surface keeps its contract on a tree of files and on the running system alike.

What passes here only on one of the two means that the fake lies, or that the code does.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from msgspec.structs import replace

from kata_pin.base.cpuset import CpuSet
from kata_pin.base.errors import TaskGone
from kata_pin.base.placement import Action
from kata_pin.base.sandbox import Task
from kata_pin.base.steps import finish
from kata_pin.base.threads import ThreadKey
from kata_pin.base.values import Outcome
from kata_pin.linux import process, tasks
from kata_pin.linux.affinity import NOTHING, ExpectedThread, apply_all, audit_affinity, audit_deep
from kata_pin.linux.cgroups import CpusetReader
from kata_pin.linux.files import HOST, HostRoot
from kata_pin.linux.process import ProcessIndex
from kata_pin.linux.topology import online, read_topology
from kata_pin.rights.broker.protocol import AffinityChange
from tests.support.hosttree import FakeHost, grow, listing
from tests.support.specimen import specimen, two_cpus

THREADS = 4


@dataclass(frozen=True)
class Subject:
    """A host with one process of four threads, and ways to change it."""

    root: HostRoot
    pid: int
    tids: list[int]
    cpus: tuple[int, int]
    grow: Callable[[], int]
    end: Callable[[int], None]

    def tasks(self) -> list[Task]:
        """Read its threads with a reader of their own."""
        return finish(tasks.TaskReader().read(self.root, self.pid, CpusetReader(self.root)))

    def key(self, tid: int) -> ThreadKey:
        """Return a thread's identity."""
        return ThreadKey(self.pid, tid, tasks.starttime(self.root, self.pid, tid))


def fake_subject(folder: Path) -> Subject:
    """Return the subject on a tree with two CPUs and cgroup v2."""
    host = FakeHost(folder, online=(0, 1))
    mount = "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw"
    grow(folder, listing("developers-machine"))
    grow(folder, {"proc/self/mountinfo": mount, "sys/fs/cgroup/cpuset.cpus.effective": "0-1"})
    host.process(1, ppid=0, comm="init")
    host.process(500, ppid=1, threads=THREADS)

    def grow_one() -> int:
        host.thread(500, 900)
        return 900

    return Subject(
        host.root,
        500,
        [500, 501, 502, 503],
        (0, 1),
        grow_one,
        lambda tid: host.end_thread(500, tid),
    )


@pytest.fixture(params=["tree", "running system"])
def subject(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Subject]:
    """Give the same subject twice."""
    if request.param == "tree":
        yield fake_subject(tmp_path)
        return
    cpus = two_cpus()
    with specimen(THREADS - 1) as real:
        yield Subject(HOST, real.pid, list(real.tids), cpus, lambda: real.grow(1)[0], real.end)


def test_lists_all_threads(subject: Subject) -> None:
    """The list has every thread once, ascending, the main thread among them."""
    listed = tasks.list_tids(subject.root, subject.pid)
    assert listed == sorted(subject.tids)
    assert subject.pid in listed


def test_tasks_agree_with_single_looks(subject: Subject) -> None:
    """What a TaskReader says of a thread is what each single call says of it."""
    found = subject.tasks()
    assert [task.key.tid for task in found] == sorted(subject.tids)
    for task in found:
        assert task.key == subject.key(task.key.tid)
        assert task.affinity == tasks.get_affinity(task.key.tid, subject.root)
        assert task.affinity <= online(subject.root)
        assert not task.cpuset or task.affinity <= task.cpuset
        assert task.cgroup.startswith("/")
        assert not task.kernel


def test_single_thread_is_the_same(subject: Subject) -> None:
    """read_task and a TaskReader give equal values."""
    one = tasks.read_task(subject.root, subject.pid, subject.tids[-1], CpusetReader(subject.root))
    assert one.key in {task.key for task in subject.tasks()}


def test_pin_and_read_back(subject: Subject) -> None:
    """A pin shows in the thread's task and in no other thread's."""
    tid = subject.tids[1]
    before = {task.key.tid: task.affinity for task in subject.tasks()}
    target = CpuSet([subject.cpus[1]])
    result = apply_all(subject.root, [Action(subject.key(tid), target, before[tid], "test")])[0]
    assert (result.outcome, result.after) == (Outcome.DONE, target)
    assert {task.key.tid: task.affinity for task in subject.tasks()} == before | {tid: target}


def test_pin_of_another_thread_s_key(subject: Subject) -> None:
    """A key with another start time, or of another process, reaches nobody."""
    before = [task.affinity for task in subject.tasks()]
    tid = subject.tids[1]
    target = CpuSet([subject.cpus[1]])
    stale = ThreadKey(subject.pid, tid, 1)
    other = ThreadKey(1, tid, subject.key(tid).starttime)
    outcomes = [
        apply_all(subject.root, [Action(key, target, target, "")])[0].outcome
        for key in (stale, other)
    ]
    assert outcomes == [Outcome.REUSED, Outcome.GONE]
    assert [task.affinity for task in subject.tasks()] == before


def test_pin_to_a_cpu_that_is_not_there(subject: Subject) -> None:
    """EINVAL is told as a refusal and the affinity stays."""
    tid = subject.tids[1]
    before = tasks.get_affinity(tid, subject.root)
    result = apply_all(subject.root, [Action(subject.key(tid), CpuSet([8000]), before, "test")])[0]
    assert result.outcome is Outcome.REFUSED
    assert tasks.get_affinity(tid, subject.root) == before


def test_ended_thread(subject: Subject) -> None:
    """An ended thread is GONE, TaskGone and absent, whoever asks."""
    tid = subject.tids[-1]
    key = subject.key(tid)
    subject.end(tid)
    target = CpuSet([subject.cpus[0]])
    assert apply_all(subject.root, [Action(key, target, target, "test")])[0].outcome is Outcome.GONE
    assert tid not in tasks.list_tids(subject.root, subject.pid)
    with pytest.raises(TaskGone):
        tasks.read_task(subject.root, subject.pid, tid, CpusetReader(subject.root))
    with pytest.raises(TaskGone):
        tasks.starttime(subject.root, subject.pid, tid)
    with pytest.raises(TaskGone):
        tasks.get_affinity(tid, subject.root)


def test_audit_follows_every_change(subject: Subject) -> None:
    """The audit is quiet on what was read, then names the moved, the new and the ended thread."""
    expected = {task.key.tid: frozenset(task.affinity) for task in subject.tasks()}
    deep = {
        t.key.tid: ExpectedThread(t.key.starttime, frozenset(t.affinity)) for t in subject.tasks()
    }
    assert finish(audit_affinity(subject.root, subject.pid, expected)) is NOTHING
    assert finish(audit_deep(subject.root, subject.pid, deep)) is NOTHING
    moved, ended = subject.tids[1], subject.tids[-1]
    change = AffinityChange(*subject.key(moved), 0, frozenset({subject.cpus[1]}))
    subject.root.calls.set_affinities([change], subject.root.proc())
    born = subject.grow()
    subject.end(ended)
    for finding in (
        finish(audit_affinity(subject.root, subject.pid, expected)),
        finish(audit_deep(subject.root, subject.pid, deep)),
    ):
        assert (finding.moved, finding.born, finding.gone) == ((moved,), (born,), (ended,))


def test_deep_audit_knows_who_is_who(subject: Subject) -> None:
    """An expectation with another start time is of another thread."""
    deep = {
        t.key.tid: ExpectedThread(t.key.starttime, frozenset(t.affinity)) for t in subject.tasks()
    }
    tid = subject.tids[1]
    deep[tid] = deep[tid]._replace(starttime=1)
    finding = finish(audit_deep(subject.root, subject.pid, deep))
    assert (finding.moved, finding.born, finding.gone) == ((), (tid,), (tid,))


def test_process_facts(subject: Subject) -> None:
    """A process is a live one with a name, an executable, arguments and cgroups."""
    found = process.read_process(subject.root, subject.pid)
    assert process.is_alive(subject.root, found.key)
    assert found.comm.startswith("python")
    path, deleted = process.exe(subject.root, subject.pid)
    assert os.path.basename(path).startswith("python")
    assert not deleted
    assert len(process.cmdline(subject.root, subject.pid)) > 2
    found_in = process.cgroups(subject.root, subject.pid).paths
    assert all(path.startswith("/") for path in found_in)


def test_index_has_the_process(subject: Subject) -> None:
    """The table has the process under its parent, and no thread of it."""
    index = ProcessIndex(subject.root)
    index.refresh()
    found = index.get(subject.pid)
    now = process.read_process(subject.root, subject.pid)
    assert found is not None
    assert replace(found, state="") == replace(now, state="")  # it may run in one of the looks
    assert found in index.children(found.ppid)
    assert all(index.get(tid) is None for tid in subject.tids if tid != subject.pid)
    assert not any(found in workers for workers in index.kernel_workers.values())


def test_nobody_is_gone(subject: Subject) -> None:
    """Every question about a pid that is not there is answered by TaskGone."""
    nobody = 4_194_304  # PID_MAX_LIMIT: never given out
    reader = CpusetReader(subject.root)
    questions: list[Callable[[], object]] = [
        lambda: process.read_process(subject.root, nobody),
        lambda: process.cmdline(subject.root, nobody),
        lambda: process.exe(subject.root, nobody),
        lambda: process.cgroups(subject.root, nobody),
        lambda: tasks.list_tids(subject.root, nobody),
        lambda: finish(tasks.TaskReader().read(subject.root, nobody, reader)),
        lambda: tasks.read_task(subject.root, subject.pid, nobody, reader),
    ]
    for question in questions:
        with pytest.raises(TaskGone):
            question()


def test_init_has_an_affinity(subject: Subject) -> None:
    """The affinity of pid 1, what released threads get, is of CPUs that are online."""
    mask = tasks.get_affinity(1, subject.root)
    assert mask
    assert mask <= online(subject.root)


def test_topology_places_each_online_cpu(subject: Subject) -> None:
    """Each online CPU has one place; cores, caches and nodes part the online CPUs."""
    host = read_topology(subject.root)
    assert CpuSet(cpu.cpu for cpu in host.cpus) == host.online == online(subject.root)
    for groups in (host.cores, host.llcs, host.packages, host.nodes):
        assert sum(len(cpus) for cpus in groups.values()) == len(host.online)
    assert set(host.nodes) <= set(host.distances) or host.distances == {}


def test_the_census_changes_with_each_birth() -> None:
    """A child is born, and is reaped."""
    index = ProcessIndex(HOST)
    index.refresh()
    before = process._census(HOST)
    with subprocess.Popen(["sleep", "60"]) as child:
        born = process._census(HOST)
        index.refresh()
        assert index.get(child.pid) is not None
        child.kill()
        child.wait()
        index.refresh()
        assert index.get(child.pid) is None
    assert len({before, born, process._census(HOST)}) == 3
