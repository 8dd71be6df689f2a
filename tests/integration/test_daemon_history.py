"""`kata-pin history` tells of real passes over real VMs, with the daemon and without it."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from tests.support.daemon import Node, private_node
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.root, pytest.mark.qemu]

CPUS = sorted(os.sched_getaffinity(0))


def _changes(node: Node, *arguments: str) -> list[dict[str, Any]]:
    done = node.cli("history", "--json", *arguments)
    assert done.returncode == 0, done.stderr
    changes: list[dict[str, Any]] = json.loads(done.stdout)["changes"]
    return [one for one in changes if one["sandbox"].startswith(node.root.name)]


def _facts(changes: list[dict[str, Any]]) -> list[tuple[str, str | None, int, list[str]]]:
    return [(one["state"], one["mask"], one["moved"], one["triggers"]) for one in changes]


@pytest.mark.skipif(len(CPUS) < 2, reason="needs two CPUs")
def test_history_of_a_sandbox_from_its_first_pin_to_its_end() -> None:
    """Pins, an update, an operator's unpin and the end are told with their reasons, in order."""
    first, second = CPUS[:2]
    with private_node() as node:
        daemon = node.start()
        with node.pod("p1") as pod:
            pod.announce()
            pod.create("c1", str(first))
            pod.wait_placed({first})
            pod.create("c2", str(second))
            pod.wait_placed({first, second})
            assert node.cli("unpin", pod.id).returncode == 0
            told = _changes(node, pod.id)
        wait_for(lambda: _changes(node, pod.id)[-1]["state"] == "gone", "the end to be told")
        assert told[-1]["pod"] == f"shop/pod-{pod.id}"
        pinned = next(one for one in told if one["mask"] == str(first))
        assert {"hook:createRuntime", "Kata's state"} & set(pinned["triggers"])
        assert 0 < pinned["moved"] <= pinned["threads"]
        assert 0 < pinned["latency_ms"] < 10_000
        wider = next(one for one in told if one["mask"] == f"{first}-{second}")
        assert wider["previous_mask"] == str(first)
        assert (told[-1]["state"], told[-1]["triggers"]) == ("released", ["unpin"])
        with_daemon = _changes(node)
        exits = {"VMM exited", "thread exited", "processes were read"}  # whichever is first
        assert exits & set(with_daemon[-1]["triggers"])

        node.cli("reconcile")
        daemon.kill()
        without = _changes(node)
        assert _facts(without) == _facts(with_daemon)
        assert node.cli("history", "--since", "1d").stdout.count("released") >= 1
        assert node.cli("history", "nobody").returncode == 1
        assert node.cli("history", "--since", "soon").returncode == 2
