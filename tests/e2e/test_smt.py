"""Pairs on a machine with thread siblings and two NUMA nodes, and why, in explain's words.

These flavours have no KVM inside, so QEMU emulates: its vCPU threads are named by QMP, in the
window of the sandbox's createRuntime. CPUs 2n and 2n+1 are one core; 0-7 are node 0, 8-15 node 1.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.e2e.katapods import LabPod, Pods
from tests.e2e.node import Node
from tests.support.daemon import Node as PrivateNode
from tests.support.hosttree import listing
from tests.support.qemu import Accelerator, Machine

pytestmark = pytest.mark.usefixtures("untouched")


@pytest.fixture
def smt(node: Node) -> None:
    """Skip where cores have one thread."""
    if node.threads < 2:
        pytest.skip(f"{node.flavour} has no thread siblings")


def test_live_topology_is_the_captured_one(node: Node) -> None:
    """This machine's pCPUs share what those of the tree in tests/data/sysfs share."""
    name = f"lab-{node.flavour}" if node.threads > 1 else "lab-trixie-kvm"
    captured = {path: text for path, text in listing(name).items() if path.endswith("list")}
    assert captured
    assert {path: Path("/", path).read_text().strip() for path in captured} == captured


@pytest.mark.usefixtures("smt")
def test_guest_siblings_share_a_core(pinner: PrivateNode, start_pod: Pods) -> None:
    """Of CPUs 1, 2-3, 4 the whole core goes to a guest core, though index order would split it."""
    pod = _pod(start_pod, "4,sockets=1,cores=2,threads=2,maxcpus=4")
    pod.create("c1", "1,2,3,4", exclusive=True)
    pod.create("c2", "6,7")
    pod.wait_placed({6, 7}, {0: 2, 1: 3, 2: 1, 3: 4})
    lines = _explained(pinner, pod)
    assert "thread sibling of vCPU 1, on the same core" in lines[0]
    assert "thread sibling of vCPU 3, on another core" in lines[2]


@pytest.mark.usefixtures("smt")
def test_vcpus_are_on_the_node_of_their_memory(pinner: PrivateNode, start_pod: Pods) -> None:
    """The guest node whose memory is on host node 1 is served from there, first of all rules."""
    pod = _pod(
        start_pod,
        "4,sockets=2,cores=1,threads=2,maxcpus=4",
        *_guest_node(0, cpus="0-1", host_node=1),
        *_guest_node(1, cpus="2-3", host_node=0),
    )
    pod.create("c1", "2,3,8,9", exclusive=True)
    pod.create("c2", "6,7")
    pod.wait_placed({6, 7}, {0: 8, 1: 9, 2: 2, 3: 3})
    lines = _explained(pinner, pod)
    assert "on host NUMA node 1, where its memory is" in lines[0]
    assert "on host NUMA node 0, where its memory is" in lines[3]
    assert "thread sibling of vCPU 0, on the same core" in lines[1]


@pytest.mark.usefixtures("smt")
def test_fewer_vcpus_get_whole_cores(start_pod: Pods) -> None:
    """Two vCPUs for four exclusive CPUs: each gets a run, and no run crosses a core or a node."""
    pod = _pod(start_pod, "2,sockets=2,cores=1,threads=1,maxcpus=2")
    pod.create("c1", "2,3,8,9", exclusive=True)
    truth = {index: os.sched_getaffinity(tid) for index, tid in pod.kata.vcpus().items()}
    assert truth == {0: {2, 3}, 1: {8, 9}}
    assert pod.misplaced({2, 3, 8, 9}, None)  # the pairs; everything else is on the whole mask
    others = set(pod.kata.tids()) - set(pod.kata.vcpus().values())
    assert {frozenset(os.sched_getaffinity(tid)) for tid in others} == {frozenset({2, 3, 8, 9})}


def _pod(start_pod: Pods, smp: str, *extra: str) -> LabPod:
    """Start and announce an emulated VM with that guest topology."""
    count = int(smp.partition(",")[0])
    machine = Machine(boot=count, maximum=count, smp=smp, extra=extra)
    pod = start_pod(machine=machine, accelerator=Accelerator.TCG)
    assert pod.announce().stderr == ""
    return pod


def _guest_node(number: int, *, cpus: str, host_node: int) -> tuple[str, ...]:
    """Return QEMU's arguments for a guest node whose memory is bound to a host node."""
    memory = f"memory-backend-ram,id=m{number},size=8M,host-nodes={host_node},policy=bind"
    node = f"node,nodeid={number},cpus={cpus},memdev=m{number}"
    return ("-object", memory, "-numa", node)


def _explained(pinner: PrivateNode, pod: LabPod) -> list[str]:
    """Return explain's lines about the vCPUs, by index."""
    lines = pinner.ask("explain", sandbox=pod.id)["lines"]
    return sorted((line for line in lines if " vcpu " in line), key=lambda line: line.split()[1])
