"""Whether anybody else had a pCPU between two looks at the kernel's counters. Pure.

Two facts about a thread that may run on one pCPU only, and is alone there: while it is ready, its
wait grows by the run time of everybody else; and what the pCPU counts beyond the thread's own
slices and run time was somebody else's. The first is exact for a busy vCPU, the second sees what
ran while the vCPU slept. Who it was, and whether it was a kernel thread that belongs there, takes
a window.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kata_pin.model.measured.counters import CpuRun, TaskRun


class Look(NamedTuple):
    """The counters of a pCPU at one time; `own` are the threads that may run there only, by tid.

    `cpu` is None where the kernel has no /proc/schedstat, or where threads of the owner come and go
    that may run elsewhere too: then its slices cannot be told apart.
    """

    at_ns: int
    own: Mapping[int, TaskRun]
    cpu: CpuRun | None = None


class Growth(NamedTuple):
    """What grew between two looks: how long the own threads waited and ran, what others took.

    `taken_ns` and `slices` are by the pCPU's own counters; `slices` is None where there are none.
    """

    length_ns: int
    waited_ns: int
    taken_ns: int
    slices: int | None
    ran_ns: int = 0

    @property
    def others_ns(self) -> int:
        """How long others had it at most."""
        return min(self.length_ns, max(self.waited_ns, self.taken_ns))

    @property
    def percent(self) -> float:
        """The same as a share."""
        return 100 * self.others_ns / self.length_ns if self.length_ns > 0 else 0.0


def growth(before: Look, after: Look) -> Growth | None:
    """Return what grew; None where the threads are not the same, or nothing can be said."""
    length = after.at_ns - before.at_ns
    if length <= 0 or not after.own or before.own.keys() != after.own.keys():
        return None
    ran = sum(after.own[tid].ran_ns - one.ran_ns for tid, one in before.own.items())
    waited = sum(after.own[tid].waited_ns - one.waited_ns for tid, one in before.own.items())
    mine = sum(after.own[tid].slices - one.slices for tid, one in before.own.items())
    if ran < 0 or waited < 0 or mine < 0:
        return None
    slices, taken = None, 0
    if before.cpu is not None and after.cpu is not None:
        slices = max(0, after.cpu.slices - before.cpu.slices - mine)
        if slices:
            taken = max(0, after.cpu.ran_ns - before.cpu.ran_ns - ran)
    return Growth(length, waited, taken, slices, ran)
