"""A real kubelet 1.37 that finds a resized container in its checkpoint: entry and `baselines`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kata_pin.base.cpuset import CpuSet
from kata_pin.peers.kubelet.checkpoint import parse_checkpoint
from tests.kubelet.recording import Setup, play
from tests.kubelet.test_pod_level import CPUS, container

pytestmark = [pytest.mark.root, pytest.mark.timeout(180)]


def test_an_entry_that_grew(tmp_path: Path, newest: str) -> None:
    """It keeps what the container has and what it had first, and gives the next pod others.

    No kubelet changes exclusive CPUs in place yet: the test wrote the entry. The rest of the last
    checkpoint is the kubelet's own.
    """
    grown = {"p1": {"a": "1-2,9-10"}}
    steps: list[dict[str, Any]] = [
        {"op": "add", "pod": "p1", "containers": [container("a", 2)]},
        {"op": "restart", "entries": grown},
        {"op": "add", "pod": "p2", "containers": [container("a", 2)]},
    ]
    gates = ("InPlacePodVerticalScalingExclusiveCPUs",)
    answered = play(tmp_path / "stage", CPUS, Setup("0"), steps, newest, gates=gates)
    assert [step["entries"] for step in answered["ops"]] == [
        {"p1": {"a": "1,9"}}, grown, {**grown, "p2": {"a": "3,11"}},
    ]  # fmt: skip
    baselines = json.loads(json.loads(answered["checkpoint"])["data"])["baselines"]
    assert {pod: of["a"]["baseline"] for pod, of in baselines.items()} == {
        "p1": "1,9", "p2": "3,11",
    }  # fmt: skip
    state = parse_checkpoint(answered["checkpoint"].encode())
    assert state.entries["p1"]["a"] == CpuSet.parse("1-2,9-10")
