"""What `top` reads, and the rates between two readings."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from typing import TypeVar

from msgspec import Struct, field

from kata_pin.base.counters import (
    TICK_NS,
    BandwidthRates,
    CacheUse,
    CpuRates,
    CpuTimes,
    Sample,
    TaskRates,
    Throttling,
    rates_between,
)
from kata_pin.base.threads import TaskRun, TaskSample, ThreadKey
from kata_pin.linux.cgroups import CgroupFiles
from kata_pin.linux.counters import cpu_samples
from kata_pin.linux.files import HostRoot
from kata_pin.linux.resctrl import cache_use
from kata_pin.linux.task_counters import TaskSampler

Name = TypeVar("Name", bound=str)

# Rates of threads and of exclusive CPUs between two samples.
#
# Wait is what a guest shows as steal. The kernel adds it only when the thread gets a CPU: a thread
# that was ready in both samples and has not run meanwhile has waited all the time.


class Window:
    """The time between two samples of the same threads and CPUs."""

    def __init__(self, before: Sample, after: Sample) -> None:
        self._before = before
        self._after = after
        self._ns = max(after.at_ns - before.at_ns, 1)
        self.tasks: Mapping[ThreadKey, TaskRates] = {
            key: self._task(before.tasks[key], now)
            for key, now in after.tasks.items()
            if key in before.tasks
        }
        """The rates of the threads that are in both samples."""

    @property
    def seconds(self) -> float:
        """How long it is."""
        return self._ns / 1e9

    def _task(self, old: TaskSample, new: TaskSample) -> TaskRates:
        ran = min(_growth(old.run.ran_ns, new.run.ran_ns), self._ns)
        waited = min(_growth(old.run.waited_ns, new.run.waited_ns), self._ns - ran)
        starving = old.ready and new.ready and old.run == new.run
        preemptions = migrations = None
        if old.moves is not None and new.moves is not None:
            preemptions = self._rate(old.moves.preemptions, new.moves.preemptions)
            migrations = self._rate(old.moves.migrations, new.moves.migrations)
        return TaskRates(
            cpu_percent=self._percent(ran),
            wait_percent=100.0 if starving else self._percent(waited),
            preemptions=preemptions,
            migrations=migrations,
            last_cpu=new.last_cpu,
            starving=starving,
        )

    def cpu(
        self,
        cpu: int,
        *,
        alone: Collection[ThreadKey],
        roaming: Collection[ThreadKey],
        throttled: float = 0,
    ) -> CpuRates:
        """Return the rates of an exclusive CPU.

        `alone` are the owner's threads that may run on this CPU only, `roaming` those that may run
        here and elsewhere: how much of theirs was here is unknown, so foreign work is what is left
        if all of it was. `throttled` is in which part of the time quotas stopped the owner, in per
        cent.
        """
        every = [*alone, *roaming]
        busy = self._busy_beyond(cpu, every)
        own = foreign = None
        if all(key in self.tasks for key in alone):
            own = sum(self.tasks[key].cpu_percent for key in alone)
            roamed = sum(self.tasks[key].cpu_percent for key in roaming if key in self.tasks)
            foreign = self._foreign(alone, own, roamed + throttled, busy)
        steal = self._ticks(cpu, lambda times: times.steal)
        old, new = self._before.cpus.get(cpu), self._after.cpus.get(cpu)
        interrupts: Mapping[str, float] | None = None
        softirqs: Mapping[str, float] | None = None
        if old is not None and new is not None:
            interrupts = self._rates(old.interrupts, new.interrupts)
            softirqs = self._rates(old.softirqs, new.softirqs)
        return CpuRates(
            own_percent=own,
            foreign_percent=foreign,
            foreign_switches=self._foreign_switches(cpu, every),
            steal_percent=None if steal is None else self._percent(steal * TICK_NS),
            interrupts=interrupts,
            softirqs=softirqs,
        )

    def _foreign(
        self, alone: Collection[ThreadKey], own: float, excused: float, busy: float | None
    ) -> float | None:
        """Return how much of a CPU others had, in per cent: at least so much is certain.

        Two ways, of which the greater holds. While a thread that can run nowhere else waits,
        somebody else runs: its wait less what the owner's other threads ran and what a quota
        stopped it (`excused`), to the nanosecond. And `busy`, what the CPU did beyond the owner's
        threads.
        """
        certain = [
            (one := self.tasks[key]).wait_percent - (own - one.cpu_percent) - excused
            for key in alone
        ]
        if busy is not None:
            certain.append(busy)
        return min(100.0, max(0.0, *certain)) if certain else None

    def _busy_beyond(self, cpu: int, own: Collection[ThreadKey]) -> float | None:
        """Return how much a CPU was busy with tasks beyond the owner's, in per cent, at least.

        What cannot be told from foreign work counts as none: interrupts, what a hypervisor took,
        two ticks, and the time in which the files were read.
        """
        unused = self._ticks(cpu, sum)
        ran_ns = self._own(own, lambda run: run.ran_ns)
        if unused is None or ran_ns is None:
            return None
        window_ns = self._after.cpus_from_ns - self._before.cpus_until_ns
        return 100 * (window_ns - (unused + 2) * TICK_NS - ran_ns) / self._ns

    def _foreign_switches(self, cpu: int, own: Collection[ThreadKey]) -> float | None:
        """Return how often others came onto the CPU, per second; at least so often is certain."""
        old, new = self._before.cpus.get(cpu), self._after.cpus.get(cpu)
        slices = self._own(own, lambda run: run.slices)
        if old is None or new is None or old.run is None or new.run is None or slices is None:
            return None
        return max(0, _growth(old.run.slices, new.run.slices) - slices) / self.seconds

    def _own(self, own: Collection[ThreadKey], of: Callable[[TaskRun], int]) -> int | None:
        """Return a sum over the owner's threads; None if one was not read.

        From before the first reading of the CPU to after the second: never less than it was between
        them.
        """
        total = 0
        for key in own:
            first, last = self._before.tasks.get(key), self._after.tasks_after.get(key)
            if first is None or last is None:
                return None
            total += _growth(of(first.run), of(last))
        return total

    def throttled_percent(self, key: ThreadKey) -> float | None:
        """Return how much of the time quotas stopped a thread's cgroups; None: unknown."""
        old, new = self._before.throttled.get(key), self._after.throttled.get(key)
        if old is None or new is None:
            return None
        return self._percent(_growth(old.ns, new.ns))

    def cache(self, sandbox_id: str) -> tuple[CacheUse | None, BandwidthRates]:
        """Return what a sandbox uses of caches, and its memory bandwidth."""
        old, new = self._before.caches.get(sandbox_id), self._after.caches.get(sandbox_id)
        return new, rates_between(old, new)

    def _ticks(self, cpu: int, of: Callable[[CpuTimes], int]) -> int | None:
        old, new = self._before.cpus.get(cpu), self._after.cpus.get(cpu)
        if old is None or new is None or old.times is None or new.times is None:
            return None
        return _growth(of(old.times), of(new.times))

    def _percent(self, ns: int) -> float:
        return min(100.0, 100 * ns / self._ns)

    def _rate(self, old: int | None, new: int | None) -> float | None:
        return None if old is None or new is None else _growth(old, new) / self.seconds

    def _rates(
        self, old: Mapping[Name, int] | None, new: Mapping[Name, int] | None
    ) -> dict[str, float] | None:
        if old is None or new is None:
            return None
        return {name: _growth(old.get(name, 0), n) / self.seconds for name, n in new.items()}


