"""A day of churn in minutes: sandboxes come, change and go, and nothing of them may stay behind.

    scripts/bench soak --minutes 20

`kata-pin run` as a process of its own, with short audits, and stand-ins for VMs (standins.py): each
is announced by hooks on the real socket, gets containers that come and go, cpusets that Kata's
state changes, a thread that somebody moves, and ends by poststops, by its death, or both. Meanwhile
people ask for the state, the history and metrics, and some hang up in the middle; the configuration
is reloaded. With a pod a minute, a day has 1,440 sandboxes.

Judged: memory, between the second and the last quarter of the samples; and after everything has
ended descriptors, inotify watches and rows of the registry, against what the daemon had before the
first sandbox. The broker's readers are counted apart, each with its socket: they are made when they
are first wanted, and kept. What is bounded by a setting or a constant (history, tombstones) may be
full.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import shutil
import signal
import socket
import sqlite3
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kata_pin.base.documents.answers import Names
from kata_pin.peers.oci import Phase
from kata_pin.records.containers import TOMBSTONES
from kata_pin.records.hooks import HookMessage
from kata_pin.service.protocol import ask, decode
from tests.bench.figures import BenchError, Row
from tests.bench.node import BenchNode, Container
from tests.bench.service import ServiceProcess, service
from tests.bench.standins import begin, program, wait_up, write_state
from tests.support.hooks import encode
from tests.support.katalike import ContainerSpec
from tests.support.waiting import wait_for

LIVING: Final = 20
SHORT_LIVED: Final = 3
"""Containers that come and go while a sandbox lives."""
SAMPLES: Final = 40
SETTINGS: Final[dict[str, object]] = {
    "audit": {"affinity_s": 1, "deep_s": 5},
    "history": {"rows": 400, "sandbox_rows": 20},
    "metrics": {"listen": "unix", "sandboxes": 5},
    "nri": {"enabled": "no"},
}
HISTORY_ROWS: Final = 400
MEMORY_MIB: Final = 2.0
"""Most that memory may grow between the second and the last quarter."""

LIVE_TABLES: Final = ("containers", "pairs", "first_seen", "released")
"""Tables that hold rows of living sandboxes only."""


@dataclass(frozen=True)
class Sample:
    """What the daemon had at one moment."""

    at_s: float
    churned: int
    living: int
    rss_mib: float
    descriptors: int  #: without one for each reader
    readers: int
    watches: int
    rows: dict[str, int]

    def __str__(self) -> str:
        rows = ", ".join(f"{name} {count}" for name, count in self.rows.items())
        return (
            f"{self.at_s:6.0f} s  {self.churned:5d} churned  {self.living:3d} living  "
            f"{self.rss_mib:6.2f} MiB  {self.descriptors:4d} fds  {self.readers:2d} readers  "
            f"{self.watches:4d} watches  {rows}"
        )


@dataclass
class Soaked:
    """The samples of a soak: before the first sandbox, during it, after the last."""

    before: Sample
    after: Sample
    during: list[Sample]

    @property
    def memory_grown_mib(self) -> float:
        """How much more memory the last quarter has than the second, by their medians."""
        quarter = max(1, len(self.during) // 4)
        early, late = self.during[quarter : 2 * quarter] or self.during, self.during[-quarter:]
        return _median(late) - _median(early)

    @property
    def rows_left(self) -> int:
        """Rows of sandboxes that are over, beyond what is bounded."""
        left = sum(self.after.rows[name] for name in LIVE_TABLES)
        left += max(0, self.after.rows["seen"] - TOMBSTONES)
        return left + max(0, self.after.rows["history"] - HISTORY_ROWS)


def measure(node: BenchNode, seconds: int) -> Iterator[Row]:
    """Yield what is left of a soak of so many seconds; its samples go to stderr."""
    done = soak(node, seconds)
    first, last = done.before, done.after
    minutes = f"{seconds / 60:g} min, {last.churned} sandboxes"
    tail = done.during[-1]
    count = len(done.during)

    def row(what: str, unit: str, value: float, limit: float, detail: str) -> Row:
        return Row(
            f"{what}, {minutes}", value, unit, count, bar=limit, bar_on_ratio=False, detail=detail
        )

    yield row(
        "soak: memory grown", "MiB", done.memory_grown_mib, MEMORY_MIB,
        f"{first.rss_mib:.1f} before, {done.during[0].rss_mib:.1f} at first, {tail.rss_mib:.1f} at "
        f"last with {tail.living} sandboxes, {last.rss_mib:.1f} after",
    )  # fmt: skip
    yield row(
        "soak: descriptors left", "", last.descriptors - first.descriptors, 0,
        f"{first.descriptors} before, {tail.descriptors} with {tail.living} sandboxes",
    )  # fmt: skip
    yield row(
        "soak: inotify watches left", "", last.watches - first.watches, 0,
        f"{first.watches} before, {tail.watches} with {tail.living} sandboxes",
    )  # fmt: skip
    yield row("soak: rows left", "", done.rows_left, 0, str(last.rows))


def soak(node: BenchNode, seconds: float, *, living: int = LIVING) -> Soaked:
    """Churn for so long, with so many sandboxes at once; BenchError when the daemon complains."""
    settings = {**SETTINGS, "hypervisors": [str(program(node))]}
    with service(node, **settings) as daemon, contextlib.ExitStack() as closing:
        churn = Churn(node, living)
        closing.callback(churn.close)
        probe = Probe(node, daemon, churn)
        people = People(node, daemon)
        people.ask()  # what is made when it is first wanted is there then
        before = probe.sample()
        during: list[Sample] = []
        end = time.monotonic() + seconds
        next_at, period = time.monotonic() + seconds / SAMPLES, seconds / SAMPLES
        while time.monotonic() < end:
            churn.turn()
            if time.monotonic() >= next_at:
                next_at += period
                people.ask()
                during.append(probe.sample())
                print(during[-1], file=sys.stderr, flush=True)
        churn.close()
        after = _when_all_is_over(probe, churn)
        print(after, file=sys.stderr, flush=True)
        if "ERROR" in daemon.log:
            raise BenchError(f"the daemon complained: {daemon.log[-400:]}")
        if not during:
            raise BenchError("too short: no sample was taken")
        return Soaked(before, after, during)


def _when_all_is_over(probe: Probe, churn: Churn) -> Sample:
    """Wait until the daemon has let go of every sandbox, and rests; return what it has then."""

    def over() -> bool:
        return not any(one.startswith(churn.prefix) for one in probe.sandboxes())

    wait_for(over, "the daemon to let go of every sandbox", 60)
    time.sleep(6)  # a deep audit, and the looks at what is young
    return probe.sample()


class Life:
    """One sandbox from its start to its end."""

    def __init__(self, node: BenchNode, name: str) -> None:
        self.name = name
        self._node = node
        self._containers: list[Container] = []
        self._cpus = itertools.cycle([str(cpu) for cpu in node.online] + [str(node.online)])
        self._process = begin(program(node), name)
        wait_up(self._process)
        self._write_state(next(self._cpus))

    def begin(self) -> None:
        """Announce the sandbox and its first container."""
        for name in ("", "c1"):
            container = self._container(name, str(self._node.last_cpu))
            self._hook(Phase.CREATE_RUNTIME, container)
            self._hook(Phase.POSTSTART, container)

    def live(self, dice: random.Random) -> None:
        """Have containers come and go, Kata change the cpuset, somebody move a thread."""
        for number in range(SHORT_LIVED):
            container = self._container(f"s{dice.randrange(1 << 30):x}-{number}", None)
            self._hook(Phase.CREATE_RUNTIME, container)
            self._end(container)
        self._write_state(next(self._cpus))
        tids = [int(one) for one in os.listdir(f"/proc/{self._process.pid}/task")]
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(dice.choice(tids), set(self._node.online))

    def end(self, *, quietly: bool) -> None:
        """End it: by its hooks and its death, or `quietly` by its death alone."""
        for container in [] if quietly else list(self._containers):
            self._end(container)
        self._process.kill()
        self._process.communicate()
        shutil.rmtree(self._node.dirs.vc / "sbs" / self.name, ignore_errors=True)
        for container in self._containers:
            shutil.rmtree(container.bundle, ignore_errors=True)

    def _container(self, name: str, cpus: str | None) -> Container:
        container = self._node.container(self.name, name, cpus=cpus)
        self._containers.append(container)
        return container

    def _end(self, container: Container) -> None:
        self._hook(Phase.POSTSTOP, container)
        shutil.rmtree(container.bundle, ignore_errors=True)
        self._containers.remove(container)

    def _write_state(self, cpus: str) -> None:
        alone = ContainerSpec(f"{self.name}-c1", cpus=cpus, shares=1024)
        containers = [ContainerSpec(self.name), alone]
        write_state(self._node, self.name, self._process.pid, containers)

    def _hook(self, phase: Phase, container: Container) -> None:
        say(self._node, phase, container, self._process.pid, self.name, to="")


def say(
    node: BenchNode, phase: Phase, container: Container, pid: int, sandbox: str, *, to: str = "\n"
) -> None:
    """Say what a hook says, and hear the answers to the first of them, or to their end.

    BenchError unless it is recorded.
    """
    stamp = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    body = container.state(pid, sandbox if phase.id_is_sandbox else "")
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(30)
        peer.connect(str(node.runtime_dir / "hook.sock"))
        peer.sendall(encode(HookMessage(phase, stamp, os.getpid(), body)))
        answer = b""
        while not (to and to.encode() in answer) and (piece := peer.recv(4096)):
            answer += piece
    if not answer.startswith(b"recorded\n"):
        raise BenchError(f"{phase} of {container.id}: answered {answer!r}")


class Churn:
    """The sandboxes: in every turn one begins, one changes, and the oldest ends."""

    prefix = "soak"

    def __init__(self, node: BenchNode, living: int) -> None:
        self._node = node
        self._most = living
        self._living: deque[Life] = deque()
        self._dice = random.Random(8)
        self.churned = 0

    @property
    def living(self) -> int:
        """How many live."""
        return len(self._living)

    def turn(self) -> None:
        """Do it once."""
        life = Life(self._node, f"{self.prefix}{self.churned:06d}")
        self.churned += 1
        self._living.append(life)
        life.begin()
        self._dice.choice(self._living).live(self._dice)
        if len(self._living) > self._most:
            self._living.popleft().end(quietly=self._dice.random() < 0.3)

    def close(self) -> None:
        """End every sandbox."""
        while self._living:
            self._living.popleft().end(quietly=True)


@dataclass
class Probe:
    """Looks at the daemon from outside."""

    node: BenchNode
    daemon: ServiceProcess
    churn: Churn
    start: float = field(default_factory=time.monotonic)

    def sample(self) -> Sample:
        """Return what it has now."""
        folder = Path(f"/proc/{self.daemon.pid}/fdinfo")
        infos = []
        for one in os.listdir(folder):
            with contextlib.suppress(FileNotFoundError):
                infos.append((folder / one).read_text())
        readers = _readers(self.daemon.pid)
        return Sample(
            at_s=time.monotonic() - self.start,
            churned=self.churn.churned,
            living=self.churn.living,
            rss_mib=self.daemon.memory_mib(),
            descriptors=len(infos) - readers,
            readers=readers,
            watches=sum(info.count("inotify wd:") for info in infos),
            rows=self._rows(),
        )

    def sandboxes(self) -> list[str]:
        """Return the ids that the daemon shows."""
        names = ask(str(self.node.runtime_dir / "status.sock"), "names", {}, 10.0)
        return [one.id for one in decode(names, Names).sandboxes]

    def _rows(self) -> dict[str, int]:
        path = self.node.runtime_dir / "registry.db"
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
            return {
                name: int(database.execute(f"SELECT count(*) FROM {name}").fetchone()[0])
                for name in (*LIVE_TABLES, "seen", "history")
            }


def _children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _readers(daemon: int) -> int:
    """Return how many readers the daemon's broker, its only child, has."""
    (broker,) = _children(daemon)
    return len(_children(broker))


