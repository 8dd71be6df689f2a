"""Our own allocator on a node with many CPUs: containerd's NRI, runc's cgroups, QEMU's threads.

A pod with each policy, changed live, removed; at each step the cgroups, what NRI was told and the
masks of the threads agree. containerd before 1.7 has no NRI: then there is nothing to see.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from kata_pin.model.alloc import CpuClass
from kata_pin.model.cpuset import CpuSet
from kata_pin.wire.orders import render_orders
from tests.e2e.criruntime import CGROUP, CriNode, kata_handler, qemu_pid
from tests.e2e.node import Node
from tests.e2e.unit import Unit

pytestmark = pytest.mark.usefixtures("kvm", "untouched")

KEY: Final = "cpu-policy.kata-pin.io"
TWO_CPUS: Final = {"cpu_quota": 200_000, "cpu_period": 100_000, "cpu_shares": 2048}
ORDERS: Final = Path("/etc/kata-pin/policies")
_CONFIG: Final = Path("/etc/containerd/config.toml")
_NRI: Final = """
[plugins."io.containerd.nri.v1.nri"]
  disable = false
"""


@pytest.fixture(scope="module")
def containerd(node: Node, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CriNode]:
    """containerd with NRI, and minikata as the handler `kata`."""
    if "containerd 1.6" in node.run(["containerd", "--version"]).replace("containerd.io", ""):
        pytest.skip("containerd 1.6 has no NRI")
    before = _CONFIG.read_text()
    _CONFIG.write_text(before.replace(_NRI, "") + _NRI)
    try:
        with kata_handler(node, tmp_path_factory.mktemp("cri")) as made:
            yield made
    finally:
        _CONFIG.write_text(before)
        node.run(["systemctl", "restart", "containerd"], seconds=60)


@contextlib.contextmanager
def deciding(node: Node, unit: Unit, policy: str) -> Iterator[None]:
    """Have the installed daemon decide cpusets."""
    alloc = {
        "policy": policy,
        "eligibility": "relaxed",
        "allow": [{"namespace": "*"}],
    }
    try:
        with unit.restarted_with(alloc=alloc, nri={"enabled": "yes"}):
            node.wait(lambda: _allocation(unit)["guarantee"] != "sandboxes only", "NRI", 60)
            yield
    finally:
        ORDERS.unlink(missing_ok=True)


def _allocation(unit: Unit) -> dict[str, Any]:
    return dict(unit.state()["allocation"])


def _grant(unit: Unit, container: str) -> dict[str, Any]:
    return next(one for one in _allocation(unit)["grants"] if one["id"] == container)


def _cpuset(name: str) -> str:
    """Return what a cgroup below the pods' parent allows, of a container or `kata_<sandbox>`."""
    roots = [Path("/sys/fs/cgroup") / part for part in ("", "cpuset")]
    found = [
        path for root in roots for path in root.glob(f"{CGROUP.lstrip('/')}/**/{name}/cpuset.cpus")
    ]
    assert found, f"no cgroup {name}"
    return found[0].read_text().strip()


def _vcpus(unit: Unit, pod: str) -> list[str]:
    """Return the affinities of a sandbox's vCPU threads, as the kernel tells."""
    return sorted(
        str(CpuSet(os.sched_getaffinity(one["tid"])))
        for one in unit.sandbox(pod)["threads"]
        if one["role"] == "vcpu"
    )


@pytest.mark.parametrize("policy", ["static", "annotation", "topology"])
def test_a_pod_with_each_policy(node: Node, containerd: CriNode, policy: str) -> None:
    """Exclusive CPUs of one NUMA node leave all others' cpusets, are paired, and come back."""
    unit = Unit(node)
    with deciding(node, unit, policy):
        every = _allocation(unit)["pools"]["shared"]
        plain = containerd.create(containerd.run_pod("r0", ""), "r0", "app")
        assert _cpuset(plain) == every
        pod = containerd.run_pod("k1", **{KEY: "exclusive"})
        app = containerd.create(pod, "k1", "app", **TWO_CPUS)
        own = CpuSet.parse(_grant(unit, app)["exclusive"])
        rest = str(CpuSet.parse(every) - own)
        nodes = {one["node"] for one in unit.state()["node"]["cpus"] if one["cpu"] in own}
        assert (len(own), len(nodes)) == (2, 1)
        assert _cpuset(plain) == rest
        assert _cpuset(f"kata_{pod}") == str(own)
        pairs = {str(cpu) for cpu in own}
        node.wait(lambda: pairs <= set(_vcpus(unit, pod)), "the pairs to stand", 30)
        pid = qemu_pid(pod)
        if policy != "static":
            _live(node, containerd, unit, plain=plain, pod=pod, own=own, every=every)
        assert qemu_pid(pod) == pid
        containerd.cri.stop(app)
        assert _cpuset(plain) == every
        assert _allocation(unit)["pools"]["exclusive"] == ""
    containerd.remove_all()
    containerd.pods.clear()


def _live(
    node: Node,
    containerd: CriNode,
    unit: Unit,
    *,
    plain: str,
    pod: str,
    own: CpuSet,
    every: str,
) -> None:
    """Order `share`: others may use the CPUs, with the next answer; then `exclusive` again."""
    ORDERS.write_bytes(render_orders({"shop/k1": CpuClass.SHARE}))
    node.wait(lambda: unit.sandbox(pod)["exclusive"] == "", "nothing to be exclusive", 30)
    node.wait(lambda: set(_vcpus(unit, pod)) == {str(own)}, "the vCPUs on what they share", 30)
    assert _grant(unit, plain)["pending"] == every
    containerd.create(containerd.run_pod("r1", ""), "r1", "app")
    assert _cpuset(plain) == every
    ORDERS.write_bytes(render_orders({"shop/k1": CpuClass.EXCLUSIVE}))
    node.wait(lambda: unit.sandbox(pod)["exclusive"] == str(own), "its CPUs to be its own", 30)
    containerd.create(containerd.run_pod("r2", ""), "r2", "app")
    assert _cpuset(plain) == str(CpuSet.parse(every) - own)
