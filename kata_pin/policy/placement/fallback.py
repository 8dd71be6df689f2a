"""What can be applied of what is wanted, and what is applied instead when nothing can (D7).

Applied is wanted ∩ the cpuset of the thread's cgroup ∩ online. When that is empty the next of
these that is not: the sandbox's shared CPUs, its reserve CPUs, the CPUs of surplus or shared vCPUs,
the cpuset, and where even that is off (a stale reading), whatever is online. Of the cpuset it is
the sandbox's part while there is one: until Kata narrows a cgroup, CPUs that the sandbox gave up
are in it, and may belong to another sandbox by then. CPUs that other pods hold exclusively (D28)
are left out of every step, unless a thread's cpuset has no others. An empty Task.cpuset means that
the cgroup could not be read; then only the online CPUs limit.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from kata_pin.model.cpuset import EMPTY, CpuSet, union
from kata_pin.model.placement import Note, SandboxMask
from kata_pin.policy.placement import notes
from kata_pin.policy.placement.want import Fit, Kind, Want


class Step(StrEnum):
    """The fallbacks in their order; NONE when the want was met."""

    NONE = ""
    SHARED = "shared"
    RESERVE = "reserve"
    SURPLUS = "surplus"
    CPUSET = "cpuset"
    ONLINE = "online"


def fit(
    wants: Iterable[Want],
    mask: SandboxMask,
    reserve: CpuSet,
    online: CpuSet,
    others: CpuSet = EMPTY,
) -> tuple[list[Fit], list[Note]]:
    """Fit every want to its thread's cpuset; a note for each kind of obstacle met.

    `others` are the CPUs that other pods hold exclusively.
    """
    every = list(wants)
    surplus = union(want.cpus for want in every if want.kind.vcpu_for_all)
    extra = mask.overhead_extra
    # CPUs of the pod sandbox's own cpuset are never for a vCPU that is paired
    whole = mask.mask or EMPTY
    steps = (mask.shared, reserve, surplus - extra, whole - extra)
    paired = _Fitter(online, steps, others)
    other = _Fitter(online, (mask.shared | extra, reserve, surplus, whole), others)
    fits = [(paired if want.kind is Kind.PAIRED else other).fit(want) for want in every]
    return fits, list(_fallback_notes(fits))


def within(
    wanted: CpuSet,
    cpuset: CpuSet,
    online: CpuSet,
    steps: Iterable[tuple[Step, CpuSet]] = (),
    others: CpuSet = EMPTY,
) -> tuple[CpuSet, Step]:
    """Return what of `wanted` can be applied, else what the first useful step offers.

    Where nothing is left but the cpuset, the rest of it is preferred to CPUs of `others`.
    """
    allowed = cpuset & online if cpuset else online
    for step, cpus in ((Step.NONE, wanted), *steps):
        if cpus & allowed:
            return cpus & allowed, step
    if cpuset and allowed:
        return allowed - others or allowed, Step.CPUSET
    return online - others or online, Step.ONLINE


class _Fitter:
    """Fits wants; `steps` are the CPUs of SHARED, RESERVE, SURPLUS and CPUSET."""

    def __init__(self, online: CpuSet, steps: Iterable[CpuSet], others: CpuSet) -> None:
        self._online = online
        self._others = others
        names = (Step.SHARED, Step.RESERVE, Step.SURPLUS, Step.CPUSET)
        self._steps = [(name, cpus - others) for name, cpus in zip(names, steps, strict=True)]
        self._known: dict[tuple[int, int], tuple[CpuSet, Step]] = {}

    def fit(self, want: Want) -> Fit:
        cpuset = want.thread.task.cpuset
        key = (want.cpus.bits, cpuset.bits)
        found = self._known.get(key)
        if found is None:
            free = want.cpus - self._others
            found = within(free, cpuset, self._online, self._steps, self._others)
            self._known[key] = found
        applied, step = found
        if step:
            return Fit(want, applied, step, self._obstacle(want))
        return Fit(want._replace(cpus=want.cpus - self._others), applied)

    def _obstacle(self, want: Want) -> str:
        if not want.cpus:
            return "no CPUs are set"
        if not want.cpus & self._online:
            return "those CPUs are offline"
        if want.cpus <= self._others:
            return "other pods hold those CPUs exclusively"
        return f"cgroup {want.thread.task.cgroup} allows only {want.thread.task.cpuset}"


def _fallback_notes(fits: Iterable[Fit]) -> Iterable[Note]:
    counts: dict[tuple[str, str, str], tuple[int, CpuSet]] = {}
    for one in fits:
        if one.step:
            key = (one.want.kind.value, one.step, one.detail)
            count, wanted = counts.get(key, (0, EMPTY))
            counts[key] = (count + 1, wanted | one.want.cpus)
    for (_kind, step, obstacle), (count, wanted) in counts.items():
        yield notes.fallback(count, step, wanted, obstacle)
