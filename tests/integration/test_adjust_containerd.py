"""What decisions carry beside CPUs, with the real containerd: in cgroups, and seen by containers.

Limits by a policy of another package, classes by the administrator's rules. Hugepage limits and RDT
classes are judged by the spec that containerd gives to runc: neither the hugetlb controller nor
resctrl is on every machine.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from kata_pin.base.allocation import AtCreation, Device, Limits
from kata_pin.peers.nri.replies import Cpuset, NriAnswer
from tests.support.allotcluster import ALLOC, ONE_CPU, Allotted, kill_and_start, order, run
from tests.support.containerd import DEBIANS, RELEASES, Release, private_containerd, why_not
from tests.support.daemon import Json, private_node
from tests.support.foreignpolicy import NAME, make_package
from tests.support.rival import rival
from tests.support.waiting import wait_for

pytestmark = [
    pytest.mark.qemu,
    pytest.mark.root,
    pytest.mark.oci,
    pytest.mark.skipif(why_not() != "", reason=why_not()),
    pytest.mark.skipif(os.cpu_count() != 2, reason="the tests know a node of two CPUs"),
]

MIB = 1 << 20


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="cd"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.fixture(params=RELEASES)
def release(request: pytest.FixtureRequest) -> Release:
    found: Release = request.param
    return found


@pytest.fixture
def cluster(folder: Path, release: Release) -> Iterator[Allotted]:
    with (
        private_node() as node,
        private_containerd(folder, node.dirs, release=release) as containerd,
    ):
        node.runtime_dir = containerd.shared / "kp"  # where runc finds it, too
        alloc = ALLOC | {"orders": str(node.root / "policies"), "cri": str(containerd.cri_socket)}
        yield Allotted(node, containerd, alloc=alloc)


@pytest.fixture
def generous(cluster: Allotted) -> Allotted:
    """The daemon with the policy of another package."""
    hints = cluster.containerd.shared / "hints"
    hints.mkdir()
    (hints / "now").write_text("cold")
    settle(
        cluster,
        policy=NAME,
        mount_sources=[str(hints)],
        devices=["/dev/kmsg"],
        annotation_keys=["hints.example.com/node"],
    )
    package = make_package(cluster.containerd.shared / "package")
    cluster.node.start(["env", f"PYTHONPATH={package}"])
    cluster.wait_told(0)
    return cluster


def settle(cluster: Allotted, **alloc: Any) -> None:
    """Change settings of the allocator, before the daemon starts."""
    cluster.node.settings["alloc"] |= alloc
    cluster.node.config.write_text(json.dumps(cluster.node.settings))


def limits(cluster: Allotted, container: str) -> list[str]:
    """Return a container's shares, quota, period and memory limit as its cgroup has them."""
    names = ("cpu.shares", "cpu.cfs_quota_us", "cpu.cfs_period_us", "memory.limit_in_bytes")
    return [cluster.cgroup_file(container, name).read_text().strip() for name in names]


def environment(cluster: Allotted, container: str) -> list[str]:
    """Return the environment of a container's first process, once runc has become it."""
    file = Path(f"/proc/{cluster.pid(container)}/environ")

    def read() -> list[str]:
        found = [one for one in file.read_text().split("\0") if one]  # none during an exec
        return [] if any(one.startswith("_LIBCONTAINER") for one in found) else found

    return wait_for(read, "the container's own environment")


def root(cluster: Allotted, container: str) -> Path:
    """Return the root that a container sees."""
    return Path(f"/proc/{cluster.pid(container)}/root")


def notes(cluster: Allotted) -> str:
    """Return the allocator's notes."""
    return " ".join(one["text"] for one in cluster.allocation()["notes"])


def test_everything_that_a_policy_decides(generous: Allotted) -> None:
    """Limits, environment and a mount at creation; then the limits change on the running pod."""
    _, app = run(generous, "r0", **ONE_CPU, memory_limit_in_bytes=128 * MIB)
    assert limits(generous, app) == ["512", "50000", "50000", str(64 * MIB)]
    assert "HINT=a b" in environment(generous, app)
    seen = root(generous, app) / "hints/now"
    assert seen.read_text() == "cold"
    with pytest.raises(OSError, match="Read-only"):
        seen.write_text("warm")
    order(generous, "shop/r0", "share")
    wanted = ["2048", "70000", "50000", str(96 * MIB)]
    wait_for(lambda: limits(generous, app) == wanted, "the limits to change")
    wait_for(lambda: generous.grant(app)["pending"] is None, "nothing to be pending")
    shown = generous.node.cli("alloc", "explain", app).stdout
    assert "CPU shares" in shown
    assert "HINT=a b" in shown
    assert "memory limit 100663296 bytes" in " ".join(generous.node.cli("pools").stdout.split())
    assert generous.grant(app)["millis"] == 1000  # our shares are not taken for its request


