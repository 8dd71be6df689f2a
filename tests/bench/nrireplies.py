"""How long NRI's handlers keep the container runtime waiting while every sandbox is reconciled.

`kata-pin run` as a process of its own with 100 sandboxes; a runtime played here (nriruntime.py of
tests/support) calls it one event at a time, as containerd does under its lock. Meanwhile all
threads are scattered again and again, and a reload asks for passes over every sandbox.

Timed: from a call's bytes to its answer's, for each kind of event in turn: an update, a start, that
waits for its pins because the workload runs next, a stop, and a pod of another runtime. Floor: the
same calls while nothing else happens. Also without the time that daemon and runtime waited for a
CPU: those are the neighbours' on a machine that is not idle.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kata_pin.base.documents.state import State
from kata_pin.peers.nri.messages import EventKind
from kata_pin.peers.proto import nri_pb2 as pb
from kata_pin.service.protocol import ask, decode
from tests.bench.figures import MS, BenchError, Row, Samples
from tests.bench.idle import wait_until_quiet
from tests.bench.node import BenchNode
from tests.bench.service import ServiceProcess, service
from tests.bench.standins import crowd
from tests.support.hooks import INTERPRETER
from tests.support.nriruntime import Peer, Runtime, container, pod
from tests.support.waiting import wait_for

SANDBOXES = 100
TIMEOUT_MS = 2000
"""The runtime's timeout, its own default; an answer has a quarter of it at most."""

BAR_MS = 50.0

KINDS = {
    "update": EventKind.POST_UPDATE_CONTAINER,
    "start": EventKind.START_CONTAINER,
    "stop": EventKind.STOP_CONTAINER,
    "other runtime": EventKind.RUN_POD_SANDBOX,
}


def measure(node: BenchNode, rounds: int) -> Iterator[Row]:
    """Yield the p99 of answers to each kind of event, and the longest of all."""
    path = node.root / "nri.sock"
    nri = {"enabled": "yes", "socket": str(path)}
    quiet = {"affinity_s": 3600, "deep_s": 86400}
    with crowd(node, SANDBOXES) as sandboxes:
        taken = asyncio.run(_taken(node, path, sandboxes.ids, rounds, {
            "hypervisors": sandboxes.hypervisors, "nri": nri, "audit": quiet,
        }))  # fmt: skip
    yield from taken.rows(sandboxes.what)


@dataclass(frozen=True)
class Answer:
    """An answer: the kind of event, its seconds, and those without waits for a CPU."""

    kind: str
    seconds: float
    own_s: float


@dataclass
class Taken:
    """Answers at rest and under load; how many passes set something meanwhile."""

    rest: list[Answer] = field(default_factory=list)
    load: list[Answer] = field(default_factory=list)
    reconciled: int = 0

    def rows(self, what: str) -> Iterator[Row]:
        """Yield a row a kind, and that of the longest answer."""
        for kind in KINDS:
            floor, load = (
                Samples([one.seconds for one in taken if one.kind == kind])
                for taken in (self.rest, self.load)
            )
            own = Samples([one.own_s for one in self.load if one.kind == kind])
            yield Row(
                f"NRI answer, {kind}, {what} reconciling", load.percentile(99) * MS, "ms",
                len(load.seconds), floor=floor.percentile(99) * MS,
                ratio=load.median / floor.median, bar=BAR_MS, bar_on_ratio=False,
                detail=f"p50 {load.median * MS:.2f}; {load.spread}; without waits for a CPU "
                f"p50 {own.median * MS:.2f}, {own.spread}",
            )  # fmt: skip
        longest = max(self.load, key=lambda one: one.seconds)
        yield Row(
            f"NRI answer, the longest, {what} reconciling", longest.seconds * MS, "ms",
            len(self.load), bar=TIMEOUT_MS / 4, bar_on_ratio=False,
            detail=f"a quarter of {TIMEOUT_MS} ms; without waits for a CPU "
            f"{longest.own_s * MS:.0f}; {self.reconciled} passes meanwhile",
        )  # fmt: skip


