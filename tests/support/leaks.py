"""A pytest plugin: a test fails if it leaves something behind or holds an event loop for long.

Checked after each test, once its own fixtures are gone: descriptors, inotify watches, child
processes, mounts below pytest's temporary folder, and asyncio tasks that still run when their loop
is closed. What fixtures of a wider scope opened before the test is no leak. tests/conftest.py loads
it; tests/repo/test_leaks.py tests it.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

SLOW_S = 0.2
"""CPU time that one callback of an event loop may take; busy neighbours do not make it longer.

The slowest of tests/unit takes 0.02. In tests/stress a test's own flood may hold the loop.
"""

SETTLE_S = 2.0
"""How long a thread or a child that is already ending may take to be gone."""

_SELF = "/proc/self"

_POLLER = {"anon_inode:[eventpoll]", "anon_inode:[eventfd]"}
"""What grpc's library keeps open from its first call to the process's end."""


@dataclass(frozen=True, slots=True)
class Holdings:
    """What this process holds; each set has one readable line per thing."""

    descriptors: frozenset[str]
    watches: frozenset[str]
    children: frozenset[str]
    mounts: frozenset[str]

    @classmethod
    def now(cls, below: str) -> Holdings:
        """Return what is held now, with the mounts below a folder."""
        descriptors, watches = _descriptors()
        return cls(descriptors, watches, _children(), _mounts(below))

    def since(self, before: Holdings) -> list[str]:
        """Return what was not held before."""
        return [
            f"{kind} {thing}"
            for kind, now, then in (
                ("descriptor", self.descriptors, before.descriptors),
                ("inotify watch", self.watches, before.watches),
                ("child process", self.children, before.children),
                ("mount", self.mounts, before.mounts),
            )
            for thing in sorted(now - then)
        ]


def _descriptors() -> tuple[frozenset[str], frozenset[str]]:
    """Return descriptors as `number -> target`, and the watches of those of inotify."""
    descriptors, watches = [], []
    for number in os.listdir(f"{_SELF}/fd"):
        try:
            target = os.readlink(f"{_SELF}/fd/{number}")
        except FileNotFoundError:  # the descriptor of listdir itself
            continue
        if not (target in _POLLER and "grpc" in sys.modules):
            descriptors.append(f"{number} -> {target}")
        if target == "anon_inode:inotify":
            info = Path(f"{_SELF}/fdinfo/{number}").read_text()
            lines = (line.split() for line in info.splitlines())
            watches += [f"{number} {words[1]}" for words in lines if words[0] == "inotify"]
    return frozenset(descriptors), frozenset(watches)


def _children() -> frozenset[str]:
    """Return the child processes of all threads of this process as `pid name`."""
    pids: list[str] = []
    for thread in os.listdir(f"{_SELF}/task"):
        try:
            pids += Path(f"{_SELF}/task/{thread}/children").read_text().split()
        except OSError:  # a thread that ended meanwhile
            continue
    return frozenset(f"{pid} {_name(pid)}" for pid in pids)


def _name(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "(ended)"


def _mounts(below: str) -> frozenset[str]:
    """Return mount points below a folder: other test runs may mount elsewhere at the same time."""
    text = Path(f"{_SELF}/mounts").read_text()
    if below not in text:
        return frozenset()
    points = (line.split()[1] for line in text.splitlines())
    return frozenset(point for point in points if point.startswith(below))


@dataclass
class LoopWatch:
    """What event loops of this process did since they were last asked about."""

    pending: list[str] = field(default_factory=list)
    slow: list[str] = field(default_factory=list)

    def install(self) -> None:
        """Watch every loop from now on.

        asyncio's debug mode finds slow callbacks too, but by wall time, which a busy machine
        stretches, and at a third of the suite's time.
        """
        found, run, close = self, asyncio.Handle._run, asyncio.Runner.close

        def timed_run(self: asyncio.Handle) -> None:
            what = getattr(self, "_callback", None)
            began = time.thread_time()
            run(self)
            took = time.thread_time() - began
            if took > SLOW_S:
                found.slow.append(f"callback that took {took:.2f} s of CPU time: {_owner(what)}")

        def checked_close(self: asyncio.Runner) -> None:
            loop = getattr(self, "_loop", None)
            if loop is not None and not loop.is_closed():
                found.pending += [f"task {task!r}" for task in asyncio.all_tasks(loop)]
            close(self)

        asyncio.Handle._run = timed_run  # type: ignore[method-assign]
        asyncio.Runner.close = checked_close  # type: ignore[method-assign]

    def take(self) -> tuple[list[str], list[str]]:
        """Return pending tasks and slow callbacks, once."""
        found = self.pending, self.slow
        self.pending, self.slow = [], []
        return found


def _owner(callback: object) -> str:
    """Return the task that a callback runs a step of, or the callback."""
    return repr(getattr(callback, "__self__", None) or callback)


LOOPS = LoopWatch()
LOOPS.install()


def pytest_collection_finish() -> None:
    """Take what was collected out of the garbage collector's sight.

    Going through thousands of tests can take one callback more than its CPU time.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _leaves_nothing_behind(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """Made before a test's other fixtures of its own, and so checked after they are gone."""
    below = str(tmp_path_factory.getbasetemp())
    LOOPS.take()
    before = Holdings.now(below)
    yield
    found = Holdings.now(below).since(before)
    if found:
        gc.collect()  # objects in cycles, such as an exception's frames, hold descriptors
        until = time.monotonic() + SETTLE_S
        while (found := Holdings.now(below).since(before)) and time.monotonic() < until:
            time.sleep(0.01)
    pending, slow = LOOPS.take()
    found += pending if "stress" in request.path.parts else pending + slow
    if found:
        pytest.fail("the test left behind:\n  " + "\n  ".join(found), pytrace=False)