class People:
    """Who looks on: state, history, metrics, and clients that go in the middle."""

    def __init__(self, node: BenchNode, daemon: ServiceProcess) -> None:
        self._node = node
        self._daemon = daemon

    def ask(self) -> None:
        """Ask for everything once, and have the configuration reloaded."""
        status = str(self._node.runtime_dir / "status.sock")
        for verb in ("ping", "state", "history"):
            ask(status, verb, {}, 10.0)
        for path, request in (
            (status, b'{"version": 1, "verb": "state"'),
            (status, b'{"version": 1, "verb": "state"}\n'),
            (str(self._node.runtime_dir / "metrics.sock"), b"GET /metr"),
            (str(self._node.runtime_dir / "hook.sock"), b"KP1 createRuntime 5 7 900\n{"),
        ):
            with socket.socket(socket.AF_UNIX) as rude:
                rude.connect(path)
                rude.sendall(request)
        with socket.socket(socket.AF_UNIX) as prometheus:
            prometheus.settimeout(10)
            prometheus.connect(str(self._node.runtime_dir / "metrics.sock"))
            prometheus.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            if b"kata_pin_sandboxes" not in b"".join(iter(lambda: prometheus.recv(65536), b"")):
                raise BenchError("metrics were not answered")
        os.kill(self._daemon.pid, signal.SIGHUP)


def _median(samples: Sequence[Sample]) -> float:
    return statistics.median(sample.rss_mib for sample in samples)
