"""The host's topology from sysfs trees, whole and damaged."""

from __future__ import annotations

from pathlib import Path

import pytest

from kata_pin.base.cpuset import CpuSet, HostTopology
from kata_pin.base.errors import HostError, ParseError
from kata_pin.linux.topology import online, read_topology
from tests.support.hosttree import grow, listing

CPU = "sys/devices/system/cpu"


def of(folder: Path, name: str) -> HostTopology:
    return read_topology(grow(folder, listing(name)))


def lists(groups: dict[int, CpuSet]) -> dict[int, str]:
    return {number: str(cpus) for number, cpus in groups.items()}


def test_two_sockets_with_threads(tmp_path: Path) -> None:
    """Packages, nodes, caches and cores of the lab's machine are what its lscpu says."""
    host = of(tmp_path, "two-sockets-smt")
    assert str(host.online) == str(host.present) == "0-15"
    assert lists(host.nodes) == lists(host.packages) == {0: "0-7", 1: "8-15"}
    assert lists(host.llcs) == {0: "0-7", 8: "8-15"}
    assert lists(host.cores) == {n: f"{n}-{n + 1}" for n in range(0, 16, 2)}
    assert [cpu.thread for cpu in host.cpus] == [0, 1] * 8
    assert host.distances == {0: (10, 20), 1: (20, 10)}
    assert not host.isolated
    assert not host.nohz_full
    assert {cpu.kind for cpu in host.cpus} == {""}


def test_core_types_of_a_hybrid_part(tmp_path: Path) -> None:
    """Each CPU of a hybrid part says its type; a level 2 cache is never taken for the last one."""
    host = of(tmp_path, "hybrid")
    assert [cpu.kind for cpu in host.cpus] == ["performance"] * 8 + ["efficient"] * 8
    assert lists(host.llcs) == {0: "0-15"}
    assert str(host.siblings(1)) == "0-1"
    assert str(host.siblings(12)) == "12"


def test_no_numa_and_no_caches(tmp_path: Path) -> None:
    """Without nodes all is node 0; without a level 3 cache the package stands for it."""
    host = of(tmp_path, "no-numa")
    assert lists(host.nodes) == {0: "0-3"}
    assert host.distances == {}
    assert lists(host.packages) == {0: "0-1", 1: "2-3"}
    assert lists(host.llcs) == {0: "0-1", 2: "2-3"}


def test_sparse_numbers_and_offline_cpus(tmp_path: Path) -> None:
    """Offline CPUs are present but have no place; sparse nodes keep their numbers and rows."""
    host = of(tmp_path, "sparse-offline")
    assert str(host.online) == "0,2-3,8,11"
    assert str(host.present) == "0-11"
    assert [cpu.cpu for cpu in host.cpus] == [0, 2, 3, 8, 11]
    assert host.get(1) is None
    assert lists(host.nodes) == {0: "0,2-3", 2: "8,11"}
    assert host.distances == {0: (10, 21, 17), 2: (21, 10, 28), 3: (17, 28, 10)}
    assert lists(host.packages) == {0: "0,2-3", 3: "8,11"}, "package -1 means unknown"
    assert [(cpu.core, cpu.thread) for cpu in host.cpus] == [
        (0, 0),
        (2, 0),
        (2, 1),
        (8, 0),
        (11, 0),
    ]


def test_several_caches_in_a_package(tmp_path: Path) -> None:
    """Topology order goes cache by cache, core by core, though siblings are eight apart."""
    host = of(tmp_path, "several-llcs")
    assert lists(host.llcs) == {0: "0-3,8-11", 4: "4-7,12-15"}
    assert host.in_order(range(16)) == [0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15]
    assert str(host.isolated) == "4-7,12-15"
    assert str(host.nohz_full) == "6-7"


def test_isolated_partitions_count_as_isolated(tmp_path: Path) -> None:
    """CPUs that a cgroup's partition isolates now join those that were isolated at boot."""
    tree = {**listing("several-llcs"), "sys/fs/cgroup/cpuset.cpus.isolated": "2-3"}
    assert str(read_topology(grow(tmp_path, tree)).isolated) == "2-7,12-15"
    empty = {**listing("single-cpu"), "sys/fs/cgroup/cpuset.cpus.isolated": ""}
    assert not read_topology(grow(tmp_path / "none", empty)).isolated


