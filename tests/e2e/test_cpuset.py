"""What a rewrite of a cpuset does to a pinned thread, on the kernel of the flavour."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import pytest

from tests.e2e.cgroup import Cpuset, cpuset
from tests.e2e.node import Node


@pytest.fixture
def group(node: Node) -> Iterator[Cpuset]:
    """A cgroup on CPUs 4-7."""
    with cpuset(node, "pins", "4-7") as made:
        yield made


@pytest.fixture
def pinned(group: Cpuset) -> Iterator[int]:
    """A process in that cgroup, pinned to CPU 5."""
    child = subprocess.Popen(["sleep", "infinity"])
    try:
        group.add(child.pid)
        os.sched_setaffinity(child.pid, {5})
        yield child.pid
    finally:
        child.kill()
        child.wait()


def test_cpuset_confines_and_refuses(group: Cpuset, pinned: int) -> None:
    """A mask outside the cpuset is refused with EINVAL, one inside is taken."""
    assert group.effective() == "4-7"
    with pytest.raises(OSError, match="Invalid argument"):
        os.sched_setaffinity(pinned, {8})
    assert os.sched_getaffinity(pinned) == {5}


def test_pin_after_a_cpuset_rewrite(node: Node, group: Cpuset, pinned: int) -> None:
    """6.12 keeps the pin when the cpuset still allows it; 6.1 widens it to the new cpuset."""
    group.write("4-6")
    assert os.sched_getaffinity(pinned) == ({5} if node.pins_stick else {4, 5, 6})


def test_pin_after_a_disjoint_cpuset(node: Node, group: Cpuset, pinned: int) -> None:
    """A disjoint cpuset overrides the pin; when the CPU comes back, 6.12 brings back the pin."""
    group.write("8-9")
    assert os.sched_getaffinity(pinned) == {8, 9}
    group.write("4-7")
    assert os.sched_getaffinity(pinned) == ({5} if node.pins_stick else {4, 5, 6, 7})
