"""Waiting for the exit of real processes."""

from __future__ import annotations

import asyncio
import os
import subprocess

from kata_pin.host.exit import wait_exit
from kata_pin.host.process import read_process
from kata_pin.host.root import HOST
from kata_pin.model.thread import ProcessKey
from tests.support.specimen import specimen

DEADLINE_S = 10.0


async def test_returns_when_the_process_exits() -> None:
    """The wait lasts as long as the process, its threads included, and no longer."""
    with specimen(2) as ours:
        key = read_process(HOST, ours.pid).key
        waiting = asyncio.create_task(wait_exit(HOST, key))
        await asyncio.sleep(0)
        ours.end(ours.tids[1])
        assert not waiting.done()
        ours.child.kill()
        await asyncio.wait_for(waiting, DEADLINE_S)


async def test_returns_at_once_for_another_process() -> None:
    """Gone, a zombie, or another's pid by now: nothing to wait for."""
    await asyncio.wait_for(wait_exit(HOST, ProcessKey(os.getpid(), 1)), DEADLINE_S)
    with subprocess.Popen(["/bin/true"]) as child:
        key = read_process(HOST, child.pid).key
        await asyncio.wait_for(wait_exit(HOST, key), DEADLINE_S)
    await asyncio.wait_for(wait_exit(HOST, key), DEADLINE_S)


async def test_cancelled_wait_leaves_no_descriptor() -> None:
    """A wait that is given up closes what it opened."""
    with specimen() as ours:
        before = len(os.listdir("/proc/self/fd"))
        key = read_process(HOST, ours.pid).key
        waits = [asyncio.create_task(wait_exit(HOST, key)) for _ in range(5)]
        await asyncio.sleep(0)
        assert len(os.listdir("/proc/self/fd")) == before + 5
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
        assert len(os.listdir("/proc/self/fd")) == before
