"""The pod-resources API of a real kubelet: the same exclusive CPUs as its checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from kata_pin.base.cpuset import CpuSet, union
from tests.kubelet.recording import Setup, play

CPUS = [{"cpu": cpu, "core": cpu, "socket": 0, "numa": 0, "uncore": 0} for cpu in range(12)]

pytestmark = [
    pytest.mark.root,
    pytest.mark.timeout(180),
]


def test_what_a_real_kubelet_lists(tmp_path: Path, release: str) -> None:
    """Exclusive CPUs by container, those that may be given, and doctor agrees with both."""
    container = {"name": "c", "role": "app", "memory_equal": True}
    pods = [
        {
            "op": "add",
            "pod": f"p{size}",
            "containers": [{**container, "request_m": size * 1000, "limit_m": size * 1000}],
        }
        for size in (2, 3)
    ]
    shared = {**pods[0], "pod": "s"}
    shared["containers"] = [{**container, "request_m": 100, "limit_m": 500}]
    stage = tmp_path / "stage"
    answered = play(stage, CPUS, Setup("0"), [*pods, shared], release, resources=True)
    entries = answered["ops"][-1]["entries"]
    given = answered["resources"]["containers"]
    assert {name.rpartition("/")[2] for name in given} == {"c"}
    assert sorted(given.values()) == sorted(entries[pod]["c"] for pod in ("p2", "p3"))
    assert answered["resources"]["allocatable"] == "1-11"  # not the reserved one
    held = union(CpuSet.parse(cpus) for cpus in given.values())
    (row,) = answered["resources"]["rows"]
    assert row == ["ok", f"as the checkpoint; {11 - len(held)} of 11 allocatable pCPUs are free"]
    assert len(held) == 5
