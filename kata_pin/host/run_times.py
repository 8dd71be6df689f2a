"""How long threads have run, and waited to run: the numbers of /proc/<pid>/schedstat, in ns.

Finer than the ticks of stat, and what a vCPU thread ran is what its guest CPU can have been busy.
Fact: Documentation/scheduler/sched-stats.rst. Nothing is kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from kata_pin.errors import ParseError, TaskGone
from kata_pin.host.files import read_once
from kata_pin.host.root import HostRoot
from kata_pin.host.tasks import starttime
from kata_pin.model.thread import ThreadKey


class RunTime(NamedTuple):
    """Seconds since a thread's birth: on a CPU, and ready but waiting for one.

    A guest without stolen-time accounting counts both as its own.
    """

    ran_s: float
    waited_s: float


def run_times(root: HostRoot, keys: Iterable[ThreadKey]) -> dict[ThreadKey, RunTime]:
    """Return how long each thread has run and waited; those that are gone are left out."""
    found: dict[ThreadKey, RunTime] = {}
    for key in keys:
        try:
            text = read_once(root.proc(key.tgid, "task", key.tid, "schedstat"))
            if starttime(root, key.tgid, key.tid) == key.starttime:
                ran, waited, *_ = text.split()
                found[key] = RunTime(int(ran) / 1e9, int(waited) / 1e9)
        except (OSError, TaskGone, ParseError, ValueError):
            continue
    return found
