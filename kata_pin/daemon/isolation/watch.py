"""The watch: after each audit, did anybody else have an exclusive pCPU?

Cheap and always on: the counters of paired vCPUs and of their pCPUs (policy/isolation/growth.py).
Those of a sandbox's other threads that are confined to the pCPU are read only while that alone does
not say that it is quiet. Where others had a pCPU for more than the setting `isolation.max_foreign`
allows, who it is takes a window: a second in which every task switch there is recorded. A foreign
task begins an episode, which is logged, counted and kept once; it lasts until the counters are
quiet again.

Kernel threads that belong to the pCPU, and the pod's own, are no intruders: after a window that
found nobody else the next one has to wait, each time twice as long; not for long where they had the
pCPU less than the counters say, as beside somebody who comes and goes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from kata_pin.daemon.isolation.claims import Claims, Watched
from kata_pin.daemon.live_config import LiveConfig
from kata_pin.daemon.reconcile.slices import Slices
from kata_pin.daemon.store.node_events import NodeEvents
from kata_pin.errors import HostError
from kata_pin.host.measure.cpus import cpu_samples
from kata_pin.host.measure.rings import DRAIN_S, SwitchRecorder, refused
from kata_pin.host.measure.taskruns import migrations, over, task_runs
from kata_pin.host.root import HostRoot
from kata_pin.model.cpuset import CpuSet
from kata_pin.model.measured.counters import TaskRun
from kata_pin.model.measured.windows import IDLE, Measured, TaskClass, Verdict
from kata_pin.model.reports.history import NodeEventKind
from kata_pin.model.reports.prove import ProvedPcpu, RanTask
from kata_pin.model.steps import STEP, Steps
from kata_pin.model.thread import ThreadKey
from kata_pin.policy.isolation import tables, verdicts
from kata_pin.policy.isolation.classes import FOREIGN, Known
from kata_pin.policy.isolation.growth import CpuLook, Growth, Look, growth
from kata_pin.policy.isolation.remedies import Node
from kata_pin.policy.isolation.verdicts import Judged

log = logging.getLogger(__name__)

WINDOW_S: Final = 1.0

MOST_PCPUS: Final = 8
"""Most pCPUs that are recorded at the same time: 2 MiB of rings, and some 50 ms of CPU time."""

LOOKED_AT: Final = 256
"""Most tasks that are looked at before the event loop serves others, 70 us each."""

MOST_RESTS: Final = 60
"""Most audits that a pCPU is left alone after windows in which only those ran who belong there."""

FEW_RESTS: Final = 3
"""The same where they did not run long enough to be those who were noticed: they may come again."""

AGAIN_S: Final = 300.0
"""How often who runs there is recorded again while an episode lasts."""

NAMED: Final = 3
"""Most intruders that a log message names."""

_V2: Final = "fs/cgroup/cgroup.controllers"

Key = tuple[str, int]
"""A sandbox and one of its pCPUs."""


@dataclass
class Sight:
    """What is known of one pCPU; times are CLOCK_MONOTONIC in seconds."""

    watched: Watched
    look: Look
    growth: Growth | None = None
    exact: bool = False
    """Whether every own thread was told from others; else others had it less than `growth` says."""
    window: ProvedPcpu | None = None
    window_at: float = 0.0
    episode_at: float | None = None
    fruitless: int = 0
    """Windows in a row that found nobody."""
    rests: int = 0
    """Audits that it is still left alone."""


class Moves(NamedTuple):
    """How often a thread was moved to another CPU, and since when it was not (CLOCK_MONOTONIC)."""

    times: int
    since: float


@dataclass
class Watch:
    """Looks at exclusive pCPUs after each audit; `start` runs a task of the daemon's.

    `usable` returns the online pCPUs that were given to no container outside of sandboxes.
    """

    _root: HostRoot
    _claims: Claims
    _live: LiveConfig
    _events: NodeEvents
    _start: Callable[[Coroutine[object, object, None]], None]
    _usable: Callable[[], CpuSet]
    sights: dict[Key, Sight] = field(default_factory=dict)
    moves: dict[ThreadKey, Moves] = field(default_factory=dict)
    """Of watched vCPUs, as far as the kernel tells."""
    problem: str = ""
    """Why who runs cannot be recorded; empty if it can."""
    waited_ns: Counter[int] = field(default_factory=Counter)
    """How long the threads of each exclusive pCPU waited for it, since the daemon's start."""
    ran_ns: Counter[int] = field(default_factory=Counter)
    """How long they ran."""
    foreign_ns: Counter[tuple[int, TaskClass]] = field(default_factory=Counter)
    """Time of other tasks in windows, by pCPU and class."""
    foreign_slices: Counter[tuple[int, TaskClass]] = field(default_factory=Counter)
    windows: Counter[Verdict] = field(default_factory=Counter)
    """Windows by what they found of each pCPU."""
    _recording: bool = False
    _tried: bool = False
    _left: dict[int, CpuLook] = field(default_factory=dict)
    """The pCPUs at the end of the last look."""

    @property
    def is_on(self) -> bool:
        """Whether the setting is on."""
        return self._live.now.isolation.watch

    async def look(self) -> None:
        """Look at the counters; record who runs where they grew too much."""
        if not self.is_on:
            self.sights.clear()
            self.moves.clear()
            return
        suspects = await Slices().run(self._compare())
        self._try_once()
        if suspects and not self._recording:
            self._recording = True
            self._start(self._examine(suspects[:MOST_PCPUS]))

    def _try_once(self) -> None:
        """Open an event at the first look: what is missing is known before it is needed."""
        usable = self._usable()
        if self._tried or not usable:
            return
        self._tried, cpu = True, usable.first
        try:
            os.close(self._root.calls.switches(cpu))
        except OSError as error:
            self._lacks(refused(f"pCPU {cpu}", error))

    def _lacks(self, error: HostError) -> None:
        if not self.problem:
            log.warning("who runs on exclusive pCPUs cannot be recorded: %s", error)
        self.problem = error.message

    def _compare(self) -> Steps[list[Key]]:
        """Compare the counters with those of the last time; return which grew too much.

        Worst first; of a pCPU that several sandboxes claim, one, and none while an episode lasts.
        """
        watched = {(one.sandbox, one.cpu): one for one in self._claims.watched()}
        self.sights = {
            key: one
            for key, one in self.sights.items()
            if key in watched or self._claims.is_passing(key[0])
        }
        vcpus = {thread for one in watched.values() for thread in one.vcpus}
        self.moves = {thread: one for thread, one in self.moves.items() if thread in vcpus}
        cpus = {cpu for _, cpu in watched}
        left, self._left = self._left, {}
        now = self._look_at(cpus)
        known = {cpu for (_, cpu), one in self.sights.items() if one.episode_at is not None}
        suspects: list[Key] = []
        for number, (key, one) in enumerate(watched.items(), start=1):
            if number % STEP == 0:
                yield
            cpu = one.cpu
            looks = (left[cpu], now[cpu]) if cpu in left and cpu in now and not one.shared else None
            if self._has_grown(key, one, looks, known):
                suspects.append(key)
        self._left = self._look_at(cpus)
        suspects.sort(key=lambda key: -(self.sights[key].growth or _NOTHING).percent)
        worst: dict[int, Key] = {}
        for key in suspects:
            worst.setdefault(key[1], key)
        return list(worst.values())

    def _has_grown(
        self, key: Key, one: Watched, cpu: tuple[CpuLook, CpuLook] | None, known: set[int]
    ) -> bool:
        """Whether others had a pCPU for too long, and it is time to see who.

        `known` are pCPUs with an episode, of this or another sandbox.
        """
        sight = self.sights.get(key)
        if sight is None or sight.watched.vcpus != one.vcpus:
            sight = self.sights[key] = Sight(one, self._read(one.vcpus))
            self._count_moves(one.vcpus, {}, sight.look.own)
            return False
        same, sight.watched = sight.watched == one, one
        before, sight.look = sight.look, self._read(one.vcpus)
        self._count_moves(one.vcpus, before.own, sight.look.own)
        grown = growth(before, sight.look, [thread.tid for thread in one.vcpus], cpu)
        sight.growth, sight.exact = grown, same and not one.others
        if grown is None:
            return False
        self.waited_ns[one.cpu] += grown.waited_ns
        self.ran_ns[one.cpu] += grown.ran_ns
        limit = self._live.now.isolation.max_foreign
        if grown.percent > limit:
            if sight.rests:
                sight.rests -= 1
                return False
            if sight.episode_at is None and one.cpu in known:
                return False
            if one.others:
                sight.look = self._read(one.threads)
                every = growth(before, sight.look, [thread.tid for thread in one.threads], cpu)
                if every is not None:
                    sight.growth, sight.exact, grown = every, same, every
        if grown.percent <= limit:
            sight.episode_at, sight.fruitless, sight.rests = None, 0, 0
            return False
        return sight.episode_at is None or time.monotonic() - sight.window_at > AGAIN_S

    def _count_moves(
        self, vcpus: Iterable[ThreadKey], before: Mapping[int, TaskRun], now: Mapping[int, TaskRun]
    ) -> None:
        """Note which vCPUs were moved since the last look; one that did not run was not."""
        ran = [one for one in vcpus if before.get(one.tid) != now.get(one.tid)]
        found = migrations(self._root, ((one.tgid, one.tid) for one in ran))
        for thread in ran:
            known, times = self.moves.get(thread), found.get(thread.tid)
            if times is not None and (known is None or known.times != times):
                self.moves[thread] = Moves(times, time.monotonic())

    def unmoved_s(self, thread: ThreadKey) -> float | None:
        """Return for how many seconds, at least, a watched vCPU was not moved; None: unknown."""
        moves = self.moves.get(thread)
        return None if moves is None else time.monotonic() - moves.since

    def _read(self, threads: Iterable[ThreadKey]) -> Look:
        runs = task_runs(self._root, ((thread.tgid, thread.tid) for thread in threads))
        return Look(time.monotonic_ns(), runs)

    def _look_at(self, cpus: set[int]) -> dict[int, CpuLook]:
        """Return the counters of pCPUs."""
        found = cpu_samples(self._root, cpus, {}, irq=False)
        now = time.monotonic_ns()
        return {cpu: CpuLook(now, one.run, one.times) for cpu, one in found.items()}

    # ---- who it is -----------------------------------------------------------------------

    async def _examine(self, keys: Iterable[Key]) -> None:
        """Record who runs on some pCPUs; of one that changes hands meanwhile nothing is said."""
        before = {key: self.sights[key].watched for key in keys if key in self.sights}
        try:
            measured = await self._record(before.values())
            self.problem = ""
            known = self._claims.known()
            free = self._usable() - self._claims.exclusive()
            node = Node(free, os.path.exists(self._root.sys(_V2)))
            vcpus = {(one.sandbox, one.cpu): one.vcpus for one in self._claims.watched()}
            for key, one in before.items():
                if key in self.sights and vcpus.get(key) == one.vcpus:
                    self._judge(key, measured, known, node)
        except HostError as error:
            self._cannot_record(before, error)
        finally:
            self._recording = False

    async def _record(self, watched: Collection[Watched]) -> Measured:
        cpus = CpuSet(one.cpu for one in watched)
        threads = [(thread.tgid, thread.tid) for one in watched for thread in one.threads]
        with SwitchRecorder(self._root, cpus, WINDOW_S) as recorder:
            before = task_runs(self._root, threads)
            more = True
            while more or recorder.left_s > 0:
                await asyncio.sleep(max(0.0, min(DRAIN_S, recorder.left_s)))
                more = recorder.drain(LOOKED_AT)
            measured = recorder.end()
        return replace(measured, times=over(before, task_runs(self._root, threads)))

    def _judge(self, key: Key, measured: Measured, known: Known, node: Node) -> None:
        """See whether foreign tasks had a pCPU; begin an episode if so."""
        sight = self.sights[key]
        limit = self._live.now.isolation.max_foreign
        owner = self._claims.owner(*key)
        judged = verdicts.judge(measured, owner, known, limit)
        row = tables.pcpu(judged, owner, measured, known, node)
        sight.window, sight.window_at = row, time.monotonic()
        self.windows[judged.verdict] += 1
        for kind, ran_ns in judged.ran_ns.items():
            if kind in FOREIGN:
                self.foreign_ns[owner.cpu, kind] += ran_ns
        for task in row.tasks:
            if task.task_class in FOREIGN:
                self.foreign_slices[owner.cpu, TaskClass(task.task_class)] += task.slices
        if judged.verdict is not Verdict.VIOLATED:
            sight.fruitless += 1
            most = MOST_RESTS if _explains(judged, sight) else FEW_RESTS
            sight.rests = min(most, 2**sight.fruitless - 1)
        elif sight.episode_at is None:
            sight.fruitless, sight.episode_at = 0, time.monotonic()
            self._report(sight, f"{', '.join(_intruders(row))}; {_remedy(row)}")

    def _cannot_record(self, keys: Iterable[Key], error: HostError) -> None:
        """Begin episodes without names: the counters alone say that somebody was there."""
        self._lacks(error)
        limit = self._live.now.isolation.max_foreign
        for key in keys:
            sight = self.sights.get(key)
            if sight is None or sight.episode_at is not None or not sight.exact:
                continue
            percent = (sight.growth or _NOTHING).of_tasks.percent
            if percent > limit:
                sight.episode_at = sight.window_at = time.monotonic()
                self._report(sight, f"others for {percent:.2f} %, without a name")

    def _report(self, sight: Sight, who: str) -> None:
        sandbox_id, cpu = sight.watched.sandbox, sight.watched.cpu
        grown = sight.growth or _NOTHING
        self._events.report(
            NodeEventKind.FOREIGN_TASKS,
            "sandbox %s: foreign tasks ran on exclusive pCPU %d of %s, whose threads waited %.2f %%"
            " of the last %.1f s: %s",
            sandbox_id,
            cpu,
            self._claims.pod(sandbox_id),
            grown.waited_percent,
            grown.length_ns / 1e9,
            who,
            cpus=str(cpu),
        )


