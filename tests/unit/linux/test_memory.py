"""Memory by NUMA node and throttling, from what kernels 6.1, 6.12 and 6.18 wrote."""

from __future__ import annotations

import pytest

from kata_pin.base.counters import Extent, NodeBytes, Placed, Throttling
from kata_pin.base.errors import ParseError
from kata_pin.linux.cgroups import parse_cpu_stat
from kata_pin.linux.memory import (
    parse_extents,
    parse_hugetlb,
    parse_node_meminfo,
    parse_numa_maps,
    parse_numa_stat,
    parse_placed,
)
from tests.support.recordings import DATA

KERNEL = DATA / "kernel"
MIB = 1024 * 1024


def test_version_2_counts_bytes() -> None:
    """A guest's memory is anonymous or shared; the page cache is left out."""
    found = parse_numa_stat((KERNEL / "6.1/pod-memory.numa_stat").read_bytes(), 4096)
    assert found == {0: NodeBytes(4096, 0), 1: NodeBytes(40 * MIB + 49152, 0)}


def test_version_1_counts_pages_of_the_whole_subtree() -> None:
    """Kata's VMM may be in a cgroup below."""
    found = parse_numa_stat((KERNEL / "6.18/root-memory.numa_stat").read_bytes(), 4096)
    assert found == {0: NodeBytes((435218 + 5991) * 4096, 0)}


def test_transparent_huge_pages_of_version_2() -> None:
    """Both kinds, anonymous and shared."""
    data = b"anon N0=8 N1=0\nshmem N0=4 N1=2\nanon_thp N0=6 N1=0\nshmem_thp N0=1 N1=2\n"
    assert parse_numa_stat(data, 4096) == {0: NodeBytes(12, 7), 1: NodeBytes(2, 2)}


def test_huge_pages_of_a_cgroup() -> None:
    """Version 2 as recorded; version 1 has a line for the subtree, by its source."""
    recorded = (KERNEL / "6.12/pod-hugetlb.2MB.numa_stat").read_bytes()
    assert parse_hugetlb(recorded) == {0: 0, 1: 6 * MIB}
    v1 = b"total=0 N0=0 N1=0\nhierarchical_total=4194304 N0=4194304 N1=0\n"
    assert parse_hugetlb(v1) == {0: 4 * MIB, 1: 0}
    with pytest.raises(ParseError):
        parse_hugetlb(b"N0=1\n")


def test_numa_maps_of_two_nodes() -> None:
    """Pages count by the size that their mapping has."""
    data = (KERNEL / "6.12/task-numa_maps").read_bytes()
    found = parse_numa_maps(data)
    assert set(found) == {0, 1}
    assert sum(one.total for one in found.values()) % 4096 == 0
    first = b"00400000 default file=/bin/busybox dirty=1 mapmax=4 active=0 N1=1 kernelpagesize_kB=4"
    assert data.startswith(first)


def test_huge_pages_of_numa_maps() -> None:
    """Two pages of hugetlbfs have 2 MiB each."""
    found = parse_numa_maps((KERNEL / "6.18/task-numa_maps").read_bytes())
    assert found[0].huge == 4 * MIB
    assert found[0].total > found[0].huge


def test_a_path_cannot_pass_for_pages() -> None:
    """The kernel escapes blanks and equals signs; a path is one word."""
    data = b"7f00 default file=/tmp/a\\040N1\\0755 mapped=1 N0=1 kernelpagesize_kB=4\n"
    assert parse_numa_maps(data) == {0: NodeBytes(4096, 0)}


@pytest.mark.parametrize(
    "data", [b"7f00 default N0=1\n", b"7f00 default N0=x kernelpagesize_kB=4\n"]
)
def test_other_numa_maps_are_refused(data: bytes) -> None:
    """Nothing is guessed."""
    with pytest.raises(ParseError):
        parse_numa_maps(data)


