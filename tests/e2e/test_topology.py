"""The processors are those of the flavour, as Linux shows them in sysfs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.e2e.node import Node

CPU = Path("/sys/devices/system/cpu")


def _read(cpu: int, name: str) -> str:
    return (CPU / f"cpu{cpu}" / "topology" / name).read_text().strip()


def test_cpus_and_nodes_are_those_promised(node: Node) -> None:
    """All CPUs are online, in equal shares of the nodes, and this process may use them all."""
    assert (CPU / "online").read_text().strip() == f"0-{node.cpus - 1}"
    assert os.sched_getaffinity(1) == set(range(node.cpus))
    share = node.cpus // node.nodes
    for number in range(node.nodes):
        text = Path(f"/sys/devices/system/node/node{number}/cpulist").read_text().strip()
        assert text == f"{number * share}-{(number + 1) * share - 1}"


def test_packages_cores_and_threads_are_those_promised(node: Node) -> None:
    """Each package has the promised cores, each core the promised threads, numbered together."""
    packages: dict[str, set[str]] = {}
    for cpu in range(node.cpus):
        first = cpu - cpu % node.threads
        siblings = str(cpu) if node.threads == 1 else f"{first}-{first + node.threads - 1}"
        assert _read(cpu, "thread_siblings_list") == siblings
        package = _read(cpu, "physical_package_id")
        packages.setdefault(package, set()).add(_read(cpu, "core_id"))
    assert len(packages) == node.cpus // (node.cores * node.threads)
    assert {len(cores) for cores in packages.values()} == {node.cores}


def test_topology_is_captured_for_the_unit_tests(node: Node) -> None:
    """scripts/capture-host writes the results' listing, from where it joins tests/data/sysfs."""
    listing = node.run([sys.executable, "scripts/capture-host"])
    (node.results_folder() / f"lab-{node.flavour}.tree").write_text(listing)
    assert f"sys/devices/system/cpu/online\t0-{node.cpus - 1}\n" in listing
