"""NRI alone: no hook in any spec, shipped settings, and pins stand before a workload starts.

What QEMU's threads may run on at that moment is read by the runtime (minikata), not by a test that
comes later.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from typing import Any, Final

import pytest

from tests.e2e.criruntime import ROOT, CriNode, kata_handler
from tests.e2e.node import Node
from tests.e2e.unit import Unit

pytestmark = pytest.mark.usefixtures("kvm", "untouched")

ONE_CPU: Final[dict[str, Any]] = {"cpu_quota": 100_000, "cpu_period": 100_000}
SHARES: Final = {"cpu_shares": 102}


@pytest.fixture(scope="module")
def containerd(node: Node, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CriNode]:
    """containerd with minikata as the handler `kata`, which has no base runtime spec."""
    if not node.nri:
        pytest.skip("this release's containerd has no NRI")
    with kata_handler(node, tmp_path_factory.mktemp("nri"), hooks=False) as made:
        yield made


def started_with(pod: str, container: str) -> set[str]:
    """Return the affinities of the VM's threads when a container's workload was started."""
    text = (ROOT / "k8s.io" / ".log" / pod).read_text()
    [found] = re.findall(rf"^{container} starts with affinities (.*)$", text, re.MULTILINE)
    return set(ast.literal_eval(found))


def hooks_of(node: Node, container: str) -> dict[str, Any]:
    """Return the OCI hooks of a container."""
    command = ["ctr", "--namespace", "k8s.io", "containers", "info", container]
    spec = json.loads(node.run(command, seconds=60))["Spec"]
    return dict(spec.get("hooks") or {})


def test_pins_stand_before_each_workload(node: Node, containerd: CriNode) -> None:
    """One exclusive and one shared container in each of three pods."""
    unit = Unit(node)

    def connected() -> bool:
        nri = unit.state()["daemon"]["nri"]
        return nri is not None and nri["connected_s"] is not None

    node.wait(connected, "NRI", seconds=60)
    for number, cpu in enumerate(("4", "5", "10")):
        name = f"nri-{number}"
        pod = containerd.run_pod(name)
        app = containerd.create(pod, name, "app", cpuset_cpus=cpu, **ONE_CPU)
        assert hooks_of(node, app) == {}
        assert started_with(pod, app) == {cpu}
        log = containerd.create(pod, name, "log", cpuset_cpus="6-7", **SHARES)
        assert started_with(pod, log) == {cpu, "6,7"}
        sources = {one["source"].partition(":")[0] for one in unit.sandbox(pod)["containers"]}
        assert "hook" not in sources
    containerd.remove_all()