def _growth(old: int, new: int) -> int:
    """Return how much a counter grew; some of the kernel's run back a little."""
    return max(0, new - old)


# One reading of everything that `top` shows: threads, exclusive CPUs, throttling.


class SampleRequest(Struct, frozen=True):
    """What to read.

    `detailed` are the threads whose moves and last CPU matter, `on_cpus` those that may run on one
    of the `cpus`, `in_cgroups` those whose cgroups' throttling is wanted: one per sandbox.
    `cache_groups` are groups of resctrl by sandbox id.
    """

    threads: Collection[ThreadKey]
    detailed: Collection[ThreadKey]
    cpus: Collection[int]
    on_cpus: Collection[ThreadKey]
    in_cgroups: Collection[ThreadKey]
    cache_groups: Mapping[str, str] = field(default_factory=dict)


class Sampler:
    """Reads samples; close it in the end."""

    def __init__(self, root: HostRoot, room: int) -> None:
        """`room` is how many descriptors may stay open."""
        self._root = root
        self._tasks = TaskSampler(root, room)
        self._cgroups = CgroupFiles(root, "cpu")
        self._folders: dict[ThreadKey, list[str] | None] = {}

    def close(self) -> None:
        """Close every descriptor."""
        self._tasks.close()

    @property
    def denied(self) -> int:
        """Threads of the last sample that may not be read."""
        return self._tasks.denied

    def sample(self, wanted: SampleRequest) -> Sample:
        """Return what the kernel counts now; raises nothing."""
        problems: dict[str, str] = {}
        at_ns = time.monotonic_ns()
        tasks = self._tasks.sample(wanted.threads, wanted.detailed)
        from_ns = time.monotonic_ns()
        cpus = cpu_samples(self._root, wanted.cpus, problems)
        until_ns = time.monotonic_ns()
        return Sample(
            at_ns=at_ns,
            tasks=tasks,
            cpus_from_ns=from_ns,
            cpus_until_ns=until_ns,
            cpus=cpus,
            tasks_after=self._tasks.runs(wanted.on_cpus) if cpus else {},
            throttled={
                key: found
                for key in wanted.in_cgroups
                if (found := self._throttling(key)) is not None
            },
            caches={
                sandbox_id: use
                for sandbox_id, group in wanted.cache_groups.items()
                if group and (use := cache_use(self._root, group)) is not None
            },
            problems={**problems, **self._tasks.problems},
        )

    def forget_cgroups(self) -> None:
        """Look again where threads are: somebody may have moved them."""
        self._folders.clear()

    def _throttling(self, key: ThreadKey) -> Throttling | None:
        if key not in self._folders:
            self._folders[key] = self._cgroups.folders(key.tgid, key.tid)
        folders = self._folders[key]
        return None if folders is None else self._cgroups.throttling(folders)
