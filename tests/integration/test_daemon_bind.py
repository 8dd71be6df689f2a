"""`kata-pin bind` with a real VM and daemon: applied, shown, kept over a restart, ended in time."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

import pytest

from tests.support.daemon import Node, Pod, private_node
from tests.support.waiting import wait_for

pytestmark = [
    pytest.mark.qemu,
    pytest.mark.root,
    pytest.mark.skipif(os.cpu_count() == 1, reason="needs two CPUs"),
]

BIND = ("bind", "p1", "--vcpu", "0", "--cpus", "1", "--overhead", "0")


@pytest.fixture
def node() -> Iterator[Node]:
    with private_node() as one:
        one.start()
        yield one


def masks(pod: Pod) -> tuple[set[int], set[int]]:
    """Return the affinities of vCPU 0 and of QEMU's main thread."""
    return os.sched_getaffinity(pod.kata.vcpus()[0]), os.sched_getaffinity(pod.kata.pid)


def test_a_binding_from_its_start_to_its_end(node: Node) -> None:
    """Tried, applied, shown everywhere, kept over a restart, cleared."""
    with node.pod("p1") as pod:
        pod.announce()
        pod.create("c1", "0-1")
        pod.wait_placed({0, 1})
        before = masks(pod)
        name = node.id_of("p1")
        tried = node.cli("bind", name, *BIND[2:], "--dry-run")
        assert "would be bound: vCPUs 0 on pCPUs 1, overhead on 0" in tried.stdout, tried
        assert masks(pod) == before
        done = node.cli("bind", name, *BIND[2:])
        assert done.returncode == 0, done
        assert masks(pod) == ({1}, {0})
        told = "bound by hand: vCPUs 0 on pCPUs 1, overhead on 0"
        assert told in " ".join(node.cli("show", name).stdout.split())
        assert told in " ".join(node.cli("explain", name).stdout.split())
        history = json.loads(node.cli("history", name, "--json").stdout)
        assert "bind" in [why for one in history["changes"] for why in one["triggers"]]
        assert history["events"][-1]["kind"] == "bound"
        assert node.cli("check", "--for", "0s").stdout.startswith("ok: ")
        assert node.daemon is not None
        node.daemon.kill()
        node.start()
        wait_for(lambda: masks(pod) == ({1}, {0}), "the next daemon to go by it", 20)
        assert "kata_pin_bindings 1.0" in node.cli("metrics").stdout
        assert node.cli("bind", "--clear").returncode == 0
        assert masks(pod) == before
