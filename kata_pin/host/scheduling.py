"""Scheduling classes of threads, and what real-time ones must leave to others."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from contextlib import suppress
from typing import Final

from kata_pin.errors import HostError, ParseError
from kata_pin.host.files import read_once, read_text
from kata_pin.host.root import HostRoot
from kata_pin.model.measured.scheduling import RtNode, Scheduling
from kata_pin.model.thread import Process, ThreadKey
from kata_pin.wire.kernel.sched import parse_scheduling

_GUARD: Final = re.compile(r"(?:ksoftirqd|rcuc)/([0-9]{1,5})\Z")
_RELEASE: Final = re.compile(r"([0-9]{1,4})\.([0-9]{1,4})")
_FAIR_SERVER: Final = (6, 12)


def scheduling(root: HostRoot, key: ThreadKey) -> Scheduling | None:
    """Return a thread's class now, None if it has ended; raises HostError or ParseError."""
    path = root.proc(key.tgid, "task", key.tid, "stat")
    try:
        found = parse_scheduling(read_once(path))
    except (FileNotFoundError, ProcessLookupError):
        return None
    except OSError as error:
        raise HostError("read", path, error.errno or 0) from error
    return found if found.starttime == key.starttime else None


def rt_node(root: HostRoot, processes: Iterable[Process], cpus: Collection[int]) -> RtNode:
    """Return what the node says of real-time threads on these pCPUs."""
    guards: dict[int, dict[str, int]] = {}
    for process in processes:
        match = _GUARD.match(process.comm) if process.kernel else None
        if match is not None and int(match[1]) in cpus:
            key = ThreadKey(process.pid, process.pid, process.key.starttime)
            with suppress(HostError, ParseError):
                found = scheduling(root, key)
                if found is not None:
                    of_cpu = guards.setdefault(int(match[1]), {})
                    of_cpu[process.comm] = found.priority if found.is_realtime else 0
    whole = {cpu: names for cpu, names in guards.items() if f"ksoftirqd/{cpu}" in names}
    unserved = {
        cpu for cpu in cpus if _number(root.debug("sched/fair_server", f"cpu{cpu}", "runtime")) == 0
    }
    return RtNode(
        _number(root.proc("sys/kernel/sched_rt_runtime_us")),
        _number(root.proc("sys/kernel/sched_rt_period_us")),
        _has_fair_server(root),
        frozenset(unserved),
        whole,
    )


def _has_fair_server(root: HostRoot) -> bool:
    with suppress(OSError):
        match = _RELEASE.match(read_text(root.proc("sys/kernel/osrelease")))
        return match is not None and (int(match[1]), int(match[2])) >= _FAIR_SERVER
    return False


def _number(path: str) -> int | None:
    """Return the number in a file, None where it cannot be read."""
    with suppress(OSError, ValueError):
        return int(read_text(path, 64))
    return None
