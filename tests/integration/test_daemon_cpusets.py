"""Written cpusets of cgroups, followed by events alone: audits come once an hour here."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.daemon import Node, Pod, private_node
from tests.support.katalike import Runtime
from tests.support.qemu import Machine
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
    with private_node() as node, _own(group, "p1") as own, _confined(node, own) as pod:
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


def _sources(node: Node, container: str) -> list[tuple[str, str, bool]]:
    """Return what each source says of a container, and whether it is used."""
    (shown,) = (one for one in node.sandboxes()["p1"]["containers"] if one["id"] == container)
    return [(one["source"], one["cpus"], one["used"]) for one in shown["cpusets"]]


def test_the_union_where_nothing_else_tells(group: Path) -> None:
    """runtime-rs without NRI: only the sandbox's cgroup tells of an update, and show says so."""
    with (
        private_node() as node,
        _own(group, node.id_of("p1")) as own,
        node.pod("p1", runtime=Runtime.RS, cgroups=[own]) as pod,
    ):
        node.start()
        pod.announce()
        pod.create("c1", "0")
        pod.wait_placed({0})
        _write(own, "1")
        _wait_seen(node, "1")
        pod.wait_placed({1}, within_s=3.0)
        wait_for(  # a pass is shown when it has ended, a moment after the last thread's move
            lambda: _sources(node, "c1") == [("bundle", "0", False), ("cgroup", "1", True)],
            "both sources to be shown",
        )
        (shown,) = (one for one in node.sandboxes()["p1"]["containers"] if one["id"] == "c1")
        assert (shown["cpus"], node.sandboxes()["p1"]["mask"]) == ("1", "1")
        lines = "\n".join(node.ask("explain", sandbox=pod.id)["lines"])
        assert "cgroup: cpuset 1 (the sandbox's cgroup takes precedence over config.json" in lines
        _write(own, "0-1")  # all that is allowed above: as if nobody had written it
        pod.wait_placed({0}, within_s=3.0)


@pytest.mark.parametrize("restarts", [False, True])
def test_kata_pins_by_the_written_union(group: Path, *, restarts: bool) -> None:
    """Kata wrote a union of as many CPUs as there are vCPUs, and pinned; no record says so yet.

    The vCPU is left to Kata, by an undo too: it stays on its pin when the cpuset grows again.
    """
    with (
        private_node() as node,
        _own(group, node.id_of("p1")) as own,
        node.pod("p1", machine=Machine(boot=1), vcpu_pinning=True, cgroups=[own]) as pod,
    ):
        daemon = node.start()
        pod.announce()
        pod.create("c1", "0,1")
        pod.wait_placed({0, 1})
        (vcpu,) = pod.kata.vcpus().values()
        _write(own, "1")
        wait_for(lambda: _notes(node) >= {"kata-pins-vcpus"}, "kata-pin to leave the vCPU")
        os.sched_setaffinity(vcpu, {1})
        if restarts:
            daemon.kill()
            node.start()
            node.wait_state("p1", "ok")
        assert node.cli("unpin", pod.id).returncode == 0
        _write(own, "0-1")
        pod.wait_placed({0, 1}, {0: 1})


def _notes(node: Node) -> set[str]:
    return {note["code"] for note in node.sandboxes()["p1"]["notes"]}


def test_persist_json_stands_above_the_union(group: Path) -> None:
    """With Kata's Go runtime the cgroup only bounds: who has what is known."""
    with (
        private_node() as node,
        _own(group, node.id_of("p1")) as own,
        node.pod("p1", cgroups=[own]) as pod,
    ):
        node.start()
        pod.announce()
        pod.create("c1", "0,1")
        _write(own, "1")
        pod.wait_placed({1}, within_s=3.0)
        (shown,) = (one for one in node.sandboxes()["p1"]["containers"] if one["id"] == "c1")
        assert (shown["cpus"], shown["cpusets_reason"]) == ("0-1", "all sources agree")


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


@contextlib.contextmanager
def _own(group: Path, name: str) -> Iterator[Path]:
    """Make the sandbox's cgroup below a pod's."""
    own = group / f"kata_{name}"
    own.mkdir()
    for file in ("cpuset.mems", "cpuset.cpus"):
        (own / file).write_text((group / file).read_text())
    try:
        yield own
    finally:
        wait_for(lambda: _removed(own), "the cgroup to be empty")


def _removed(folder: Path) -> bool:
    try:
        folder.rmdir()
    except OSError:
        return not os.path.exists(folder)
    return True
