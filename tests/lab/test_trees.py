"""The captured sysfs tree of each flavour shows the machine that the flavour promises."""

from __future__ import annotations

from pathlib import Path

import pytest

from kata_pin.linux.topology import read_topology
from tests.lab.flavours import CPUS, FLAVOURS, NODES
from tests.support.hosttree import grow, listing

SAME = "lab-trixie-kvm"
"""All flavours without thread siblings give the same tree, byte for byte."""


@pytest.mark.parametrize("name", FLAVOURS)
def test_captured_tree_is_the_flavours_machine(tmp_path: Path, name: str) -> None:
    """Nodes, packages, cores and threads of the tree in tests/data/sysfs are those promised."""
    flavour = FLAVOURS[name]
    host = read_topology(grow(tmp_path, listing(f"lab-{name}" if flavour.threads > 1 else SAME)))
    share = CPUS // NODES
    assert [str(cpus) for cpus in host.nodes.values()] == ["0-7", "8-15"]
    assert list(host.nodes.values()) == list(host.packages.values())
    assert {len(cpus) for cpus in host.cores.values()} == {flavour.threads}
    assert {len(cpus) for cpus in host.nodes.values()} == {share}
    assert len(host.cores) == NODES * flavour.cores
    assert [cpu.thread for cpu in host.cpus] == list(range(flavour.threads)) * len(host.cores)
