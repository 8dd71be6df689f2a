"""`memory: migrate` on two NUMA nodes: pages of real QEMUs follow their vCPUs, window by window."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from kata_pin.linux.memory import parse_placed
from tests.e2e.katapods import LabPod, Pods, private_daemon
from tests.e2e.node import Node
from tests.support.daemon import Node as PrivateNode
from tests.support.qemu import Machine

pytestmark = pytest.mark.usefixtures("kvm")

MIB: Final = 1 << 20
SIZE_MIB: Final = 192
RATE_MIB: Final = 16
NEAR, FAR = 0, 1
CPUS: Final = "2,3"
"""Two pCPUs of node 0; the memory is on node 1."""

RAM: Final = "memory-backend-ram,"
SHARED: Final = "memory-backend-memfd,share=on,"
HUGE: Final = "memory-backend-memfd,share=on,hugetlb=on,hugetlbsize=2M,"

Configure = Callable[..., None]


@pytest.fixture(scope="module")
def pinner(node: Node) -> Iterator[PrivateNode]:
    """A daemon that moves 16 MiB per second."""
    with private_daemon(memory="migrate", memory_rate_mib=RATE_MIB) as made:
        made.start()
        yield made


@pytest.fixture
def huge_pages() -> Iterator[None]:
    """Huge pages for one VM on both nodes."""
    pools = [
        Path(f"/sys/devices/system/node/node{one}/hugepages/hugepages-2048kB/nr_hugepages")
        for one in (NEAR, FAR)
    ]
    try:
        for pool in pools:
            pool.write_text(str(SIZE_MIB // 2 + 4))
            assert int(pool.read_text()) > SIZE_MIB // 2
        yield
    finally:
        for pool in pools:
            pool.write_text("0")


def machine(backend: str, policy: str = "preferred", *more: str) -> Machine:
    """Return a VM whose memory is all there from the start, on the far node."""
    rest = f"id=ram0,size={SIZE_MIB}M,prealloc=on,host-nodes={FAR},policy={policy}"
    extra = ("-object", f"{backend}{rest}", "-machine", "memory-backend=ram0", *more)
    return Machine(boot=2, maximum=2, memory_mib=SIZE_MIB, extra=extra)


def on_node(pod: LabPod, number: int) -> int:
    """Return how much of the guest's memory is on a node, in bytes: of the largest mapping."""
    maps = parse_placed(Path(f"/proc/{pod.kata.pid}/numa_maps").read_bytes())
    largest = max(maps, key=lambda one: sum(one.pages.values()) * one.page_size)
    return largest.pages.get(number, 0) * largest.page_size


def memory_of(pod: LabPod) -> dict[str, Any]:
    """Return what the daemon says of a pod's memory."""
    shown: dict[str, Any] = pod.node.sandboxes()[pod.id.removeprefix(pod.node.id_of(""))]["memory"]
    return shown


def place(node: Node, pod: LabPod) -> None:
    """Give the pod its exclusive pCPUs, on the near node."""
    assert on_node(pod, FAR) >= SIZE_MIB * MIB
    pod.announce()
    pod.create("c1", CPUS, exclusive=True)


@pytest.mark.parametrize(
    "vm",
    [
        pytest.param((RAM,), id="private"),
        pytest.param((RAM, "-overcommit", "mem-lock=on"), id="locked"),
        pytest.param((SHARED,), id="shared"),
        pytest.param((HUGE,), id="huge"),
    ],
)
def test_pages_follow_the_vcpus(
    node: Node,
    start_pod: Pods,
    pinner: PrivateNode,
    vm: tuple[str, ...],
    request: pytest.FixtureRequest,
) -> None:
    """All of the guest's memory moves, no faster than the setting says, and progress is shown."""
    backend, *more = vm
    if backend is HUGE:
        request.getfixturevalue("huge_pages")
    pod = start_pod("m1", machine=machine(backend, "preferred", *more))
    place(node, pod)
    seen: list[tuple[float, int]] = []

    def done() -> bool:
        shown = memory_of(pod)
        seen.append((time.monotonic(), shown["moved_bytes"]))
        return bool(shown["state"] == "near")

    node.wait(done, "all memory on the near node", seconds=60)
    assert on_node(pod, NEAR) >= SIZE_MIB * MIB
    assert on_node(pod, FAR) == 0
    shown = memory_of(pod)
    assert shown["moved_bytes"] >= SIZE_MIB * MIB
    assert (shown["nodes"], shown["problem"]) == ("0", "")
    assert shown["remote_bytes"] < 4 * MIB
    moving = [one for one in seen if 0 < one[1] < seen[-1][1]]
    assert moving, "progress is shown while it lasts"
    for (began, first), (ended, last) in itertools.combinations(moving, 2):
        assert last - first <= RATE_MIB * MIB * (ended - began) + 2 * RATE_MIB * MIB
    assert announced(pinner)[-1] >= SIZE_MIB
    assert "of memory moved to NUMA node 0" in pinner.log
    document = json.loads(pinner.cli("show", pod.id, "--memory", "--json").stdout)
    (shown,) = document["sandboxes"]
    assert shown["remote_percent"] < 20, shown  # QEMU's libraries stay where they are
    took = seen[-1][0] - seen[0][0]
    node.tell(f"memory {request.node.callspec.id}: {SIZE_MIB} MiB in {took:.1f} s")


