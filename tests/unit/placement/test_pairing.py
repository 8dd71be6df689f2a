"""The order of claims on exclusive CPUs (D10)."""

from __future__ import annotations

import pytest

from kata_pin.base.cpuset import CpuSet
from kata_pin.base.sandbox import Container, GuestTopology
from kata_pin.placement.pairing import index_order
from tests.support.at_once import place
from tests.support.world import applied, exclusive, node, sandbox, shared, smt_host, vcpu, vcpus

HOST = node(smt_host())
"""Node 0: cores (0,8) (1,9) (2,10) (3,11); node 1: (4,12) (5,13) (6,14) (7,15)."""


def guest(threads: int = 1, numa: str = "", host: str = "") -> GuestTopology:
    """Return a guest: `numa` gives each vCPU's guest node by position, `host` each node's hosts.

    `host` is cpu lists of host nodes split by `/`, one a guest node.
    """
    return GuestTopology(
        threads=threads,
        numa={index: int(digit) for index, digit in enumerate(numa)},
        host_nodes={n: CpuSet.parse(text) for n, text in enumerate(host.split("/")) if text},
    )


def paired(
    containers: tuple[Container, ...],
    indexes: tuple[int, ...],
    at: GuestTopology,
    kept: dict[int, int] | None = None,
) -> dict[int, str]:
    """Return `index -> cpu list` for the vCPUs."""
    threads = vcpus(*indexes)
    keys = {one.role.vcpu: one.key for one in threads}
    registry = {keys[index]: cpu for index, cpu in (kept or {}).items()}
    found = applied(place(sandbox(*containers, guest=at), threads, HOST, kept=registry), threads)
    return {int(label.removeprefix("vcpu ")): text for label, text in found.items()}


S = shared("s", "3")


@pytest.mark.parametrize(
    ("containers", "indexes", "at", "kept", "expected"),
    [
        pytest.param(
            (exclusive("a", "1,5"),),
            (0, 1),
            guest(),
            {},
            {0: "1", 1: "5"},
            id="index: ascending over topology order",
        ),
        pytest.param(
            (exclusive("a", "1,5"),),
            (0, 1),
            guest(numa="10", host="0/1"),
            {},
            {0: "5", 1: "1"},
            id="NUMA before index",
        ),
        pytest.param(
            (exclusive("a", "1,5"),),
            (0, 1),
            guest(numa="10", host="0/1"),
            {0: 1},
            {0: "1", 1: "5"},
            id="kept before NUMA",
        ),
        pytest.param(
            (exclusive("a", "1-2"), exclusive("b", "5-6")),
            (0, 1, 2, 3),
            guest(numa="0101", host="0/1"),
            {},
            {0: "1", 1: "5", 2: "2", 3: "6"},
            id="NUMA before container contiguity",
        ),
        pytest.param(
            (exclusive("a", "1-2,5"),),
            (0, 1, 2),
            guest(numa="111", host="0/1"),
            {},
            {0: "5", 1: "1", 2: "2"},
            id="NUMA as far as it goes, the rest by index",
        ),
        pytest.param(
            (exclusive("a", "1,5"),),
            (0, 1),
            guest(numa="00", host=""),
            {},
            {0: "1", 1: "5"},
            id="an unbound guest node says nothing",
        ),
        pytest.param(
            (exclusive("a", "1,5"),),
            (0, 1),
            guest(numa="01", host="0-1/0"),
            {},
            {0: "5", 1: "1"},
            id="the narrowest binding is served first",
        ),
        pytest.param(
            (exclusive("a", "4-5,12-13"), S),
            (0, 1, 2, 3, 4),
            guest(threads=2),
            {},
            {0: "3", 1: "5", 2: "4", 3: "12", 4: "13"},
            id="siblings before index: guest core (2,3) on host core (4,12)",
        ),
        pytest.param(
            (exclusive("a", "4-5"), exclusive("b", "12-13")),
            (0, 1, 2, 3),
            guest(threads=2),
            {},
            {0: "4", 1: "12", 2: "5", 3: "13"},
            id="siblings before container contiguity",
        ),
        pytest.param(
            (exclusive("a", "4-5,12-13"),),
            (0, 1, 2, 3),
            guest(threads=2),
            {1: 5},
            {0: "13", 1: "5", 2: "4", 3: "12"},
            id="a sibling joins the host core of a kept one",
        ),
        pytest.param(
            (exclusive("a", "1,9,5,13"),),
            (0, 1, 2, 3),
            guest(threads=2, numa="1100", host="0/1"),
            {},
            {0: "5", 1: "13", 2: "1", 3: "9"},
            id="siblings inside the NUMA node",
        ),
        pytest.param(
            (exclusive("a", "1-4"),),
            (0, 1, 2, 3),
            guest(threads=2),
            {},
            {0: "1", 1: "2", 2: "3", 3: "4"},
            id="no host core with room for both: by index",
        ),
        pytest.param(
            (exclusive("a", "4-6"), exclusive("b", "12-14")),
            (0, 1, 2, 3, 4, 5),
            guest(),
            {3: 4},
            {0: "12", 1: "13", 2: "5", 3: "4", 4: "6", 5: "14"},
            id="container contiguity before index: next to its kept vCPU",
        ),
        pytest.param(
            (exclusive("a", "4-5"), exclusive("b", "12-13")),
            (0, 1, 2, 3),
            guest(),
            {1: 12},
            {0: "13", 1: "12", 2: "4", 3: "5"},
            id="container contiguity: who has a vCPU chooses neighbours first",
        ),
        pytest.param(
            (exclusive("a", "4-7"),),
            (0, 1, 2),
            guest(threads=2, numa="011", host="0/1"),
            {},
            {0: "7", 1: "4-5", 2: "6"},
            id="runs go through the same claims",
        ),
    ],
)
def test_order_of_claims(
    containers: tuple[Container, ...],
    indexes: tuple[int, ...],
    at: GuestTopology,
    kept: dict[int, int],
    expected: dict[int, str],
) -> None:
    """Kept, then NUMA node, then siblings, then container contiguity, then index."""
    assert paired(containers, indexes, at, kept) == expected


def test_index_order_puts_unknown_first() -> None:
    """Sorted by index; unknown ones first, the oldest of them first."""
    ordered = index_order([vcpu(15), vcpu(None, tid=1900), vcpu(0), vcpu(None, tid=1800)])
    assert [(one.role.vcpu, one.key.tid) for one in ordered] == [
        (None, 1800),
        (None, 1900),
        (0, 1100),
        (15, 1115),
    ]
