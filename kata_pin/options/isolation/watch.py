"""The watch: whether others ran on exclusive pCPUs, and who (`isolation.watch`)."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from msgspec.structs import replace

from kata_pin.base.config.tree import LiveConfig
from kata_pin.base.counters import IDLE_TASK, Measured
from kata_pin.base.cpuset import CpuSet
from kata_pin.base.documents.answers import NodeEventKind
from kata_pin.base.documents.measured import ProvedPcpu, RanTask, WatchDocument, WatchedPcpu
from kata_pin.base.errors import HostError
from kata_pin.base.steps import STEP, Steps
from kata_pin.base.threads import TaskRun, ThreadKey
from kata_pin.base.values import TaskClass, Verdict
from kata_pin.engine.counters import MetricRow, Shown, Slices, readings
from kata_pin.engine.node import PcpuOwners, Watched
from kata_pin.linux.counters import cpu_samples
from kata_pin.linux.files import HostRoot
from kata_pin.linux.switches import DRAIN_S, SwitchRecorder, refused
from kata_pin.linux.task_counters import migrations, over, task_runs
from kata_pin.options.isolation.episodes import NOTHING, Episode, WatchedCpu
from kata_pin.placement import proof, proof_rows
from kata_pin.placement.owners import FOREIGN, Known
from kata_pin.placement.proof import CpuLook, Growth, Judged, Look, growth
from kata_pin.placement.remedies import NodeConditions
from kata_pin.records.history import NodeEvents
from kata_pin.service.options import Core, Running

log = logging.getLogger(__name__)


# Who had an exclusive pCPU in a window, in words.

NAMED: Final = 3
"""Most intruders that a log message names."""

MOST_THREADS: Final = 16
"""Most threads of intruders whose counters are worth following."""


def text(row: ProvedPcpu) -> str:
    """Return who had the pCPU longest, with their shares of the window and the worst's remedy."""
    worst, _ = _foreign(row)[0]
    remedy = f"run: {worst.command}" if worst.command else worst.remedy
    return f"{', '.join(_shares(row))}; {remedy}"


def names(row: ProvedPcpu) -> frozenset[str]:
    """Return the names and places of those that matter: who began a new process is no newcomer.

    None where they are many, and each has less than a tenth of what they have together: who they
    are changes from window to window, and matters little.
    """
    foreign = [(task, task.total_ms or 0.0) for task, _ in _foreign(row)]
    least = sum(ms for _, ms in foreign) / 10
    return frozenset(f"{task.comm} {_place(task)}" for task, ms in foreign[:NAMED] if ms >= least)


def threads(row: ProvedPcpu) -> list[RanTask]:
    """Return the threads that had the pCPU longest."""
    foreign = [one for one in row.tasks if one.task_class in FOREIGN and one.pid]
    foreign.sort(key=lambda one: -(one.total_ms or 0.0))
    return foreign[:MOST_THREADS]


def _shares(row: ProvedPcpu) -> Iterator[str]:
    foreign = _foreign(row)
    for task, _ in foreign[:NAMED]:
        where = _place(task)
        share = (task.total_ms or 0.0) / 10 / row.window_s
        about = [f"pid {task.pid}"] * bool(task.pid) + [where] * bool(where)
        who = f" ({', '.join(about)})" if about else ""
        yield f"{task.comm or 'a task that ended'}{who} {share:.2f} %"
    if len(foreign) > NAMED:
        yield f"{len(foreign) - NAMED} more"


def _place(task: RanTask) -> str:
    return task.pod or task.unit or task.cgroup


def _foreign(row: ProvedPcpu) -> list[tuple[RanTask, int]]:
    return proof_rows.by_process(task for task in row.tasks if task.task_class in FOREIGN)


