"""Slow reads of real processes, by the calls of this process."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kata_pin.linux.files import HostRoot
from kata_pin.linux.process import read_process
from kata_pin.rights.calls import DIRECT
from kata_pin.vmm.checks import SlowFacts
from tests.support.locked_memory import locked_process
from tests.support.specimen import specimen

pytestmark = pytest.mark.root


async def test_real_processes() -> None:
    """The calls of this process answer as the helper does."""
    root = HostRoot()
    facts = SlowFacts(root, lambda pid: read_process(root, pid))
    with specimen() as one:
        await facts.read([read_process(root, one.pid)])
        line = Path(f"/proc/{one.pid}/cmdline").read_bytes()
        assert "\0".join(facts.cmdline(one.pid)).encode() == line.removesuffix(b"\0")
        assert facts.exe_file(one.pid).inode == Path(f"/proc/{one.pid}/exe").stat().st_ino


async def test_locked_memory(tmp_path: Path) -> None:
    """A real process whose memory is locked by a file system that does not answer.

    Its neighbours in the call are read, and the event loop runs meanwhile.
    """
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.01)
            ticks += 1

    with locked_process(tmp_path / "m") as stuck, specimen() as other:
        ticking = asyncio.create_task(tick())
        requests = [(pid, "cmdline", 100) for pid in (stuck.pid, other.pid)]
        found = await DIRECT.read_slow(requests, 0.3)
        ticking.cancel()
        assert isinstance(found[stuck.pid, "cmdline"], TimeoutError)
        assert isinstance(found[other.pid, "cmdline"], bytes)
        assert ticks > 5
