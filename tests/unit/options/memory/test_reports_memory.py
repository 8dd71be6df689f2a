"""Memory by NUMA node beside the vCPUs' nodes: from cgroups, and from what a process has mapped."""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from errno import EPERM
from pathlib import Path

import pytest
from msgspec.structs import replace

from kata_pin.base.config.tree import Config
from kata_pin.base.cpuset import CpuSet
from kata_pin.base.documents.state import Memory, State
from kata_pin.base.settings import MemoryMode
from kata_pin.base.values import Mode
from kata_pin.cli.render import phrases
from kata_pin.linux.files import HOST, HostRoot
from kata_pin.options.memory.report import memory, memory_moves, remote_memory, vcpu_nodes
from tests.support.hosttree import grow
from tests.support.recordings import DATA
from tests.unit.cli import documents as docs

V2 = "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw"
V1 = "32 31 0:29 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"
POD = "kubepods/pod1/p1"
MIB = 1024 * 1024
STAT = (DATA / "kernel/6.12/pod-memory.numa_stat").read_text()
HUGE = (DATA / "kernel/6.12/pod-hugetlb.2MB.numa_stat").read_text()


def tree(folder: Path, files: Mapping[str, str], *, mount: str = V2, cgroup: str = "") -> HostRoot:
    """Return a host with a VMM 4100 in a cgroup, and files below /sys/fs/cgroup."""
    return grow(
        folder,
        {
            "proc/self/mountinfo": mount,
            "proc/4100/task/4100/cgroup": cgroup or f"0::/{POD}",
            **{f"sys/fs/cgroup/{name}": text for name, text in files.items()},
        },
    )


def one_pod(**fields: object) -> State:
    """Return a state of 16 pCPUs on two nodes: the vCPU runs on node 0."""
    vcpu = docs.thread(4101, "vcpu", "0-1", vcpu=0)
    return docs.state(docs.sandbox("shop/web", "0-1", vcpu, **fields))


def test_the_cgroup_s_memory_without_page_cache(tmp_path: Path) -> None:
    """Nearly all of the recorded pod is on node 1, the vCPU on node 0; huge pages count too."""
    root = tree(tmp_path, {f"{POD}/memory.numa_stat": STAT, f"{POD}/hugetlb.2MB.numa_stat": HUGE})
    (found,) = memory(one_pod(), exact=False, root=root).sandboxes
    assert (found.source, found.problem, found.vcpu_nodes) == ("cgroup", "", "0")
    assert found.cgroup.endswith(POD)
    assert {one.node: (one.bytes, one.huge_bytes) for one in found.nodes} == {
        0: (16384, 0),
        1: (1064960 + 35508224 + 6 * MIB, 6 * MIB),
    }
    assert found.total_bytes == sum(one.bytes for one in found.nodes)
    assert found.remote_bytes == found.nodes[1].bytes
    assert found.remote_percent == pytest.approx(99.96)


def test_version_1_counts_pages(tmp_path: Path) -> None:
    """Of the cgroup and those below it."""
    stat = (DATA / "kernel/6.18/root-memory.numa_stat").read_text()
    root = tree(tmp_path, {"memory/p1/memory.numa_stat": stat}, mount=V1, cgroup="4:memory:/p1")
    (found,) = memory(one_pod(), exact=False, root=root).sandboxes
    page = os.sysconf("SC_PAGE_SIZE")
    assert found.total_bytes == (435218 + 5991) * page
    assert found.remote_percent == 0


def test_a_folder_of_threads_has_its_memory_above(tmp_path: Path) -> None:
    """The memory controller knows no threaded cgroups."""
    root = tree(tmp_path, {f"{POD}/memory.numa_stat": STAT}, cgroup=f"0::/{POD}/vcpus")
    (tmp_path / "sys/fs/cgroup" / POD / "vcpus").mkdir()
    (found,) = memory(one_pod(), exact=False, root=root).sandboxes
    assert found.total_bytes


def test_a_cgroup_of_several_sandboxes_tells_nothing_of_one(tmp_path: Path) -> None:
    """Kata's overhead cgroup on some nodes: not the sandbox's own."""
    root = tree(tmp_path, {f"{POD}/memory.numa_stat": STAT})
    state = one_pod()
    twin = replace(state.sandboxes[0], id="ee" * 32)
    both = replace(state, sandboxes=(*state.sandboxes, twin))
    for found in memory(both, exact=False, root=root).sandboxes:
        assert (found.total_bytes, found.remote_percent, found.source) == (None, None, "none")
        assert "no memory cgroup of its own; name the sandbox" in found.problem


