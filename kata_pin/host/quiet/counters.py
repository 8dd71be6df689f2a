"""What interrupts pCPUs, counted: one reading, of which two make rates."""

from __future__ import annotations

import time

from kata_pin.errors import KataPinError
from kata_pin.host.interrupts import read_interrupts
from kata_pin.host.measure.cpus import cpu_samples
from kata_pin.host.root import HostRoot
from kata_pin.model.cpuset import CpuSet
from kata_pin.model.quiet.node import Reading


def read_counters(root: HostRoot, cpus: CpuSet) -> Reading:
    """Return the counters as of now; what cannot be read is a problem, never an error."""
    problems: dict[str, str] = {}
    rows = {}
    try:
        rows = {one.number: (one.row.text, one.row.counts) for one in read_interrupts(root)}
    except KataPinError as error:
        problems["interrupts"] = error.message
    at = time.monotonic()
    return Reading(at, rows, cpu_samples(root, cpus, problems), _lost(problems))


def _lost(problems: dict[str, str]) -> tuple[str, ...]:
    """Return what this report lacks; cpu_samples reads more than interrupts."""
    return tuple(problems[one] for one in ("interrupts", "softirqs") if one in problems)