def test_a_limit_that_another_sets_is_put_right(generous: Allotted) -> None:
    """The kubelet's update of a limit that the policy decides is followed by the policy's."""
    _, app = run(generous, "r0", **ONE_CPU, memory_limit_in_bytes=128 * MIB)
    generous.cri.update(app, cpu_shares=999)
    wait_for(lambda: limits(generous, app)[0] == "512", "the policy's shares")
    assert generous.grant(app)["millis"] == 976  # that is what the pod requests now


def test_limits_are_given_back(generous: Allotted) -> None:
    """Switched off, a container has its own limits again, and one that it lacked is lifted."""
    _, app = run(generous, "r0", **ONE_CPU, memory_limit_in_bytes=128 * MIB)
    assert limits(generous, app) == ["512", "50000", "50000", str(64 * MIB)]
    _, free = run(generous, "r1", cpu_shares=1024)
    assert limits(generous, free) == ["512", "50000", "50000", str(64 * MIB)]
    generous.node.ask("release")
    wait_for(lambda: limits(generous, app)[3] == str(128 * MIB), "its own memory limit")
    assert limits(generous, app) == ["1024", "100000", "100000", str(128 * MIB)]
    wait_for(lambda: int(limits(generous, free)[3]) > 1 << 60, "no memory limit")
    assert limits(generous, free)[:3] == ["1024", "-1", "100000"]


def test_hugepages_are_in_the_spec(generous: Allotted) -> None:
    """containerd passes it on, unless its `disable_hugetlb_controller` is true (the default)."""
    pod = generous.cri.run_pod("huge")
    app = generous.cri.create(pod, "app", pod_name="huge", **ONE_CPU)
    resources = generous.containerd.spec(app)["linux"]["resources"]
    wanted = {"pageSize": "2MB", "limit": 4 * MIB}
    assert wanted in resources["hugepageLimits"]


def test_a_device_and_an_annotation(generous: Allotted, release: Release) -> None:
    """The node that the container sees, the cgroup's rule, and what `alloc explain` shows.

    NRI's own rule lets it write, too; containerd 1.7 knows no other one.
    """
    _, app = run(generous, "dev0", **ONE_CPU)
    seen = (root(generous, app) / "dev/kmsg").stat()
    assert stat.S_ISCHR(seen.st_mode)
    assert (os.major(seen.st_rdev), os.minor(seen.st_rdev)) == (1, 11)
    assert stat.S_IMODE(seen.st_mode) == 0o440
    assert access(generous, app, "c 1:11") == ("rw" if release is DEBIANS else "r")
    spec = generous.containerd.spec(app)
    assert spec["annotations"]["hints.example.com/node"] == "0"
    shown = generous.node.cli("alloc", "explain", app).stdout
    assert "/dev/kmsg (r)" in shown
    assert "hints.example.com/node=0" in shown


def access(cluster: Allotted, container: str, device: str) -> str:
    """Return what a container's device cgroup allows it to do with a device."""
    lines = cluster.cgroup_file(container, "devices.list").read_text().splitlines()
    return next((line.split()[-1] for line in lines if line.startswith(f"{device} ")), "")


def test_a_device_that_is_another_one(generous: Allotted) -> None:
    """The numbers of /dev/zero under a path that the administrator listed."""
    _, app = run(generous, "wrong0", **ONE_CPU)
    assert generous.grant(app)["adjustment"] is None
    assert "the device /dev/kmsg as c 1:5, which is /dev/zero" in notes(generous)
    assert not (root(generous, app) / "dev/kmsg").exists()


def test_a_device_for_a_vm(generous: Allotted) -> None:
    """In the guest its numbers would be the guest's: refused, and said."""
    _, app = run(generous, "small-dev", handler="kata", **ONE_CPU)
    assert generous.grant(app)["adjustment"] is None
    assert "a device that cannot be passed into a Kata VM: '/dev/kmsg'" in notes(generous)
    devices = generous.containerd.spec(app)["linux"].get("devices") or []
    assert "/dev/kmsg" not in {device["path"] for device in devices}


