"""Healthy sandboxes whose hooks never stop, and a watch on the daemon, while something goes wrong.

The hooks are the real program with the budgets it ships with. Each one creates a container of its
own, so that at the end every message can be looked for in the registry.
"""

from __future__ import annotations

import itertools
import sqlite3
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from kata_pin.base.errors import KataPinError
from kata_pin.service.protocol import ask
from tests.bench.figures import MS, Row, count_row
from tests.bench.node import BenchNode
from tests.bench.service import ServiceProcess
from tests.support.hooks import COMMAND
from tests.support.katalike import KataSandbox
from tests.support.waiting import wait_for

PACE_S: Final = 0.1
PING_S: Final = 0.02
PING_LIMIT_S: Final = 60.0
PING_MS: Final = 100
RSS_MIB: Final = 128


@dataclass
class Figures:
    """What healthy sandboxes' hooks and the daemon's other clients had of a time."""

    sent: list[str] = field(default_factory=list)
    """The containers whose hooks were run."""
    seconds: list[float] = field(default_factory=list)
    spooled: int = 0
    unpinned: int = 0
    odd: list[str] = field(default_factory=list)
    pings: list[float] = field(default_factory=list)
    memory_mib: float = 0.0

    @property
    def past_budget(self) -> int:
        """Hooks that ended without the answer they waited for."""
        return self.spooled + self.unpinned

    def __str__(self) -> str:
        slowest = max(self.seconds, default=0) * MS
        ping = max(self.pings, default=0) * MS
        return (
            f"{len(self.sent)} hooks, {self.past_budget} past budget, {self.spooled} spooled, "
            f"slowest {slowest:.0f} ms, worst ping {ping:.0f} ms, {self.memory_mib:.0f} MiB"
        )


class Watch:
    """Pings the daemon and reads its memory in threads of its own, until the block ends."""

    def __init__(self, node: BenchNode, daemon: ServiceProcess, figures: Figures) -> None:
        self._socket = str(node.runtime_dir / "control.sock")
        self._daemon = daemon
        self._figures = figures
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=one) for one in (self._ping, self._weigh)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _ping(self) -> None:
        while not self._stop.wait(PING_S):
            start = time.monotonic()
            try:
                ask(self._socket, "ping", {}, PING_LIMIT_S)
            except KataPinError as error:
                self._figures.odd.append(f"ping: {error}")
            self._figures.pings.append(time.monotonic() - start)

    def _weigh(self) -> None:
        while not self._stop.wait(0.2):
            self._figures.memory_mib = max(self._figures.memory_mib, family_mib(self._daemon.pid))


class Traffic:
    """Hooks of some sandboxes, one after the other."""

    def __init__(self, node: BenchNode, sandboxes: Sequence[KataSandbox]) -> None:
        self._node = node
        self._sandboxes = itertools.cycle(sandboxes)
        self._numbers = itertools.count()

    def run(self, daemon: ServiceProcess, hooks: int) -> Figures:
        """Run so many hooks at their pace while the daemon is watched; return the figures."""
        figures = Figures()
        with Watch(self._node, daemon, figures):
            for _ in range(hooks):
                start = time.monotonic()
                self._one(figures)
                time.sleep(max(0.0, PACE_S - (time.monotonic() - start)))
        return figures

    def _one(self, figures: Figures) -> None:
        sandbox = next(self._sandboxes)
        name = f"t{next(self._numbers):06d}"
        container = self._node.container(sandbox.id, name, cpus=str(self._node.last_cpu))
        start = time.monotonic()
        done = hook(self._node, "createRuntime", container.state(sandbox.pid))
        figures.seconds.append(time.monotonic() - start)
        figures.sent.append(container.id)
        said = done.stderr.decode(errors="replace").strip()
        if "spooled, not recorded" in said:
            figures.spooled += 1
        elif "pins not confirmed" in said:
            figures.unpinned += 1
        elif said or done.returncode:
            figures.odd.append(f"status {done.returncode}: {said}")


def hook(node: BenchNode, phase: str, state: bytes) -> subprocess.CompletedProcess[bytes]:
    """Run one hook with its own budgets."""
    command = [*COMMAND, phase, f"--runtime-dir={node.runtime_dir}"]
    return subprocess.run(command, input=state, env={}, capture_output=True, check=False)


def lost(node: BenchNode, sent: Sequence[str], within_s: float = 120.0) -> int:
    """Wait until the spool is taken in; return how many of these containers nothing tells of."""
    spool = node.runtime_dir / "spool"
    wait_for(lambda: not list(spool.glob("*.msg")), "the spool to be taken in", within_s)
    database = sqlite3.connect(f"file:{node.runtime_dir}/registry.db?mode=ro", uri=True)
    try:
        seen = {row[0] for row in database.execute("SELECT container_id FROM seen")}
    finally:
        database.close()
    return len(set(sent) - seen)


def rows(
    name: str, stormy: Figures, calm: Figures, missing: int, *, served: bool = True
) -> Iterator[Row]:
    """Yield the rows of one attack, beside what there was without it.

    Only where the daemon can still serve, budgets and pings have bars.
    """
    count = len(stormy.sent)
    odd = f"; also {stormy.odd[0]}" if stormy.odd else ""
    limit = 0 if served else None
    slowest = f"slowest {max(stormy.seconds) * MS:.0f} ms"
    detail = f"{stormy.spooled} spooled, {slowest}{odd}; without the attack: {calm}"
    past = stormy.past_budget
    yield count_row(f"{name}: hooks past their budget", past, count, detail, bar=limit)
    yield count_row(f"{name}: hooks lost", missing, count)
    pings, worst = len(stormy.pings), max(stormy.pings) * MS
    ping_ms = PING_MS if served else None
    yield count_row(f"{name}: worst ping", worst, pings, unit="ms", bar=ping_ms)
    detail, most = "with its helpers, at its largest", stormy.memory_mib
    yield count_row(f"{name}: daemon's memory", most, pings, detail, unit="MiB", bar=RSS_MIB)


def family_mib(pid: int) -> float:
    """Return the memory of a process and its descendants in MiB, each page counted once."""
    return sum(_share_mib(one) for one in family(pid))


def family(pid: int) -> list[int]:
    """Return a process and its descendants."""
    found = [pid]
    for one in found:
        for path in Path(f"/proc/{one}/task").glob("*/children"):
            try:
                found += [int(word) for word in path.read_text().split()]
            except OSError:
                continue
    return found


def runs(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except OSError:
        return False


def _share_mib(pid: int) -> float:
    """Return the memory of one process, what it shares divided among those that share it."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024
