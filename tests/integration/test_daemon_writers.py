"""Kata pins vCPUs too: it keeps them while its own rule holds, and no longer (DESIGN D13)."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.support.daemon import Node, private_node

pytestmark = [pytest.mark.qemu, pytest.mark.root]


@pytest.fixture
def node() -> Iterator[Node]:
    with private_node() as one:
        yield one


def test_vcpus_are_katas_while_its_rule_holds(node: Node) -> None:
    """As many vCPUs as CPUs: they are left to enable_vcpus_pinning, and said so."""
    node.start()
    with node.pod("p1", vcpu_pinning=True) as pod:
        pod.announce()
        pod.create("c1", "0,1", exclusive=True)
        assert pod.misplaced({0, 1}) == []  # pairs would be 0→0 1→1
        shown = node.wait_state("p1", "ok")
        assert "kata-pins-vcpus" in [note["code"] for note in shown["notes"]]
        states = {t["state"] for t in shown["threads"] if t["role"] == "vcpu"}
        assert states == {"left"}
        pod.stop("c1")
        pod.create("c2", "1", exclusive=True)
        pod.wait_placed({1})
        assert "kata-pins-vcpus" not in str(node.sandboxes()["p1"]["notes"])


def test_pins_that_were_there_before_are_given_back_together(node: Node) -> None:
    """vCPUs that somebody had pinned one by one are not all released to one of those CPUs."""
    with node.pod("p1") as pod:
        for index, tid in pod.kata.vcpus().items():
            os.sched_setaffinity(tid, {index % 2})
        node.start()
        pod.create("c1", "0")
        pod.wait_placed({0})
        assert node.cli("unpin", pod.id).returncode == 0
        assert {tuple(os.sched_getaffinity(tid)) for tid in pod.kata.vcpus().values()} == {(0, 1)}
