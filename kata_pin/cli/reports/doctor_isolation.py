"""`doctor`: whether it can be told who runs on exclusive pCPUs, and whether memory can be moved."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Final

from kata_pin.cli.reports import remedies
from kata_pin.config import Config
from kata_pin.errors import DaemonError
from kata_pin.host.files import read_text
from kata_pin.host.memory import nodes_with_memory, probe_moves
from kata_pin.host.root import HostRoot
from kata_pin.host.topology import online
from kata_pin.model.count_noun import count
from kata_pin.model.reports.doctor import Row
from kata_pin.model.reports.watch import WatchDocument
from kata_pin.model.settings import MemoryMode
from kata_pin.remedy import here

PERFMON_SUFFICES: Final = 2
"""Above this kernels of Debian and Ubuntu give perf events to CAP_SYS_ADMIN only."""

_NEEDS: Final = (
    "the service needs CAP_PERFMON and SystemCallFilter=perf_event_open (kata-pin install writes "
    "them), and kernel.perf_event_paranoid of at most 2; a container the capability PERFMON and a "
    "seccomp profile that allows the call"
)


_MOVES_NEED: Final = (
    "a kernel with CONFIG_NUMA and CONFIG_MIGRATION; CAP_SYS_NICE; in a container a seccomp "
    "profile that allows the call (the chart's seccompProfile)"
)


def task_switches(root: HostRoot) -> Row:
    """Return whether this process can record task switches, as `prove` does."""
    try:
        os.close(root.calls.switches(online(root).first))
    except OSError as error:
        text = f"cannot be recorded: {error.strerror}; intruders on exclusive pCPUs have no names"
        return Row("task switches", "warn", text, here(remedies.RECORDS))
    if _perf_restriction(root) > PERFMON_SUFFICES:
        text = "can be recorded by root (perf), not by the daemon, which has CAP_PERFMON alone"
        return Row("task switches", "warn", text, here(remedies.PARANOID))
    return Row("task switches", "ok", "can be recorded (perf)")


def _perf_restriction(root: HostRoot) -> int:
    """Return kernel.perf_event_paranoid; the least where it cannot be read."""
    try:
        return int(read_text(root.proc("sys/kernel/perf_event_paranoid")))
    except (OSError, ValueError):
        return -1


def memory_moves(
    config: Config, root: HostRoot, probe: Callable[[], None] = probe_moves
) -> Iterator[Row]:
    """Yield whether `memory: migrate` can work here, nothing without that setting."""
    if config.memory is not MemoryMode.MIGRATE:
        return
    nodes = nodes_with_memory(root)
    if len(nodes) < 2:
        text = "memory: migrate has no effect: this node has memory on one NUMA node only"
        yield Row("memory moves", "info", text)
    elif not config.acts:
        yield Row("memory moves", "info", "memory: migrate has no effect with mode: observe")
    else:
        try:
            probe()
        except OSError as error:
            text = f"memory: migrate cannot work: move_pages is refused: {error.strerror}"
            yield Row("memory moves", "warn", text, _MOVES_NEED)
        else:
            text = f"NUMA nodes {nodes}, at most {config.memory_rate_mib} MiB per second"
            yield Row("memory moves", "ok", text)


def watch(ask: Callable[[], WatchDocument]) -> Iterator[Row]:
    """Yield whether the daemon can name who runs on exclusive pCPUs, nothing without one."""
    try:
        found = ask()
    except DaemonError:
        return
    if found.problem:
        yield Row("watch", "warn", f"intruders have no names: {found.problem}", _NEEDS)
    elif found.pcpus:
        yield Row("watch", "ok", f"watches {count(len(found.pcpus), 'exclusive pCPU')}")
