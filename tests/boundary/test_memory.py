"""Memory that follows its vCPUs, over move_pages(2) as the kernel makes it.

The guest's memory is on NUMA node 1, its exclusive pCPU on node 0: 40 MiB, 4 MiB per second.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from errno import EACCES, EBUSY, EFAULT, EPERM
from pathlib import Path
from typing import Any

import pytest

from tests.boundary.host import Vm
from tests.boundary.node import Node
from tests.support.numa_vmm import HUGE, NumaVmm

MIB = 1 << 20
PER_WINDOW = 4 * MIB // 4096
AGAIN_S, LONG_S, NEAR_S = 600, 6 * 3600, 3600


@pytest.fixture
def made(tmp_path: Path) -> Node:
    one = Node(tmp_path, sysfs="two-sockets-smt", memory="migrate", memory_rate_mib=4)
    one.host.write("sys/devices/system/node/has_memory", "0-1")
    for number in range(2):
        _free(one, number, 4096)
    one.kernel.memory = NumaVmm(10 * PER_WINDOW, 1)
    return one


@pytest.fixture
async def node(made: Node) -> AsyncIterator[Node]:
    async with made:
        yield made


def _memory(node: Node) -> NumaVmm:
    assert isinstance(node.kernel.memory, NumaVmm)
    return node.kernel.memory


def _free(node: Node, number: int, mib: int) -> None:
    """Have a node of 4 GiB with so much free."""
    lines = (f"Node {number} MemTotal: {4096 * 1024} kB", f"Node {number} MemFree: {mib * 1024} kB")
    base = f"sys/devices/system/node/node{number}"
    node.host.write(f"{base}/meminfo", "\n".join(lines))
    node.host.write(f"{base}/hugepages/hugepages-2048kB/free_hugepages", "64")


def _mems(node: Node, vm: Vm, mems: str) -> None:
    path = f"proc/{vm.pid}/status"
    before = node.host.read(path).partition("\nMems_allowed_list")[0]
    node.host.write(path, f"{before}\nMems_allowed_list:\t{mems}")


async def _start(node: Node, mems: str = "0-1", **spec: str) -> Vm:
    vm = node.vm("p1", vcpus=1)
    _mems(node, vm, mems)
    await node.create(vm, "c1", "1", exclusive=True, **spec)
    return vm


async def _shown(node: Node, vm: Vm) -> dict[str, Any]:
    memory: dict[str, Any] = (await node.shown(vm))["memory"]
    return memory


async def _until(node: Node, vm: Vm, *states: str) -> dict[str, Any]:
    """Let seconds pass until memory is shown in one of these states."""
    shown: dict[str, Any] = {}
    for _ in range(400):
        shown = await _shown(node, vm)
        if shown["state"] in states:
            return shown
        await node.clock.move(1)
        await node.pause()
    raise AssertionError(shown)


async def _later(node: Node, seconds: float) -> None:
    """Have a pass after so much time."""
    await node.clock.move(seconds)
    await node.ask("reconcile")
    for _ in range(10):
        await node.pause()


async def test_all_memory_moves_in_windows(node: Node) -> None:
    """At most the rate per second, to the vCPUs' node; then it is examined much later."""
    vm = await _start(node)
    shown = await _until(node, vm, "near")
    assert (shown["nodes"], shown["remote_bytes"], shown["moved_bytes"]) == ("0", 0, 40 * MIB)
    assert {one.most for one in node.kernel.windows} == {PER_WINDOW}
    memory = _memory(node)
    memory.nodes = dict.fromkeys(memory.nodes, 1)
    await _later(node, NEAR_S / 2)
    assert memory.on(0) == 0
    await _later(node, NEAR_S)
    await _until(node, vm, "near")
    assert memory.on(1) == 0


@pytest.mark.parametrize("number", [EBUSY, EFAULT, EACCES])
async def test_some_pages_refuse(node: Node, number: int) -> None:
    """The others move; what is left has its reason, and is not tried for ever."""
    memory = _memory(node)
    memory.refusals = {memory.address(one * 8): number for one in range(1280)}
    vm = await _start(node)
    assert "5 MiB cannot be moved: " in (await _until(node, vm, "stopped"))["problem"]
    assert memory.on(1) == 1280
    moves = memory.moves
    for _ in range(3):
        await _later(node, AGAIN_S)
    assert memory.moves == moves
    await _later(node, LONG_S)
    assert memory.moves > moves


@pytest.mark.parametrize(("pinned", "windows"), [(10, 3), (1, 99)])
async def test_memory_that_is_pinned_for_a_device(node: Node, pinned: int, windows: int) -> None:
    """What is pinned stays; where nothing moves only a few windows are tried."""
    memory = _memory(node)
    memory.pinned = {memory.address(one) for one in range(pinned * PER_WINDOW)}
    vm = await _start(node)
    said = f"{4 * pinned} MiB cannot be moved: busy, or pinned for a device (VFIO)"
    assert said in (await _until(node, vm, "stopped"))["problem"]
    assert memory.on(1) == pinned * PER_WINDOW
    assert len(node.kernel.windows) <= windows


async def test_huge_pages(node: Node) -> None:
    """One page of 2 MiB counts as that."""
    memory = node.kernel.memory = NumaVmm(8, 1, size=HUGE)
    memory.backing, memory.shared = "/anon_hugepage", True
    vm = await _start(node)
    assert (await _until(node, vm, "near"))["moved_bytes"] == 16 * MIB
    assert {(one.most, one.shared) for one in node.kernel.windows} == {(2, True)}


