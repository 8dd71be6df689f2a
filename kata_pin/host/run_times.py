"""How long threads have run, and waited to run: the numbers of /proc/<pid>/schedstat, in ns.

Finer than the ticks of stat, and what a vCPU thread ran is what its guest CPU can have been busy.
Fact: Documentation/scheduler/sched-stats.rst. Nothing is kept.
"""

from __future__ import annotations

from collections.abc import Iterable

from kata_pin.errors import ParseError, TaskGone
from kata_pin.host.files import read_once
from kata_pin.host.root import HostRoot
from kata_pin.host.tasks import starttime
from kata_pin.model.thread import ThreadKey


def run_times(root: HostRoot, keys: Iterable[ThreadKey]) -> dict[ThreadKey, float]:
    """Return the seconds that each thread has run since its birth; those that are gone are out."""
    return {key: ran for key, (ran, _) in _read(root, keys).items()}


def ready_times(root: HostRoot, keys: Iterable[ThreadKey]) -> dict[ThreadKey, float]:
    """Return the seconds that each thread has run or waited for a CPU; likewise.

    A guest that is not told of stolen time takes all of it for its own.
    """
    return {key: ran + waited for key, (ran, waited) in _read(root, keys).items()}


def _read(root: HostRoot, keys: Iterable[ThreadKey]) -> dict[ThreadKey, tuple[float, float]]:
    found: dict[ThreadKey, tuple[float, float]] = {}
    for key in keys:
        try:
            text = read_once(root.proc(key.tgid, "task", key.tid, "schedstat"))
            if starttime(root, key.tgid, key.tid) == key.starttime:
                ran, waited, *_ = text.split()
                found[key] = int(ran) / 1e9, int(waited) / 1e9
        except (OSError, TaskGone, ParseError, ValueError):
            continue
    return found
