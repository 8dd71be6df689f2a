"""QMP's window: QEMU is asked while its process is found."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kata_pin.base.config.tree import Config, LiveConfig
from kata_pin.base.sandbox import Container, ProcessKey, Vmm
from kata_pin.engine.sandboxes import Sandboxes
from kata_pin.follow.hooks import HookService
from kata_pin.records.hooks import HookConnection

ANSWERS = (
    b'{"return": [{"cpu-index": 0, "thread-id": 7}]}\n{"return": [{"id": "io0", "thread-id": 8}]}'
)
VMM = Vmm(kind="qemu", process=ProcessKey(5, 1), parent=1, exe="/qemu", witness="pid from a hook")


class Window:
    """A QEMU, and who finds its process: each waits for the other to have begun."""

    def __init__(self, vmm: Vmm | None) -> None:
        self.vmm = vmm
        self.asked, self.found = asyncio.Event(), asyncio.Event()
        self.off = False

    async def vcpu_list(self, path: str, greeting_s: float, session_s: float) -> bytes:
        """Answer once somebody looks for the process."""
        self.asked.set()
        try:
            await self.found.wait()
            await asyncio.sleep(0.01)
        finally:
            self.off = True
        return ANSWERS

    async def find_vmm(self, sandbox_id: str) -> Vmm | None:
        """Find it once it is asked."""
        await self.asked.wait()
        self.found.set()
        return self.vmm


@pytest.mark.parametrize("known", [True, False])
async def test_qemu_answers_while_its_process_is_found(*, known: bool) -> None:
    """Both wait for each other here. What an unknown process's socket answers is not used."""
    window, sandboxes = Window(VMM if known else None), Sandboxes()
    unused = cast("Any", None)
    service = HookService(
        *(LiveConfig(Config()), unused, unused, unused, sandboxes, unused, unused),
        window.find_vmm,
        cast("Any", window),
    )
    connection = cast("HookConnection", SimpleNamespace(gone=asyncio.Event()))
    async with asyncio.timeout(5):
        await service._ask_qemu(connection, Container("s", "s", pid_hint=5))
    assert window.off
    assert (sandboxes.enter("s").cache.qmp is not None) is known
