"""A real kubelet 1.37 with pod-level resource managers: whose CPUs are whose, and doctor's view."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kata_pin.base.cpuset import CpuSet
from kata_pin.peers.kubelet.checkpoint import parse_checkpoint
from tests.kubelet.recording import Setup, play

CPUS = [{"cpu": cpu, "core": cpu % 8, "socket": 0, "numa": 0, "uncore": 0} for cpu in range(16)]

pytestmark = [
    pytest.mark.root,
    pytest.mark.timeout(180),
]


def container(name: str, cpus: int = 0, role: str = "app") -> dict[str, Any]:
    """Return a container with so many CPUs, or without a CPU request."""
    millis = cpus * 1000
    return {
        "name": name, "role": role, "request_m": millis, "limit_m": millis, "memory_equal": True,
    }  # fmt: skip


def test_pods_with_cpus_of_their_own(tmp_path: Path, newest: str) -> None:
    """Containers that share a pod's CPUs have an entry each, which the pod-resources API lists for
    none of them; doctor finds both to agree."""
    pods: list[dict[str, Any]] = [
        {"op": "add", "pod": "p1", "containers": [container("a", 2)]},
        {
            "op": "add", "pod": "p2", "pod_m": 6000,
            "containers": [container("a", 2), container("b"), container("c")],
        },
    ]  # fmt: skip
    gates = ("PodLevelResourceManagers", "InPlacePodVerticalScalingExclusiveCPUs")
    setup = Setup("0", {}, "best-effort", "pod")
    answered = play(tmp_path / "stage", CPUS, setup, pods, newest, gates=gates, resources=True)
    assert [step["result"] for step in answered["ops"]] == ["ok", "ok"]
    state = parse_checkpoint(answered["checkpoint"].encode())
    assert (state.version, state.doubles) == (4, ())
    whole = state.pod_entries["p2"]
    own = state.entries["p2"]
    assert (len(whole), len(own["a"])) == (6, 2)
    assert own["b"] == own["c"] == whole - own["a"]
    assert CpuSet(range(16)) == state.default | whole | state.entries["p1"]["a"]
    listed = answered["resources"]["containers"]
    assert sorted(listed.values()) == sorted(map(str, (state.entries["p1"]["a"], own["a"])))
    ((status, text),) = answered["resources"]["rows"]
    assert (status, text) == ("ok", "as the checkpoint; 7 of 15 allocatable pCPUs are free")
