"""The NRI plugin in the daemon against containerd's own library of NRI 0.12, with a real QEMU.

Containerd 2.3 is built on it: one call for each event, and a Synchronize in parts. The pods' ids
are those of idle VMs started here, where Kata would have started them.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.daemon import Node, private_node
from tests.support.nrilibrary import Adaptation, why_not
from tests.support.waiting import wait_for

pytestmark = [
    pytest.mark.qemu,
    pytest.mark.root,
    pytest.mark.skipif(why_not() != "", reason=why_not()),
]

MANY = 2000
"""Pods of 4 KiB and more: two messages of 4 MiB are not enough for them."""


@pytest.fixture
def node() -> Iterator[Node]:
    with private_node() as one:
        one.configure(nri={"enabled": "yes", "socket": str(one.root / "nri.sock")})
        yield one


def _milliseconds(said: str) -> int:
    word, _, number = said.partition(" ")
    assert word == "ok", said
    return int(number)


def test_a_pods_life(node: Node) -> None:
    """Every event comes as a call of its own, is answered at once, and has its effect."""
    with Adaptation(node.root / "nri.sock") as runtime, node.pod("p1") as pod:
        node.start()
        assert runtime.line() == "synchronized"
        _milliseconds(runtime.call("RunPodSandbox", pod.id))
        _milliseconds(runtime.call("CreateContainer", pod.id, "c1", "1"))
        _milliseconds(runtime.call("StartContainer", pod.id, "c1", "1"))
        assert pod.misplaced({1}) == []  # StartContainer waits for the pins
        _milliseconds(runtime.call("PostStartContainer", pod.id, "c1", "1"))
        _milliseconds(runtime.call("UpdateContainer", pod.id, "c1", "0"))
        _milliseconds(runtime.call("PostUpdateContainer", pod.id, "c1", "0"))
        pod.wait_placed({0})
        _milliseconds(runtime.call("StartContainer", pod.id, "c2", "1"))
        assert pod.misplaced({0, 1}) == []
        _milliseconds(runtime.call("StopContainer", pod.id, "c2", "1"))
        pod.wait_placed({0})
        _milliseconds(runtime.call("RemoveContainer", pod.id, "c2", "1"))
        wait_for(lambda: node.registered()["c2"].state == "deleted", "the removal")
        _milliseconds(runtime.call("StopPodSandbox", pod.id))
        wait_for(lambda: node.registered()["c1"].state == "stopped", "the end")
        _milliseconds(runtime.call("RemovePodSandbox", pod.id))


def test_a_synchronize_of_many_parts(node: Node) -> None:
    """Two thousand pods come in parts; none is Kata's, nothing is kept of them, events go on."""
    with Adaptation(node.root / "nri.sock", pods=MANY) as runtime, node.pod("p1") as pod:
        node.start()
        assert runtime.line() == "synchronized"
        wait_for(lambda: f"{MANY} pods, {MANY} containers" in node.log, "all to be taken in")
        _milliseconds(runtime.call("StartContainer", pod.id, "c1", "1"))
        assert pod.misplaced({1}) == []
        assert {one.sandbox_id for one in node.registered().values()} == {pod.id}


def test_a_hung_daemon_costs_one_timeout(node: Node) -> None:
    """The library drops a plugin that hangs, after its timeout; the plugin comes back by itself."""
    with Adaptation(node.root / "nri.sock") as runtime, node.pod("p1") as pod:
        daemon = node.start()
        assert runtime.line() == "synchronized"
        with daemon.hung():
            assert _milliseconds(runtime.call("StartContainer", pod.id, "c1", "1")) < 4000
            assert _milliseconds(runtime.call("StartContainer", pod.id, "c2", "1")) < 500
        assert runtime.line() == "synchronized"
        _milliseconds(runtime.call("PostUpdateContainer", pod.id, "c1", "0"))
        pod.wait_placed({0})
