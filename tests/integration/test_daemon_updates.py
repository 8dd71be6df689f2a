"""Cpusets that change after a container's create hook: only Kata's own state tells of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.daemon import Node, private_node
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.qemu, pytest.mark.root]


@pytest.fixture
def node() -> Iterator[Node]:
    with private_node(audit={"affinity_s": 0.1, "deep_s": 0.2}) as one:
        yield one


def test_an_update_before_the_start_outlives_poststart(node: Node) -> None:
    """poststart reads a config.json that an update before it has not changed: the update counts."""
    with node.pod("p1") as pod:
        node.start()
        pod.announce()
        pod.create("c1", None)
        pod.persist("c1", "1")
        pod.wait_placed({1})
        pod.started("c1")
        assert node.registered()["c1"].state == "running"
        assert str(node.registered()["c1"].cpus) == "1"
        assert pod.misplaced({1}) == []


def test_kata_state_counts_also_when_a_hook_came_later(node: Node) -> None:
    """A daemon that first looks after poststart takes the update in, older than the hook or not."""
    with node.pod("p1") as pod:
        daemon = node.start()
        pod.announce()
        pod.create("c1", None)
        with daemon.hung():
            pod.persist("c1", "1")
            assert "spooled" in pod.started("c1").stderr
        pod.wait_placed({1})
        wait_for(lambda: not node.spooled(), "the spool to be taken in")
        assert pod.misplaced({1}) == []
