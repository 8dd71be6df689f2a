"""The daemon's hot loop: does every thread of a process have its affinity?

audit_affinity opens no file of a thread and builds no CpuSet while all is well. What it finds only
marks a sandbox for a pass (D1), so an answer may be a moment old. Budgets: design.md, "Numbers to
hold".
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NamedTuple, TypeVar

from kata_pin.host.files import read_once
from kata_pin.host.process import translated
from kata_pin.host.root import HostRoot
from kata_pin.host.tasks import list_inodes
from kata_pin.model.steps import STEP, Steps, at_once
from kata_pin.wire.proc import parse_starttime


@dataclass(frozen=True, slots=True)
class Finding:
    """What an audit of one process found; false when nothing differs.

    `moved`: threads with another affinity than expected; `born`: threads not expected; `gone`:
    expected ones that exited, or whose tid another thread has now.
    """

    moved: tuple[int, ...] = ()
    born: tuple[int, ...] = ()
    gone: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.moved or self.born or self.gone)


T = TypeVar("T")

VANISHED: Final = (FileNotFoundError, ProcessLookupError)
"""GONE_ERRNOS as exceptions."""

NOTHING: Final = Finding()


class Expected(NamedTuple):
    """What a deep audit expects of a thread: when it was born and where it may run."""

    starttime: int
    affinity: frozenset[int]


def audit_affinity_in_steps(
    root: HostRoot, tgid: int, expected: Mapping[int, frozenset[int]]
) -> Steps[Finding]:
    """Compare the process's threads, by tid, and their affinities with what is expected.

    One listing and one system call a thread. A process that is gone has all its threads gone.
    Raises HostError for an errno that no vanished thread explains.
    """
    get_affinity = root.calls.get_affinity
    observed = yield from _observe(root, tgid, get_affinity)
    if observed == expected:
        return NOTHING
    return _compare(observed, expected, set(expected))


def audit_deep_in_steps(
    root: HostRoot,
    tgid: int,
    expected: Mapping[int, Expected],
    inodes: Mapping[int, int] = MappingProxyType({}),
) -> Steps[Finding]:
    """Compare start times too: another start time means that the thread exited and a new one came.

    `inodes` are those of the threads' folders in /proc when their start times were read. The kernel
    gives each task another one (host.tasks.TaskReader), so a thread that still has its own is the
    expected one; of any other the stat file is read. Raises HostError as audit_affinity does.
    """
    get_affinity = root.calls.get_affinity
    base = f"{root.proc()}/{tgid}/task"
    same = inodes.items() & list_inodes(root, tgid).items() if inodes else frozenset()
    starts = {tid: expected[tid].starttime for tid, _ in same if tid in expected}

    def look(tid: int) -> tuple[int, AbstractSet[int]]:
        start = starts.get(tid)
        if start is None:
            start = parse_starttime(read_once(f"{base}/{tid}/stat"))
        return start, get_affinity(tid)

    observed = yield from _observe(root, tgid, look)
    if observed == expected:
        return NOTHING
    still = {tid for tid, e in expected.items() if tid in observed and observed[tid][0] == e[0]}
    return _compare(observed, expected, still)


audit_affinity = at_once(audit_affinity_in_steps)
audit_deep = at_once(audit_deep_in_steps)


def _observe(root: HostRoot, tgid: int, look: Callable[[int], T]) -> Steps[dict[int, T]]:
    """Return what `look` sees of each thread, without those that vanish meanwhile."""
    tids: list[int] = []
    observed: dict[int, T] = {}
    try:
        with suppress(*VANISHED):
            tids = list(map(int, os.listdir(f"{root.proc()}/{tgid}/task")))
        for start in range(0, len(tids), STEP):
            several = tids[start : start + STEP]
            try:
                observed |= {tid: look(tid) for tid in several}
            except VANISHED:  # look again, thread by thread
                for tid in several:
                    with suppress(*VANISHED):
                        observed[tid] = look(tid)
            yield
    except OSError as error:
        raise translated(error, "audit", f"process {tgid}") from error
    return observed


def _compare(observed: Mapping[int, T], expected: Mapping[int, T], same: set[int]) -> Finding:
    """Sort the differences; `same` are the expected threads that still have their start time."""
    return Finding(
        moved=tuple(t for t in observed if t in same and observed[t] != expected[t]),
        born=tuple(t for t in observed if t not in same),
        gone=tuple(t for t in expected if t not in same or t not in observed),
    )
