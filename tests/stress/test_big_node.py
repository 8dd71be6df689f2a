"""A node of 256 pCPUs and 8 NUMA nodes that 250 sandboxes fill: each is placed and shown."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.boundary.host import Json, Vm, kernel_list
from tests.boundary.node import Node
from tests.support.waiting import SCALE

CPUS = 256
NODES = 8
FREE = 6
"""The first pCPUs are the node's own; each of the others is one pod's."""

WITHIN_S = 60.0


@pytest.fixture
def node(tmp_path: Path) -> Node:
    """A node whose NUMA nodes are a package each, with two threads per core."""
    audit = {"affinity_s": 10, "deep_s": 60}
    node = Node(tmp_path, sysfs=CPUS, audit=audit, exclusive="always")
    host, size = node.host, CPUS // NODES
    for cpu in range(CPUS):
        topology = f"sys/devices/system/cpu/cpu{cpu}/topology"
        host.write(f"{topology}/core_cpus_list", kernel_list({cpu & ~1, cpu | 1}))
        host.write(f"{topology}/physical_package_id", str(cpu // size))
    for number in range(NODES):
        folder = f"sys/devices/system/node/node{number}"
        host.write(f"{folder}/cpulist", kernel_list({*range(number * size, (number + 1) * size)}))
        far = ("10" if other == number else "32" for other in range(NODES))
        host.write(f"{folder}/distance", " ".join(far))
    return node


async def test_a_full_node(node: Node) -> None:
    """All are adopted by one audit, and one repairs a thread of each; nothing of them is shared."""
    async with node:
        vms: dict[int, Vm] = {}
        for cpu in range(FREE, CPUS):
            vm = vms[cpu] = node.vm(f"p{cpu}")
            vm.bundle(f"c{cpu}", str(cpu), exclusive=True)
            vm.persist(**{f"c{cpu}": str(cpu)})
            await node.pause()

        async def placed() -> None:
            async with asyncio.timeout(WITHIN_S * SCALE):
                while any({*vm.masks.values()} != {str(cpu)} for cpu, vm in vms.items()):
                    await asyncio.sleep(0.1)

        await node.clock.move(61)
        await placed()
        for vm in vms.values():
            node.host.affinities[vm.iothread] = {0}
        await node.clock.move(11)
        await placed()

        wanted = {vm.id: ("ok", str(cpu)) for cpu, vm in vms.items()}
        async with asyncio.timeout(WITHIN_S * SCALE):
            while _shown(state := await node.ask("state")) != wanted:
                await asyncio.sleep(0.1)
        places = {one["cpu"]: (one["node"], one["core"]) for one in state["node"]["cpus"]}
        assert places == {cpu: (cpu // (CPUS // NODES), cpu & ~1) for cpu in range(CPUS)}


def _shown(state: Json) -> dict[str, tuple[str, str]]:
    return {one["id"]: (one["state"], one["exclusive"]) for one in state["sandboxes"]}
