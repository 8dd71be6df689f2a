"""Memory by NUMA node beside the vCPUs' nodes: from cgroups, and from what a process has mapped."""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from kata_pin.base.cpuset import CpuSet
from kata_pin.base.documents.state import Memory, State
from kata_pin.cli.render import phrases
from kata_pin.options.memory.report import vcpu_nodes
from tests.support.recordings import DATA
from tests.unit.cli import documents as docs
from tests.unit.conftest import Doctor

V2 = "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw"
V1 = "32 31 0:29 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"
POD = "kubepods/pod1/p1"
MIB = 1024 * 1024
STAT = (DATA / "kernel/6.12/pod-memory.numa_stat").read_text()
HUGE = (DATA / "kernel/6.12/pod-hugetlb.2MB.numa_stat").read_text()


def grow(node: Doctor, files: Mapping[str, str], *, mount: str = V2, cgroup: str = "") -> None:
    """Make a host with a VMM 4100 in a cgroup, and files below /sys/fs/cgroup."""
    node.write("proc/self/mountinfo", mount)
    node.write("proc/4100/task/4100/cgroup", cgroup or f"0::/{POD}")
    for name, text in files.items():
        node.write(f"sys/fs/cgroup/{name}", text)


def shown(node: Doctor, state: State, *name: str) -> Any:
    """Return what `show --memory` has of the one sandbox of a state."""
    node.state = state
    (found,) = node.json("show", *name, "--memory")["sandboxes"]
    return found


def one_pod(**fields: object) -> State:
    """Return a state of 16 pCPUs on two nodes: the vCPU runs on node 0."""
    vcpu = docs.thread(4101, "vcpu", "0-1", vcpu=0)
    return docs.state(docs.sandbox("shop/web", "0-1", vcpu, **fields))


def test_the_cgroup_s_memory_without_page_cache(doctor: Doctor) -> None:
    """Nearly all of the recorded pod is on node 1, the vCPU on node 0; huge pages count too."""
    grow(doctor, {f"{POD}/memory.numa_stat": STAT, f"{POD}/hugetlb.2MB.numa_stat": HUGE})
    found = shown(doctor, one_pod())
    assert (found["source"], found["problem"], found["vcpu_nodes"]) == ("cgroup", "", "0")
    assert found["cgroup"].endswith(POD)
    nodes = {one["node"]: (one["bytes"], one["huge_bytes"]) for one in found["nodes"]}
    assert nodes == {0: (16384, 0), 1: (1064960 + 35508224 + 6 * MIB, 6 * MIB)}
    assert found["total_bytes"] == sum(each for each, _ in nodes.values())
    assert found["remote_bytes"] == nodes[1][0]
    assert found["remote_percent"] == pytest.approx(99.96)


def test_version_1_counts_pages(doctor: Doctor) -> None:
    """Of the cgroup and those below it."""
    stat = (DATA / "kernel/6.18/root-memory.numa_stat").read_text()
    grow(doctor, {"memory/p1/memory.numa_stat": stat}, mount=V1, cgroup="4:memory:/p1")
    found = shown(doctor, one_pod())
    assert found["total_bytes"] == (435218 + 5991) * os.sysconf("SC_PAGE_SIZE")
    assert found["remote_percent"] == 0


def test_a_folder_of_threads_has_its_memory_above(doctor: Doctor) -> None:
    """The memory controller knows no threaded cgroups."""
    grow(doctor, {f"{POD}/memory.numa_stat": STAT}, cgroup=f"0::/{POD}/vcpus")
    (doctor.files / "sys/fs/cgroup" / POD / "vcpus").mkdir()
    assert shown(doctor, one_pod())["total_bytes"]


def test_a_cgroup_of_several_sandboxes_tells_nothing_of_one(doctor: Doctor) -> None:
    """Kata's overhead cgroup on some nodes: not the sandbox's own."""
    grow(doctor, {f"{POD}/memory.numa_stat": STAT})
    state = one_pod()
    twin = replace(state.sandboxes[0], id="ee" * 32)
    doctor.state = replace(state, sandboxes=(*state.sandboxes, twin))
    found = doctor.json("show", "--memory")["sandboxes"]
    assert len(found) == 2
    for one in found:
        assert (one["total_bytes"], one["remote_percent"], one["source"]) == (None, None, "none")
        assert "no memory cgroup of its own; name the sandbox" in one["problem"]


@pytest.mark.parametrize("text", ["", "anon N0=x\n"])
def test_what_cannot_be_read_is_unknown(doctor: Doctor, text: str) -> None:
    """Never 0."""
    grow(doctor, {f"{POD}/memory.numa_stat": text} if text else {f"{POD}/cgroup.procs": ""})
    found = shown(doctor, one_pod())
    assert (found["total_bytes"], found["remote_bytes"], found["source"]) == (None, None, "none")
    assert found["problem"]


