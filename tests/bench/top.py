"""What a sample of `kata-pin top` costs: 1,000 real threads in 25 sandboxes, idle and busy.

The floor is one pread of each thread's schedstat with its descriptor kept open: less than that
nobody can do. CPU time, not elapsed time: the machine may be busy.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing

from kata_pin.base.documents.state import State
from kata_pin.linux.files import HOST
from kata_pin.options.isolation.rates import Sampler
from kata_pin.options.isolation.top import Meter
from tests.bench.figures import MS, Row, Samples, in_turns
from tests.bench.node import BenchNode
from tests.support.played_threads import Played, played
from tests.unit.cli import documents as docs

SANDBOXES, THREADS, VCPUS = 25, 40, 10
"""Sandboxes, threads of each, and how many of these are vCPUs."""

BAR_MS = 10.0


def measure(node: BenchNode, rounds: int) -> Iterator[Row]:
    """Yield the CPU time of a sample: all threads idle, and every eighth just woken."""
    del node
    count = SANDBOXES * THREADS
    for name, busy in (("idle", 0), ("an eighth of them busy", count // 8)):
        kinds = ["wakes" if n * busy // count != (n + 1) * busy // count else "sleeps"
                 for n in range(count)]  # fmt: skip
        with played(*kinds) as process:
            yield from _rows(process, rounds, f"top, {count} threads, {name}")


def _rows(process: Played, rounds: int, name: str) -> Iterator[Row]:
    state = _state(process)
    files = [
        os.open(f"/proc/{process.pid}/task/{tid}/schedstat", os.O_RDONLY) for tid in process.tids
    ]
    try:
        with closing(Meter(lambda: state, Sampler(HOST, 8192), threads=False)) as meter:
            meter.document()
            floor, sample = in_turns(
                rounds,
                lambda: _cpu(lambda: [os.pread(fd, 128, 0) for fd in files]),
                lambda: _cpu(meter.sample),
            )
            whole = Samples([_cpu(meter.document) for _ in range(rounds)])
            meter.expand(threads=True)
            meter.document()
            single = Samples([_cpu(meter.sample) for _ in range(rounds)])
    finally:
        for fd in files:
            os.close(fd)
    yield Row(
        name, sample.median * MS, "ms CPU", rounds, floor=floor.median * MS,
        ratio=sample.median / floor.median, bar=BAR_MS, bar_on_ratio=False, detail=sample.spread,
    )  # fmt: skip
    yield Row(f"{name}, one by one", single.median * MS, "ms CPU", rounds, detail=single.spread)
    yield Row(f"{name}, with its document", whole.median * MS, "ms CPU", rounds,
              detail=whole.spread)  # fmt: skip


def _cpu(work: Callable[[], object]) -> float:
    """Return the CPU time in seconds that something takes, 30 ms after the last time."""
    time.sleep(0.03)
    start = time.process_time()
    work()
    return time.process_time() - start


def _state(process: Played) -> State:
    every = []
    for number in range(SANDBOXES):
        first = number * THREADS
        every.append(
            docs.sandbox(
                f"bench/pod-{number}",
                "0-1",
                *(process.thread(first + n, "vcpu", vcpu=n) for n in range(VCPUS)),
                *(process.thread(first + n, "emulator") for n in range(VCPUS, THREADS)),
                exclusive="0" if number == 0 else "",
            )
        )
    return docs.state(*every, cpus=2)
