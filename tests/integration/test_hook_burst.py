"""Two hundred hooks at once: a node that starts all its pods after a boot."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from kata_pin.records.hooks import HookConnection, HookMessage, Spool
from tests.support.hooks import COMMAND, STATE, HookDaemon, runtime_directory

pytestmark = pytest.mark.alone

HOOKS = 200
BUDGET_S = 0.25 + 0.2  # record and pin, the defaults
STARVED_S = 1.5  # of 200 processes on two CPUs each may wait this long for its next turn


@pytest.fixture
def runtime_dir() -> Iterator[Path]:
    with runtime_directory() as path:
        yield path


@dataclass(frozen=True)
class Ended:
    """How a hook ended; `at_ns` is CLOCK_BOOTTIME when it was seen to have."""

    pid: int
    status: int
    at_ns: int


def burst(runtime_dir: Path, *arguments: str) -> list[Ended]:
    """Start all hooks as fast as can be and return how each ended."""
    command = [*COMMAND, "createRuntime", f"--runtime-dir={runtime_dir}", *arguments]
    state = runtime_dir / "state.json"
    state.write_bytes(STATE)
    files = [(os.POSIX_SPAWN_OPEN, 0, state, os.O_RDONLY, 0),
             (os.POSIX_SPAWN_OPEN, 2, "/dev/null", os.O_WRONLY, 0)]  # fmt: skip
    running = threading.Semaphore(0)
    with ThreadPoolExecutor(1) as watcher:
        ends = watcher.submit(see_all_end, running)
        for _ in range(HOOKS):
            os.posix_spawn(command[0], command, {}, file_actions=files)
            running.release()
    return ends.result()


def see_all_end(running: threading.Semaphore) -> list[Ended]:
    """Take the end of each hook at its moment, while others are still being started."""
    ended = []
    for _ in range(HOOKS):
        assert running.acquire(timeout=20), "a hook was not started"
        info = os.waitid(os.P_ALL, 0, os.WEXITED)
        assert info is not None
        now = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        ended.append(Ended(info.si_pid, info.si_status, now))
    return ended


def check_none_lost(ended: list[Ended], received: list[HookMessage], spool: Path) -> None:
    """Check that each hook's message is somewhere, once by its identity, and each was in time."""
    spooled = list(Spool(str(spool)).pending())
    by_key = {message.key: message for message in [*received, *spooled]}
    assert Counter(message.pid for message in by_key.values()) == Counter(e.pid for e in ended)
    assert {message.body for message in by_key.values()} == {STATE}
    assert {e.status for e in ended} == {0}
    started = {message.pid: message.stamp_ns for message in by_key.values()}
    slowest_s = max(e.at_ns - started[e.pid] for e in ended) / 1e9
    both = len(received) + len(spooled) - len(by_key)
    print(
        f"slowest {slowest_s:.3f} s, {len(received)} received, {len(spooled)} spooled, {both} both"
    )
    assert slowest_s < BUDGET_S + STARVED_S


def test_burst_with_a_slow_daemon(runtime_dir: Path) -> None:
    """With a daemon too slow for most of them, each message is received or spooled, or both."""

    async def commit_slowly(connection: HookConnection) -> None:
        time.sleep(0.01)  # the whole loop stands, as in a long commit
        await connection.recorded()
        await connection.pinned()

    with HookDaemon(runtime_dir, commit_slowly) as daemon:
        ended = burst(runtime_dir)
    check_none_lost(ended, daemon.messages, runtime_dir / "spool")
    assert list(Spool(str(runtime_dir / "spool")).pending())


def test_burst_without_a_daemon(runtime_dir: Path) -> None:
    """Without a daemon all 200 are in the spool, in order."""
    check_none_lost(burst(runtime_dir), [], runtime_dir / "spool")


def test_burst_on_a_full_backlog(runtime_dir: Path) -> None:
    """With a daemon that hangs and a backlog for ten, all 200 are in the spool in time."""
    with socket.socket(socket.AF_UNIX) as hung:
        hung.bind(str(runtime_dir / "hook.sock"))
        hung.listen(10)
        ended = burst(runtime_dir)
    check_none_lost(ended, [], runtime_dir / "spool")