# Cheap and always on: the counters of paired vCPUs and of their pCPUs (placement/proof.py). Those
# of a sandbox's other threads that are confined to the pCPU are read only while that alone does not
# say that it is quiet. Where others had a pCPU for more than the setting `isolation.max_foreign`
# allows, who it is takes a window: a second in which every task switch there is recorded. A foreign
# task begins an episode, which lasts until the counters are quiet again; episodes.py says what of
# it is recorded and logged.
#
# Kernel threads that belong to the pCPU, and the pod's own, are no intruders: after a window that
# found nobody else the next one has to wait, each time twice as long; not for long where they had
# the pCPU less than the counters say, as beside somebody who comes and goes.

WINDOW_S: Final = 1.0

MOST_PCPUS: Final = 8
"""Most pCPUs that are recorded at the same time: 2 MiB of rings, and some 50 ms of CPU time."""

LOOKED_AT: Final = 256
"""Most tasks that are looked at before the event loop serves others, 70 us each."""

MOST_SKIPPED: Final = 60
"""Most audits that a pCPU is left alone after windows in which only those ran who belong there."""

FEW_SKIPPED: Final = 3
"""The same where they did not run long enough to be those who were noticed: they may come again."""

GONE: Final = (
    "sandbox %s: foreign tasks no longer run on exclusive pCPU %d of %s; they did for %.0f s"
)
UNWATCHED: Final = (
    "sandbox %s: exclusive pCPU %d of %s is no longer watched; foreign tasks ran there for %.0f s"
)

_V2: Final = "fs/cgroup/cgroup.controllers"

Key = tuple[str, int]
"""A sandbox and one of its pCPUs."""


class Moves(NamedTuple):
    """How often a thread was moved to another CPU, and since when it was not (CLOCK_MONOTONIC)."""

    times: int
    since: float


