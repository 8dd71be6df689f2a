"""The part `churn`: a hundred thousand containers' lives, as fast as the daemon answers.

A life is a container's createRuntime, poststart and poststop over the real socket, with a bundle of
its own. It needs no VM: each hundred share a sandbox, whose VMM is a stand-in that comes and goes
too. `bench soak` has fewer lives with more in each; here the number counts.

Looked at when all sandboxes have ended, after a tenth, after half and at the end of the lives: what
grows by as little as a byte per life shows.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kata_pin.peers.oci import Phase
from kata_pin.records.containers import TOMBSTONES
from tests.bench.figures import BenchError, Row
from tests.bench.node import BenchNode
from tests.bench.service import ServiceProcess, service
from tests.bench.soak import LIVE_TABLES, SETTINGS, Churn, Probe, Sample, say
from tests.bench.standins import begin, program, wait_up, write_state
from tests.support.katalike import ContainerSpec
from tests.support.waiting import wait_for

LIVES: Final = 100
"""Containers of one sandbox, one after the other."""
AT_ONCE: Final = 4
LOOKS: Final = (0.1, 0.5, 1.0)
MEMORY_MIB: Final = 2.0
SETTLE_S: Final = 6.0  # a deep audit, and the looks at what is young


@dataclass(frozen=True)
class Seen:
    """What the daemon had after so many lives."""

    lives: int
    sample: Sample
    threads: int
    tasks: int

    def __str__(self) -> str:
        one = self.sample
        rows = ", ".join(f"{name} {count}" for name, count in one.rows.items())
        return (
            f"{self.lives:7d} lives  {one.rss_mib:6.2f} MiB  {one.descriptors} descriptors  "
            f"{one.watches} watches  {self.threads} threads  {self.tasks} tasks  {rows}"
        )


def measure(lives: int, _only: tuple[str, ...]) -> Iterator[Row]:
    """Yield what grew between the first look and the last."""
    lives = at_least_one_sandbox(lives)
    with BenchNode() as node:
        told = node.runtime_dir / "tasks"  # the daemon may write there alone
        command = (sys.executable, "-m", "tests.chaos.counted", str(told))
        settings = {**SETTINGS, "hypervisors": [str(program(node))]}
        with service(node, command, **settings) as daemon:
            probe = Probe(node, daemon, Churn(node, 0))
            seen: list[Seen] = []
            start = time.monotonic()
            for share in LOOKS:
                done = seen[-1].lives if seen else 0
                _live(node, done // LIVES, round(lives * share) // LIVES)
                wait_for(lambda: not _living(probe), "every sandbox to be forgotten", 60)
                time.sleep(SETTLE_S)
                seen.append(_look(probe, daemon, told, round(lives * share)))
                print(f"  {seen[-1]}", file=sys.stderr, flush=True)
            took = time.monotonic() - start
            if "ERROR" in daemon.log:
                raise BenchError(f"the daemon complained: {daemon.log[-400:]}")
    first, last = seen[0], seen[-1]
    detail = f"{took:.0f} s; {'; '.join(' '.join(str(one).split()) for one in seen)}"

    def row(what: str, unit: str, value: float, limit: float | None, detail: str = "") -> Row:
        name = f"churn: {what} from {first.lives} to {last.lives} lives"
        return Row(name, value, unit, lives, bar=limit, bar_on_ratio=False, detail=detail)

    early, late = first.sample, last.sample
    rows = sum(late.rows[name] for name in LIVE_TABLES)
    full = first.lives > TOMBSTONES  # before that what is bounded still fills
    grown = late.rss_mib - early.rss_mib
    yield row("memory", "MiB", grown, MEMORY_MIB if full else None, detail)
    yield row("descriptors", "", late.descriptors - early.descriptors, 0)
    yield row("watches", "", late.watches - early.watches, 0)
    yield row("rows of what has ended", "", rows, 0)
    yield row("threads", "", last.threads - first.threads, 0)
    yield row("tasks", "", last.tasks - first.tasks, 0)


def at_least_one_sandbox(lives: int) -> int:
    """Return how many lives there are if a sandbox is to live before the first look.

    Before that the daemon has no history that could be counted.
    """
    return max(lives, round(LIVES / LOOKS[0]))


def _living(probe: Probe) -> list[str]:
    return [one for one in probe.sandboxes() if one.startswith("churn")]


def _look(probe: Probe, daemon: ServiceProcess, told: Path, lives: int) -> Seen:
    told.unlink(missing_ok=True)
    os.kill(daemon.pid, signal.SIGUSR2)
    wait_for(told.exists, "the daemon to count its tasks")
    threads = len(os.listdir(f"/proc/{daemon.pid}/task"))
    return Seen(lives, probe.sample(), threads, int(told.read_text()))


def _live(node: BenchNode, first: int, end: int) -> None:
    """Let the sandboxes of these numbers live, some at once."""
    numbers = iter(range(first, end))
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for number in iter(lambda: next(numbers, None), None):
                _sandbox(node, f"churn{number:06d}")
        except BaseException as error:  # it must reach the caller
            failures.append(error)

    workers = [threading.Thread(target=work) for _ in range(AT_ONCE)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for failure in failures:
        raise failure


def _sandbox(node: BenchNode, name: str) -> None:
    process = begin(program(node), name)
    try:
        wait_up(process)
        pause = node.container(name)
        write_state(node, name, process.pid, [ContainerSpec(name)])
        say(node, Phase.CREATE_RUNTIME, pause, process.pid, name)
        for number, cpus in zip(range(LIVES), itertools.cycle(("0", "1", None)), strict=False):
            container = node.container(name, f"c{number}", cpus=cpus)
            for phase in (Phase.CREATE_RUNTIME, Phase.POSTSTART, Phase.POSTSTOP):
                say(node, phase, container, process.pid, name)
            shutil.rmtree(container.bundle)
        say(node, Phase.POSTSTOP, pause, process.pid, name)
        shutil.rmtree(pause.bundle)
    finally:
        process.kill()
        process.communicate()
        shutil.rmtree(node.dirs.vc / "sbs" / name, ignore_errors=True)
