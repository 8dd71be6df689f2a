"""Pictures of machines whose topology was recorded."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from kata_pin.base.cpuset import CpuSet
from kata_pin.base.documents.state import State
from kata_pin.cli.render.layout import Output
from kata_pin.linux.topology import read_topology
from kata_pin.options.pictures import svg
from kata_pin.options.pictures.picture import fitted, picture
from tests.support.hosttree import SYSFS, grow, listing
from tests.unit.options.pictures.test_drawing import check_boxes, on, titles


def host(name: str, folder: Path) -> State:
    """Return an idle node with one of the recorded topologies."""
    found = read_topology(grow(folder, listing(name)))
    return on(found.cpus, online=str(found.online), present=str(found.present))


@pytest.mark.parametrize("name", sorted(one.stem for one in SYSFS.glob("*.tree")))
def test_recorded_topologies(name: str, tmp_path: Path) -> None:
    """Every recorded machine is drawn whole, offline pCPUs too."""
    state = host(name, tmp_path)
    found = picture(state, Output(80))
    present = CpuSet.parse(state.node.present)
    assert CpuSet(one.number for one in found.tiles) == present
    check_boxes(fitted(found, Output(80)), found)
    ElementTree.fromstring(svg.document(state))


def test_levels_nest_as_the_machine_does(tmp_path: Path) -> None:
    """A level with one member is named in the title around it; caches are boxes where several."""
    caches = titles(host("several-llcs", tmp_path / "a"))
    assert caches[0] == "package 0 · NUMA node 0"
    assert sum(one.startswith("last-level cache of ") for one in caches) == 2
    sockets = titles(host("two-sockets-smt", tmp_path / "b"))
    assert [one for one in sockets if not one.startswith("core ")] == [
        "package 0 · NUMA node 0 · last-level cache of 0-7",
        "package 1 · NUMA node 1 · last-level cache of 8-15",
    ]
    assert titles(host("sparse-offline", tmp_path / "c"))[-1].startswith("offline 1,4-7,9-10")