@dataclass
class Watch(Running):
    """Looks at exclusive pCPUs after each audit, and restores nothing.

    `start` runs a task of the daemon's, `usable` returns the online pCPUs that were given to no
    container outside of sandboxes.
    """

    _root: HostRoot
    owners: PcpuOwners
    _live: LiveConfig
    _events: NodeEvents
    _start: Callable[[Coroutine[object, object, None]], None]
    _usable: Callable[[], CpuSet]
    sights: dict[Key, WatchedCpu] = field(default_factory=dict)
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

    def verbs(self) -> Mapping[str, Callable[[], WatchDocument]]:
        """Answer `watch`."""
        return {"watch": self.report}

    def thread(self, key: ThreadKey) -> Mapping[str, Any]:
        """Return for how long, at least, a watched vCPU was not moved."""
        moves = self.moves.get(key)
        return {} if moves is None else {"unmoved_s": round(time.monotonic() - moves.since, 3)}

    def violations(self) -> Mapping[str, int]:
        """Return on how many pCPUs others run; nothing if nobody looks."""
        lasting = {one.watched.cpu for one in self.sights.values() if one.episode is not None}
        return {"foreign": len(lasting)} if self.is_on else {}

    def metrics(self) -> Iterable[Shown]:
        """Return what was counted; nothing if nobody looks: 0 would say that nobody ran there."""
        return readings(METRICS, self) if self.is_on else ()

    def report(self) -> WatchDocument:
        """Return the document as of now."""
        now = time.monotonic()
        sights = sorted(
            self.sights.values(), key=lambda one: (one.watched.cpu, one.watched.sandbox)
        )
        return WatchDocument(
            time=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time())),
            max_foreign_percent=self._live.now.isolation.max_foreign,
            problem=self.problem,
            pcpus=tuple(_pcpu(one, self.owners.pod(one.watched.sandbox), now) for one in sights),
        )

    async def look(self) -> None:
        """Look at the counters; record who runs where they grew too much."""
        if not self.is_on:
            while self.sights:
                self._end(self.sights.popitem()[1], UNWATCHED)
            self.moves.clear()
            return
        suspects = await Slices().run(self._compare())
        self._try()
        if suspects and not self._recording:
            self._recording = True
            self._start(self._examine(suspects[:MOST_PCPUS]))

    def _try(self) -> None:
        """Open an event: what is missing is known before it is needed, and a remedy at once."""
        usable = self._usable()
        if not usable or (self._tried and not self.problem):
            return
        self._tried, cpu = True, usable.first
        try:
            os.close(self._root.calls.switches(cpu))
            self.problem = ""
        except OSError as error:
            self._lacks(refused(f"pCPU {cpu}", error))

    def _lacks(self, error: HostError) -> None:
        if not self.problem:
            log.warning("who runs on exclusive pCPUs cannot be recorded: %s", error)
        self.problem = error.message

    def _compare(self) -> Steps[list[Key]]:
        """Compare the counters with those of the last time; return which grew too much.

        Worst first; of a pCPU that several sandboxes claim, the first, and none while an episode
        lasts: the threads of the others are not read.
        """
        watched = {(one.sandbox, one.cpu): one for one in self.owners.watched()}
        for key in [*self.sights]:
            if key not in watched and not self.owners.is_passing(key[0]):
                self._end(self.sights.pop(key), UNWATCHED)
        vcpus = {thread for one in watched.values() for thread in one.vcpus}
        self.moves = {thread: one for thread, one in self.moves.items() if thread in vcpus}
        cpus = {cpu for _, cpu in watched}
        left, self._left = self._left, {}
        now = self._look_at(cpus)
        known = {cpu for (_, cpu), one in self.sights.items() if one.episode is not None}
        suspects: list[Key] = []
        for number, (key, one) in enumerate(watched.items(), start=1):
            if number % STEP == 0:
                yield
            cpu = one.cpu
            looks = (left[cpu], now[cpu]) if cpu in left and cpu in now and not one.shared else None
            if self._has_grown(key, one, looks, known):
                suspects.append(key)
                known.add(cpu)
        self._left = self._look_at(cpus)
        suspects.sort(key=lambda key: -(self.sights[key].growth or NOTHING).percent)
        return suspects

    def _has_grown(
        self, key: Key, one: Watched, cpu: tuple[CpuLook, CpuLook] | None, known: set[int]
    ) -> bool:
        """Whether others had a pCPU for too long, and it is time to see who.

        `known` are pCPUs with an episode, or about to be recorded, of this or another sandbox.
        """
        sight = self.sights.get(key)
        if sight is None or sight.watched.vcpus != one.vcpus:
            if sight is not None:
                self._end(sight, UNWATCHED)
            sight = self.sights[key] = WatchedCpu(one, self._read(one.vcpus))
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
        sight.percent = grown.percent
        if grown.percent > limit:
            if sight.is_left_alone:
                sight.skipped_audits -= 1
                return False
            if sight.episode is None and one.cpu in known:
                return False
            if one.others:
                sight.look = self._read(one.threads)
                every = growth(before, sight.look, [thread.tid for thread in one.threads], cpu)
                if every is not None:
                    sight.growth, sight.exact, grown = every, same, every
        if grown.percent <= limit:
            self._end(sight, GONE)
            sight.empty_windows = sight.skipped_audits = 0
            return False
        return self._is_due(sight, grown)

    def _is_due(self, sight: WatchedCpu, grown: Growth) -> bool:
        """Whether it is time to see who runs there, in an episode again."""
        episode = sight.episode
        if episode is None:
            return True
        new = episode.took(grown.percent, task_runs(self._root, episode.tids), grown.length_ns)
        now = time.monotonic()
        return episode.is_due(grown.percent, sight.pace, sight.window_at, now, new=new)

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
            known = self.owners.known()
            free = self._usable() - self.owners.exclusive()
            node = NodeConditions(free, os.path.exists(self._root.sys(_V2)))
            vcpus = {(one.sandbox, one.cpu): one.vcpus for one in self.owners.watched()}
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

    def _judge(self, key: Key, measured: Measured, known: Known, node: NodeConditions) -> None:
        """See whether foreign tasks had a pCPU; begin an episode if so."""
        sight = self.sights[key]
        limit = self._live.now.isolation.max_foreign
        owner = self.owners.owner(*key)
        judged = proof.judge(measured, owner, known, limit)
        row = proof_rows.pcpu(judged, owner, measured, known, node)
        sight.window, sight.window_at, sight.recorded = row, time.monotonic(), sight.percent
        self.windows[judged.verdict] += 1
        for kind, ran_ns in judged.ran_ns.items():
            if kind in FOREIGN:
                self.foreign_ns[owner.cpu, kind] += ran_ns
        for task in row.tasks:
            if task.task_class in FOREIGN:
                self.foreign_slices[owner.cpu, TaskClass(task.task_class)] += task.slices
        if judged.verdict is not Verdict.VIOLATED:
            sight.empty_windows += 1
            most = MOST_SKIPPED if _explains(judged, sight) else FEW_SKIPPED
            sight.skipped_audits = min(most, 2**sight.empty_windows - 1)
            return
        sight.empty_windows = sight.skipped_audits = 0
        episode = self._episode(sight)
        grown = sight.growth or NOTHING
        longest = threads(row)
        followed = sum(one.total_ms or 0.0 for one in longest) / 10 / row.window_s
        unknown = max(0.0, judged.foreign_percent - followed)
        episode.found_by_window(judged.foreign_percent, names(row), grown.percent, unknown)
        episode.tids = frozenset((one.pid, one.tid) for one in longest)
        episode.runs = task_runs(self._root, episode.tids)
        self._report(sight, judged.foreign_percent, text(row))

    def _cannot_record(self, keys: Iterable[Key], error: HostError) -> None:
        """Have episodes without names: the counters alone say that somebody was there."""
        self._lacks(error)
        limit = self._live.now.isolation.max_foreign
        for key in keys:
            sight = self.sights.get(key)
            if sight is None or not sight.exact:
                continue
            grown = sight.growth or NOTHING
            percent = grown.of_tasks.percent
            if percent > limit:
                sight.window_at = time.monotonic()
                self._episode(sight).found_by_window(percent, (), grown.percent)
                self._report(sight, percent, f"others for {percent:.2f} %, without a name")

    def _episode(self, sight: WatchedCpu) -> Episode:
        """Return the episode of a pCPU, begun now if there is none."""
        if sight.episode is None:
            sight.episode = Episode(time.monotonic())
        return sight.episode

    def _report(self, sight: WatchedCpu, percent: float, who: str) -> None:
        """Report who runs there if that is news, unless there was too much of it lately."""
        episode = self._episode(sight)
        if not episode.is_owed or not sight.pace.allows(percent, time.monotonic()):
            return
        sight.pace.reported(percent)
        episode.is_owed, episode.is_reported = False, True
        sandbox_id, cpu = sight.watched.sandbox, sight.watched.cpu
        grown = sight.growth or NOTHING
        self._events.report(
            NodeEventKind.FOREIGN_TASKS,
            "sandbox %s: foreign tasks ran on exclusive pCPU %d of %s, whose threads waited %.2f %%"
            " of the last %.1f s: %s",
            sandbox_id,
            cpu,
            self.owners.pod(sandbox_id),
            grown.waited_percent,
            grown.length_ns / 1e9,
            who,
            cpus=str(cpu),
        )

    def _end(self, sight: WatchedCpu, why: str) -> None:
        """End the episode of a pCPU, if it has one; report that if the log has its beginning."""
        episode, sight.episode = sight.episode, None
        if episode is None or not episode.is_reported:
            return
        sandbox_id, cpu = sight.watched.sandbox, sight.watched.cpu
        about = (sandbox_id, cpu, self.owners.pod(sandbox_id), time.monotonic() - episode.since)
        self._events.report(
            NodeEventKind.FOREIGN_TASKS,
            why,
            *about,
            level=logging.INFO,
            counts=False,
            cpus=str(cpu),
        )