async def test_memory_gets_short(node: Node) -> None:
    """A part of the node stays free; later it goes on."""
    _free(node, 0, 4096 * 5 // 100)
    vm = await _start(node)
    shown = await _until(node, vm, "stopped", "near")
    assert "NUMA node 0 has no more free memory" in shown["problem"]
    _free(node, 0, 4096)
    await _later(node, AGAIN_S)
    assert (await _until(node, vm, "near"))["problem"] == ""


@pytest.mark.parametrize("how", ["moved", "ended", "released", "observe", "report"])
async def test_what_ends_a_move(node: Node, how: str) -> None:
    """No window after the sandbox, the setting or the pins are gone; other nodes are a new aim."""
    vm = await _start(node)
    await node.until(lambda: len(node.kernel.windows) == 1, "the first window")
    if how == "moved":
        await node.create(vm, "c1", "9", exclusive=True)
        assert vm.masks["v0"] == "9"
        await _until(node, vm, "near")
        assert (await _shown(node, vm))["nodes"] == "1"
        assert _memory(node).on(0) == 0
        return
    if how == "ended":
        vm.end()
        node.kernel.connector.exited(vm.pid, vm.pid)
        await node.until(lambda: not node.rows("containers"), "p1 is forgotten")
    elif how == "released":
        await node.ask("unpin", sandbox=vm.id)
    else:
        node.change(**({"mode": "observe"} if how == "observe" else {"memory": "report"}))
        await node.ask("reload")
    for _ in range(20):
        await node.clock.move(2)
        await node.pause()
    assert len(node.kernel.windows) == 1


async def test_what_is_bound_stays(node: Node) -> None:
    """By the VMM's own policy: it is named with the remedy."""
    _memory(node).policy = "bind:1"
    vm = await _start(node)
    shown = await _until(node, vm, "stopped")
    assert "(policy bind:1): see host-nodes" in shown["problem"]
    assert (node.kernel.windows, shown["remote_bytes"]) == ([], 40 * MIB)


async def test_what_the_kubelet_decided_stays(node: Node) -> None:
    """Memory that its memory manager gave is not moved elsewhere."""
    vm = await _start(node, given="1")
    assert "given memory of NUMA node 1" in (await _until(node, vm, "stopped"))["problem"]
    assert node.kernel.windows == []


async def test_a_cpuset_that_forbids_the_node(node: Node) -> None:
    """Nothing is tried; the reason says what to change."""
    vm = await _start(node, mems="1")
    await _until(node, vm, "stopped")
    assert node.kernel.windows == []
    assert "cpuset.mems allows NUMA node 1 alone" in str((await node.shown(vm))["notes"])


@pytest.mark.parametrize(("number", "words"), [(EPERM, "CAP_SYS_NICE"), (EACCES, "not verified")])
async def test_a_call_that_is_refused(node: Node, number: int, words: str) -> None:
    """It is said, and tried again later."""
    memory = _memory(node)
    memory.error = number
    vm = await _start(node)
    assert words in (await _until(node, vm, "stopped"))["problem"]
    memory.error = 0
    await _later(node, LONG_S)
    await _until(node, vm, "near")


async def test_a_move_that_does_not_end(node: Node) -> None:
    """One deadline, then the sandbox is left for hours."""
    memory = _memory(node)
    memory.hangs = True
    vm = await _start(node)
    assert "does not answer in time" in (await _until(node, vm, "stopped"))["problem"]
    await _later(node, LONG_S - 100)
    assert len(node.kernel.windows) == 1


async def test_many_mappings(node: Node) -> None:
    """They are parsed beside the event loop: a callback may take 0.2 s (tests/support/leaks.py)."""
    memory = _memory(node)
    memory.other_mappings = 50_000
    vm = await _start(node)
    await _until(node, vm, "near")
    assert memory.on(1) == 0


async def test_an_error_of_ours_is_a_barrier(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sandbox is left alone, another one is moved all the same, and the daemon goes on."""
    memory = _memory(node)
    broken: list[bool] = []

    def numa_maps() -> str:
        if not broken:
            broken.append(True)
            raise RuntimeError("a defect")
        return NumaVmm.numa_maps(memory)

    monkeypatch.setattr(memory, "numa_maps", numa_maps)
    vm = await _start(node)
    other = node.vm("p2", vcpus=1)
    _mems(node, other, "0-1")
    await node.create(other, "c2", "3", exclusive=True)
    await _until(node, other, "near")
    assert (await _shown(node, vm))["problem"] == "a defect"


async def test_a_stat_file_that_says_nothing(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the VMM has ended is not known then: the mover goes on with the others."""
    memory = _memory(node)
    vm = await _start(node)
    stat = f"proc/{vm.pid}/stat"
    before, looks = node.host.read(stat), [0]

    def numa_maps() -> str:
        looks[0] += 1
        node.host.write(stat, "nothing")
        raise PermissionError(EACCES, "not now")

    monkeypatch.setattr(memory, "numa_maps", numa_maps)
    await node.create(vm, "c1", "9", exclusive=True)
    await node.until(lambda: looks[0] > 0, "a look at its memory")
    await node.pause()
    node.host.write(stat, before)
    monkeypatch.undo()
    await _later(node, AGAIN_S)
    await _until(node, vm, "near")


async def test_a_new_daemon_does_the_rest(node: Node) -> None:
    """Nothing is recorded: what was moved is where it is."""
    vm = await _start(node)
    await node.until(lambda: len(node.kernel.windows) == 1, "the first window")
    await node.kill()
    await node.start()
    shown = await _until(node, vm, "near")
    assert (_memory(node).on(1), shown["moved_bytes"]) == (0, 36 * MIB)
