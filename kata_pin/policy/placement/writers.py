"""Other writers of affinities: when Kata's own pinning is left to do the vCPUs (D13)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from kata_pin.model.cpuset import EMPTY
from kata_pin.model.placement import SandboxMask


class KataPinningMode(StrEnum):
    """What the handler's Kata configuration makes of vCPU affinity."""

    OFF = "off"
    COUNT = "count"  # enable_vcpus_pinning: acts while vCPUs and CPUs of the union are as many
    NUMA = "numa"  # enable_vcpus_pinning with enable_numa: acts always


@dataclass(frozen=True, slots=True)
class KataPinning:
    """What Kata's configuration makes of one sandbox's vCPUs, and what says so; empty: nothing."""

    mode: KataPinningMode = KataPinningMode.OFF
    evidence: str = ""


NO_KATA_PINNING: Final = KataPinning()


def kata_holds(mode: KataPinningMode, vcpus: int, mask: SandboxMask) -> bool:
    """Return whether Kata's own rule holds, so that kata-pin must not overwrite its pins.

    Kata compares the number of vCPU threads with the union over all its containers, the pod
    sandbox's own cpuset included (virtcontainers sandbox.go, checkVCPUsPinning).
    """
    if mode is KataPinningMode.COUNT:
        return vcpus == len((mask.mask or EMPTY) | mask.overhead_extra)
    return mode is KataPinningMode.NUMA