def _explains(judged: Judged, sight: WatchedCpu) -> bool:
    """Whether others than the vCPUs ran in a window half as long as the counters had said."""
    own = {IDLE_TASK, *(thread.tid for thread in sight.watched.vcpus)}
    ran_ns = sum(one.ran_ns for one in judged.window.tasks if one.tid not in own)
    return 2 * 100 * ran_ns >= (sight.growth or NOTHING).percent * judged.window.length_ns


# The watch document: what the daemon saw of exclusive pCPUs lately.


def _pcpu(sight: WatchedCpu, pod: str, now: float) -> WatchedPcpu:
    grown, window = sight.growth, sight.window
    return WatchedPcpu(
        cpu=sight.watched.cpu,
        sandbox=sight.watched.sandbox,
        pod=pod,
        age_s=round(now - sight.look.at_ns / 1e9, 3),
        over_s=None if grown is None else round(grown.length_ns / 1e9, 3),
        waited_percent=None if grown is None else grown.waited_percent,
        others_percent=None if grown is None else grown.percent,
        others_slices=None if grown is None else grown.slices,
        episode_s=None if sight.episode is None else round(now - sight.episode.since, 3),
        window_age_s=None if window is None else round(now - sight.window_at, 3),
        window=window,
    )


def start(core: Core) -> Running:
    """Return the option at work; without a daemon there is nothing to watch."""
    if core.serving is None:
        return Running()

    def usable() -> CpuSet:
        node = core.node.last
        return node.topology.online - node.assigned - core.options.exclusive()

    return Watch(core.root, core.owners, core.live, core.events, core.serving.start, usable)


