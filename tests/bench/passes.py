"""CPU time of one pass over one VM: read, decide, set, verify; without a hook's message.

Once with every thread on all pCPUs before, so that each is set, and once with nothing to set.
Floor: list, set and get over the same threads, bare, in turns.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.bench.events import bare, messages_of, take
from tests.bench.figures import Row, Samples, median_row
from tests.bench.node import TWO_HUNDRED_SIXTY, BenchNode, scatter
from tests.bench.service import local_service
from tests.support.katalike import KataSandbox


def measure(node: BenchNode, rounds: int) -> Iterator[Row]:
    """Yield the rows of a VM with 20 threads and of one with 260."""
    node.start(1)
    node.start(1, TWO_HUNDRED_SIXTY, prefix="big")
    twenty, big = node.sandboxes
    yield from asyncio.run(_passes(node, twenty, rounds, bar_ms=1.2))
    yield from asyncio.run(_passes(node, big, max(rounds // 3, 10), bar_ms=7.0))


async def _passes(
    node: BenchNode, sandbox: KataSandbox, rounds: int, *, bar_ms: float
) -> list[Row]:
    async with local_service(node.config(audits=False)) as daemon:
        await daemon.settle([sandbox.id])
        work = node.container(sandbox.id, "c1", cpus=str(node.last_cpu))
        await take(daemon, next(messages_of(work, sandbox.pid)))
        tids, everywhere = sandbox.tids(), frozenset(node.online)
        run = daemon.parts.passes._run_pass
        floor, setting, resting = [], [], []
        for _ in range(rounds):
            scatter(tids, everywhere)
            floor.append(_cpu_s(lambda: bare(sandbox.pid, frozenset({node.last_cpu}))))
            scatter(tids, everywhere)
            setting.append(_cpu_s(lambda: run(sandbox.id)))
            resting.append(_cpu_s(lambda: run(sandbox.id)))
            await asyncio.sleep(0)
    return [
        replace(
            median_row(f"{what}, {len(tids)} threads", Samples(samples), Samples(floor)),
            unit="ms CPU", bar=bar_ms, bar_on_ratio=False,
        )
        for what, samples in (("pass that sets all", setting), ("pass that sets none", resting))
    ]  # fmt: skip


def _cpu_s(work: Callable[[], object]) -> float:
    """Return the CPU time that something takes in this thread."""
    start = time.thread_time()
    work()
    return time.thread_time() - start
