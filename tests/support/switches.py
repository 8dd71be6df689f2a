"""Recording task switches for a while, in one call."""

from __future__ import annotations

from kata_pin.base.counters import Measured
from kata_pin.base.cpuset import CpuSet
from kata_pin.linux.files import HostRoot
from kata_pin.linux.switches import RING_BYTES, SwitchRecorder


def record_switches(
    root: HostRoot, cpus: CpuSet, seconds: float, *, ring_bytes: int = RING_BYTES
) -> Measured:
    """Record the switches of some pCPUs for so long; raises HostError as SwitchRecorder does."""
    with SwitchRecorder(root, cpus, seconds, ring_bytes=ring_bytes) as recorder:
        while recorder.left_s > 0:
            recorder.wait()
            recorder.drain()
        return recorder.end()
