"""A thread alone on its pCPU, on a machine that others load too; and who ran there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from kata_pin.base.cpuset import CpuSet
from kata_pin.base.errors import HostError
from kata_pin.linux.files import HOST
from tests.support.switches import record_switches


@contextmanager
def left_alone(tid: int) -> Iterator[None]:
    """Keep all ordinary tasks off a thread's pCPU, but for the 5 % that Linux reserves for them."""
    os.sched_setscheduler(tid, os.SCHED_FIFO, os.sched_param(50))
    try:
        yield
    finally:
        os.sched_setscheduler(tid, os.SCHED_OTHER, os.sched_param(0))


def may_record() -> bool:
    """Whether this machine lets task switches be recorded."""
    try:
        record_switches(HOST, CpuSet([1]), 0.01)
    except HostError:
        return False
    return True
