"""Audits of 5,000 threads in 250 sandboxes, against bare loops over the same threads.

Timed: Auditor.affinity() and Auditor.deep() of a whole Daemon in this process, its 250 sandboxes
adopted, pinned and settled, and the whole round that the service runs every deep audit (process
table, spool, node, adoption, Auditor.deep). CPU time of this process, so that neighbours on the
machine do not count; nothing else runs in it. Floors, in turns: listdir and sched_getaffinity; the
same and one read of each stat file.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

from msgspec.structs import replace

from kata_pin.base.config.tree import Audit
from tests.bench.figures import BenchError, Row, Samples, median_row
from tests.bench.node import BenchNode
from tests.bench.service import LocalService, local_service
from tests.bench.standins import Crowd, crowd

SANDBOXES = 250


def measure(node: BenchNode, rounds: int) -> Iterator[Row]:
    """Yield the rows of audits over 250 idle VMs."""
    with crowd(node, SANDBOXES) as sandboxes:
        figures = asyncio.run(figures_of(node, sandboxes, rounds))
    yield from figures.rows(f"{figures.threads} threads, {sandboxes.what}")


async def figures_of(node: BenchNode, sandboxes: Crowd, rounds: int) -> Figures:
    """Return what audits of these sandboxes cost."""
    config = replace(node.config(), hypervisors=sandboxes.hypervisors)
    async with local_service(config) as daemon:
        await daemon.settle(sandboxes.ids)
        return await take(daemon, sandboxes.ids, rounds)


class Figures:
    """CPU times of the audits and of their floors, and over how many threads."""

    def __init__(self, threads: int, samples: Mapping[str, Sequence[float]]) -> None:
        self.threads = threads
        self._samples = {name: Samples(taken) for name, taken in samples.items()}

    def of(self, name: str) -> Samples:
        """Return the samples of `affinity`, `deep`, `round` or of a floor."""
        return self._samples[name]

    def rows(self, what: str) -> list[Row]:
        """Return the rows, with their bars."""
        bare, bare_stat = self.of("bare"), self.of("bare stat")
        return [
            cpu_row(f"affinity audit, {what}", self.of("affinity"), bare, bar=3.0),
            cpu_row(f"deep audit, {what}", self.of("deep"), bare_stat, bar=2.0),
            cpu_row(f"deep round with adoption, {what}", self.of("round"), bare_stat),
            cpu_row(f"the watch after each audit, {what}", self.of("watch"), bare),
            self._shares(what),
        ]

    def _shares(self, what: str) -> Row:
        """Return what all of it uses of a core with the default periods, and its parts."""
        each_s, deep_s = Audit().affinity_s, Audit().deep_s
        shares = {
            "affinity audits": self.of("affinity").median * (1 / each_s - 1 / deep_s),
            "deep rounds": self.of("round").median / deep_s,
            "the watch": self.of("watch").median / each_s,
        }
        detail = ", ".join(f"{name} {100 * share:.2f}" for name, share in shares.items())
        rounds = len(self.of("watch").seconds)
        share = 100 * sum(shares.values())
        return Row(f"audits at rest, {what}", share, "% of a core", rounds, detail=detail)


def cpu_row(name: str, samples: Samples, floor: Samples, *, bar: float | None = None) -> Row:
    """Return the row of a median of CPU times."""
    return dataclasses.replace(median_row(name, samples, floor, bar=bar), unit="ms CPU")


async def take(daemon: LocalService, ids: Sequence[str], rounds: int) -> Figures:
    """Run every audit and both floors in turns, over these sandboxes."""
    tids = {
        tgid: threads
        for sandbox_id in ids
        for tgid, threads in expected(daemon, sandbox_id).items()
    }

    async def bare_loop() -> None:
        bare(tids)

    async def bare_stat_loop() -> None:
        bare_stat(tids)

    async def watch() -> None:
        for option in daemon.parts.options:  # with default settings the watch alone
            looked = option.look()
            if inspect.isawaitable(looked):
                await looked

    measures: dict[str, Callable[[], Awaitable[object]]] = {
        "bare": bare_loop,
        "affinity": daemon.parts.auditor.affinity,
        "bare stat": bare_stat_loop,
        "deep": daemon.parts.auditor.deep,
        "round": daemon.parts.audits.deep,
        "watch": watch,
    }
    samples: dict[str, list[float]] = {name: [] for name in measures}
    for work in measures.values():  # what is derived once a report is not an audit's cost
        await work()
    for _ in range(rounds):
        for name, work in measures.items():
            daemon.keep_only(ids)
            start = time.process_time()
            await work()
            samples[name].append(time.process_time() - start)
    return Figures(sum(map(len, tids.values())), samples)


def expected(daemon: LocalService, sandbox_id: str) -> dict[int, list[int]]:
    """Return the threads of a sandbox's last report by process."""
    cache = daemon.parts.sandboxes.cache(sandbox_id)
    if cache is None or cache.report is None:
        raise BenchError(f"no report on {sandbox_id}")
    threads: dict[int, list[int]] = {}
    for thread in cache.report.threads:
        threads.setdefault(thread.key.tgid, []).append(thread.key.tid)
    return threads


def bare(tids: Mapping[int, object]) -> None:
    """List the threads of each process and get each affinity."""
    for tgid in tids:
        for name in os.listdir(f"/proc/{tgid}/task"):
            os.sched_getaffinity(int(name))


def bare_stat(tids: Mapping[int, object]) -> None:
    """Do the same, and read each stat file."""
    for tgid in tids:
        for name in os.listdir(f"/proc/{tgid}/task"):
            fd = os.open(f"/proc/{tgid}/task/{name}/stat", os.O_RDONLY)
            os.read(fd, 4096)
            os.close(fd)
            os.sched_getaffinity(int(name))
