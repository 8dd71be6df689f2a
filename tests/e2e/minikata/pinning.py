"""Kata's own vCPU pinning (enable_vcpus_pinning), with its faults. Affinity of threads only.

It acts only while there are as many vCPUs as CPUs in the sandbox's cpuset. The Go runtime indexes
the cpuset by QEMU's cpu-index: hotplugged vCPUs have the highest ones, so its shim panics (recorded
from 3.21: own-pinning-panic). runtime-rs counts them through. Facts: sandbox.go checkVCPUsPinning,
resource_inner.rs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping


class PanicError(Exception):
    """The Go shim dies here, and leaves QEMU behind."""


class OwnPinning:
    """What Kata remembers of its pins: whether there are any."""

    def __init__(self, *, go: bool) -> None:
        self._go = go
        self._pinned = False

    def check(self, vcpus: Mapping[int, int], cpus: set[int]) -> None:
        """Pin, or take the pins back; `vcpus` are threads by cpu-index."""
        if len(vcpus) != len(cpus):
            if self._pinned and cpus:
                for tid in vcpus.values():
                    os.sched_setaffinity(tid, cpus)
            self._pinned = False
            return
        ordered = sorted(cpus)
        for position, (index, tid) in enumerate(sorted(vcpus.items())):
            place = index if self._go else position
            if place >= len(ordered):
                raise PanicError(
                    f"runtime error: index out of range [{place}] with length {len(ordered)}"
                )
            os.sched_setaffinity(tid, {ordered[place]})
        self._pinned = True