def _seconds(times_ns: Mapping[int, int], watch: Watch) -> Mapping[str, float]:
    """Return seconds by pCPU, also of exclusive ones that have none yet."""
    cpus = sorted({*times_ns, *watch.owners.exclusive()})
    return {str(cpu): times_ns.get(cpu, 0) / 1e9 for cpu in cpus}


def _by_class(
    counts: Mapping[tuple[int, TaskClass], int], watch: Watch, unit: float = 1.0
) -> Mapping[tuple[str, str], float]:
    """Return numbers by pCPU and class, also of exclusive ones that have none yet."""
    cpus = sorted({*watch.owners.exclusive(), *(cpu for cpu, _ in counts)})
    return {
        (str(cpu), kind): counts.get((cpu, kind), 0) / unit
        for cpu in cpus
        for kind in sorted(FOREIGN)
    }


_BY_CLASS: Final = {"cpu": (), "class": sorted(FOREIGN)}

METRICS: Final[tuple[MetricRow[Watch], ...]] = (
    MetricRow(
        "kata_pin_vcpu_run_seconds_total",
        "Time that vCPUs with an exclusive pCPU ran, by pCPU.",
        lambda watch: _seconds(watch.ran_ns, watch),
        {"cpu": ()},
        "As of the last audit.",
    ),
    MetricRow(
        "kata_pin_vcpu_wait_seconds_total",
        "Time that vCPUs with an exclusive pCPU were ready and waited for it, by pCPU.",
        lambda watch: _seconds(watch.waited_ns, watch),
        {"cpu": ()},
        "The guest's steal time.",
    ),
    MetricRow(
        "kata_pin_foreign_seconds_total",
        "Time of others' tasks on exclusive pCPUs in the windows that were recorded.",
        lambda watch: _by_class(watch.foreign_ns, watch, 1e9),
        _BY_CLASS,
        "A window takes a second, and is recorded only after the counters showed others.",
    ),
    MetricRow(
        "kata_pin_foreign_switches_total",
        "Times that others' tasks got an exclusive pCPU in the windows that were recorded.",
        lambda watch: _by_class(watch.foreign_slices, watch),
        _BY_CLASS,
    ),
    MetricRow(
        "kata_pin_windows_total",
        "Windows of exclusive pCPUs that were recorded, by verdict.",
        lambda watch: {verdict: watch.windows[verdict] for verdict in Verdict},
        {"verdict": Verdict},
    ),
)