def test_a_vm_is_not_resized(generous: Allotted) -> None:
    """Limits by which Kata sizes its VM are refused, whole decisions with them, and said."""
    pod, app = run(generous, "big", handler="kata", **ONE_CPU)
    assert generous.grant(app)["adjustment"] is None
    assert "which would resize its Kata VM" in notes(generous)
    spec = generous.containerd.spec(app)
    assert "HINT=a b" not in spec["process"]["env"]
    assert spec["linux"]["resources"]["cpu"]["quota"] == 100_000
    vcpus = len(generous.vcpus(pod))
    other, _ = run(generous, "small", handler="kata", **ONE_CPU)
    assert len(generous.vcpus(other)) == vcpus


def test_classes_of_the_administrator(cluster: Allotted) -> None:
    """By rule without an annotation, by annotation where a rule lets the pod choose."""
    allow = {"namespace": "shop", "rdt": ["gold"], "blockio": ["slow"]}
    settle(
        cluster,
        assign=[{"namespace": "bank", "handler": "*", "blockio": "slow"}],
        allow=[allow],
    )
    cluster.start()
    _, plain = run(cluster, "r0")
    assert cluster.grant(plain)["adjustment"] is None
    _, ruled = run(cluster, "bank/r1")
    throttle = cluster.cgroup_file(ruled, "blkio.throttle.read_bps_device").read_text()
    assert throttle.split()[1:] == ["1000000"]
    assert chosen(cluster, "r2", {"blockio-class.kata-pin.io": "slow"})["blockio_class"] == "slow"
    assert chosen(cluster, "bank/r3", {"rdt-class.kata-pin.io": "gold"})["rdt_class"] == ""
    assert "no allow rule permits 'gold'" in notes(cluster)
    hostile = {"rdt-class.kata-pin.io": "../info", "blockio-class.kata-pin.io": "slow\nx"}
    assert chosen(cluster, "r4", hostile) == {}
    kata = cluster.cri.run_pod("bank/k1", "kata")
    app = cluster.cri.create(kata, "app", pod_name="bank/k1")
    assert cluster.grant(app)["adjustment"] is None
    assert "no effect on a Kata VM" in " ".join(cluster.grant(app)["reasons"])


def chosen(cluster: Allotted, name: str, annotations: dict[str, str]) -> Json:
    """Return what the container of a pod with annotations got beside CPUs."""
    pod = cluster.cri.run_pod(name, "", annotations)
    app = cluster.cri.create(pod, "app", pod_name=name)
    return dict(cluster.grant(app)["adjustment"] or {})


def test_an_rdt_class_reaches_runc(cluster: Allotted) -> None:
    """It is in the spec; where there is no resctrl, runc ignores it."""
    settle(cluster, assign=[{"namespace": "bank", "rdt": "gold"}])
    cluster.start()
    pod = cluster.cri.run_pod("bank/r0")
    app = cluster.cri.create(pod, "app", pod_name="bank/r0")
    assert cluster.containerd.spec(app)["linux"]["intelRdt"] == {"closID": "gold"}
    shown = cluster.node.cli("alloc", "explain", app).stdout
    assert "RDT class gold by alloc.assign" in " ".join(shown.split())


def test_a_block_io_class_that_containerd_does_not_know(cluster: Allotted) -> None:
    """Its error fails the creation and names the class; the retry runs without it."""
    settle(cluster, assign=[{"namespace": "shop", "blockio": "platinum"}])
    cluster.start()
    pod = cluster.cri.run_pod("r0")
    with pytest.raises(grpc.RpcError, match="platinum"):
        cluster.cri.create(pod, "app", pod_name="r0")
    app = cluster.cri.create(pod, "app", pod_name="r0", attempt=1)
    cluster.cri.start(app)
    assert "failed after kata-pin set its cpuset, block-I/O class" in cluster.node.log
    assert "without kata-pin's cpuset, block-I/O class" in cluster.node.log


def readable(cluster: Allotted, container: str) -> dict[str, str]:
    """Return what a container reads of its placement, from where it sees the file."""
    text = (root(cluster, container) / "run/kata-pin/placement").read_text()
    return dict(line.split("=") for line in text.splitlines())


