"""The state document of 250 sandboxes with 20 threads each: what it costs the daemon, and whom.

Timed: the answer to the `state` verb in a whole Daemon in this process, for all sandboxes and for
one, as CPU time; and the longest time, CPU time too, for which it held the event loop. Any member
of the status group can ask for it, so it must neither cost much nor delay hooks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

from msgspec.structs import replace

from kata_pin.base.documents.state import State
from kata_pin.base.json_text import Fields
from kata_pin.service.protocol import decode
from tests.bench.audits import SANDBOXES
from tests.bench.figures import MS, BenchError, Row, Samples
from tests.bench.node import BenchNode
from tests.bench.service import LocalService, local_service
from tests.bench.standins import Crowd, crowd

STATE_MS = 25.0
"""CPU time of one document of all sandboxes."""

HELD_MS = 10.0
"""Longest time between two turns of the event loop meanwhile."""


def measure(node: BenchNode, rounds: int) -> Iterator[Row]:
    """Yield the rows of documents about 250 idle VMs."""
    with crowd(node, SANDBOXES) as sandboxes:
        yield from asyncio.run(_figures(node, sandboxes, rounds))


async def _figures(node: BenchNode, sandboxes: Crowd, rounds: int) -> list[Row]:
    config = replace(node.config(), hypervisors=sandboxes.hypervisors)
    async with local_service(config) as daemon:
        await daemon.settle(sandboxes.ids)
        daemon.keep_only(sandboxes.ids)
        found = decode(await _state(daemon), State)
        threads = sum(len(one.threads) for one in found.sandboxes)
        if len(found.sandboxes) != len(sandboxes.ids) or not threads:
            raise BenchError(f"{len(found.sandboxes)} sandboxes are shown")
        taken = [await _taken(daemon) for _ in range(rounds)]
        single = [await _taken(daemon, sandbox=sandboxes.ids[0]) for _ in range(rounds)]
    what = f"{threads} threads, {sandboxes.what}"
    return [
        _row(f"state of all, {what}", [cpu for cpu, _ in taken], STATE_MS, "ms CPU"),
        _row(f"state of all, longest hold, {what}", [held for _, held in taken], HELD_MS, "ms CPU"),
        _row(f"state of one, {what}", [cpu for cpu, _ in single], None, "ms CPU"),
    ]


async def _state(daemon: LocalService, **arguments: str) -> bytes:
    return await daemon.parts.controls[0].verbs["state"](Fields(arguments, source="state"))


async def _taken(daemon: LocalService, **arguments: str) -> tuple[float, float]:
    """Return the CPU time of a document and the longest hold of the loop, in seconds."""
    longest = 0.0

    async def heartbeat() -> None:
        nonlocal longest
        while True:
            last = time.process_time()
            await asyncio.sleep(0)
            longest = max(longest, time.process_time() - last)

    watching = asyncio.create_task(heartbeat())
    await asyncio.sleep(0)
    start = time.process_time()
    await _state(daemon, **arguments)
    spent = time.process_time() - start
    watching.cancel()
    return spent, longest


def _row(name: str, seconds: list[float], bar: float | None, unit: str) -> Row:
    samples = Samples(seconds)
    return Row(
        name, samples.median * MS, unit, len(seconds), bar=bar, bar_on_ratio=False,
        detail=samples.spread,
    )  # fmt: skip
