"""Which memory moves, where to: only a guest's, only to nodes with room, never against a policy."""

from __future__ import annotations

from dataclasses import replace
from errno import EACCES, EBUSY, EFAULT, ENOENT, ENOMEM

import pytest

from kata_pin.model.cpuset import EMPTY, CpuSet
from kata_pin.model.measured.memory import Extent, FreeMemory, Placed
from kata_pin.model.placement import Desired, Placement, SandboxMask
from kata_pin.model.thread import Thread
from kata_pin.policy import memory
from kata_pin.policy.memory import Aim, Region, choose_node, near_nodes, pages_in, plan_moves
from tests.support import world

MIB = 1 << 20
ZERO, ONE, BOTH = CpuSet([0]), CpuSet([1]), CpuSet([0, 1])
GUEST = Placed(0x1000, "default", {1: 1024}, 4096)
EXTENT = Extent(0x1000, 0x1000 + 8 * MIB, shared=False)
TOPOLOGY = world.smt_host()


def planned(*placed: Placed, near: CpuSet = ZERO, allowed: CpuSet = BOTH) -> memory.MovePlan:
    """Return the plan for mappings that all have the same place."""
    return plan_moves(placed, [EXTENT], near, allowed)


def test_far_memory_moves() -> None:
    """A region has all that is needed to move it."""
    found = planned(replaced(pages={0: 24, 1: 1000}))
    (region,) = found.regions
    assert region == Region(0x1000, EXTENT.end, 4096, False, False, ZERO, 1000 * 4096)
    assert (found.total, found.remote, found.bound) == (1024 * 4096, 1000 * 4096, 0)
    assert found.sources == ONE
    assert found.worthwhile


def replaced(**changes: object) -> Placed:
    return GUEST._replace(**changes)  # type: ignore[arg-type]


def test_a_little_far_memory_is_left() -> None:
    """Below a tenth no move begins; at a tenth it does."""
    assert not planned(replaced(pages={0: 922, 1: 102})).worthwhile
    assert planned(replaced(pages={0: 918, 1: 102})).worthwhile
    assert not planned(replaced(pages={0: 1024})).worthwhile
    assert not memory.MovePlan().worthwhile
    assert planned(replaced(pages={0: 1024, 1: 10})).negligible
    assert not planned(replaced(pages={0: 1000, 1: 24})).negligible


@pytest.mark.parametrize(
    ("file", "huge", "shared", "moves"),
    [
        ("", False, False, True),
        ("", False, True, False),
        ("/memfd:memory-backend-memfd\\040(deleted)", False, True, True),
        ("/dev/shm/dimm1", False, True, True),
        ("/dev/zero\\040(deleted)", False, True, True),
        ("/anon_hugepage\\040(deleted)", True, False, True),
        ("/dev/hugepages/kata", True, True, True),
        ("/usr/lib/libc.so.6", False, False, False),
        ("/opt/kata/share/kata-containers/kata.image", False, True, False),
        ("/run/kata/dev/shm/file", False, True, False),
    ],
)
def test_only_memory_of_a_guest(file: str, huge: bool, shared: bool, moves: bool) -> None:
    """Libraries and Kata's image belong to everybody who maps them."""
    extent = EXTENT._replace(shared=shared)
    found = plan_moves([replaced(file=file, huge=huge)], [extent], ZERO, BOTH)
    assert bool(found.regions) == moves
    assert [one.shared for one in found.regions] == [shared] * moves
    assert found.total == 1024 * 4096 * moves, "what never moves counts nowhere"


