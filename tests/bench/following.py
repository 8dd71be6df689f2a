"""From an update that no hook tells to the last thread verified, by each source of events.

100 sandboxes are there, of 20 threads each. One of them gets another CPU, in turns the first and
the last of the machine, so that every thread of it is moved. Timed in the event loop of a whole
Daemon, from before the update until the pass that has the new mask has read every affinity back:
persist.json rewritten as Kata does (that write is in it), NRI's PostUpdateContainer from before it
is sent, a written cpuset of the sandbox's cgroup. Kata keeps the union of the containers' cpusets
there, and with runtime-rs nothing else tells of it. Since Linux 6.2 the kernel moves the threads at
that write, so the pass only finds that they are right. Floor: list, set and get, in turns.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import os
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from msgspec.structs import replace

from kata_pin.base.config.tree import Config, Nri, NriEnabled
from kata_pin.base.cpuset import CpuSet
from kata_pin.base.placement import PassOutcome
from kata_pin.follow.files import SPACING_S
from kata_pin.peers.nri.messages import EventKind
from kata_pin.peers.oci import Phase
from kata_pin.records.hooks import HookMessage
from tests.bench.events import TimedConnection, Waits, bare
from tests.bench.figures import BenchError, Row, Samples, median_row, timed
from tests.bench.node import BenchNode, accelerator
from tests.bench.service import LocalService, local_service
from tests.support import nriruntime
from tests.support.katalike import KataSandbox, Runtime
from tests.support.nriruntime import Peer
from tests.support.qemu import TWENTY, Accelerator
from tests.support.specimen import CpusetCgroup, cpuset_cgroup

SANDBOXES: Final = 100
MEDIAN_MS: Final = 10.0
P99_MS: Final = 50.0


def measure(node: BenchNode, rounds: int) -> Iterator[Row]:
    """Yield the rows of every source."""
    if accelerator() is not Accelerator.KVM:
        raise BenchError("needs KVM: 100 VMs are too many under TCG")
    if len(node.online) < 2:
        raise BenchError("needs two pCPUs")
    with ExitStack() as closing:
        group = closing.enter_context(cpuset_cgroup(str(node.online)))
        node.start(SANDBOXES - 1)
        confined = _confined(node, group, closing)
        yield from asyncio.run(_measured(node, confined, group, rounds))


def _confined(node: BenchNode, group: CpusetCgroup, closing: ExitStack) -> KataSandbox:
    """Start a sandbox of runtime-rs in a cgroup of its name."""
    folder = Path(group.folder) / "kata_rs0000"
    folder.mkdir()
    closing.callback(folder.rmdir)
    for name in ("cpuset.mems", "cpuset.cpus"):
        if (folder / name).exists():
            (folder / name).write_text((folder.parent / name).read_text())
    sandbox = KataSandbox(
        node.dirs, "rs0000", TWENTY, runtime=Runtime.RS, shim_process=False, cgroups=[folder]
    )
    closing.callback(sandbox.stop)
    return sandbox.start()


class Turns:
    """Whose turn it is: the CPU that the sandbox gets next."""

    def __init__(self, node: BenchNode) -> None:
        self._cpus = itertools.cycle((next(iter(node.online)), node.last_cpu))

    def next(self) -> CpuSet:
        """Return the other CPU."""
        return CpuSet([next(self._cpus)])


class Watcher:
    """An observer of passes that waits for one sandbox's mask."""

    def __init__(self) -> None:
        self._wanted: tuple[str, CpuSet] | None = None
        self._seen = asyncio.Event()

    def passed(self, outcome: PassOutcome) -> None:
        """See Observer."""
        if self._wanted == (outcome.sandbox_id, outcome.mask) and outcome.report.all_placed:
            self._seen.set()

    def ended(self, outcome: PassOutcome) -> None:
        """See Observer."""

    def failed(self, operation: str, error: Exception) -> None:
        """See Observer."""

    def want(self, sandbox_id: str, mask: CpuSet) -> None:
        """Wait for this from now on."""
        self._wanted = sandbox_id, mask
        self._seen.clear()

    async def wait(self) -> None:
        """Return after the pass; BenchError when it does not come."""
        try:
            async with asyncio.timeout(5.0):
                await self._seen.wait()
        except TimeoutError as error:
            raise BenchError(f"no pass had {self._wanted} within 5 s") from error


