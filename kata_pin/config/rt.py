"""The settings of scheduling classes: the section `rt`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kata_pin.config.kinds import matching, setting

NO_CLASS: Final = "none"


@dataclass(frozen=True)
class Rt:
    """Real-time scheduling of vCPUs, for guests that never wait; off by default."""

    vcpus: str = setting(
        NO_CLASS,
        "scheduling class of paired vCPUs. fifo:PRIORITY: SCHED_FIFO, where nothing else has to "
        "run on the pCPU that could then starve; else the vCPU keeps its class, and show says why. "
        "The service needs more rights for it, which `kata-pin install` gives",
        matching(r"none|fifo:([1-9]|[1-4][0-9])", "none, or fifo: and a priority from 1 to 49"),
        example="fifo:1",
    )

    @property
    def priority(self) -> int:
        """The priority of vCPUs; 0: they keep their class."""
        return 0 if self.vcpus == NO_CLASS else int(self.vcpus.partition(":")[2])
