"""Where VMs' memory is when CPUs are about to change: by their cgroups, at that moment."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import cast

import pytest

from kata_pin.base.allocation import AllocState
from kata_pin.base.cpuset import CpuSet
from kata_pin.engine.node import NodeWatch
from kata_pin.linux.files import HostRoot
from kata_pin.options.allocation.holders import MemoryHomes
from kata_pin.placement.masks import vm_of
from kata_pin.records.containers import Registry
from tests.support import world
from tests.support.allotted import Host, allocator, request
from tests.support.hosttree import grow

V2 = "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw"
POD = "kubepods/pod1/p1"
PID = world.VMM_PID
NEAR, FAR = CpuSet.parse("0-3,8-11"), CpuSet.parse("4-7,12-15")


def tree(folder: Path, files: Mapping[str, str]) -> HostRoot:
    """Return a host whose VMM is in the pod's cgroup, with these files there."""
    return grow(
        folder,
        {
            "proc/self/mountinfo": V2,
            f"proc/{PID}/task/{PID}/cgroup": f"0::/{POD}",
            **{f"sys/fs/cgroup/{POD}/{name}": text for name, text in files.items()},
        },
    )


def homes(root: HostRoot, host: Host) -> MemoryHomes:
    """Return homes of a node on which only sandbox s-a has a VMM."""
    node = cast("NodeWatch", host)
    return MemoryHomes(root, node, lambda one: world.sandbox().vmm if one == "s-a" else None)


@pytest.mark.parametrize(
    ("files", "home"),
    [
        ({"memory.numa_stat": "anon N0=10 N1=90\nshmem N0=0 N1=50"}, FAR),
        ({"memory.numa_stat": "anon N0=90 N1=10"}, NEAR),
        ({"memory.numa_stat": "anon N0=50 N1=50"}, CpuSet()),
        ({"memory.numa_stat": "anon N0=0 N1=0"}, CpuSet()),
        (
            {
                "memory.numa_stat": "anon N0=90 N1=10",
                "hugetlb.2MB.numa_stat": "total=200 N0=0 N1=200",
            },
            FAR,
        ),
        ({"memory.numa_stat": "anon N3=90"}, CpuSet()),
        ({"memory.numa_stat": "nonsense"}, CpuSet()),
        ({}, CpuSet()),
    ],
)
def test_the_node_with_most_of_it(tmp_path: Path, files: Mapping[str, str], home: CpuSet) -> None:
    """More than half, huge pages included; else nothing is preferred."""
    seen = homes(tree(tmp_path, files), Host(world.smt_host()))
    state = seen.seen(AllocState(), request("a", "exclusive", cpus=2))
    assert state.memory == {vm_of("s-a"): home}


def test_nothing_is_looked_at_for_nothing(tmp_path: Path) -> None:
    """Containers without a VM, sandboxes without a VMM, hosts with one node."""
    seen = homes(HostRoot(str(tmp_path)), Host(world.smt_host()))
    state = AllocState()
    assert seen.seen(state, request("a", kata=False)) is state
    assert seen.seen(state, request("b")) is state
    single = homes(HostRoot(str(tmp_path)), Host(world.flat(8)))
    assert single.seen(state, request("a")) is state


def test_a_live_change_goes_to_the_memory(tmp_path: Path, registry: Registry) -> None:
    """As the daemon decides: the counters are read when the change comes, not before."""
    root = tree(tmp_path, {"memory.numa_stat": "anon N0=90 N1=10"})
    host = Host(world.smt_host())
    one = allocator(registry, host)
    one._memory = homes(root, host)
    one.admit(request("a", "none", cpus=2))
    tree(tmp_path, {"memory.numa_stat": "anon N0=10 N1=90"})
    grant = one.change(request("a", "exclusive", cpus=2), "test").state.get("c-a")
    assert grant is not None, [*one.state.grants]
    assert grant.exclusive <= FAR
    assert "on the NUMA node of its VM's memory" in grant.reasons
