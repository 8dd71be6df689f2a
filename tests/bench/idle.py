"""The daemon at rest with 250 real idle VMs, and what people and hooks meet there.

`kata-pin run` as a process of its own, default settings (an affinity audit every 10 s, a deep one
every 60 s). CPU time is the scheduler's own count (schedstat), over a whole number of deep periods
in a full run.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from tests.bench.audits import SANDBOXES
from tests.bench.commands import SHOW_MANY, show_rows
from tests.bench.figures import BenchError, Row
from tests.bench.hooks import known_sandbox, other_runtime
from tests.bench.node import BenchNode
from tests.bench.service import ServiceProcess, service
from tests.bench.standins import crowd
from tests.support.waiting import wait_for


def measure(node: BenchNode, seconds: int) -> Iterator[Row]:
    """Yield CPU and memory of the resting daemon over some seconds, then hooks and commands."""
    with crowd(node, SANDBOXES) as sandboxes:
        settings: dict[str, object] = {"hypervisors": sandboxes.hypervisors}
        suffix = f", {sandboxes.what}"
        with service(node, **settings) as daemon:
            yield from _at_rest(daemon, seconds, suffix, bar_mib=50.0)
            yield from show_rows(node, max(seconds // 6, 3), SHOW_MANY, suffix=suffix)
            rounds = max(seconds // 2, 10)
            if node.sandboxes:
                yield from known_sandbox(node, node.sandboxes[0], rounds, suffix=suffix)
            yield from other_runtime(node, rounds, suffix=suffix)
            if "ERROR" in daemon.log:
                raise BenchError(f"the daemon complained: {daemon.log[-400:]}")
        with service(node, **settings, isolation={"watch": False}) as daemon:
            yield from _at_rest(daemon, seconds, f", options off{suffix}", bar_mib=45.0)


def _at_rest(daemon: ServiceProcess, seconds: int, suffix: str, *, bar_mib: float) -> Iterator[Row]:
    """Yield what a daemon uses that has nothing to do."""
    wait_until_quiet(daemon)
    start_s, broker_s, start = daemon.cpu_s(), daemon.broker_cpu_s(), time.monotonic()
    time.sleep(seconds)
    spent_s, elapsed = daemon.cpu_s() - start_s, time.monotonic() - start
    broker_s = daemon.broker_cpu_s() - broker_s
    yield Row(
        f"idle daemon and broker, CPU{suffix}", 100 * (spent_s + broker_s) / elapsed,
        "% of a core", 1, bar=0.6, bar_on_ratio=False,
        detail=f"{spent_s:.2f} s in {elapsed:.0f} s, and the broker {broker_s:.2f} s",
    )  # fmt: skip
    yield Row(
        f"idle daemon, RSS{suffix}", daemon.memory_mib(), "MiB", 1, bar=bar_mib,
        bar_on_ratio=False, detail=f"at most {daemon.memory_mib('VmHWM'):.1f}",
    )  # fmt: skip


def wait_until_quiet(daemon: ServiceProcess) -> None:
    """Wait until the daemon has used next to nothing for two seconds."""

    def quiet() -> bool:
        before = daemon.cpu_s()
        time.sleep(2.0)
        return daemon.cpu_s() - before < 0.02

    wait_for(quiet, "the daemon to come to rest", 120)
