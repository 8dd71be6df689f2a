"""What policy wants for one thread, before the cgroup and the online CPUs have their say."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from kata_pin.model.cpuset import CpuSet
from kata_pin.model.thread import Thread


class Kind(Enum):
    """Why a thread is wanted where it is."""

    PAIRED = "paired"  # a vCPU with exclusive CPUs
    SURPLUS = "surplus"  # an unpaired vCPU, beyond the exclusive CPUs
    SHARED = "shared"  # the vCPU kept for containers without exclusive CPUs
    FLOAT = "float"  # a vCPU on the whole sandbox mask
    DISPUTED = "disputed"  # a thread of disputed role on the whole sandbox mask
    OVERHEAD = "overhead"  # a thread that is no vCPU

    @property
    def vcpu_for_all(self) -> bool:
        """Whether it is a vCPU whose CPUs other threads may fall back to (D7)."""
        return self is Kind.SURPLUS or self is Kind.SHARED


class Want(NamedTuple):
    """The policy's choice for one thread; a paired vCPU serves container `container_id`."""

    thread: Thread
    cpus: CpuSet
    kind: Kind
    reason: str
    container_id: str = ""


class Fit(NamedTuple):
    """A want after D7: what can be applied, and the fallback step that was needed."""

    want: Want
    applied: CpuSet
    step: str = ""
    detail: str = ""

    @property
    def paired(self) -> bool:
        """Whether the thread has the exclusive CPUs it was meant to have."""
        return self.want.kind is Kind.PAIRED and not self.step
