"""`doctor` for programs of the node that matter to pinning: which of them run, since when."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Final

from kata_pin.cli.reports import processes, remedies, words
from kata_pin.model.reports.doctor import Row
from kata_pin.model.reports.state import State
from kata_pin.remedy import Remedy, here

RUNTIMES: Final = frozenset({"containerd", "crio", "kubelet"})

_WATCHED: Final = {
    "irqbalance": (
        "info",
        "moves interrupts, also to exclusive CPUs",
        Remedy("ban these CPUs by IRQBALANCE_BANNED_CPULIST"),
    ),
    "tuned": (
        "info",
        "its scheduler plugin can set affinities",
        Remedy("keep VMMs out of its scheduler groups; kata-pin check shows drift"),
    ),
    "numad": (
        "warn",
        "sets affinities of large processes",
        Remedy("systemctl disable --now numad", "on the node: systemctl disable --now numad"),
    ),
    "kata-pin": (
        "warn",
        "a daemon that does not answer here; two daemons set the same affinities",
        remedies.OTHER_DAEMON,
    ),
}
"""Status, effect and remedy of programs that interfere, by their process name."""


def programs(state: State | None) -> Iterator[Row]:
    """Yield a row for the runtimes that are running, and one per program that interferes."""
    found: dict[str, list[str]] = {}
    for process in processes.every_process():
        name = process.comm
        if name in RUNTIMES or (name in _WATCHED and not _is_own(name, process.pid, state)):
            since = words.age(processes.described(process).age_s)
            found.setdefault(name, []).append(f"pid {process.pid}, started {since} ago")
    listed = {name: f"{name} ({'; '.join(pids)})" for name, pids in sorted(found.items())}
    runtimes = [text for name, text in listed.items() if name in RUNTIMES]
    none = f"not running: {', '.join(sorted(RUNTIMES))}"
    yield Row("programs", "ok" if runtimes else "info", ", ".join(runtimes) or none)
    for name, (status, effect, remedy) in _WATCHED.items():
        if name in listed:
            yield Row("programs", status, f"{listed[name]}: {effect}", here(remedy))


def _is_own(name: str, pid: int, state: State | None) -> bool:
    """Return whether a process is kata-pin, but no second daemon.

    A daemon that hangs cannot say its pid: it has a row of its own.
    """
    if name != "kata-pin":
        return False
    if state is not None and state.daemon.silent:
        return True
    daemon = state.daemon.pid if state is not None else None
    return pid in {daemon, os.getpid()} or "run" not in processes.command(pid).split()
