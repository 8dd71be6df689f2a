"""Cpusets that are pending, sent at once to the real containerd: by CRI, or by NRI unasked.

containerd 1.7 is too old for updates unasked, so CRI is the way to it; containerd 2.4 takes them.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.support.allotcluster import (
    ALLOC,
    ONE_CPU,
    Allotted,
    agreed,
    killed_within,
    order,
    run,
)
from tests.support.containerd import (
    BUILT,
    RELEASES,
    Release,
    only_built,
    only_debians,
    private_containerd,
    why_not,
)
from tests.support.daemon import private_node
from tests.support.waiting import wait_for

pytestmark = [
    pytest.mark.qemu,
    pytest.mark.root,
    pytest.mark.oci,
    pytest.mark.skipif(why_not() != "", reason=why_not()),
    pytest.mark.skipif(os.cpu_count() != 2, reason="the tests know a node of two CPUs"),
]


@pytest.fixture(params=RELEASES)
def release(request: pytest.FixtureRequest) -> Release:
    found: Release = request.param
    return found


@pytest.fixture
def way(release: Release) -> str:
    """What cpusets are sent by."""
    return "nri" if release is BUILT else "cri"


@pytest.fixture
def cluster(folder: Path, release: Release) -> Iterator[Allotted]:
    with (
        private_node() as node,
        private_containerd(folder, node.dirs, release=release) as containerd,
    ):
        alloc = ALLOC | {"orders": str(node.root / "policies"), "cri": str(containerd.cri_socket)}
        yield Allotted(node, containerd, alloc=alloc)


def settle(cluster: Allotted, **alloc: Any) -> None:
    """Change settings of the allocator, before the daemon starts."""
    cluster.node.settings["alloc"] |= alloc
    cluster.node.config.write_text(json.dumps(cluster.node.settings))


def wait_cgroup(cluster: Allotted, container: str, cpus: str) -> None:
    """Wait until a container's cgroup has a cpuset; nothing else happens meanwhile."""
    try:
        wait_for(lambda: cluster.cgroup(container) == cpus, f"the cpuset {cpus}")
    except TimeoutError as error:
        error.add_note(f"{cluster.allocation()}\n{cluster.node.log[-6000:]}")
        raise


def test_an_order_reaches_everybody_at_once(cluster: Allotted, way: str) -> None:
    """None to exclusive to share on a running pod: another container's cgroup and the VM's follow
    without any call of the runtime's, and nothing of the containers changes but the cpuset."""
    cluster.start()
    pod, app = run(cluster, "k1", handler="kata", **ONE_CPU)
    _, plain = run(cluster, "r0", cpu_quota=50_000, cpu_period=100_000, cpu_shares=512)
    vcpus = len(cluster.vcpus(pod))
    before = limits(cluster, plain)
    order(cluster, "shop/k1", "exclusive")
    own = str(wait_for(lambda: cluster.grant(app)["exclusive"], "the order to be in force"))
    (other,) = {"0", "1"} - {own}
    wait_cgroup(cluster, plain, other)
    wait_for(lambda: cluster.sandbox_cgroup(pod) == own, "the VM's cpuset")
    cluster.wait_exclusive(pod, own)
    wait_for(lambda: cluster.grant(plain)["pending"] is None, "nothing to be pending")
    order(cluster, "shop/k1", "share")
    wait_cgroup(cluster, plain, "0-1")
    assert limits(cluster, plain) == before
    assert len(cluster.vcpus(pod)) == vcpus
    push = cluster.allocation()["push"]
    assert (push["channel"], push["problem"], push["failures"]) == (way, "", [])
    assert f"sent at once by {way.upper()}" in cluster.node.cli("pools").stdout
    assert "UpdateContainer not decided" not in cluster.node.log


def limits(cluster: Allotted, container: str) -> list[str]:
    """Return a container's CPU limits as its cgroup has them."""
    shares = cluster.cgroup_file(container).parent
    cpu = Path(str(shares).replace("/cpuset/", "/cpu/", 1))
    return [
        (cpu / name).read_text() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us", "cpu.shares")
    ]


