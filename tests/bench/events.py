"""From an event to the last thread verified, and from a thread's birth to its pin.

Timed for messages: Reception.hook, from the call with a decoded message until the answer `pinned`
is written, in the event loop of a whole Daemon. That is the bundle read, the registry's commit, the
supervisor's pass (process table, VMM, threads and helpers, roles, decision, masks set and read
back, threads listed again) and the wake-ups between them; the socket is left out. All threads have
all pCPUs before, so every one is set. Floor: list, set and get over the same threads, in turns.
Passes alone are given in CPU time of the daemon's thread.

Timed for births: from the kernel's own stamp of the fork (process connector, CLOCK_MONOTONIC) until
another process sees the affinity that the new thread should have, polling every 50 us. The daemon
is `kata-pin run`, at rest before each birth. An iothread is added by QMP while QEMU's main thread
has all pCPUs, so that it inherits them (floor: hearing of a thread's birth and setting its mask,
bare); a vCPU is hotplugged as Kata does it (floor: the vCPU enters KVM_RUN, before which nothing
tells what it is).
"""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import dataclasses
import itertools
import math
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, Self

from kata_pin.engine.runner import Turn
from kata_pin.peers.oci import Phase
from kata_pin.records.hooks import HookConnection, HookMessage
from kata_pin.rights.broker.libc import process_events
from kata_pin.vmm.role_cache import YOUNG_S
from tests.bench.figures import (
    MS,
    BenchError,
    Row,
    Samples,
    in_turns,
    median_row,
    requests_row,
    tail_row,
    timed,
)
from tests.bench.hooks import HookRunner
from tests.bench.node import BenchNode, Container, accelerator, scatter
from tests.bench.service import KATA_PIN, LocalService, ServiceProcess, local_service, service
from tests.support.counted import Requests, counted
from tests.support.katalike import KataSandbox
from tests.support.qemu import (
    TWENTY,
    TWO_HUNDRED_SIXTY,
    Accelerator,
    Machine,
    with_one_vcpu,
)
from tests.support.waiting import SCALE, wait_for

_MACHINES: Final = {6: Machine(boot=1, maximum=1), 20: TWENTY, 260: TWO_HUNDRED_SIXTY}
"""The VMs in which iothreads are born, by their threads."""

_FEWER_ROUNDS: Final = 100
"""So many threads that a third of the rounds must do: an unplug takes long."""

_EVENT = struct.Struct("=36xIIQIIII")  # proc_event: what, cpu, timestamp_ns, then four ids
_FORK = 1

POLL_S: Final = 50e-6
"""Between two looks at a new thread's affinity; the figures are late by as much at most."""


WAIT_S: Final = 5.0 * SCALE
"""Longest wait for a birth, its pin, or the daemon's rest."""

REST_S: Final = 0.03 * SCALE
"""How long the daemon has been idle before a thread is born, unless it never is."""


class TimedConnection(HookConnection):
    """A hook whose answer ends the measurement."""

    def __init__(self, message: HookMessage) -> None:
        self.message = message
        self.gone = asyncio.Event()
        self.answers: list[str] = []

    def _send(self, line: bytes, *, last: bool) -> None:
        self.answers.append(line.decode().strip())
        if last:
            self.gone.set()


