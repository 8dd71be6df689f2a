"""Moving pages of a real QEMU, by the running broker and without one; one node is enough."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kata_pin.base.cpuset import CpuSet
from kata_pin.linux.files import HOST, HostRoot
from kata_pin.linux.memory import allowed_nodes, free_memory, mappings, nodes_with_memory
from kata_pin.linux.tasks import starttime
from kata_pin.options.memory.keeper import plan_moves
from kata_pin.rights.broker.pages import MAX_PAGES, PagesMoved, PageWindow
from kata_pin.rights.calls import DIRECT, Calls
from tests.integration.test_broker import broker, children
from tests.support.qemu import QEMU, Accelerator, Machine, command_line
from tests.support.waiting import wait_for

pytestmark = pytest.mark.root

SIZE_MIB = 32
MIB = 1 << 20
NODE = nodes_with_memory(HOST).first
HERE = CpuSet([NODE])


@pytest.fixture(params=["ram", "memfd"])
def vm(request: pytest.FixtureRequest) -> Iterator[int]:
    """A QEMU whose memory is all there; returns its pid."""
    share = ",share=on" if request.param == "memfd" else ""
    backend = f"memory-backend-{request.param},id=r,size={SIZE_MIB}M,prealloc=on{share}"
    machine = Machine(
        paused=True,
        memory_mib=SIZE_MIB,
        extra=("-object", backend, "-machine", "memory-backend=r"),
    )
    argv = command_line("pages", machine, Accelerator.TCG, smp="1")
    with subprocess.Popen(argv, stdin=subprocess.DEVNULL) as process:
        try:
            wait_for(lambda: _guest_bytes(process.pid) >= SIZE_MIB * MIB, "the VM's memory")
            yield process.pid
        finally:
            process.kill()


def _guest_bytes(pid: int) -> int:
    placed, _ = asyncio.run(mappings(HOST, pid, 10))
    return max(sum(one.pages.values()) * one.page_size for one in placed)


async def whole(calls: Calls, pid: int) -> PageWindow:
    """Return the window of the VM's memory, as the daemon finds it."""
    root = HostRoot(calls=calls)
    placed, extents = await mappings(root, pid, 10)
    elsewhere = CpuSet([NODE + 1])
    plan = plan_moves(placed, extents, elsewhere, elsewhere)
    region = plan.regions[0]
    assert region.remote >= SIZE_MIB * MIB
    pages = min(MAX_PAGES, (region.end - region.start) // region.page_size)
    return PageWindow(
        pid, starttime(HOST, pid, pid), region.start, region.page_size, pages, pages,
        frozenset(HERE), NODE, region.shared,
    )  # fmt: skip


async def test_pages_of_a_real_vm(vm: int, tmp_path: Path) -> None:
    """The daemon's way: what is mapped, a window of it; all is near, so nothing moves."""
    with broker(tmp_path, QEMU) as running:
        window = await whole(running.calls, vm)
        assert await running.calls.move_pages(window, 10) == PagesMoved(window.pages)
        no_node = window._replace(node=1000, near=frozenset({1000}))
        with pytest.raises(OSError, match="No such device"):
            await running.calls.move_pages(no_node, 10)
        again = await running.calls.move_pages(window, 10)
        assert again == PagesMoved(window.pages), "one window that is refused spoils no other"
    assert await DIRECT.move_pages(window, 10) == PagesMoved(window.pages)
    assert NODE in allowed_nodes(HOST, vm)
    free = free_memory(HOST, NODE)
    assert 0 < free.available <= free.total


async def test_a_move_that_hangs(vm: int, tmp_path: Path) -> None:
    """Its child is killed after the deadline, another takes its place, affinities go on."""
    with broker(tmp_path, QEMU) as running:
        window = await whole(running.calls, vm)
        before = set(children(running.process.pid))
        await running.calls.move_pages(window, 10)
        (mover,) = set(children(running.process.pid)) - before
        rights = Path(f"/proc/{mover}/status").read_text().partition("CapEff:\t")[2].split()[0]
        assert int(rights, 16) & ~(1 << 19 | 1 << 23) == 0, "CAP_SYS_PTRACE and CAP_SYS_NICE"
        os.kill(mover, signal.SIGSTOP)
        with pytest.raises(TimeoutError):
            await running.calls.move_pages(window, 0.3)
        wait_for(lambda: not os.path.exists(f"/proc/{mover}"), "the child to end")
        assert await running.calls.move_pages(window, 10) == PagesMoved(window.pages)


async def test_a_process_that_ends(vm: int, tmp_path: Path) -> None:
    """ESRCH, with and without a broker."""
    window = await whole(DIRECT, vm)
    os.kill(vm, signal.SIGKILL)
    os.waitpid(vm, 0)
    with broker(tmp_path, QEMU) as running, pytest.raises(ProcessLookupError):
        await running.calls.move_pages(window, 10)
    with pytest.raises(ProcessLookupError):
        await DIRECT.move_pages(window, 10)