def test_a_pod_that_ends_gives_back_at_once(cluster: Allotted) -> None:
    """With NRI's answers and pushes mixed, all cpusets are those of the grants in the end."""
    cluster.start()
    _, plain = run(cluster, "r0")
    pod, app = run(cluster, "k1", handler="kata", **ONE_CPU)
    for _ in range(3):
        order(cluster, "shop/k1", "exclusive")
        agreed(cluster, plain, pod, app)
        order(cluster, "shop/k1", "none")
        agreed(cluster, plain, pod)
    order(cluster, "shop/k1", "exclusive")
    cluster.cri.stop(app)
    cluster.cri.stop_pod(pod)
    agreed(cluster, plain, pod)


def test_killed_while_it_sends(cluster: Allotted) -> None:
    """A daemon that is killed at any point of it comes back and finishes."""
    random = Random(7)
    cluster.start()
    _, plain = run(cluster, "r0")
    pod, app = run(cluster, "k1", handler="kata", **ONE_CPU)
    for _ in range(3):
        with killed_within(cluster, random.uniform(0.2, 0.6)):
            order(cluster, "shop/k1", "exclusive")
            time.sleep(random.uniform(0, 0.3))  # the kill comes before, within or after it
        agreed(cluster, plain, pod, app)
        with killed_within(cluster, random.uniform(0.2, 0.6)):
            order(cluster, "shop/k1", "none")
            time.sleep(random.uniform(0, 0.3))
        agreed(cluster, plain, pod)


def test_the_runtime_is_restarted_meanwhile(cluster: Allotted) -> None:
    """What could not be sent is in the answer to the new Synchronize, or sent after it."""
    cluster.start()
    _, plain = run(cluster, "r0")
    pod, app = run(cluster, "k1", handler="kata", **ONE_CPU)
    for cpu_class in ("exclusive", "none"):
        told = cluster.told
        restart = threading.Thread(target=cluster.containerd.restart)
        restart.start()
        order(cluster, "shop/k1", cpu_class)
        restart.join()
        cluster.cri = cluster.containerd.cri
        cluster.wait_told(told)
        agreed(cluster, plain, pod, app if cpu_class == "exclusive" else "")


@only_debians
def test_a_socket_that_hangs(cluster: Allotted, folder: Path) -> None:
    """Events are answered and threads are pinned all the same; the daemon stops at once."""
    path = folder / "hangs.sock"
    settle(cluster, cri=str(path))
    with hanging(path):
        cluster.start()
        run(cluster, "r0")
        pod, app = run(cluster, "k1", handler="kata", **ONE_CPU)
        order(cluster, "shop/k1", "exclusive")
        own = str(wait_for(lambda: cluster.grant(app)["exclusive"], "the order to be in force"))
        cluster.wait_exclusive(pod, own)
        began = time.monotonic()
        run(cluster, "r1")
        assert time.monotonic() - began < 4
        wait_for(lambda: cluster.allocation()["push"]["failures"], "the failure", 20)
        assert "cpusets not sent" not in cluster.node.log
        assert cluster.node.daemon is not None
        began = time.monotonic()
        assert cluster.node.daemon.terminate() == 0
        assert time.monotonic() - began < 4


@contextmanager
def hanging(path: Path) -> Iterator[None]:
    """Listen, and never say a word."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(64)
        yield


@only_built
def test_updates_unasked_beside_events(cluster: Allotted) -> None:
    """Overrides and pods come and go together; none waits for another, all agree at the end."""
    settle(cluster, cri="")
    cluster.start()
    _, plain = run(cluster, "r0")
    pod, app = run(cluster, "k1", handler="kata", **ONE_CPU)
    stop = threading.Event()
    churn = threading.Thread(target=churned, args=(cluster, stop))
    churn.start()
    for _ in range(8):
        for cpu_class in ("exclusive", "none"):
            order(cluster, "shop/k1", cpu_class)
    stop.set()
    churn.join()
    agreed(cluster, plain, pod)
    order(cluster, "shop/k1", "exclusive")
    agreed(cluster, plain, pod, app)
    assert cluster.node.log.count("NRI: containerd") == 1  # never closed


def churned(cluster: Allotted, stop: threading.Event) -> None:
    number = 0
    while not stop.is_set():
        number += 1
        pod, container = run(cluster, f"c{number}")
        cluster.cri.stop(container)
        cluster.cri.stop_pod(pod)
        cluster.cri.remove_pod(pod)