def test_without_vcpus_nothing_is_remote(doctor: Doctor) -> None:
    """There is nothing to be far from."""
    grow(doctor, {f"{POD}/memory.numa_stat": STAT})
    found = shown(doctor, docs.state(docs.sandbox("shop/web", "0-1")))
    assert found["total_bytes"]
    assert found["remote_percent"] is None
    lost = docs.sandbox("shop/lost", "0-1", vmm=None, vmm_problem="none found")
    found = shown(doctor, docs.state(lost), "shop/lost")
    assert (found["pid"], found["problem"]) == (None, "none found")


def test_nodes_of_vcpus_that_may_run_anywhere() -> None:
    """All nodes then."""
    state = docs.state(docs.sandbox("a", None, docs.thread(1, "vcpu", "0-15", vcpu=0)))
    assert vcpu_nodes(state.sandboxes[0], state) == CpuSet([0, 1])


def test_what_a_process_has_mapped(doctor: Doctor) -> None:
    """A real process: this one, with 64 MiB that it wrote to."""
    doctor.host = None
    with mmap.mmap(-1, 64 * MIB) as area:
        for page in range(0, 64 * MIB, 4096):
            area[page] = 1
        found = shown(doctor, one_pod(vmm=docs.vmm(pid=os.getpid())), "shop/web")
    assert (found["source"], found["cgroup"], found["problem"]) == ("process", "", "")
    assert found["total_bytes"] > 64 * MIB
    assert found["remote_bytes"] is not None


def test_a_process_that_is_gone(doctor: Doctor) -> None:
    """The cgroup's figures stay, with the reason."""
    grow(doctor, {f"{POD}/memory.numa_stat": STAT})
    found = shown(doctor, one_pod(vmm=docs.vmm(pid=4_194_305)), "shop/web")
    assert "cannot read numa_maps of process 4194305: " in found["problem"]


def test_doctor_warns_of_remote_memory_with_a_remedy(doctor: Doctor) -> None:
    """What is wrong, and what to type."""
    grow(doctor, {f"{POD}/memory.numa_stat": STAT})
    doctor.state = one_pod()
    row = doctor.row("memory")
    assert (row.status, row.sandbox) == ("warn", "shop/web")
    assert row.text == "100 % of its memory is on NUMA node 1, its vCPUs run on node 0"
    assert "migratepages 4100 1 0" in row.remedy
    for near in ("anon N0=910 N1=90\n", ""):  # less than a tenth, and unknown
        grow(doctor, {f"{POD}/memory.numa_stat": near})
        assert doctor.rows("memory") == []


@pytest.mark.parametrize(
    ("move", "words"),
    [
        (None, "memory: migrate in kata-pin's settings moves it"),
        (Memory("waiting", "0", None, 0, ""), "for new pods"),
        (Memory("near", "0", 5, 0, ""), "for new pods"),
        (Memory("moving", "0", 5, 9, ""), ""),
        (Memory("stopped", "0", 5, 9, "no memory"), ""),
    ],
)
def test_a_remedy_that_is_under_way_is_not_named(
    doctor: Doctor, move: Memory | None, words: str
) -> None:
    """What the daemon does already, or cannot do, is said elsewhere."""
    grow(doctor, {f"{POD}/memory.numa_stat": STAT})
    doctor.state = one_pod(memory=move)
    assert [words in row.remedy for row in doctor.rows("memory")] == [True] * bool(words)


@pytest.mark.root
@pytest.mark.parametrize(
    ("nodes", "mode", "expected"),
    [
        ("0", "act", ("info", "on one NUMA node only")),
        ("0-1", "observe", ("info", "mode: observe")),
        ("0-1", "act", ("ok", "NUMA nodes 0-1, at most 128 MiB per second")),
    ],
)
def test_whether_memory_can_be_moved(
    doctor: Doctor, nodes: str, mode: str, expected: tuple[str, str]
) -> None:
    """A row only with the setting; it names what is in the way."""
    doctor.write("sys/devices/system/node/has_memory", nodes)
    row = doctor.row("memory moves", memory="migrate", mode=mode)
    status, words = expected
    assert (row.status, words in row.text) == (status, True)
    assert doctor.rows("memory moves", memory="report", mode=mode) == []


@pytest.mark.parametrize(
    ("move", "text"),
    [
        (None, ""),
        (Memory("waiting", "", None, 0, ""), ""),
        (Memory("waiting", "1", None, 0, ""), "not yet examined for moves to NUMA node 1"),
        (Memory("near", "1", 0, 3 * MIB, ""), "on NUMA node 1; 3.0 MiB moved"),
        (Memory("near", "1", 2 * MIB, 0, ""), "on NUMA node 1, 2.0 MiB elsewhere; 0 moved"),
        (
            Memory("moving", "0-1", 2 * MIB, MIB, ""),
            "moving to NUMA node 0-1: 1.0 MiB moved, 2.0 MiB left",
        ),
        (
            Memory("stopped", "1", 2 * MIB, 0, "no room"),
            "2.0 MiB not on NUMA node 1: no room; 0 moved",
        ),
    ],
)
def test_moves_in_words(move: Memory | None, text: str) -> None:
    """As `show SANDBOX` and `show --memory` have it."""
    assert phrases.memory_move(move).plain == text
