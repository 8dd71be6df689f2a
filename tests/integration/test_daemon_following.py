"""Changes that no hook tells, followed by events alone: audits come once an hour here."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from tests.support.daemon import Node, private_node
from tests.support.katalike import ContainerSpec, Runtime
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.qemu, pytest.mark.root]

AUDITED = {"affinity_s": 0.1, "deep_s": 0.2}


@pytest.fixture
def audited() -> Iterator[Node]:
    """A node on which no event of a file or a CPU is heard: only audits find what changed."""
    with private_node(audit=AUDITED, changes="audit") as one:
        yield one


# ---- persist.json ------------------------------------------------------------------------


def test_an_update_that_only_persist_json_tells(node: Node) -> None:
    """The kubelet moves a container; no hook runs, and the threads follow at once."""
    with node.pod("p1") as pod:
        node.start()
        pod.announce()
        pod.create("c1", "0")
        pod.wait_placed({0})
        pod.persist("c1", "1")
        pod.wait_placed({1}, within_s=3.0)
        pod.persist("c1", "0,1")
        pod.wait_placed({0, 1}, within_s=3.0)


def test_updates_without_events_are_found_by_audits(audited: Node) -> None:
    """The same with every event of a file dropped."""
    with audited.pod("p1") as pod:
        audited.start()
        pod.announce()
        pod.create("c1", "0")
        pod.wait_placed({0})
        pod.persist("c1", "1")
        pod.wait_placed({1})
        assert "a written cpuset" not in audited.log


def test_a_sandbox_that_nobody_announced(node: Node) -> None:
    """It appears while the daemon runs: no hook, no audit; Kata's state tells."""
    node.start()
    with node.pod("p1") as pod:
        pod.persist("c1", "1")
        pod.wait_placed({1}, within_s=5.0)
        pod.persist("c1", "0")
        pod.wait_placed({0}, within_s=3.0)
    wait_for(lambda: "p1" not in node.sandboxes(), "the sandbox to be forgotten")


def test_a_directory_that_vanishes_and_comes_back(node: Node) -> None:
    """Everything of the Go runtime's is removed and made anew: it is followed again."""
    with node.pod("p1") as pod:
        node.start()
        pod.announce()
        pod.create("c1", "0")
        pod.wait_placed({0})
        shutil.rmtree(node.dirs.vc / "sbs")
        (node.dirs.vc / "sbs").mkdir()
        pod.persist("c1", "1")
        pod.wait_placed({1}, within_s=3.0)


def test_another_pods_file_does_not_speak_for_this_one(node: Node) -> None:
    """persist.json of p2 that lists a container of p1's id with p1's annotations moves nothing."""
    with node.pod("p1") as pod, node.pod("p2") as other:
        node.start()
        pod.announce()
        pod.create("c1", "0")
        pod.wait_placed({0})
        other.announce()
        entry = ContainerSpec("c1", cpus="1")
        other.kata.write_persist([*other.kata.containers, entry])
        other.create("c2", "1")
        other.wait_placed({1})
        assert pod.misplaced({0}) == []
        assert node.registered()["c1"].sandbox_id == pod.id


# ---- runtime-rs --------------------------------------------------------------------------


def test_a_sandbox_of_runtime_rs_appears(node: Node) -> None:
    """Its state.json has no containers: the sandbox is known and shown at once, without a mask."""
    node.start()
    with node.pod("p1", runtime=Runtime.RS):
        assert node.wait_state("p1", "unpinned")["vmm"]
