"""The choice of the policy `topology`."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kata_pin.base.cpuset import EMPTY
from kata_pin.options.allocation.accumulator import Machine
from kata_pin.options.allocation.policies import KEYS, ZoneChoice
from kata_pin.options.allocation.policy import AllocError
from tests.support.machines import Shape, host
from tests.support.world import cpus

HOST = host(Shape(uppers=2, lowers=2, llcs=2, cores=2).cpus())
"""32 CPUs: 2 packages of 2 nodes of 2 caches of 2 cores; siblings are n and n + 16.

Caches are 0-1, 2-3, ... with their siblings, nodes 0-3, 4-7, 8-11, 12-15 with theirs.
"""

CHOICE = ZoneChoice(HOST, Machine.of(HOST))


@pytest.mark.parametrize(
    ("free", "wanted", "beside", "expected"),
    [
        ("0-31", 2, "", "0,16"),
        ("0-31", 4, "", "0-1,16-17"),
        ("0-31", 8, "", "0-3,16-19"),
        ("0-31", 12, "", "0-5,16-21"),
        ("2-31", 2, "", "2,18"),
        ("1-31", 4, "", "2-3,18-19"),
        ("0-9,11-25,27-31", 2, "10,26", "11,27"),
        ("9,11,27", 1, "10,26", "11"),
        ("0-9,12-25,28-31", 2, "10,26", "8,24"),
        ("0-7,12-23,28-31", 2, "10,26", "12,28"),
        ("0-7,16-23", 2, "10,26", "0,16"),
        ("0,2,4,6,1,17", 2, "", "1,17"),
        ("0-3,7,23", 2, "", "7,23"),
        ("0,16,4-7", 3, "", "4-6"),
        ("2,18,20", 1, "", "20"),
        ("2,4-5,12,16-19,21,23,29,31", 4, "", "4-5,21,23"),
    ],
    ids=[
        "whole core",
        "whole cache",
        "whole node",
        "a node and the nearest",
        "tightest fit",
        "a cache that fits, not one in part use",
        "beside the pod in its cache",
        "its cache before a tighter fit",
        "beside the pod on its node",
        "beside the pod in its package",
        "elsewhere",
        "whole core before narrow zone",
        "whole core before lower zone",
        "one node before two",
        "one thread splits no whole core",
        "tightest node of the host",
    ],
)
def test_choose(free: str, wanted: int, beside: str, expected: str) -> None:
    """The narrowest zone that serves, near to the pod, with whole cores, fitting tightly."""
    assert CHOICE.choose(cpus(free), wanted, cpus(beside)) == cpus(expected)


def test_too_few() -> None:
    """No zone, so not even the host, has enough."""
    with pytest.raises(AllocError, match="requested=4, available=3"):
        CHOICE.choose(cpus("1-3"), 4, EMPTY)
    assert CHOICE.choose(cpus("1-3"), 0, EMPTY) == EMPTY
    assert CHOICE.candidates(cpus("1-3"), 4, EMPTY) == ()


def test_candidates_are_in_the_order_of_their_keys() -> None:
    """What is shown is what was compared: sorted by the keys, the first one is taken."""
    free = cpus("0-5,8,16-31")
    told = CHOICE.candidates(free, 4, cpus("8"))
    keys = [tuple(value for _, value in one.keys) for one in told]
    assert keys == sorted(keys)
    assert all(tuple(name for name, _ in one.keys) == KEYS for one in told)
    assert told[0].taken == CHOICE.choose(free, 4, cpus("8"))
    assert all(not one.taken for one in told[1:])
    assert all(one.cpus <= free and len(one.cpus) >= 4 for one in told)


def test_whole_cores_before_a_narrow_zone() -> None:
    """Two whole cores of two caches rather than one and two halves of one cache."""
    wide = host(Shape(llcs=2, cores=4).cpus())
    choice = ZoneChoice(wide, Machine.of(wide))
    free = cpus("0,8,1,2,4,12")
    assert wide.llcs[0] == cpus("0-3,8-11")
    assert choice.choose(free, 4, EMPTY) == cpus("0,4,8,12")


def test_rest_of_a_large_request_is_on_the_nearest_node() -> None:
    """The kernel's distances decide where a request goes on that no node can serve."""
    rows: dict[int, tuple[int, ...]] = {
        0: (10, 30, 30, 11), 1: (30, 10, 11, 30), 2: (30, 11, 10, 20), 3: (11, 30, 20, 10),
    }  # fmt: skip
    far = replace(HOST, distances=rows)
    choice = ZoneChoice(far, Machine.of(far))
    assert choice.choose(cpus("0-31"), 18, EMPTY) == cpus("0-3,16-19,12-15,28-31,8,24")


def test_a_zone_is_told_once() -> None:
    """A cache that is a whole node and package is one candidate."""
    plain = host(Shape(uppers=2, cores=4).cpus())
    told = ZoneChoice(plain, Machine.of(plain)).candidates(cpus("0-15"), 2, EMPTY)
    assert [one.level for one in told] == ["llc", "llc", "host"]


def test_fewest_nodes() -> None:
    """A request above every node spans as few nodes as possible, the fullest first."""
    taken = CHOICE.choose(cpus("0-1,4-6,8-11,24-27"), 10, EMPTY)
    assert taken >= cpus("8-11,24-27")
    assert len([node for node in HOST.nodes.values() if node & taken]) == 2
