"""What a hook costs a container: the real program against the real daemon, beside a bare Python.

Timed: from posix_spawn of `/usr/bin/python3 -IS kata-pin-hook PHASE`, the file that `kata-pin
install` writes, until waitpid has its end, stdin and stderr being files. The floor,
`/usr/bin/python3 -I -S -c pass`, takes its turn in every round. The daemon is `kata-pin run` on a
tmpfs; before every round the VM's threads are given all pCPUs, so that a pass has all of them to
set.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kata_pin.records.hooks import Spool
from kata_pin.vmm.role_cache import YOUNG_S
from tests.bench.figures import MS, BenchError, Row, Samples, in_turns, median_row, requests_row
from tests.bench.node import BenchNode, Container, scatter
from tests.bench.service import KATA_PIN, ServiceProcess, service
from tests.support.counted import Requests, counted
from tests.support.hooks import INTERPRETER
from tests.support.katalike import KataSandbox
from tests.support.waiting import wait_for

BARE = (INTERPRETER, "-I", "-S", "-c", "pass")
AT_ONCE = 200
BUDGET_S = 0.25 + 0.2
"""What a hook may wait for the record and then for the pins, by default."""


class HookRunner:
    """Starts hooks of one node, and bare interpreters."""

    def __init__(self, node: BenchNode) -> None:
        self._command = node.hook_command()
        self._stdin = node.root / "stdin"
        self._stderr = node.root / "stderr"

    def time(self, phase: str, state: bytes) -> float:
        """Run one hook; return its seconds. BenchError when it fails a container."""
        self._stdin.write_bytes(state)
        return self._time([*self._command, phase])

    def time_bare(self) -> float:
        """Run the bare interpreter; return its seconds."""
        return self._time(list(BARE))

    def said(self) -> str:
        """Return what the last hook wrote to stderr: nothing when all went well."""
        return self._stderr.read_text()

    def _time(self, argv: list[str]) -> float:
        truncate = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        files = [
            (os.POSIX_SPAWN_OPEN, 0, str(self._stdin), os.O_RDONLY | os.O_CREAT, 0o600),
            (os.POSIX_SPAWN_OPEN, 2, str(self._stderr), truncate, 0o600),
        ]
        start = time.perf_counter()
        pid = os.posix_spawn(argv[0], argv, {}, file_actions=files)
        _, status = os.waitpid(pid, 0)
        seconds = time.perf_counter() - start
        if status:
            raise BenchError(f"a hook ended with status {status}: {self.said()}")
        return seconds


def measure(node: BenchNode, rounds: int) -> Iterator[Row]:
    """Yield the rows of all hooks."""
    fresh = max(rounds // 4, 5)
    node.start(fresh + 2)
    first, *others = node.sandboxes
    with service(node) as daemon:
        yield from known_sandbox(node, first, rounds)
        yield from first_message(node, others[1:])
        yield from other_runtime(node, rounds)
        yield from many_at_once(node, daemon)
    yield from daemon_away(node, rounds)
    yield from requests_of_hooks(node, first, others[0])


def known_sandbox(
    node: BenchNode, sandbox: KataSandbox, rounds: int, *, suffix: str = ""
) -> Iterator[Row]:
    """Measure poststart, createRuntime and prestart of a container of a sandbox with 20 threads."""
    run = HookRunner(node)
    work = node.container(sandbox.id, "c1", cpus=str(node.last_cpu))
    run.time("createRuntime", work.state(sandbox.pid))
    tids = sandbox.tids()

    def waiting(phase: str, *, shown: str = "") -> Callable[[], float]:
        def once() -> float:
            scatter(tids, frozenset(node.online))
            seconds = run.time(phase, work.state(sandbox.pid, shown))
            expect_silence(run, phase)
            return seconds

        return once

    bare, poststart, create, prestart = in_turns(
        rounds,
        run.time_bare,
        waiting("poststart", shown=sandbox.id),
        waiting("createRuntime"),
        waiting("prestart"),
    )
    threads = f"{len(tids)} threads"
    yield median_row(f"hook poststart, recorded{suffix}", poststart, bare, bar=1.25)
    bar = 1.8 if suffix else 2.0
    yield median_row(f"hook createRuntime, pinned, {threads}{suffix}", create, bare, bar=bar)
    yield median_row(f"hook prestart, pinned, {threads}{suffix}", prestart, bare, bar=bar)


def first_message(node: BenchNode, sandboxes: list[KataSandbox]) -> Iterator[Row]:
    """Measure the hook that announces a sandbox, QMP's window open: each VM is asked once."""
    run = HookRunner(node)
    cpus = str(node.last_cpu)
    waiting = iter(sandboxes)

    def announce() -> float:
        sandbox = next(waiting)
        pause = node.container(sandbox.id, cpus=cpus)
        scatter(sandbox.tids(), frozenset(node.online))
        sandbox.shim.let_go()
        seconds = run.time("createRuntime", pause.state(sandbox.pid))
        expect_silence(run, "createRuntime of a sandbox")
        return seconds

    bare, announced = in_turns(len(sandboxes), run.time_bare, announce)
    yield median_row("hook createRuntime, first, QMP asked", announced, bare, bar=2.0)


