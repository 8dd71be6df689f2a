"""Scheduling classes of vCPU threads: real-time ones only where they cannot spread.

Whatever the daemon asks, a thread becomes real-time only if it has the name that VMMs give a vCPU
and may run on a single CPU, and what it starts does not inherit the class. Any thread of a verified
process can be given back an ordinary one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from errno import EACCES, EINVAL
from typing import Final

from kata_pin.broker.affinity import change_threads
from kata_pin.broker.protocol import Change, Changed

MOST_PRIORITY: Final = 49
"""Below threaded interrupt handlers, which have 50 (kernel/sched/syscalls.c, sched_set_fifo)."""

_REALTIME: Final = frozenset({os.SCHED_FIFO, os.SCHED_RR})
_ORDINARY: Final = frozenset({os.SCHED_OTHER, os.SCHED_BATCH, os.SCHED_IDLE})
_VCPU: Final = re.compile(rb"(CPU [0-9]{1,4}/(KVM|TCG)|(fc_|db_)?vcpu ?[0-9]{1,4})\Z")

SetClass = Callable[[int, int, os.sched_param], None]
Affinity = Callable[[int], Sequence[int] | set[int]]


def set_classes(
    changes: Sequence[Change],
    policy: int,
    priority: int,
    proc: str = "/proc",
    *,
    set_one: SetClass = os.sched_setscheduler,
    affinity: Affinity = os.sched_getaffinity,
) -> list[Changed]:
    """Give threads a class; OSError for one that may not be given, else one errno per thread."""
    realtime = policy in _REALTIME
    if realtime and not 0 < priority <= MOST_PRIORITY:
        raise OSError(EINVAL, "no priority for a vCPU")
    if not realtime and (policy not in _ORDINARY or priority):
        raise OSError(EINVAL, "no such class")
    tgids = {one.tid: one.tgid for one in changes}

    def give(tid: int, _: object) -> None:
        if not realtime:
            set_one(tid, policy, os.sched_param(0))
            return
        if not _is_vcpu(f"{proc}/{tgids[tid]}/task/{tid}/comm") or len(affinity(tid)) != 1:
            raise OSError(EACCES, "no vCPU with a CPU of its own")
        set_one(tid, policy | os.SCHED_RESET_ON_FORK, os.sched_param(priority))

    return change_threads(changes, proc, give, lambda _: ())


def _is_vcpu(path: str) -> bool:
    with open(path, "rb", buffering=0) as file:
        return _VCPU.match(file.read(64).rstrip(b"\n")) is not None
