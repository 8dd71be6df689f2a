"""A task as it is looked at after it ran."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kata_pin.host.measure.seen import TasksSeen, look_at
from kata_pin.host.root import HostRoot
from kata_pin.model.cpuset import CpuSet
from tests.support.hosttree import FakeCalls, grow

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


def test_tasks_are_looked_at_in_portions(tmp_path: Path) -> None:
    """Who has an event loop to serve looks at a few at a time; none is forgotten."""
    root = looked_at(tmp_path, "Name:\tsh\nTgid:\t8")
    seen = TasksSeen(root)
    seen.note_tids([7, 9, 11])
    assert [seen.look(2), seen.look(2)] == [True, False]
    assert {tid: task.pid for tid, task in seen.tasks([7, 9, 11]).items()} == {7: 0, 9: 8, 11: 0}
