"""Beside a real kubelet: its decisions, our replica of them, and kata-pin's policy `static`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.kubelet.recording import PROJECT, Setup, make_steps, record
from tests.support.kubelet_live import host_topology, replay

HOSTS = json.loads((PROJECT / "tests/data/oracles/kubelet_live.json").read_text())["topologies"]
STEPS = 48

pytestmark = [
    pytest.mark.root,
    pytest.mark.timeout(180),
]


def on(*options: str) -> dict[str, str]:
    """Return the kubelet's policy options that are on."""
    return dict.fromkeys(options, "true")


@pytest.mark.parametrize(
    ("host", "setup"),
    [
        ("smt16", Setup("0", on("full-pcpus-only", "strict-cpu-reservation"))),
        ("smt16", Setup("0-1", on("distribute-cpus-across-cores"), "best-effort")),
        ("srv64", Setup("0,32", on("distribute-cpus-across-numa", "full-pcpus-only"))),
        ("srv64", Setup("0,32", on("align-by-socket", "full-pcpus-only"), "restricted")),
        ("amd48", Setup("0,24", on("prefer-align-cpus-by-uncorecache"), "single-numa-node")),
        ("icx64", Setup("0,32", {}, "restricted", "pod")),
        ("nosmt24", Setup("0", on("strict-cpu-reservation"), "single-numa-node", "pod")),
    ],
    ids=lambda value: (
        value if isinstance(value, str) else "-".join([*value.options, value.topology_manager])
    ),
)
def test_pods_get_what_a_real_kubelet_gives(
    tmp_path: Path, host: str, setup: Setup, release: str
) -> None:
    """Every decision about pods that come, go and change is the real kubelet's."""
    compare(tmp_path / "stage", host, setup, release)


def test_what_was_decided_otherwise_before(tmp_path: Path, newest: str) -> None:
    """Older releases split CPUs over packages with these two options."""
    setup = Setup("0,32", on("align-by-socket", "distribute-cpus-across-numa"))
    compare(tmp_path / "stage", "srv64", setup, newest)


def compare(stage: Path, host: str, setup: Setup, release: str) -> None:
    """Compare every decision of a trace with ours."""
    cpus = HOSTS[host]["cpus"]
    even = "full-pcpus-only" in setup.options
    steps = make_steps(STEPS, STEPS, len(cpus), even=even)
    trace = record(stage, cpus, setup, steps, release)
    counted = replay(host_topology(cpus), trace)
    assert counted.steps == STEPS
    assert counted.containers > STEPS // 4  # small hosts are full most of the time
    assert counted.by_static + counted.not_static == counted.containers


def test_a_kubelet_that_was_killed_keeps_its_decisions(tmp_path: Path, release: str) -> None:
    """After a restart every pod has the CPUs that it had, and the next ones fit in."""
    cpus = HOSTS["srv64"]["cpus"]
    pods = [step for step in make_steps(38, 40, len(cpus)) if step["op"] == "add"]
    steps = [*pods[:4], {"op": "del", "pod": pods[1]["pod"]}, {"op": "restart"}, *pods[4:6]]
    trace = record(tmp_path / "stage", cpus, Setup("0,32"), steps, release)
    counted = replay(host_topology(cpus), trace)
    assert (counted.steps, counted.refused) == (8, 0)
    assert trace["ops"][5]["entries"] == trace["ops"][4]["entries"]
    assert len(trace["ops"][5]["entries"]) == 3
