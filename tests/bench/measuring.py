"""Measured isolation: what recording task switches and the daemon's watch cost.

Recording: pairs of processes wake each other through pipes on every CPU of this machine, and the
CPU time of the reader is related to the switches that they made. The watch: looks at the counters
of 1,000 threads of this process, as at 1,000 vCPUs of which each has a pCPU of its own.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from kata_pin.base.config.tree import Config, LiveConfig
from kata_pin.base.cpuset import CpuSet
from kata_pin.base.threads import ThreadKey
from kata_pin.engine.node import PcpuOwners, Watched
from kata_pin.linux.files import HOST
from kata_pin.linux.recording import RING_BYTES
from kata_pin.linux.switches import SwitchRecorder
from kata_pin.linux.tasks import starttime
from kata_pin.options.isolation.watch import Watch
from kata_pin.records.history import NodeEvents
from tests.bench.figures import MS, Row, Samples
from tests.bench.node import BenchNode
from tests.support.switches import record_switches

RATE = 20_000
READER_PERCENT = 10.0
VCPUS = 1000
PERIOD_S = 10.0
"""Between two audits."""

PING = """
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
a, b = os.pipe(), os.pipe()
if os.fork():
    while True:
        os.write(a[1], b"x"); os.read(b[0], 1)
while True:
    os.read(a[0], 1); os.write(b[1], b"x")
"""


def measure(_: BenchNode, rounds: int) -> Iterator[Row]:
    """Yield what a switch costs the reader, what is lost without one, and what a look costs."""
    cpus = CpuSet(os.sched_getaffinity(0))
    with switching(cpus):
        found = record_switches(HOST, cpus, rounds / 2, ring_bytes=RING_BYTES)
        with SwitchRecorder(HOST, cpus, 1.0, ring_bytes=64 * 1024) as recorder:
            time.sleep(1.0)
            recorder.drain()
            time.sleep(0.2)
            late = recorder.end()
    windows = found.cpus.values()
    switches = sum(one.slices for window in windows for one in window.tasks)
    seconds = max(window.length_ns for window in windows) / 1e9
    lost = sum(window.lost for window in windows)
    per_switch_ns = found.reader_ns / switches
    yield Row(
        f"reader at {RATE} switches/s", per_switch_ns * RATE / 1e7, "% of a core", switches,
        bar=READER_PERCENT, bar_on_ratio=False,
        detail=f"{switches / seconds:.0f}/s on {len(cpus)} CPUs, {lost} records lost",
    )  # fmt: skip
    unread = sum(window.lost for window in late.cpus.values())
    told = all(window.problem for window in late.cpus.values())
    yield Row(
        "records lost while nobody reads", unread, "records", 1,
        detail="reported on every CPU" if told else "NOT reported on every CPU",
    )  # fmt: skip
    looks = asyncio.run(_looks(rounds))
    yield Row(
        f"watch, one look at {VCPUS} vCPUs", looks.median * MS, "ms CPU", rounds,
        detail=f"{100 * looks.median / PERIOD_S:.3f} % of a core at one each {PERIOD_S:g} s",
    )  # fmt: skip


@contextmanager
def switching(cpus: CpuSet) -> Iterator[None]:
    """Have two processes per CPU wake each other, one at a time."""
    running = [
        subprocess.Popen([sys.executable, "-ISc", PING, str(cpu)], start_new_session=True)
        for cpu in cpus
    ]
    try:
        time.sleep(0.5)
        yield
    finally:
        for one in running:
            os.killpg(one.pid, 9)
            one.wait()


async def _looks(rounds: int) -> Samples:
    over = threading.Event()
    threads = [threading.Thread(target=over.wait) for _ in range(VCPUS)]
    for one in threads:
        one.start()
    pid = os.getpid()
    watched = [
        Watched("s", cpu, (ThreadKey(pid, tid, starttime(HOST, pid, tid)),), (), shared=False)
        for cpu, tid in enumerate(one.native_id or 0 for one in threads)
    ]

    class Crowd:
        def watched(self) -> Iterator[Watched]:
            yield from watched

    def start(work: Any) -> None:
        work.close()

    watch = Watch(
        HOST, cast("PcpuOwners", Crowd()), LiveConfig(Config()), NodeEvents(), start, CpuSet
    )
    try:
        taken = []
        for _ in range(rounds):
            began = time.thread_time()
            await watch.look()
            taken.append(time.thread_time() - began)
    finally:
        over.set()
        for one in threads:
            one.join()
    assert len(watch.sights) == VCPUS
    return Samples(taken)