async def _taken(
    node: BenchNode, path: Path, ids: list[str], rounds: int, settings: dict[str, Any]
) -> Taken:
    taken = Taken()
    async with Runtime(path) as runtime:
        with service(node, **settings) as daemon:
            peer = await runtime.plugin()
            await peer.registered()
            await peer.configure(timeout_ms=TIMEOUT_MS)
            await peer.synchronize([_pod(one) for one in ids])
            await asyncio.to_thread(_wait_settled, node, ids)
            await asyncio.to_thread(wait_until_quiet, daemon)
            calls = Calls(peer, ids, daemon)
            for _ in range(max(rounds // 4, 10)):
                await calls.round(taken.rest)
            before = _applied(node)
            with storm(node, daemon):
                for _ in range(rounds):
                    await calls.round(taken.load)
            taken.reconciled = _applied(node) - before
    return taken


class Calls:
    """The runtime's calls, one sandbox after the other."""

    def __init__(self, peer: Peer, ids: list[str], daemon: ServiceProcess) -> None:
        self._peer = peer
        self._waits = [f"/proc/{pid}/schedstat" for pid in (daemon.pid, os.getpid())]
        self._ids = itertools.cycle(ids)
        self._numbers = itertools.count()

    async def round(self, taken: list[Answer]) -> None:
        """Call once for each kind of event; add the answers."""
        sandbox_id, number = next(self._ids), next(self._numbers)
        app = container(f"{sandbox_id}-n{number}", sandbox_id, cpus="0")
        for name, kind in KINDS.items():
            known = kind is not EventKind.RUN_POD_SANDBOX
            told = _pod(sandbox_id) if known else pod(f"other{number}", runtime_handler="runc")
            start, waited = time.perf_counter(), self._waited_s()
            await self._peer.event(kind, told, app if known else None)
            took = time.perf_counter() - start
            taken.append(Answer(name, took, max(0.0, took - (self._waited_s() - waited))))

    def _waited_s(self) -> float:
        """Return how long the daemon and we have waited for a CPU so far (schedstat)."""
        return sum(int(Path(path).read_text().split()[1]) for path in self._waits) / 1e9


_STORM = """
import os, signal, sys, time
daemon, cpus, *tids = map(int, sys.argv[1:])
while True:
    for tid in tids:
        os.sched_setaffinity(tid, range(cpus))
    os.kill(daemon, signal.SIGHUP)
    time.sleep(0.2)
"""


@contextlib.contextmanager
def storm(node: BenchNode, daemon: ServiceProcess) -> Iterator[None]:
    """Scatter every thread and have every sandbox reconciled, again and again, in a process."""
    tids = [str(tid) for one in node.sandboxes for tid in one.tids()]
    cpus = str(list(node.online)[-1] + 1)
    process = subprocess.Popen([INTERPRETER, "-IS", "-c", _STORM, str(daemon.pid), cpus, *tids])
    try:
        yield
        if process.poll() is not None:
            raise BenchError("what scatters the threads has ended")
    finally:
        process.kill()
        process.wait()


def _applied(node: BenchNode) -> int:
    """Return how many passes have set something, as metrics tell."""
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(30)
        peer.connect(str(node.runtime_dir / "metrics.sock"))
        peer.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        text = b"".join(iter(lambda: peer.recv(65536), b"")).decode()
    found = re.search(r"^kata_pin_apply_seconds_count ([0-9.]+)$", text, re.MULTILINE)
    if found is None:
        raise BenchError("no count of passes in the metrics")
    return int(float(found[1]))


def _pod(sandbox_id: str) -> pb.PodSandbox:
    return pod(sandbox_id, runtime_handler="kata")


def _wait_settled(node: BenchNode, ids: list[str]) -> None:
    def settled() -> bool:
        state = ask(str(node.runtime_dir / "status.sock"), "state", {}, 10.0)
        states = {one.id: one.state for one in decode(state, State).sandboxes}
        return all(states.get(one) in {"ok", "unpinned"} for one in ids)

    wait_for(settled, f"{len(ids)} sandboxes", 120)