_NOTHING: Final = Growth(0, 0, 0, None)


def _explains(judged: Judged, sight: Sight) -> bool:
    """Whether others than the vCPUs ran in a window half as long as the counters had said."""
    own = {IDLE, *(thread.tid for thread in sight.watched.vcpus)}
    ran_ns = sum(one.ran_ns for one in judged.window.tasks if one.tid not in own)
    return 2 * 100 * ran_ns >= (sight.growth or _NOTHING).percent * judged.window.length_ns


def _intruders(row: ProvedPcpu) -> Iterator[str]:
    """Yield who had the pCPU longest, with their shares of the window."""
    foreign = _foreign(row)
    for task, _ in foreign[:NAMED]:
        where = task.pod or task.unit or task.cgroup
        share = (task.total_ms or 0.0) / 10 / row.window_s
        about = [f"pid {task.pid}"] * bool(task.pid) + [where] * bool(where)
        who = f" ({', '.join(about)})" if about else ""
        yield f"{task.comm or 'a task that ended'}{who} {share:.2f} %"
    if len(foreign) > NAMED:
        yield f"{len(foreign) - NAMED} more"


def _remedy(row: ProvedPcpu) -> str:
    worst, _ = _foreign(row)[0]
    return f"run: {worst.command}" if worst.command else worst.remedy


def _foreign(row: ProvedPcpu) -> list[tuple[RanTask, int]]:
    return tables.by_process(task for task in row.tasks if task.task_class in FOREIGN)
