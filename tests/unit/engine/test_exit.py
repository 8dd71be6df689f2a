"""Noticing the exit of real processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess

from kata_pin.base.sandbox import ProcessKey
from kata_pin.engine.runner import ExitWatches
from kata_pin.linux.files import HOST
from kata_pin.linux.process import read_process
from tests.support.specimen import specimen

DEADLINE_S = 10.0


def descriptors() -> int:
    """How many descriptors this process has."""
    return len(os.listdir("/proc/self/fd"))


async def test_reports_when_the_process_exits() -> None:
    """Once, when the process has ended with all its threads; nothing stays open."""
    exited: asyncio.Queue[None] = asyncio.Queue()
    with specimen(2) as ours, contextlib.closing(ExitWatches(HOST)) as watches:
        before = descriptors()
        watches.watch(read_process(HOST, ours.pid).key, lambda: exited.put_nowait(None))
        ours.end(ours.tids[1])
        await asyncio.sleep(0.05)
        assert exited.empty()
        ours.child.kill()
        await asyncio.wait_for(exited.get(), DEADLINE_S)
        await asyncio.sleep(0.05)
        assert exited.empty()
        assert descriptors() == before


async def test_reports_soon_for_another_process() -> None:
    """Gone, a zombie, or another's pid by now: it has exited."""
    exited: asyncio.Queue[None] = asyncio.Queue()
    with contextlib.closing(ExitWatches(HOST)) as watches:
        watches.watch(ProcessKey(os.getpid(), 1), lambda: exited.put_nowait(None))
        with subprocess.Popen(["/bin/true"]) as child:
            key = read_process(HOST, child.pid).key
            watches.watch(key, lambda: exited.put_nowait(None))
        watches.watch(key, lambda: exited.put_nowait(None))
        for _ in range(3):
            await asyncio.wait_for(exited.get(), DEADLINE_S)


async def test_closed_watches_leave_no_descriptor() -> None:
    """Watches that are given up close what they opened."""
    with specimen() as ours:
        before = descriptors()
        watches = ExitWatches(HOST)
        for _ in range(5):
            watches.watch(read_process(HOST, ours.pid).key, lambda: None)
        assert descriptors() == before + 5
        watches.close()
        assert descriptors() == before