def other_runtime(node: BenchNode, rounds: int, *, suffix: str = "") -> Iterator[Row]:
    """Measure the hook of a container that another runtime runs: CRI-O's `always`."""
    run = HookRunner(node)
    numbers = iter(range(rounds))
    with _workload() as pid:

        def foreign() -> float:
            one = node.container(f"other{next(numbers):05d}", kata=False)
            seconds = run.time("createRuntime", one.state(pid))
            expect_silence(run, "createRuntime of another runtime's container")
            return seconds

        bare, samples = in_turns(rounds, run.time_bare, foreign)
    name = f"hook createRuntime, container without a VM{suffix}"
    yield median_row(name, samples, bare, bar=1.5 if suffix else None)


def requests_of_hooks(node: BenchNode, known: KataSandbox, new: KataSandbox) -> Iterator[Row]:
    """Count what hooks ask of the broker until they are answered: the least of some rounds.

    What other new processes of the machine cost comes on top of that.
    """
    run, requests = HookRunner(node), Requests(node.root / "requests")
    work = node.container(known.id, "c1", cpus=str(node.last_cpu))
    pause = node.container(new.id, cpus=str(node.last_cpu))
    other = node.container("counted", kata=False)
    with service(node, (*counted(node.root / "requests"), *KATA_PIN)), _workload() as pid:
        run.time("createRuntime", work.state(known.pid))
        time.sleep(YOUNG_S * 1.25)
        new.shim.let_go()
        for name, state, rounds in (
            ("createRuntime, pinned", work.state(known.pid), 3),
            ("createRuntime, first, QMP asked", pause.state(new.pid), 1),
            ("createRuntime, container without a VM", other.state(pid), 3),
        ):
            taken = []
            for _ in range(rounds):
                scatter(known.tids(), frozenset(node.online))
                requests.taken()
                run.time("createRuntime", state)
                taken.append(requests.taken())
            yield requests_row(f"requests of a hook, {name}", taken)


@contextlib.contextmanager
def _workload() -> Iterator[int]:
    """Run a process that stands for a container's; yield its pid."""
    with subprocess.Popen(["/usr/bin/sleep", "600"]) as process:
        try:
            yield process.pid
        finally:
            process.kill()


def daemon_away(node: BenchNode, rounds: int) -> Iterator[Row]:
    """Measure the hook that spools, with fsync, because nobody listens."""
    run = HookRunner(node)
    work = Container("away-c1", node.dirs.bundles / "away-c1")

    def away() -> float:
        return run.time("poststart", work.state(1))

    bare, samples = in_turns(rounds, run.time_bare, away)
    spooled = list(Spool(str(node.runtime_dir / "spool")).pending())
    if len(spooled) != rounds:
        raise BenchError(f"{rounds} hooks left {len(spooled)} messages in the spool")
    shutil.rmtree(node.runtime_dir)
    yield median_row("hook poststart, daemon away, spooled", samples, bare, bar=1.5)


@dataclass(frozen=True)
class Ended:
    """How a hook of many ended; `at_ns` is CLOCK_BOOTTIME when it was seen to have."""

    pid: int
    status: int
    at_ns: int