def test_a_container_reads_its_placement(cluster: Allotted) -> None:
    """By its environment what was true at creation; by the file what is true now."""
    settle(cluster, placement_env="true", placement_file="/run/kata-pin")
    cluster.start()
    pod, app = run(cluster, "r0")
    variables = {"KATA_PIN_CLASS=none", "KATA_PIN_CPUS=0-1", "KATA_PIN_NUMA_NODES=0"}
    assert variables <= set(environment(cluster, app))
    first = readable(cluster, app)
    assert (first["CLASS"], first["CPUS"], first["EXCLUSIVE_CPUS"]) == ("none", "0-1", "")
    _, other = run(cluster, "r1", "exclusive", **ONE_CPU)
    own = cluster.grant(other)["exclusive"]
    assert f"KATA_PIN_EXCLUSIVE_CPUS={own}" in environment(cluster, other)
    assert readable(cluster, other)["EXCLUSIVE_CPUS"] == own
    (left,) = {"0", "1"} - {own}
    wait_for(lambda: readable(cluster, app)["CPUS"] == left, "the file to follow")
    kill_and_start(cluster)
    order(cluster, "shop/r1", "share")
    wait_for(lambda: readable(cluster, app)["CPUS"] == "0-1", "the file to follow the new daemon")
    wait_for(lambda: readable(cluster, other)["CLASS"] == "share", "the other one to follow")
    with pytest.raises(OSError, match="Read-only"):
        (root(cluster, app) / "run/kata-pin/placement").unlink()
    assert "/run/kata-pin" in cluster.node.cli("alloc", "explain", app).stdout
    folder = cluster.node.runtime_dir / "placements" / app
    assert folder.is_dir()
    cluster.cri.stop_pod(pod)
    cluster.cri.remove_pod(pod)
    wait_for(lambda: not folder.exists(), "the folder of the removed container to go")


def test_a_kata_container_reads_of_its_guest(cluster: Allotted) -> None:
    """No pCPU is named to it; its guest CPUs are, once they are known (there is no agent here)."""
    settle(cluster, placement_env="true", placement_file="/run/kata-pin")
    cluster.start()
    _, app = run(cluster, "k1", "exclusive", handler="kata", **ONE_CPU)
    spec = cluster.containerd.spec(app)
    (mount,) = (one for one in spec["mounts"] if one["destination"] == "/run/kata-pin")
    assert {"bind", "ro"} <= set(mount["options"])
    text = (Path(mount["source"]) / "placement").read_text()
    assert text == "CLASS=exclusive\nCPU_COUNT=1\nGUEST_CPUS=\n"
    ours = {one for one in spec["process"]["env"] if one.startswith("KATA_PIN_")}
    assert ours == {"KATA_PIN_CLASS=exclusive", "KATA_PIN_CPU_COUNT=1"}


OTHERS = {
    "CPU shares": NriAnswer(Cpuset(limits=Limits(shares=77))),
    "memory limit": NriAnswer(Cpuset(limits=Limits(memory=50 * MIB))),
    "environment": NriAnswer(creation=AtCreation(env=(("HINT", "mine"),))),
    "devices": NriAnswer(creation=AtCreation(devices=(Device("/dev/kmsg", "c", 1, 11),))),
    "annotations": NriAnswer(creation=AtCreation(annotations=(("hints.example.com/node", "7"),))),
}


@pytest.mark.parametrize("field", OTHERS)
def test_another_plugin_sets_the_same(generous: Allotted, field: str) -> None:
    """NRI refuses the creation and names both plugins; kata-pin names the field, and yields."""
    with rival(generous.containerd.nri_socket, index="50", answer=OTHERS[field]):
        pod = generous.cri.run_pod("dev0")
        with pytest.raises(grpc.RpcError, match=r"rival.* both tried to set"):
            generous.cri.create(pod, "app", pod_name="dev0", **ONE_CPU)
        again = generous.cri.create(pod, "app", pod_name="dev0", attempt=1, **ONE_CPU)
        generous.cri.start(again)
    assert generous.allocation()["suspended"] == ""
    log = generous.node.log
    assert "another NRI plugin may set the same" in log
    (line,) = (one for one in log.splitlines() if "may set the same" in one)
    assert field in line