def test_only_by_the_setting(
    node: Node, start_pod: Pods, pinner: PrivateNode, configure: Configure
) -> None:
    """With `report` nothing moves; with `migrate`, by a reload, it does; back, it stops."""
    configure(memory="report")
    pod = start_pod("m2", machine=machine(RAM))
    place(node, pod)
    pinner.ask("reconcile")
    assert memory_of(pod) is None
    assert on_node(pod, FAR) >= SIZE_MIB * MIB
    configure(memory="migrate", memory_rate_mib=4)
    node.wait(lambda: bool(on_node(pod, NEAR)), "the first window", seconds=30)
    configure(memory="report")
    node.wait(lambda: _rests(pod), "the last window", seconds=30)
    assert 0 < on_node(pod, NEAR) < SIZE_MIB * MIB


def test_what_the_vmm_bound_stays(node: Node, start_pod: Pods) -> None:
    """A policy `bind` is the VMM's own: it is reported with the remedy, and nothing moves."""
    pod = start_pod("m3", machine=machine(RAM, "bind"))
    place(node, pod)
    node.wait(lambda: bool(memory_of(pod)["state"] == "stopped"), "the reason", seconds=30)
    shown = memory_of(pod)
    assert "policy bind:1" in shown["problem"]
    assert shown["remote_bytes"] >= SIZE_MIB * MIB
    assert on_node(pod, NEAR) == 0


def test_a_cpuset_that_forbids_the_node(node: Node, start_pod: Pods) -> None:
    """The VMM's cgroup allows node 1 alone: the reason names the file."""
    pod = start_pod("m4", machine=machine(RAM))
    mems = Path(pod.cgroup.folder) / "cpuset.mems"
    mems.write_text(str(FAR))
    place(node, pod)
    node.wait(lambda: bool(memory_of(pod)["state"] == "stopped"), "the reason", seconds=30)
    assert "cpuset.mems allows NUMA node 1 alone" in memory_of(pod)["problem"]
    assert on_node(pod, NEAR) == 0


def test_a_daemon_that_is_killed_while_it_moves(
    node: Node, start_pod: Pods, pinner: PrivateNode, configure: Configure
) -> None:
    """What was moved stays moved, nothing goes on without it, and the next daemon does the rest."""
    configure(memory="migrate", memory_rate_mib=8)
    earlier = len(announced(pinner))
    pod = start_pod("m5", machine=machine(SHARED))
    place(node, pod)
    node.wait(lambda: memory_of(pod)["moved_bytes"] >= 16 * MIB, "some windows", seconds=60)
    assert pinner.daemon is not None
    pinner.daemon.kill()
    node.wait(lambda: _rests(pod), "the last window", seconds=30)
    half = on_node(pod, NEAR)
    assert 16 * MIB <= half < SIZE_MIB * MIB
    assert half + on_node(pod, FAR) >= SIZE_MIB * MIB
    pinner.start()
    node.wait(lambda: bool(memory_of(pod)["state"] == "near"), "the rest", seconds=90)
    assert on_node(pod, FAR) == 0
    first, *_, rest = announced(pinner)[earlier:]
    assert rest <= first - 12, "what was moved is not moved again"
    assert memory_of(pod)["moved_bytes"] <= (rest + 4) * MIB


def announced(pinner: PrivateNode) -> list[int]:
    """Return how many MiB each move was to take, of the guest and of QEMU itself."""
    return [int(one) for one in re.findall(r"moving (\d+) MiB of memory from", pinner.log)]


def _rests(pod: LabPod) -> bool:
    """Whether no page moves any more."""
    before = on_node(pod, NEAR)
    time.sleep(1.5)  # longer than a window and its pause: none may begin any more
    return on_node(pod, NEAR) == before
