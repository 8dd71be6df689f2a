"""One reading of everything that `top` shows: threads, exclusive CPUs, throttling."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from kata_pin.host.measure.cgroups import CgroupFiles
from kata_pin.host.measure.cpus import cpu_samples
from kata_pin.host.measure.resctrl import cache_use
from kata_pin.host.measure.tasks import TaskSampler
from kata_pin.host.root import HostRoot
from kata_pin.model.measured.counters import Throttling
from kata_pin.model.measured.samples import Sample
from kata_pin.model.thread import ThreadKey


@dataclass(frozen=True)
class Wanted:
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

    def sample(self, wanted: Wanted) -> Sample:
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
