"""A real kubelet on a host with cores of different sizes, where it assigns CPUs twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kata_pin.base.config.tree import Config, Paths
from kata_pin.base.cpuset import CpuSet
from kata_pin.base.placement import DoubleAssignment
from kata_pin.cli.doctor import install
from kata_pin.peers.kubelet.checkpoint import read_kubelet
from tests.kubelet.recording import Setup, record
from tests.support.kubelet_live import MismatchError, replay
from tests.support.machines import hybrid

HOST = hybrid()
"""Eight cores with two threads, CPUs 0 to 15, and eight with one, 16 to 23."""

CPUS = [
    {"cpu": one.cpu, "core": one.core, "socket": one.package, "numa": one.node, "uncore": one.llc}
    for one in HOST.cpus
]

pytestmark = [
    pytest.mark.root,
    pytest.mark.timeout(180),
]


def pods(*sizes: int) -> list[dict[str, Any]]:
    """Return steps that add pods p0, p1, ... of one container with so many CPUs."""
    return [
        {
            "op": "add",
            "pod": f"p{number}",
            "containers": [
                {
                    "name": "c",
                    "role": "app",
                    "request_m": size * 1000,
                    "limit_m": size * 1000,
                    "memory_equal": True,
                }
            ],
        }
        for number, size in enumerate(sizes)
    ]


def test_double_assignments_of_a_real_kubelet(tmp_path: Path, release: str) -> None:
    """The checkpoint is read, its double assignment is named and reported."""
    record(tmp_path / "stage", CPUS, Setup("0"), pods(9, 1, 3, 2), release)
    file = tmp_path / "stage" / "root" / "cpu_manager_state"
    state = read_kubelet(str(file))
    assert state is not None
    assert state.doubles == (DoubleAssignment(CpuSet([4]), ("p2", "p3")),)
    assert CpuSet([0]) <= state.entries["p0"]["c"]  # the reserved CPU
    row = install.kubelet(Config(paths=Paths(kubelet_state=str(file))))
    assert row.status == "warn"
    assert row.text.endswith("pCPU 4 is assigned to pod p2 and pod p3")


def test_true_unit_sizes(tmp_path: Path, release: str) -> None:
    """All choose the same until a core is in part use; the kubelet then takes it as a free one.

    Cores have 1 CPU on average, and a core with 1 free CPU is free to the kubelet. With true sizes
    the next whole core is taken, without them single CPUs, and nothing is taken twice.
    """
    trace = record(tmp_path / "stage", CPUS, Setup("0-1"), pods(8, 3, 2), release)
    assert [step["entries"][step["pod"]]["c"] for step in trace["ops"]] == ["16-23", "2-4", "4-5"]
    for sizes, given in (("true", "6-7"), ("false", "5-6")):
        ours = {**trace, "options": {"true-unit-sizes": sizes}}
        assert replay(HOST, {**ours, "ops": trace["ops"][:2]}).by_static == 2
        with pytest.raises(MismatchError, match="static's CPUs") as different:
            replay(HOST, ours)
        assert f"got      {given}" in str(different.value)
