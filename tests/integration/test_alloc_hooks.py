"""Our own allocator without NRI: hooks report containers, threads follow, what is guaranteed.

Without Kubernetes the administrator's orders say who has CPUs of its own. Real QEMUs, no runtime.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.daemon import PERIOD_US, Node, Pod, private_node
from tests.support.waiting import wait_for

pytestmark = [
    pytest.mark.qemu,
    pytest.mark.root,
    pytest.mark.skipif(os.cpu_count() != 2, reason="the tests know a node of two CPUs"),
]


@pytest.fixture
def node() -> Iterator[Node]:
    with private_node() as one:
        alloc = {"policy": "annotation", "shared_minimum": "1", "orders": str(one.root / "orders")}
        one.configure(alloc=alloc)
        yield one


def _create(pod: Pod, container: str, *, cpus: int = 0) -> None:
    """Create a container without a cpuset; `cpus` is its limit and its request."""
    bundle = pod.write_bundle(container)
    config: Any = json.loads((bundle / "config.json").read_text())
    if cpus:
        config["linux"]["resources"]["cpu"] = {
            "quota": cpus * PERIOD_US,
            "period": PERIOD_US,
            "shares": 1024 * cpus,
        }
    (bundle / "config.json").write_text(json.dumps(config))
    pod.persist(container, None)
    assert pod.node.hook("createRuntime", container, pod.kata.pid).status == 0


def _order(node: Node, pod: Pod, cpu_class: str) -> None:
    done = node.cli("policy", "set", pod.id, cpu_class)
    assert done.returncode == 0, done.stderr


def test_exclusive_among_sandboxes(node: Node) -> None:
    """Another sandbox's threads leave the exclusive CPU, and may come back when its owner ends."""
    node.start()
    with node.pod("p1") as one, node.pod("p2") as two:
        two.announce()
        _create(two, "c2")
        two.wait_placed({0, 1})
        one.announce()
        _create(one, "c1", cpus=1)
        _order(node, one, "exclusive")
        own = int(_wait_exclusive(node))
        rest = {0, 1} - {own}
        two.wait_placed(rest)
        one.wait_placed(rest, {1: own})
        said = node.cli("pools").stdout
        assert "exclusive among sandboxes only" in said
        explained = node.cli("alloc", "explain", "c1").stdout
        assert "- administrator's override: exclusive" in explained
        assert "none: only threads are pinned" in explained
        assert node.daemon is not None
        node.daemon.kill()
        assert f"exclusive  {own}" in node.cli("alloc", "explain", "c1").stdout
        node.start()
        assert _exclusive(node) == str(own)
        one.wait_placed(rest, {1: own})
        one.stop("c1")
        two.wait_placed({0, 1})
        assert _exclusive(node) == ""


def _wait_exclusive(node: Node) -> str:
    try:
        return wait_for(lambda: _exclusive(node), "the order to be in force")
    except TimeoutError as error:
        error.add_note(f"{node.ask('state')['allocation']}\n{node.registered()}")
        error.add_note(node.log[-4000:])
        raise


def _exclusive(node: Node) -> str:
    return str(node.ask("state")["allocation"]["pools"]["exclusive"])


def test_cpus_that_others_gave_are_not_given_again(node: Node) -> None:
    """A container that came with exclusive CPUs keeps them alone; when it ends they are free."""
    node.start()
    with node.pod("p1") as theirs, node.pod("p2") as ours:
        theirs.announce()
        theirs.create("c1", "1", exclusive=True)
        theirs.wait_placed({1})
        ours.announce()
        _create(ours, "c2", cpus=1)
        _order(node, ours, "exclusive")
        ours.wait_placed({0})
        assert _exclusive(node) == ""
        said = node.cli("pools").stdout
        assert "taken" in said
        assert "inferred" in said
        assert node.cli("check", "--for", "0s").returncode == 0
        theirs.stop("c1")
        own = int(_wait_exclusive(node))
        ours.wait_placed({0, 1} - {own}, {1: own})


def test_cpus_that_are_given_already_are_a_conflict(node: Node) -> None:
    """Others give out a CPU that is in a grant: nothing is moved, and the operator is told."""
    node.start()
    with node.pod("p1") as theirs, node.pod("p2") as ours:
        ours.announce()
        _create(ours, "c2", cpus=1)
        _order(node, ours, "exclusive")
        own = int(_wait_exclusive(node))
        ours.wait_placed({0, 1} - {own}, {1: own})
        theirs.announce()
        theirs.create("c1", str(own), exclusive=True)
        theirs.wait_placed({own})
        ours.wait_placed({0, 1} - {own}, {1: own})
        notes = node.ask("state")["allocation"]["notes"]
        assert [one["code"] for one in notes] == ["alloc-conflict"]
        assert node.cli("check").returncode == 3
        assert f"pCPU {own} is granted to" in node.log