def test_largest_first_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many mappings those with most remote memory are moved."""
    monkeypatch.setattr(memory, "MAX_REGIONS", 2)
    placed = [replaced(start=0x1000 * one, pages={1: one}) for one in (1, 3, 2)]
    extents = [Extent(0x1000 * one, 0x1000 * one + 8 * MIB, shared=False) for one in (1, 2, 3)]
    found = plan_moves(placed, extents, ZERO, BOTH)
    assert [one.remote for one in found.regions] == [3 * 4096, 2 * 4096]
    assert found.remote == 5 * 4096


def test_a_mapping_that_changed_meanwhile() -> None:
    """numa_maps and maps are read one after the other; and its end is cut to whole pages."""
    assert planned(replaced(start=0x2000)).regions == ()
    huge = replaced(start=0x1000, page_size=2 * MIB, huge=True, file="/anon_hugepage")
    extent = EXTENT._replace(end=EXTENT.start + 5 * MIB)
    (region,) = plan_moves([huge], [extent], ZERO, BOTH).regions
    assert (region.end - region.start) == 4 * MIB


@pytest.mark.parametrize(
    ("policy", "near", "nodes"),
    [
        ("default", ZERO, ZERO),
        ("local", ZERO, ZERO),
        ("prefer:1", ZERO, ZERO),
        ("prefer(many):1", ZERO, ZERO),
        ("bind:1", ZERO, EMPTY),
        ("bind=static:1", ZERO, EMPTY),
        ("bind:0-1", ZERO, ZERO),
        ("bind=static|balancing:0", BOTH - ONE, ZERO),
        ("interleave:0-1", ZERO, EMPTY),
        ("weightedinterleave:0-1", ZERO, EMPTY),
    ],
)
def test_what_the_vmm_bound_stays(policy: str, near: CpuSet, nodes: CpuSet) -> None:
    """A preference is none of its own; `bind` and `interleave` are."""
    found = planned(replaced(policy=policy), near=near)
    assert [one.nodes for one in found.regions] == ([nodes] if nodes else [])
    assert (found.bound, found.policy) == ((0, "") if nodes else (1024 * 4096, policy))


def test_nodes_that_the_process_may_not_use() -> None:
    """Of two near nodes only the one that its cpuset allows is an aim."""
    (region,) = planned(replaced(pages={2: 5}), near=BOTH, allowed=ONE).regions
    assert region.nodes == ONE


FREE = FreeMemory(1000 * MIB, 500 * MIB, {2 * MIB: 3})
REGION = Region(0, 8 * MIB, 4096, False, False, BOTH, 0)


def test_the_node_with_most_room() -> None:
    """A part of each node stays free; pages are limited to what is asked for, and to the room."""
    full = FREE._replace(available=40 * MIB)
    assert choose_node(REGION, {0: full, 1: FREE}, 100) == Aim(1, 100)
    assert choose_node(REGION, {0: FREE, 1: full}, 1 << 20) == Aim(0, 450 * MIB // 4096)
    assert "NUMA node 0-1 has no more free memory" in choose_node(REGION, {0: full}, 9).problem
    edge = FREE._replace(available=50 * MIB)
    assert choose_node(REGION, {0: edge}, 9).problem
    assert choose_node(REGION, {0: edge._replace(available=50 * MIB + 4096)}, 9) == Aim(0, 1)
    assert choose_node(REGION, {}, 9).problem


def test_huge_pages_come_from_the_pool() -> None:
    """Free memory does not count for them."""
    huge = REGION._replace(page_size=2 * MIB, huge=True)
    assert choose_node(huge, {0: FREE}, 9) == Aim(0, 3)
    none = choose_node(huge._replace(page_size=1 << 30), {0: FREE}, 9)
    assert "has no more free huge pages" in none.problem


def test_pages_of_a_rate() -> None:
    """At least one page, whatever its size; at most a window."""
    assert pages_in(4096, 16 * MIB, 65536) == 4096
    assert pages_in(1 << 30, 16 * MIB, 65536) == 1
    assert pages_in(4096, 1 << 40, 65536) == 65536


def test_why_pages_are_refused() -> None:
    """The commonest reason, in words."""
    assert "VFIO" in memory.why_refused({EBUSY: 5, EACCES: 2})
    assert "shared" in memory.why_refused({EBUSY: 1, EACCES: 2})
    for errno in (EFAULT, ENOENT, ENOMEM):
        assert not memory.why_refused({errno: 1}).startswith("error")
    assert memory.why_refused({5: 1}) == "error 5"
    assert memory.why_refused({})


def placement(*vcpus: tuple[Thread, bool], exclusive: str = "0-3") -> Placement:
    """Return a placement that wants vCPUs where they are."""
    desired = {
        one.key: Desired(one.key, one.task.affinity, one.task.affinity, "", paired=paired)
        for one, paired in vcpus
    }
    cpus = CpuSet.parse(exclusive)
    return Placement("pod", SandboxMask(cpus, exclusive=cpus), desired)


def test_nodes_of_paired_vcpus() -> None:
    """Unpaired ones do not count beside them; alone, as with `float`, they do."""
    near, far, wide = world.vcpu(0, on="1"), world.vcpu(1, on="5"), world.vcpu(2, on="0-7")
    both = placement((near, True), (far, True))
    assert near_nodes([near, far], both, TOPOLOGY) == BOTH
    assert near_nodes([near, wide], placement((near, True), (wide, False)), TOPOLOGY) == ZERO
    assert near_nodes([far], placement((far, False)), TOPOLOGY) == ONE


def test_before_vcpus_are_placed() -> None:
    """Released, unmanaged, no exclusive pCPUs, no decision: none; off its place: unknown."""
    vcpu = world.vcpu(0, on="1")
    good = placement((vcpu, True))
    off = replace(good.desired[vcpu.key], applied=CpuSet([2]))
    released = replace(good.desired[vcpu.key], release=True)
    for case in (
        replace(good, desired={vcpu.key: released}),
        replace(good, desired={}),
        placement((vcpu, True), exclusive=""),
        None,
    ):
        assert near_nodes([vcpu], case, TOPOLOGY) == EMPTY
    assert near_nodes([vcpu], replace(good, desired={vcpu.key: off}), TOPOLOGY) is None
