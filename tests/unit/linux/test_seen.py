"""A task as it is looked at after it ran."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from kata_pin.base.cpuset import CpuSet
from kata_pin.base.values import TaskClass
from kata_pin.linux.files import HostRoot
from kata_pin.linux.switches import TasksSeen, look_at
from kata_pin.placement.remedies import NodeConditions, of_task
from tests.support.hosttree import FakeCalls, grow
from tests.support.recordings import DATA

STAT = f"9 (sh) R 1 {'0 ' * 49}"


def looked_at(folder: Path, status: str) -> HostRoot:
    files = {"stat": STAT, "status": status, "cgroup": "0::/user.slice/kata_p1"}
    root = grow(folder, {f"proc/9/{name}": text for name, text in files.items()})
    calls = FakeCalls()
    calls.affinities[9] = frozenset({1})
    return replace(root, calls=calls)


@pytest.mark.parametrize(
    ("uids", "by_root"), [("0 0 0 0", True), ("1000 0 0 0", False), ("0 0 0 7", False), ("", False)]
)
def test_whose_it_is(tmp_path: Path, uids: str, *, by_root: bool) -> None:
    """A program that is setuid root was started by somebody else, perhaps in a cgroup of theirs."""
    task = look_at(looked_at(tmp_path, f"Name:\tsh\nTgid:\t8\nUid:\t{uids}"), 9)
    assert task is not None
    assert (task.tid, task.pid, task.by_root) == (9, 8, by_root)
    assert (task.affinity, task.cgroup) == (CpuSet([1]), "/user.slice/kata_p1")


def test_without_a_status(tmp_path: Path) -> None:
    """The thread stands for its process, and nobody is taken for root."""
    root = looked_at(tmp_path, "Name:\tsh")
    (tmp_path / "proc/9/status").unlink()
    task = look_at(root, 9)
    assert task is not None
    assert (task.pid, task.by_root) == (9, False)


def test_the_shim_of_runtime_rs_is_known_by_its_process(tmp_path: Path) -> None:
    """Its threads have names of Tokio's; what they are says the process, also to a remedy."""
    recorded = DATA / "kata-4.1/proc/shim"
    text = {name: (recorded / name).read_text() for name in ("stat", "status", "cgroup")}
    rows = [line.split("\t") for line in (recorded / "threads.tsv").read_text().splitlines()[1:]]
    files = {f"proc/762/{name}": content for name, content in text.items()}
    calls = FakeCalls(online=range(16))
    for tid, comm, cpus, _, _ in rows:
        stat = text["stat"].replace("762 (containerd-shim)", f"{tid} ({comm})", 1)
        files |= {f"proc/{tid}/stat": stat, f"proc/{tid}/status": text["status"]}
        files |= {f"proc/{tid}/cgroup": text["cgroup"]}
        calls.affinities[int(tid)] = frozenset(CpuSet.parse(cpus))
    root = replace(grow(tmp_path, files), calls=calls)
    tasks = [look_at(root, int(row[0])) for row in rows]
    assert [task and task.comm for task in tasks][:2] == ["containerd-shim", "tokio-rt-worker"]
    node = NodeConditions(CpuSet.parse("0-3"), cgroup_v2=True)
    for task in tasks:
        assert task is not None
        assert (task.pid, task.process) == (762, "containerd-shim")
        for kind, word in (
            (TaskClass.OTHER_SANDBOX, "set overhead_roles: {shim: housekeeping}"),
            (TaskClass.USER, "do not restrict it"),
        ):
            remedy = of_task(task, kind, node, "p2")
            assert word in remedy.text
            assert not remedy.command


def test_tasks_are_looked_at_in_portions(tmp_path: Path) -> None:
    """Who has an event loop to serve looks at a few at a time; none is forgotten."""
    root = looked_at(tmp_path, "Name:\tsh\nTgid:\t8")
    seen = TasksSeen(root)
    seen.note_tids([7, 9, 11])
    assert [seen.look(2), seen.look(2)] == [True, False]
    assert {tid: task.pid for tid, task in seen.tasks([7, 9, 11]).items()} == {7: 0, 9: 8, 11: 0}
