"""How long NRI's handlers keep the container runtime waiting while every sandbox is reconciled.

`kata-pin run` as a process of its own with 100 sandboxes; a runtime played here (nriruntime.py of
tests/support) calls it one event at a time, as containerd does under its lock. Meanwhile all
threads are scattered again and again, and a reload asks for passes over every sandbox.

Timed: from a call's bytes to its answer's, for each kind of event in turn: an update, a start, that
waits for its pins because the workload runs next, a stop, and a pod of another runtime. Floor: the
same calls while nothing else happens.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kata_pin.cli.client import ask
from kata_pin.wire.nri import EventKind
from kata_pin.wire.proto import nri_pb2 as pb
from tests.bench.figures import MS, BenchError, Row, Samples
from tests.bench.idle import wait_until_quiet
from tests.bench.node import BenchNode, scatter
from tests.bench.service import ServiceProcess, service
from tests.bench.standins import crowd
from tests.support.nriruntime import Peer, Runtime, container, pod
from tests.support.waiting import wait_for

SANDBOXES = 100
TIMEOUT_MS = 2000
"""The runtime's timeout, its own default; an answer has a quarter of it at most."""

BAR_MS = 50.0

STORM_S = 0.2
"""Between two demands for passes over every sandbox; they take longer."""

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


@dataclass
class Taken:
    """Seconds that answers took, by the kind of event, at rest and under load; passes meanwhile."""

    rest: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    load: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    reconciled: int = 0

    def rows(self, what: str) -> Iterator[Row]:
        """Yield a row a kind, and that of the longest answer."""
        for kind in KINDS:
            floor, load = Samples(self.rest[kind]), Samples(self.load[kind])
            yield Row(
                f"NRI answer, {kind}, {what} reconciling", load.percentile(99) * MS, "ms",
                len(load.seconds), floor=floor.percentile(99) * MS,
                ratio=load.median / floor.median, bar=BAR_MS, bar_on_ratio=False,
                detail=f"p50 {load.median * MS:.2f}; {load.spread}",
            )  # fmt: skip
        every = [seconds for taken in self.load.values() for seconds in taken]
        yield Row(
            f"NRI answer, the longest, {what} reconciling", max(every) * MS, "ms", len(every),
            bar=TIMEOUT_MS / 4, bar_on_ratio=False,
            detail=f"a quarter of {TIMEOUT_MS} ms; {self.reconciled} passes meanwhile",
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
            calls = Calls(peer, ids)
            for _ in range(max(rounds // 4, 10)):
                await calls.round(taken.rest)
            storm = Storm(node, daemon)
            storm.start()
            try:
                for _ in range(rounds):
                    await calls.round(taken.load)
            finally:
                taken.reconciled = await asyncio.to_thread(storm.stop)
    return taken


class Calls:
    """The runtime's calls, one sandbox after the other."""

    def __init__(self, peer: Peer, ids: list[str]) -> None:
        self._peer = peer
        self._ids = itertools.cycle(ids)
        self._numbers = itertools.count()

    async def round(self, taken: dict[str, list[float]]) -> None:
        """Call once for each kind of event; add the seconds."""
        sandbox_id, number = next(self._ids), next(self._numbers)
        app = container(f"{sandbox_id}-n{number}", sandbox_id, cpus="0")
        for name, kind in KINDS.items():
            known = kind is not EventKind.RUN_POD_SANDBOX
            told = _pod(sandbox_id) if known else pod(f"other{number}", runtime_handler="runc")
            start = time.perf_counter()
            await self._peer.event(kind, told, app if known else None)
            taken[name].append(time.perf_counter() - start)


class Storm:
    """Scatters every thread and has every sandbox reconciled, again and again, in a thread."""

    def __init__(self, node: BenchNode, daemon: ServiceProcess) -> None:
        self._node = node
        self._daemon = daemon
        self._tids = [tid for one in node.sandboxes for tid in one.tids()]
        self._over = threading.Event()
        self._before = _applied(node)
        self._trouble: Exception | None = None
        self._thread = threading.Thread(target=self._run)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> int:
        """End; return how many passes set something. BenchError when the daemon is in trouble."""
        self._over.set()
        self._thread.join()
        if self._trouble is not None:
            raise BenchError(f"reconcile: {self._trouble}")
        return _applied(self._node) - self._before

    def _run(self) -> None:
        try:
            while not self._over.wait(STORM_S):
                scatter(self._tids, frozenset(self._node.online))
                os.kill(self._daemon.pid, signal.SIGHUP)
        except OSError as error:
            self._trouble = error


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
        states = {one["id"]: one["state"] for one in state["sandboxes"]}
        return all(states.get(one) in {"ok", "unpinned"} for one in ids)

    wait_for(settled, f"{len(ids)} sandboxes", 120)
