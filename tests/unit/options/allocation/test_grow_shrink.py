"""Growing by the nearest CPUs, shrinking where that breaks least."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kata_pin.base.cpuset import EMPTY
from kata_pin.options.allocation.accumulator import Machine
from kata_pin.options.allocation.choice import apartness, grow, layers, nodes_by_distance, shrink
from kata_pin.options.allocation.policy import AllocError
from tests.support.machines import Shape, host
from tests.support.world import cpus

HOST = host(Shape(uppers=2, lowers=2, llcs=2, cores=2).cpus())
"""32 CPUs: 2 packages of 2 nodes of 2 caches of 2 cores; siblings are n and n + 16.

Caches are 0-1, 2-3, ... with their siblings, nodes 0-3, 4-7, 8-11, 12-15 with theirs.
"""

MACHINE = Machine.of(HOST)


@pytest.mark.parametrize(
    ("held", "free", "more", "expected"),
    [
        ("0", "1-31", 1, "0,16"),
        ("0", "1-15,17-31", 2, "0-1,17"),
        ("0,16", "2-15,18-31", 2, "0,2,16,18"),
        ("0,16", "4-15,20-31", 2, "0,4,16,20"),
        ("0,16", "8-15,24-31", 2, "0,8,16,24"),
        ("0,16", "3,8,24", 2, "0,3,8,16"),
        ("", "1,17,5", 2, "1,17"),
    ],
    ids=["sibling", "cache", "node", "package", "other package", "piecemeal", "from nothing"],
)
def test_grow(held: str, free: str, more: int, expected: str) -> None:
    """What is held stays; the nearest free CPUs come to it."""
    assert grow(MACHINE, HOST, cpus(held), cpus(free), more) == cpus(expected)


def test_grow_where_packages_lie_in_nodes() -> None:
    """The same package comes before the rest of the node."""
    small = host(
        Shape(uppers=2, lowers=2, llcs=1, cores=2, threads=1, packages_in_nodes=True).cpus()
    )
    machine = Machine.of(small)
    assert machine.nodes_first
    assert small.packages[1] == cpus("2-3")
    assert grow(machine, small, cpus("2"), cpus("0-1,3-7"), 1) == cpus("2-3")
    one_cache = host([replace(cpu, llc=0) for cpu in small.cpus if cpu.node == 0])
    assert grow(Machine.of(one_cache), one_cache, cpus("2"), cpus("0-1"), 1) == cpus("0,2")


def test_layers_widen() -> None:
    """Each layer holds what the one before it held: core, cache, then the smaller unit first."""
    nested = host(Shape(uppers=2, lowers=2, cores=1, packages_in_nodes=True, threads=1).cpus())
    found = list(layers(Machine.of(nested), nested, cpus("1")))
    assert found[:4] == [cpus("1"), cpus("1"), cpus("1"), cpus("0-1")]
    plain = list(layers(MACHINE, HOST, cpus("0")))
    assert [len(layer) for layer in plain[:4]] == [2, 4, 8, 16]


def test_grow_too_far() -> None:
    """More than there is: an error, what is held does not count as free."""
    with pytest.raises(AllocError):
        grow(MACHINE, HOST, cpus("0"), cpus("0-1"), 2)


@pytest.mark.parametrize(
    ("held", "wanted", "expected"),
    [
        ("0,16,1", 2, "0,16"),
        ("0,16,1,17", 2, "0,16"),
        ("0,1,16,17", 3, "0,1,16"),
        ("0,16,8", 2, "0,16"),
        ("0,8,24,9,25", 4, "8,9,24,25"),
        ("0-1,16-17,2,18", 4, "0-1,16-17"),
        ("0,16,2-3,18-19", 4, "2-3,18-19"),
        ("0-1,16-17,4", 4, "0-1,16-17"),
        ("3", 0, ""),
        ("3,5", 2, "3,5"),
    ],
)
def test_shrink(held: str, wanted: int, expected: str) -> None:
    """What stands alone goes first, by node, cache and core; whole cores stay whole."""
    assert shrink(HOST, cpus(held), wanted) == cpus(expected)


def test_nodes_follow_distances() -> None:
    """The kernel's distances say which node is next; without them the numbers do."""
    assert nodes_by_distance(HOST, cpus("12")) == [0, 1, 2, 3]
    rows: dict[int, tuple[int, ...]] = {
        0: (10, 11, 30, 20),
        1: (11, 10, 20, 30),
        2: (30, 20, 10, 11),
        3: (20, 30, 11, 10),
    }
    measured = replace(HOST, distances=rows)
    assert nodes_by_distance(measured, cpus("12")) == [3, 2, 0, 1]
    held = cpus("12-15,28-31")
    free = cpus("0-7,16-23")
    assert grow(Machine.of(measured), measured, held, free, 1) - held == cpus("0")
    assert grow(Machine.of(measured), measured, cpus("8-11,24-27"), free, 1) >= cpus("4")


@pytest.mark.parametrize(
    ("here", "around", "expected"),
    [
        ("1", "0", (0, 0)),
        ("2", "0", (0, 1)),
        ("4", "0", (1, 1)),
        ("8", "0", (2, 1)),
        ("8", "", (0, 0)),
    ],
)
def test_apartness(here: str, around: str, expected: tuple[int, int]) -> None:
    """Same cache, same node, same package, elsewhere; nothing to be apart from."""
    assert apartness(MACHINE, cpus(here).bits, cpus(around).bits) == expected


def test_empty_grow() -> None:
    """Nothing more is nothing more."""
    assert grow(MACHINE, HOST, cpus("5"), EMPTY, 0) == cpus("5")