@pytest.mark.parametrize("text", ["", "anon N0=x\n"])
def test_what_cannot_be_read_is_unknown(tmp_path: Path, text: str) -> None:
    """Never 0."""
    files = {f"{POD}/memory.numa_stat": text} if text else {f"{POD}/cgroup.procs": ""}
    (found,) = memory(one_pod(), exact=False, root=tree(tmp_path, files)).sandboxes
    assert (found.total_bytes, found.remote_bytes, found.source) == (None, None, "none")
    assert found.problem


def test_without_vcpus_nothing_is_remote(tmp_path: Path) -> None:
    """There is nothing to be far from."""
    root = tree(tmp_path, {f"{POD}/memory.numa_stat": STAT})
    state = docs.state(docs.sandbox("shop/web", "0-1"))
    (found,) = memory(state, exact=False, root=root).sandboxes
    assert found.total_bytes
    assert found.remote_percent is None
    lost = docs.state(docs.sandbox("shop/lost", "0-1", vmm=None, vmm_problem="none found"))
    (found,) = memory(lost, exact=True, root=root).sandboxes
    assert (found.pid, found.problem) == (None, "none found")


def test_nodes_of_vcpus_that_may_run_anywhere() -> None:
    """All nodes then."""
    state = docs.state(docs.sandbox("a", None, docs.thread(1, "vcpu", "0-15", vcpu=0)))
    assert vcpu_nodes(state.sandboxes[0], state) == CpuSet([0, 1])


def test_what_a_process_has_mapped() -> None:
    """A real process: this one, with 64 MiB that it wrote to."""
    with mmap.mmap(-1, 64 * MIB) as area:
        for page in range(0, 64 * MIB, 4096):
            area[page] = 1
        state = one_pod(vmm=docs.vmm(pid=os.getpid()))
        (found,) = memory(state, exact=True, root=HOST).sandboxes
    assert (found.source, found.cgroup, found.problem) == ("process", "", "")
    assert (found.total_bytes or 0) > 64 * MIB
    assert found.remote_bytes is not None


def test_a_process_that_is_gone(tmp_path: Path) -> None:
    """The cgroup's figures stay, with the reason."""
    root = tree(tmp_path, {f"{POD}/memory.numa_stat": STAT})
    state = one_pod(vmm=docs.vmm(pid=4_194_305))
    (found,) = memory(state, exact=True, root=root).sandboxes
    assert "cannot read numa_maps of process 4194305: " in found.problem


def test_doctor_warns_of_remote_memory_with_a_remedy(tmp_path: Path) -> None:
    """What is wrong, and what to type."""
    root = tree(tmp_path, {f"{POD}/memory.numa_stat": STAT})
    (found,) = memory(one_pod(), exact=False, root=root).sandboxes
    (row,) = remote_memory(found, "shop/web")
    assert (row.status, row.sandbox) == ("warn", "shop/web")
    assert row.text == "100 % of its memory is on NUMA node 1, its vCPUs run on node 0"
    assert "migratepages 4100 1 0" in row.remedy
    assert list(remote_memory(replace(found, remote_percent=9.9), "shop/web")) == []
    assert list(remote_memory(replace(found, remote_percent=None), "shop/web")) == []


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
    tmp_path: Path, move: Memory | None, words: str
) -> None:
    """What the daemon does already, or cannot do, is said elsewhere."""
    root = tree(tmp_path, {f"{POD}/memory.numa_stat": STAT})
    (found,) = memory(one_pod(memory=move), exact=False, root=root).sandboxes
    assert found.move == move
    rows = list(remote_memory(found, "web"))
    assert [words in one.remedy for one in rows] == [True] * bool(words)


@pytest.mark.parametrize(
    ("nodes", "mode", "errno", "expected"),
    [
        ("0", Mode.ACT, 0, ("info", "on one NUMA node only")),
        ("0-1", Mode.OBSERVE, 0, ("info", "mode: observe")),
        ("0-1", Mode.ACT, EPERM, ("warn", "move_pages is refused: Operation not permitted")),
        ("0-1", Mode.ACT, 0, ("ok", "NUMA nodes 0-1, at most 128 MiB per second")),
    ],
)
def test_whether_memory_can_be_moved(
    tmp_path: Path, nodes: str, mode: Mode, errno: int, expected: tuple[str, str]
) -> None:
    """A row only with the setting; it names what is in the way."""

    def probe() -> None:
        if errno:
            raise OSError(errno, os.strerror(errno))

    root = grow(tmp_path, {"sys/devices/system/node/has_memory": nodes})
    config = replace(Config(), memory=MemoryMode.MIGRATE, mode=mode)
    (row,) = memory_moves(config, root, probe)
    status, words = expected
    assert row.status == status
    assert words in row.text
    assert ("CAP_SYS_NICE" in row.remedy) == (status == "warn")
    assert not list(memory_moves(replace(config, memory=MemoryMode.REPORT), root, probe))


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