@dataclass
class Stage:
    """What is measured on."""

    node: BenchNode
    daemon: LocalService
    peer: Peer
    watcher: Watcher
    confined: KataSandbox
    group: CpusetCgroup


Update = Callable[[CpuSet], Coroutine[Any, Any, None]]


async def _measured(
    node: BenchNode, confined: KataSandbox, group: CpusetCgroup, rounds: int
) -> list[Row]:
    async with (
        nriruntime.Runtime(node.root / "nri.sock") as runtime,
        local_service(_config(node)) as daemon,
    ):
        peer = await runtime.plugin()
        await peer.ready()
        ids = [one.id for one in (*node.sandboxes, confined)]
        await daemon.settle(ids)
        daemon.keep_only(ids)
        watcher = Watcher()
        daemon.parts.passes._observers = (*daemon.parts.passes._observers, watcher)
        return await _rows(Stage(node, daemon, peer, watcher, confined, group), rounds)


async def _rows(stage: Stage, rounds: int) -> list[Row]:
    first, second = stage.node.sandboxes[:2]
    await _record(stage)
    sources: dict[str, tuple[KataSandbox, Update]] = {
        "persist.json": (first, partial(_persist, stage.node, first)),
        "NRI": (second, partial(_update, stage.peer, second)),
        "written cpuset": (stage.confined, partial(_write, stage.group)),
    }
    rows: list[Row] = []
    for name, (sandbox, update) in sources.items():
        rows += await _by(stage, name, sandbox, update, rounds)
    return rows


async def _by(
    stage: Stage, name: str, sandbox: KataSandbox, update: Update, rounds: int
) -> list[Row]:
    """Return the rows of one source."""
    turns, waits, floor = Turns(stage.node), Waits(), []
    for number in range(rounds + 2):
        cpus = turns.next()
        floor.append(timed(partial(bare, sandbox.pid, _where(sandbox))))
        stage.watcher.want(sandbox.id, cpus)
        samples = waits if number >= 2 else Waits()  # the first ones may find them there already
        await samples.take(_until(update(cpus), stage.watcher))
        _check(sandbox, cpus)
        await asyncio.sleep(SPACING_S * 1.5)  # who writes more often is read later
    what = f"{name} to verified, 20 threads, {SANDBOXES} sandboxes"
    median = median_row(what, waits.wall, Samples(floor))
    return [
        dataclasses.replace(median, bar=MEDIAN_MS, bar_on_ratio=False),
        waits.row(f"{what}, p99", Samples(floor), bar_ms=P99_MS),
    ]


async def _until(update: Coroutine[Any, Any, None], watcher: Watcher) -> None:
    await update
    await watcher.wait()


async def _persist(node: BenchNode, sandbox: KataSandbox, cpus: CpuSet) -> None:
    pause, work = node.specs(sandbox.id)
    sandbox.write_persist([pause, dataclasses.replace(work, cpus=str(cpus))])


async def _update(peer: Peer, sandbox: KataSandbox, cpus: CpuSet) -> None:
    told = nriruntime.container(f"{sandbox.id}-c1", sandbox.id, str(cpus))
    await peer.event(EventKind.POST_UPDATE_CONTAINER, nriruntime.pod(sandbox.id), told)


async def _write(group: CpusetCgroup, cpus: CpuSet) -> None:
    (Path(group.folder) / "kata_rs0000/cpuset.cpus").write_text(str(cpus))


async def _record(stage: Stage) -> None:
    """Record a container of runtime-rs with both CPUs: all that a hook tells of it."""
    node, sandbox = stage.node, stage.confined
    both = CpuSet([next(iter(node.online)), node.last_cpu])
    work = node.container(sandbox.id, "c1", cpus=str(both))
    stamp = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    message = HookMessage(Phase.CREATE_RUNTIME, stamp, os.getpid(), work.state(sandbox.pid))
    await stage.daemon.parts.hook_service.hook(TimedConnection(message))


def _where(sandbox: KataSandbox) -> frozenset[int]:
    return frozenset(os.sched_getaffinity(sandbox.pid))


def _check(sandbox: KataSandbox, cpus: CpuSet) -> None:
    for tid in sandbox.tids():
        if os.sched_getaffinity(tid) != set(cpus):
            raise BenchError(f"thread {tid} of {sandbox.id} is not on {cpus}")


def _config(node: BenchNode) -> Config:
    nri = Nri(enabled=NriEnabled.YES, socket=str(node.root / "nri.sock"))
    return replace(node.config(), nri=nri)