def measure_events(node: BenchNode, rounds: int) -> Iterator[Row]:
    """Yield the rows of messages."""
    node.start(1)
    node.start(1, TWO_HUNDRED_SIXTY, prefix="big")
    twenty, big = node.sandboxes
    few = max(rounds // 3, 10)
    yield from asyncio.run(_messages(node, twenty, rounds, bar_ms=5.0))
    yield from asyncio.run(_messages(node, big, few, bar_ms=20.0))
    yield from asyncio.run(_passes(node, twenty, rounds, bar=18.0))
    yield from asyncio.run(_passes(node, big, few, bar=9.0))


async def _messages(
    node: BenchNode, sandbox: KataSandbox, rounds: int, *, bar_ms: float
) -> list[Row]:
    """Measure messages about a known sandbox, and first messages: the sandbox just forgotten."""
    async with local_service(node.config()) as daemon:
        await daemon.settle([sandbox.id])
        work = node.container(sandbox.id, "c1", cpus=str(node.last_cpu))
        tids, everywhere = sandbox.tids(), frozenset(node.online)
        message = messages_of(work, sandbox.pid)
        await take(daemon, next(message))
        floor, known, fresh = [], Waits(), Waits()
        for _ in range(rounds):
            scatter(tids, everywhere)
            floor.append(timed(lambda: bare(sandbox.pid, frozenset({node.last_cpu}))))
            scatter(tids, everywhere)
            await known.take(take(daemon, next(message)))
            daemon.parts.passes.drop(sandbox.id)
            scatter(tids, everywhere)
            await fresh.take(take(daemon, next(message)))
    what = f"{len(tids)} threads"
    return [
        known.row(f"event to verified, {what}", Samples(floor), bar_ms=bar_ms),
        fresh.row(f"first message to verified, {what}", Samples(floor)),
    ]


async def _passes(node: BenchNode, sandbox: KataSandbox, rounds: int, *, bar: float) -> list[Row]:
    """Measure the CPU time of passes: over threads that all have to be set, and over quiet ones."""
    async with local_service(node.config()) as daemon:
        await daemon.settle([sandbox.id])
        work = node.container(sandbox.id, "c1", cpus=str(node.last_cpu))
        await take(daemon, next(messages_of(work, sandbox.pid)))
        tids, everywhere = sandbox.tids(), frozenset(node.online)
        passes = daemon.parts.passes
        daemon.parts.sandboxes.entry(sandbox.id).supervisor.as_of = math.inf  # each lists /proc

        def run(sandbox_id: str) -> None:
            with contextlib.suppress(StopIteration):  # it ends without ever waiting
                passes._run_pass(sandbox_id, WithoutPause(passes._scheduler, "")).send(None)

        floor, setting, quiet = [], [], []
        for _ in range(rounds):
            scatter(tids, everywhere)
            floor.append(_cpu_time(lambda: bare(sandbox.pid, frozenset({node.last_cpu}))))
            scatter(tids, everywhere)
            setting.append(_cpu_time(lambda: run(sandbox.id)))
            quiet.append(_cpu_time(lambda: run(sandbox.id)))
    name = f"CPU of a pass, {len(tids)} threads"
    return [
        median_row(f"{name} to set", Samples(setting), Samples(floor), bar=bar),
        median_row(f"{name} in place", Samples(quiet), Samples(floor)),
    ]


class WithoutPause(Turn):
    """A turn in which nothing else is served."""

    async def breathe(self) -> None:
        """Go on at once."""


def _cpu_time(work: Callable[[], object]) -> float:
    """Return the CPU time of this thread that something takes, in seconds."""
    start = time.thread_time()
    work()
    return time.thread_time() - start


class Waits:
    """How long the same thing took, by the clock and in CPU time of this thread."""

    def __init__(self) -> None:
        self._wall: list[float] = []
        self._cpu: list[float] = []

    async def take(self, work: Coroutine[Any, Any, None]) -> None:
        """Take one sample."""
        start, cpu = time.perf_counter(), time.thread_time()
        await work
        self._wall.append(time.perf_counter() - start)
        self._cpu.append(time.thread_time() - cpu)

    @property
    def wall(self) -> Samples:
        """What was taken, by the clock."""
        return Samples(self._wall)

    @property
    def cpu(self) -> Samples:
        """The same in CPU time."""
        return Samples(self._cpu)

    def row(self, name: str, floor: Samples, *, bar_ms: float | None = None) -> Row:
        """Return the row of the p99 by the clock; CPU time tells what neighbours added."""
        cpu = self.cpu
        row = tail_row(name, Samples(self._wall), floor, bar_ms=bar_ms)
        used = f"CPU p50 {cpu.median * MS:.2f}, p99 {cpu.percentile(99) * MS:.2f}"
        return dataclasses.replace(row, detail=f"{row.detail}; {used}")


def bare(pid: int, cpus: frozenset[int]) -> None:
    """List the threads of a process, set each affinity and read it back: the floor of a pass."""
    for name in os.listdir(f"/proc/{pid}/task"):
        os.sched_setaffinity(int(name), cpus)
        os.sched_getaffinity(int(name))


def messages_of(container: Container, pid: int) -> Iterator[HookMessage]:
    """Yield createRuntime messages, each newer than the last."""
    for number in itertools.count():
        stamp = time.clock_gettime_ns(time.CLOCK_BOOTTIME) + number
        yield HookMessage(Phase.CREATE_RUNTIME, stamp, os.getpid(), container.state(pid))


async def take(daemon: LocalService, message: HookMessage) -> None:
    """Have the daemon take a message and pin; BenchError if it does not."""
    connection = TimedConnection(message)
    await daemon.parts.hook_service.hook(connection)
    if connection.answers != ["recorded", "pinned"]:
        raise BenchError(f"a message was answered {connection.answers}")


# ---- births --------------------------------------------------------------------------------------


class Size(NamedTuple):
    """VMs of so many threads: one in which iothreads are born, and one in which vCPUs are.

    The second has one boot vCPU and two pCPUs, so that a hotplugged vCPU gets one of its own.
    """

    threads: int
    grow: KataSandbox
    plug: KataSandbox

    def is_pinned(self) -> bool:
        """Whether the main thread of the first is where its only container is."""
        return len(os.sched_getaffinity(self.grow.pid)) == 1


def measure_births(node: BenchNode, rounds: int) -> Iterator[Row]:
    """Yield the rows of threads born in VMs of each size: an iothread, and a hotplugged vCPU."""
    if accelerator() is not Accelerator.KVM:
        raise BenchError("needs KVM: under TCG nothing names a hotplugged vCPU")
    if len(node.online) < 2:
        raise BenchError("needs two pCPUs: a vCPU inherits the one")
    first, last = next(iter(node.online)), node.last_cpu
    both, names = frozenset({first, last}), (f"new{number}" for number in itertools.count())
    sizes = [_start_size(node, threads, machine) for threads, machine in _MACHINES.items()]
    with service(node) as daemon, Births(daemon) as births:
        run = HookRunner(node)
        for _, grow, plug in sizes:
            for sandbox, name, cpu in ((plug, "c1", first), (plug, "c2", last), (grow, "c1", last)):
                one = node.container(sandbox.id, name, cpus=str(cpu))
                run.time("createRuntime", one.state(sandbox.pid))
        for size in sizes:
            few = rounds if size.threads < _FEWER_ROUNDS else max(rounds // 3, 10)
            yield from _times_of_births(size, births, both, names, few)
    yield from _requests_of_births(node, sizes, both, names)


def _times_of_births(
    size: Size, births: Births, both: frozenset[int], names: Iterator[str], rounds: int
) -> Iterator[Row]:
    """Yield the rows of how long births take in VMs of one size."""
    bare_one, iothread, nameable, vcpu = in_turns(
        rounds,
        lambda: _bare_reaction(births, both),
        lambda: _iothread_to_pin(size.grow, births, both, next(names)),
        lambda: _vcpu_until(size.plug, births, _in_kvm_run),
        lambda: _vcpu_until(size.plug, births, lambda _, tid: _is_paired(tid, both)),
    )
    row = median_row(
        f"thread born to pinned (iothread), {size.threads} threads", iothread, bare_one
    )
    bar = max(2.0, 20 * bare_one.median * MS)
    yield dataclasses.replace(row, bar=bar, bar_on_ratio=False)
    yield median_row(f"vCPU hotplugged to paired, {size.threads} threads", vcpu, nameable, bar=4.0)


def _requests_of_births(
    node: BenchNode, sizes: Sequence[Size], both: frozenset[int], names: Iterator[str]
) -> Iterator[Row]:
    """Yield the rows of what births ask of the broker in VMs that have no young threads."""
    requests = Requests(node.root / "requests")
    asked: dict[str, list[list[str]]] = {}

    def take(kind: str, size: Size) -> None:
        name = f"requests of a birth ({kind}), {size.threads} threads"
        asked.setdefault(name, []).append(requests.taken())

    def is_paired(size: Size, _: int, tid: int) -> bool:
        if paired := _is_paired(tid, both):
            take("vCPU, to its pair", size)
        return paired

    command = (*counted(node.root / "requests"), *KATA_PIN)
    with service(node, command) as daemon, Births(daemon) as births:
        for _ in range(3):
            wait_for(lambda: all(size.is_pinned() for size in sizes), "the VMs to be pinned")
            time.sleep(YOUNG_S * 1.25)
            for size in sizes:
                births.drain()
                requests.taken()
                _iothread_to_pin(size.grow, births, both, next(names))
                wait_for(size.is_pinned, "the main thread to be pinned")
                take("iothread, to its pin and the main thread's", size)
            for size in sizes:
                births.drain()
                requests.taken()
                _vcpu_until(size.plug, births, partial(is_paired, size))
    for name, rounds in asked.items():
        yield requests_row(name, rounds)


def _start_size(node: BenchNode, threads: int, machine: Machine) -> Size:
    """Start the VMs of a size, each with all pCPUs until its pods have theirs."""
    grow = _start(node, f"grow{threads}", machine)
    return Size(threads, grow, _start(node, f"plug{threads}", with_one_vcpu(threads)))


def _start(node: BenchNode, name: str, machine: Machine) -> KataSandbox:
    """Start a sandbox of which Kata's state tells its pause container only."""
    sandbox = KataSandbox(
        node.dirs, name, machine, shim_process=False, containers=node.specs(name)[:1]
    )
    node.sandboxes.append(sandbox.start())
    return sandbox


class Births:
    """A subscription to process events of our own, for the kernel's stamps of forks.

    `daemon` is what hears of them too.
    """

    def __init__(self, daemon: ServiceProcess | None = None) -> None:
        self._daemon = daemon
        self._socket: socket.socket = process_events(1, execs=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def drain(self) -> None:
        """Let the daemon end what it does, within WAIT_S; forget what came so far."""
        daemon, until = self._daemon, time.monotonic() + WAIT_S
        while daemon is not None and time.monotonic() < until:
            used_s = daemon.cpu_s()
            time.sleep(REST_S)
            if daemon.cpu_s() - used_s < REST_S / 20:
                break
        with contextlib.suppress(BlockingIOError):
            while True:
                self._socket.recv(4096)

    def thread_of(self, tgid: int, timeout_s: float = WAIT_S) -> tuple[int, float]:
        """Return the next thread born in a process, and when: seconds of CLOCK_MONOTONIC."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            select.select([self._socket], [], [], timeout_s)
            with contextlib.suppress(BlockingIOError):
                data = self._socket.recv(4096)
                what, _, stamp, _, _, child, group = _EVENT.unpack_from(data)
                if what == _FORK and group == tgid and child != tgid:
                    return child, stamp / 1e9
        raise BenchError(f"no thread of {tgid} was born within {timeout_s:g} s")


def _vcpu_until(sandbox: KataSandbox, births: Births, done: Callable[[int, int], bool]) -> float:
    """Plug a vCPU; return the seconds from its birth until `done` (tgid, tid); unplug it."""
    births.drain()
    plugging = threading.Thread(target=sandbox.shim.plug, args=(1,))
    plugging.start()
    try:
        return until_done(sandbox.pid, births, done)
    finally:
        plugging.join()
        sandbox.shim.unplug(1)


def _iothread_to_pin(
    sandbox: KataSandbox, births: Births, everywhere: frozenset[int], name: str
) -> float:
    """Add an iothread that inherits every pCPU; return the seconds from its birth to its pin."""
    os.sched_setaffinity(sandbox.pid, everywhere)
    births.drain()
    adding = threading.Thread(
        target=sandbox.shim.execute,
        args=("object-add",),
        kwargs={"qom-type": "iothread", "id": name},
    )
    adding.start()
    try:
        return until_done(
            sandbox.pid, births, lambda _, tid: os.sched_getaffinity(tid) != everywhere
        )
    finally:
        adding.join()
        sandbox.shim.execute("object-del", id=name)


def until_done(pid: int, births: Births, done: Callable[[int, int], bool]) -> float:
    """Return the seconds from the next birth in a VM until `done` (tgid, tid)."""
    tid, born = births.thread_of(pid)
    while not done(pid, tid):
        if time.monotonic() > born + WAIT_S:
            raise BenchError(f"a new thread was not pinned within {WAIT_S:g} s")
        time.sleep(POLL_S)
    return time.monotonic() - born


def _is_paired(tid: int, both: frozenset[int]) -> bool:
    """Whether a vCPU of two has a pCPU of its own; it inherited both."""
    return os.sched_getaffinity(tid) != both


def _in_kvm_run(tgid: int, tid: int) -> bool:
    """Whether a thread has entered KVM: before that nothing tells it from any other thread."""
    with open(f"/proc/{tgid}/task/{tid}/syscall", encoding="ascii") as file:
        words = file.read().split()
    return words[:1] == ["16"] and words[2] == "0xae80"


def _bare_reaction(births: Births, cpus: frozenset[int]) -> float:
    """Start a thread of our own; return the seconds until its birth was heard and its mask set."""
    births.drain()
    until = _thread.allocate_lock()
    until.acquire()
    _thread.start_new_thread(until.acquire, ())
    try:
        tid, born = births.thread_of(os.getpid())
        os.sched_setaffinity(tid, cpus)
        os.sched_getaffinity(tid)
        return time.monotonic() - born
    finally:
        until.release()
