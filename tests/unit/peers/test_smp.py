"""-smp and -numa: every form, QEMU's defaults of both eras, bounds.

The numbers were checked against QEMU itself: tests/integration/test_wire_qemu.py.
"""

from __future__ import annotations

import pytest

from kata_pin.base.cpuset import CpuSet
from kata_pin.base.errors import ParseError
from kata_pin.peers.qemu import parse_numa, parse_smp


@pytest.mark.parametrize(
    ("value", "machine", "expected"),
    [
        pytest.param(
            "2,cores=1,threads=1,sockets=16,maxcpus=16", "q35", (2, 16, 16, 1, 1, 1), id="Kata Go"
        ),
        pytest.param("2,cores=1,threads=1", "q35", (2, 2, 2, 1, 1, 1), id="Kata confidential"),
        pytest.param("2,maxcpus=8", "q35", (2, 8, 1, 1, 8, 1), id="runtime-rs"),
        pytest.param("cpus=2,maxcpus=8", "q35", (2, 8, 1, 1, 8, 1), id="keyed"),
        pytest.param("4", "q35", (4, 4, 1, 1, 4, 1), id="cores before sockets"),
        pytest.param("4", "pc-q35-6.2", (4, 4, 1, 1, 4, 1), id="since 6.2"),
        pytest.param("4", "pc-q35-6.1", (4, 4, 4, 1, 1, 1), id="sockets before cores until 6.1"),
        pytest.param("4", "pc-i440fx-2.12", (4, 4, 4, 1, 1, 1), id="two-digit minor"),
        pytest.param("4", "pc-q35-10.1", (4, 4, 1, 1, 4, 1), id="two-digit major"),
        pytest.param("8,sockets=2", "pc-q35-6.1", (8, 8, 2, 1, 4, 1), id="old, sockets given"),
        pytest.param("8,cores=2", "q35", (8, 8, 4, 1, 2, 1), id="sockets left"),
        pytest.param("8,threads=2", "q35", (8, 8, 1, 1, 4, 2), id="threads given"),
        pytest.param("8,sockets=2,cores=2", "q35", (8, 8, 2, 1, 2, 2), id="threads left"),
        pytest.param("12,sockets=2,dies=2,cores=3", "q35", (12, 12, 2, 2, 3, 1), id="dies"),
        pytest.param("sockets=2,cores=2", "q35", (4, 4, 2, 1, 2, 1), id="no cpus"),
        pytest.param("maxcpus=4", "q35", (4, 4, 1, 1, 4, 1), id="only maxcpus"),
        pytest.param("8,clusters=2,cores=2,sockets=2", "virt", (8, 8, 2, 1, 4, 1), id="clusters"),
    ],
)
def test_forms(value: str, machine: str, expected: tuple[int, ...]) -> None:
    """boot, maximum, sockets, dies, cores, threads as QEMU computes them."""
    guest = parse_smp([value], machine)
    shape = (guest.sockets, guest.dies, guest.cores, guest.threads)
    assert (guest.boot, guest.maximum, *shape) == expected


def test_no_smp_is_one_vcpu() -> None:
    """QEMU's default."""
    guest = parse_smp([])
    assert (guest.boot, guest.maximum) == (1, 1)


def test_repeated_smp_merges() -> None:
    """QEMU merges -smp options; the last value of a key counts."""
    guest = parse_smp(["2", "maxcpus=8", "cpus=3"])
    assert (guest.boot, guest.maximum) == (3, 8)


@pytest.mark.parametrize(
    "value",
    [
        "4097",
        "2,maxcpus=1",
        "4,sockets=3",
        "2,sockets=99",
        "2,maxcpus=5,sockets=2",
        "6,sockets=2,cores=2,threads=2",
        "4,cores=3,threads=1,sockets=1",
        "x",
        "",
        "1,cores=",
        "1,cores=-1",
        "1e3",
        "0x4",
        "9" * 5000,
        "sockets=4096,cores=4096",
    ],
)
def test_absurd(value: str) -> None:
    """What QEMU would refuse, or no machine can have, is a ParseError."""
    with pytest.raises(ParseError):
        parse_smp([value])


def test_one_node_tells_nothing() -> None:
    """Kata's ordinary `-numa node,memdev=dimm1` leaves the map empty."""
    guest = parse_numa(parse_smp(["4"]), ["node,memdev=dimm1"], {"dimm1": CpuSet([1])})
    assert (guest.numa, guest.host_nodes) == ({}, {0: CpuSet([1])})


def test_nodes_without_cpus_get_sockets_in_turn() -> None:
    """QEMU's default on x86."""
    guest = parse_numa(parse_smp(["8,sockets=4,cores=2"]), ["node", "node,nodeid=1"], {})
    assert guest.numa == {0: 0, 1: 0, 2: 1, 3: 1, 4: 0, 5: 0, 6: 1, 7: 1}


def test_cpu_form() -> None:
    """`-numa cpu,node-id=,socket-id=` maps all vCPUs in that place."""
    values = ["node", "node", "cpu,node-id=0,socket-id=1", "cpu,node-id=1,socket-id=0,core-id=1"]
    guest = parse_numa(parse_smp(["8,sockets=2,cores=2,threads=2"]), values, {})
    assert guest.numa == {4: 0, 5: 0, 6: 0, 7: 0, 2: 1, 3: 1}


def test_cpus_above_the_guest_are_left_out() -> None:
    """A node cannot hold vCPUs that do not exist."""
    guest = parse_numa(parse_smp(["2"]), ["node,cpus=0-8000", "node"], {})
    assert guest.numa == {0: 0, 1: 0}


@pytest.mark.parametrize(
    "values",
    [
        ["node,nodeid=128"],
        ["node,nodeid=x"],
        ["node,cpus=0-99999999999"],
        ["node"] * 129,
        ["cpu,node-id=0,socket-id=99999"],
    ],
)
def test_absurd_nodes(values: list[str]) -> None:
    """Beyond QEMU's own limits is a ParseError."""
    with pytest.raises(ParseError):
        parse_numa(parse_smp(["4"]), values, {})
