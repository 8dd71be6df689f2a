"""A VM without a cpuset keeps off the CPUs that others have exclusively, as is inferred (D28).

No kubelet's checkpoint says what is exclusive here, and no allocator; audits come once an hour.
"""

from __future__ import annotations

import os

import pytest

from tests.support.daemon import Node

pytestmark = [
    pytest.mark.qemu,
    pytest.mark.root,
    pytest.mark.skipif(os.cpu_count() != 2, reason="names every CPU of a machine with two"),
]


def test_a_vm_that_boots_beside_exclusive_cpus(node: Node) -> None:
    """It keeps off them from its first pass on, follows them, and has all when they are free."""
    node.start()
    with node.pod("p1") as owner, node.pod("p2", booting=True) as guest:
        owner.announce()
        owner.create("c1", "1", exclusive=True)
        owner.wait_placed({1})
        guest.announce()
        guest.wait_placed({0})
        shown = node.wait_state("p2", "ok")
        assert shown["mask"] == "0"
        assert shown["mask_origin"].startswith("CPUs that no other pod has exclusively")
        owner.create("c2", "0", exclusive=True)  # now everything is exclusive: no better place
        guest.wait_placed({0, 1})
        assert node.wait_state("p2", "unpinned")["mask"] is None
        owner.stop("c1")
        owner.wait_placed({0})
        guest.wait_placed({1})
        owner.stop("c2")
        guest.wait_placed({0, 1})
        assert node.wait_state("p2", "unpinned")["mask"] is None


def test_across_a_restart(node: Node) -> None:
    """The next daemon knows from its records, before a pass over the other sandbox has run."""
    daemon = node.start()
    with node.pod("p2") as owner, node.pod("p1", booting=True) as guest:  # p1's pass is the first
        owner.announce()
        guest.announce()
        owner.create("c1", "1", exclusive=True)
        guest.wait_placed({0})
        daemon.kill()
        node.start()
        guest.wait_placed({0})
        assert node.wait_state("p1", "ok")["mask"] == "0"
        rows = node.ask("history", sandbox=guest.id)["changes"]
        assert [row["state"] for row in rows] == ["unpinned", "ok"], rows


def test_an_undo_of_the_owner_frees_nothing(node: Node) -> None:
    """`unpin` ends kata-pin's work for a pod; its containers' CPUs stay theirs."""
    node.start()
    with node.pod("p1") as owner, node.pod("p2", booting=True) as guest:
        owner.announce()
        guest.announce()
        owner.create("c1", "1", exclusive=True)
        guest.wait_placed({0})
        assert node.cli("unpin", owner.id).returncode == 0
        node.ask("reconcile")
        guest.wait_placed({0})
        assert node.cli("unpin", guest.id).returncode == 0
        assert guest.misplaced({0, 1}) == []
