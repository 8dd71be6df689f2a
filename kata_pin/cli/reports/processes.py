"""Processes of the host and the load of its pCPUs, by psutil; threads are host/'s (ADR 4).

Names and command lines are read here: psutil reads /proc/PID/cmdline whole, even for a name, and
any user can make that file as long as the address space (PR_SET_MM_MAP).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

import psutil

from kata_pin.errors import HostError, TaskGone
from kata_pin.host.process import cmdline, read_process
from kata_pin.host.root import HOST
from kata_pin.model.cpuset import CpuSet
from kata_pin.model.reports.who import HostProcess, ProcessThread
from kata_pin.model.thread import Process

MAX_COMMAND: Final = 200
"""Characters of a command line that are reported."""


def why_hidden() -> str:
    """Return why other users' processes cannot be seen from here, empty where they can be.

    proc_pid(5): with hidepid=1 their files cannot be read, with hidepid=2 they are not listed.
    """
    try:
        read_process(HOST, 1)
    except HostError:
        return "this user cannot see the processes of others (/proc is mounted with hidepid)"
    return ""


def every_process() -> Iterator[Process]:
    """Yield the processes of this host; those that exit meanwhile are left out."""
    for pid in psutil.pids():
        with suppress(TaskGone):
            yield read_process(HOST, pid)


def described(
    process: Process,
    threads: tuple[ProcessThread, ...] = (),
    *,
    sandbox: str = "",
    pod: str = "",
    intruder: bool = False,
) -> HostProcess:
    """Return a process with its user, command line, age and CPU time.

    What cannot be read, or no longer can, is empty or None.
    """
    facts = {}
    with suppress(psutil.NoSuchProcess):
        facts = psutil.Process(process.pid).as_dict(("username", "create_time", "cpu_times"))
    born, times = facts.get("create_time"), facts.get("cpu_times")
    return HostProcess(
        pid=process.pid,
        comm=process.comm,
        user=facts.get("username") or "",
        command=command(process.pid),
        age_s=None if born is None else max(0.0, time.time() - born),
        cpu_s=None if times is None else times.user + times.system,
        sandbox=sandbox,
        pod=pod,
        intruder=intruder,
        threads=threads,
    )


def command(pid: int) -> str:
    """Return the start of a process's command line, empty if there is none to read."""
    try:
        words = " ".join(cmdline(HOST, pid)).strip()
    except HostError:
        return ""
    return words if len(words) <= MAX_COMMAND else f"{words[: MAX_COMMAND - 3]}..."


def busy_percents(online: CpuSet, *, interval_s: float = 0.2) -> dict[int, float]:
    """Return how busy each pCPU is during the interval, in percent; empty if that is unknown."""
    loads = psutil.cpu_percent(interval_s, percpu=True)
    # psutil lists online pCPUs in order, without their numbers
    return dict(zip(online, loads, strict=True)) if len(loads) == len(online) else {}