def many_at_once(node: BenchNode, daemon: ServiceProcess, at_once: int = AT_ONCE) -> Iterator[Row]:
    """Start so many hooks, each of a container, at once; check that each message counts once."""
    states, ids = [], []
    for number, sandbox in zip(range(at_once), itertools.cycle(node.sandboxes), strict=False):
        container = node.container(sandbox.id, f"many{number:03d}", cpus=str(node.last_cpu))
        ids.append(container.id)
        file = node.root / f"{container.id}.json"
        file.write_bytes(container.state(sandbox.pid))
        states.append((file, node.root / f"{container.id}.err"))
    argv = [*node.hook_command(), "createRuntime"]
    quiet = [(file, Path("/dev/null")) for file, _ in states]
    bare_s, _ = _burst(list(BARE), quiet)
    used_s = daemon.cpu_s()
    wall_s, ended = _burst(argv, states)
    used_s = daemon.cpu_s() - used_s
    failed = [one for one in ended if one.status]
    if failed:
        raise BenchError(f"{len(failed)} of {at_once} hooks failed their container")
    spool = node.runtime_dir / "spool"
    wait_for(lambda: not list(spool.glob("*.msg")), "the spool to be taken in", 20)
    stamps = _recorded(node, ids)
    lost = {one.pid for one in ended} ^ set(stamps)
    if lost:
        raise BenchError(f"messages of {len(lost)} of {at_once} hooks were lost or counted twice")
    said = [err.read_text() for _, err in states]
    waits = Samples([(one.at_ns - stamps[one.pid]) / 1e9 for one in ended])
    late = sum("spooled" in text for text in said)
    unpinned = sum("pins not confirmed" in text for text in said)
    double = daemon.log.count("dropped: a newer message is recorded")
    counts = f"{late} spooled, {unpinned} left before pinned, {double} both acked and spooled"
    counts += f"; daemon's CPU {used_s:.2f} s"
    yield Row(
        f"hook, {at_once} at once, all ended",
        wall_s * MS, "ms", at_once, bare_s * MS, wall_s / bare_s,
        detail=f"none lost, none counted twice; {counts}",
    )  # fmt: skip
    yield Row(
        f"hook, {at_once} at once, the slowest from its stamp to its end",
        max(waits.seconds) * MS, "ms", at_once, bare_s * MS, max(waits.seconds) / bare_s,
        bar=BUDGET_S * MS + bare_s * MS, bar_on_ratio=False,
        detail=f"bar: the budget of {BUDGET_S * MS:g} ms and what as many bare ones need for all",
    )  # fmt: skip


def expect_silence(run: HookRunner, what: str) -> None:
    """Raise BenchError unless the daemon's answer was all the hook wanted."""
    said = run.said()
    if said:
        raise BenchError(f"{what}: {said.strip()}")


def _burst(argv: list[str], files: list[tuple[Path, Path]]) -> tuple[float, list[Ended]]:
    """Start a process for every pair of stdin and stderr; return the seconds and their ends."""
    start = time.perf_counter()
    write = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    waiting = {
        os.posix_spawn(
            argv[0], argv, {},
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, str(stdin), os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 2, str(stderr), write, 0o600),
            ],
        )
        for stdin, stderr in files
    }  # fmt: skip
    ended = []
    while waiting:
        pid, status = os.waitpid(-1, 0)
        if pid in waiting:
            waiting.discard(pid)
            ended.append(Ended(pid, status, time.clock_gettime_ns(time.CLOCK_BOOTTIME)))
    return time.perf_counter() - start, ended


def _recorded(node: BenchNode, container_ids: list[str]) -> dict[int, int]:
    """Return the stamp by the hook's pid of the messages that the registry has."""
    registry = sqlite3.connect(f"file:{node.runtime_dir}/registry.db?mode=ro", uri=True)
    try:
        marks = ", ".join("?" * len(container_ids))
        rows = registry.execute(
            f"SELECT pid, stamp_ns FROM seen WHERE container_id IN ({marks})", container_ids
        )
        return dict(rows.fetchall())
    finally:
        registry.close()