def test_mappings_with_their_policy() -> None:
    """What decides whether a mapping moves: start, policy, pages, file, hugetlbfs."""
    data = (
        b"7f00 bind=static:1 file=/memfd:ram0\\040(deleted) dirty=9 N1=9 kernelpagesize_kB=4\n"
        b"7f80 prefer (many):0-1 anon=3 N0=3 kernelpagesize_kB=4\n"
        b"7fc0 weighted interleave:0-1 huge dirty=2 N0=1 N1=1 kernelpagesize_kB=2048\n"
        b"7ff0 default\n"
        b"7ff8 local file=" + b"x" * 999 + b" N0=1 kernelpagesize_kB=4\n"
    )
    memfd, many, huge, long = parse_placed(data)
    assert memfd == Placed(0x7F00, "bind=static:1", {1: 9}, 4096, "/memfd:ram0\\040(deleted)")
    assert many == Placed(0x7F80, "prefer(many):0-1", {0: 3}, 4096)
    assert huge == Placed(0x7FC0, "weightedinterleave:0-1", {0: 1, 1: 1}, 2 << 20, huge=True)
    assert long.file == "x" * 256


@pytest.mark.parametrize("data", [b"7g00 default N0=1 kernelpagesize_kB=4\n", b"7f00 N0=1 N0=1\n"])
def test_other_mappings_are_refused(data: bytes) -> None:
    """An address that is none; pages of no size."""
    with pytest.raises(ParseError):
        parse_placed(data)


def test_where_mappings_end() -> None:
    """As this kernel writes them, with a path or without."""
    data = (
        b"7f2a40000000-7f2a80000000 rw-s 00000000 00:01 1057   /memfd:ram0 (deleted)\n"
        b"7ffd1000-7ffd3000 r-xp 00000000 00:00 0 \n"
    )
    assert parse_extents(data) == [
        Extent(0x7F2A40000000, 0x7F2A80000000, shared=True),
        Extent(0x7FFD1000, 0x7FFD3000, shared=False),
    ]
    recorded = parse_extents((KERNEL / "6.18/task-maps").read_bytes())
    assert len(recorded) > 10
    assert all(one.end - one.start >= 4096 for one in recorded)
    with pytest.raises(ParseError):
        parse_extents(b"7ffd1000 rw-p\n")


def test_memory_of_a_node() -> None:
    """Lines in kB; those that count pages are passed over."""
    data = b"Node 1 MemTotal:    1000 kB\nNode 1 MemFree:  10 kB\nNode 1 HugePages_Free:  3\n"
    recorded = parse_node_meminfo((KERNEL / "6.18/node0-meminfo").read_bytes())
    assert recorded["MemTotal"] == 19958804480
    assert 0 < recorded["Inactive(file)"] < recorded["MemTotal"]
    assert parse_node_meminfo(data) == {"MemTotal": 1024000, "MemFree": 10240}
    with pytest.raises(ParseError):
        parse_node_meminfo(b"MemTotal: 5 kB\n")


@pytest.mark.parametrize("data", [b"", b"anon N0=x\n", b"file N0=1\n", b"anon N0=-1\n"])
def test_other_numa_stats_are_refused(data: bytes) -> None:
    """A cgroup without memory accounting has no such file; an odd one is not taken for 0."""
    with pytest.raises(ParseError):
        parse_numa_stat(data, 4096)


def test_throttling_of_both_versions() -> None:
    """Version 1 counts nanoseconds, version 2 microseconds."""
    v2 = parse_cpu_stat((KERNEL / "6.12/pod-cpu.stat").read_bytes())
    assert v2 == Throttling(54, 9705387000)
    v1 = parse_cpu_stat(b"nr_periods 9\nnr_throttled 3\nthrottled_time 5000\n")
    assert v1 == Throttling(3, 5000)


def test_a_cgroup_without_a_quota_s_counters() -> None:
    """Without the cpu controller version 2 has times only."""
    assert parse_cpu_stat(b"usage_usec 1\nuser_usec 1\nsystem_usec 0\n") is None
    with pytest.raises(ParseError):
        parse_cpu_stat(b"nr_throttled x\n")
