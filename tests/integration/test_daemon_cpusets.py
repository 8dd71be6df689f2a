"""Written cpusets of cgroups, followed by events alone: audits come once an hour here."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.daemon import Node, Pod, private_node
from tests.support.specimen import cpuset_cgroup
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.qemu, pytest.mark.root]


@pytest.fixture
def group() -> Iterator[Path]:
    """A cgroup with both CPUs, as Kata makes it for a sandbox."""
    with cpuset_cgroup("0-1") as made:
        yield Path(made.folder)


def _write(group: Path, cpus: str) -> None:
    (group / "cpuset.cpus").write_text(cpus)


def _wait_seen(node: Node, cpus: str) -> None:
    """Wait until a pass has seen that this is what the sandbox's cgroup allows."""
    wait_for(
        lambda: _cpusets(node) == {cpus},
        f"the cpuset {cpus} to be seen",
        3.0,
    )


def _cpusets(node: Node) -> set[str]:
    threads = node.sandboxes()["p1"]["threads"]
    return {one["cpuset"] for one in threads if one["role"] == "vcpu"}


def _confined(node: Node, group: Path) -> Pod:
    return node.pod("p1", cgroups=[group])


def test_a_cpuset_that_somebody_writes(group: Path) -> None:
    """Narrowed, the threads are within it; widened again, they use all of it.

    Linux 6.2 and later moves them by itself: that a pass looked is what `show` knows.
    """
    with private_node() as node, _confined(node, group) as pod:
        node.start()
        pod.announce()
        pod.create("c1", "0,1")
        pod.wait_placed({0, 1})
        for cpus, where in (("1", {1}), ("0-1", {0, 1}), ("0", {0}), ("0-1", {0, 1})):
            _write(group, cpus)
            pod.wait_placed(where, within_s=3.0)
            _wait_seen(node, cpus)


def test_a_cpuset_above_the_sandboxs_own(group: Path) -> None:
    """A pod's cgroup is narrowed, and the sandbox's within it."""
    own = group / "kata_p1"
    own.mkdir()
    for name in ("cpuset.mems", "cpuset.cpus"):
        (own / name).write_text((group / name).read_text())
    try:
        with private_node() as node, _confined(node, own) as pod:
            node.start()
            pod.announce()
            pod.create("c1", "0,1")
            pod.wait_placed({0, 1})
            _write(own, "0")
            _wait_seen(node, "0")
            _write(group, "0")  # nothing of the sandbox's own changes by this
            _write(group, "0-1")
            _write(own, "0-1")
            _wait_seen(node, "0-1")
            pod.wait_placed({0, 1}, within_s=3.0)
    finally:
        wait_for(lambda: _removed(own), "the cgroup to be empty")


def test_without_events_the_audit_converges(group: Path) -> None:
    """With no file watched the audit finds the changed cpuset."""
    often = {"affinity_s": 0.1, "deep_s": 0.2}
    with private_node(audit=often, changes="audit") as node, _confined(node, group) as pod:
        node.start()
        pod.announce()
        pod.create("c1", "0,1")
        pod.wait_placed({0, 1})
        for cpus, where in (("1", {1}), ("0-1", {0, 1})):
            _write(group, cpus)
            pod.wait_placed(where)


def _removed(folder: Path) -> bool:
    try:
        folder.rmdir()
    except OSError:
        return not os.path.exists(folder)
    return True