def test_single_cpu(tmp_path: Path) -> None:
    """A host with one CPU has one of everything."""
    host = of(tmp_path, "single-cpu")
    assert len(host.cpus) == 1
    assert lists(host.nodes) == lists(host.llcs) == lists(host.cores) == {0: "0"}


def test_captured_machine(tmp_path: Path) -> None:
    """What scripts/capture-host takes from a real machine is enough."""
    host = of(tmp_path, "developers-machine")
    assert [cpu.cpu for cpu in host.cpus] == [0, 1]
    assert lists(host.llcs) == {0: "0-1"}
    assert host.distances == {0: (10,)}


def test_shared_level_2_cache_is_no_last_level(tmp_path: Path) -> None:
    """Without level 3 the package counts, though its CPUs share caches two by two."""
    files = listing("hybrid")
    files = {name: text for name, text in files.items() if "index3" not in name}
    assert lists(read_topology(grow(tmp_path, files)).llcs) == {0: "0-15"}


def test_dies_stand_for_missing_caches(tmp_path: Path) -> None:
    """Two dies in a package without cache files: each die counts as one cache."""
    files = listing("no-numa")
    for cpu in range(4):
        files[f"{CPU}/cpu{cpu}/topology/package_cpus_list"] = "0-3"
        files[f"{CPU}/cpu{cpu}/topology/die_cpus_list"] = "0-1" if cpu < 2 else "2-3"
    assert lists(read_topology(grow(tmp_path, files)).llcs) == {0: "0-1", 2: "2-3"}


def test_bare_online_list(tmp_path: Path) -> None:
    """A list of online CPUs alone is a topology of single cores."""
    host = read_topology(grow(tmp_path, {f"{CPU}/online": "0-1,4"}))
    assert [(cpu.cpu, cpu.core, cpu.llc) for cpu in host.cpus] == [(0, 0, 0), (1, 1, 1), (4, 4, 4)]


def test_instruction_cache_is_no_last_level(tmp_path: Path) -> None:
    """A cache for instructions only never counts."""
    files = listing("single-cpu") | {
        f"{CPU}/cpu0/cache/index9/level": "4",
        f"{CPU}/cpu0/cache/index9/type": "Instruction",
        f"{CPU}/cpu0/cache/index9/shared_cpu_list": "garbage, never read",
    }
    assert lists(read_topology(grow(tmp_path, files)).llcs) == {0: "0"}


@pytest.mark.parametrize(
    ("file", "content"),
    [
        pytest.param(f"{CPU}/online", "0-3,x", id="online list"),
        pytest.param(f"{CPU}/online", "0-99999999999", id="huge range"),
        pytest.param(f"{CPU}/isolated", "3-1", id="reversed range"),
        pytest.param(f"{CPU}/cpu2/topology/physical_package_id", "zero", id="package"),
        pytest.param(f"{CPU}/cpu2/topology/core_cpus_list", "4-5", id="siblings of another CPU"),
        pytest.param(f"{CPU}/cpu3/cache/index3/level", "\ufffd", id="cache level"),
        pytest.param(f"{CPU}/cpu3/cache/index3/shared_cpu_list", "0-", id="cache list"),
        pytest.param("sys/devices/system/node/node1/cpulist", "8-15;", id="node list"),
        pytest.param("sys/devices/system/node/node1/distance", "20 ten", id="distances"),
        pytest.param("sys/devices/cpu_core/cpus", "all", id="core type"),
    ],
)
def test_garbage_names_the_file(tmp_path: Path, file: str, content: str) -> None:
    """A damaged file is a ParseError that says which file."""
    root = grow(tmp_path, listing("two-sockets-smt") | {file: content})
    with pytest.raises(ParseError) as caught:
        read_topology(root)
    assert caught.value.source.endswith(file)


def test_no_sysfs(tmp_path: Path) -> None:
    """Without a list of online CPUs there is no topology, and the error names the file."""
    root = grow(tmp_path, {})
    with pytest.raises(HostError, match="cpu/online: No such file"):
        online(root)
