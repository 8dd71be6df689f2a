"""Which guest CPU each vCPU thread is, and the evidence for it (D12).

> tid --(KVM, QMP, names)--> cpu-index --(-smp)--> APIC id --(the guest's numbering)--> guest CPU

The guest's numbering, where it was not measured:
- A vCPU present at start has the number of its cpu-index, for good: Linux numbers the CPUs that
  are present at boot in the order of QEMU's table, and a number stays with its APIC id
  (arch/x86/kernel/apic/apic.c, allocate_logical_cpuid; cpu/topology.c since 6.9).
- A hotplugged one, Linux 6.9 and later: possible CPUs are numbered at boot in the order of their
  APIC ids, so the number is the cpu-index again (topology_init_possible_cpus).
- A hotplugged one, before 6.9: the next free number when it first appears. QEMU lists free slots
  from the highest down and Kata takes the first of the list, so they appear in descending order.
Both rules are inferred unless seen in the lab with that kernel (PROVED). Without the kernel's
release both must agree. Two threads that would have the same guest CPU are both unknown.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from kata_pin.base.cpuset import CpuSet
from kata_pin.base.placement import Placement
from kata_pin.base.sandbox import (
    GuestFacts,
    GuestMap,
    GuestTopology,
    Link,
    MeasuredGuestCpu,
    Sandbox,
    Thread,
    VcpuLink,
    Vmm,
)
from kata_pin.base.threads import ThreadKey
from kata_pin.base.values import LinkState, RoleSource, ThreadRole
from kata_pin.placement.pairing import index_order

PROVED: Final = frozenset({(6, 1), (6, 12)})
"""Guest kernels (major, minor) whose numbering of hotplugged vCPUs the lab has seen."""

RENUMBERED: Final = (6, 9)  # the first Linux that numbers hotpluggable CPUs at boot
NOTHING_KNOWN: Final = GuestFacts()

_RELEASE: Final = re.compile(r"([0-9]{1,3})\.([0-9]{1,4})(?![0-9])")
_MEASURES: Final = frozenset(
    {RoleSource.DEBUGFS, RoleSource.QMP, RoleSource.KVM_FD, RoleSource.NAME}
)

_UNPLACED: Final = Link(LinkState.UNKNOWN, "cpu-index unknown")
_OF_KVM: Final = Link(LinkState.MEASURED, "KVM's vCPU id")
_OF_SMP: Final = Link(LinkState.PROVEN, "QEMU's -smp")
_NO_APIC: Final = Link(LinkState.PROVEN, "this machine has none")
_BOOT: Final = Link(LinkState.PROVEN, "present at boot, so it keeps its number")
_NO_SMP: Final = Link(LinkState.INFERRED, "its cpu-index, if no vCPU was hotplugged")
_TWICE: Final = Link(LinkState.UNKNOWN, "two vCPUs would have this number")
_NO_RULE: Final = Link(LinkState.UNKNOWN, "hotplugged, and the guest's kernel is unknown")
_OUTSIDE: Final = Link(LinkState.UNKNOWN, "its cpu-index is not below maxcpus")


def guest_map(
    sandbox: Sandbox,
    threads: Iterable[Thread],
    placement: Placement,
    facts: GuestFacts = NOTHING_KNOWN,
    *,
    apic_of: Callable[[GuestTopology, int], int] | None = None,
) -> GuestMap:
    """Return the map of a sandbox's vCPU threads; `placement` has each thread's expected CPUs.

    `apic_of` gives the APIC id of a cpu-index, None where the machine has none (peers/qemu.py).
    """
    if sandbox.vmm is None:
        return GuestMap(sandbox.id, facts=facts)
    guest = sandbox.vmm.guest
    vcpus = index_order(one for one in threads if one.role.role is ThreadRole.VCPU)
    number = _Numbering(guest, facts)
    links = [_link(one, placement, sandbox.vmm, apic_of, number) for one in vcpus]
    return GuestMap(
        sandbox.id,
        tuple(_without_doubles(links)),
        hotplugged=any(_is_hotplugged(one, guest) for one in links) if guest.boot else None,
        facts=facts,
    )


def measured_by_apic(
    found: GuestMap, table: Mapping[int, int]
) -> dict[ThreadKey, MeasuredGuestCpu]:
    """Return the guest CPUs of threads by `table`, the guest's /proc/cpuinfo.

    It maps guest CPUs to APIC ids. Only threads whose own APIC id is proven are in the result.
    """
    cpu_of = {apic: cpu for cpu, apic in table.items()}
    return {
        one.key: MeasuredGuestCpu(cpu_of[one.apic_id], "the guest's /proc/cpuinfo")
        for one in found.links
        if one.apic_id in cpu_of
        and min(one.thread_link.state.rank, one.apic_link.state.rank) >= LinkState.PROVEN.rank
    }


def numberings(found: GuestMap, guest: GuestTopology) -> list[dict[ThreadKey, int]]:
    """Return the ways in which a guest of any kernel may number its vCPUs.

    Empty if a vCPU's index or the VM's topology at start is unknown.
    """
    indexes = {one.key: one.index for one in found.links if one.index is not None}
    if len(indexes) < len(found.links) or not guest.boot:
        return []
    top = guest.boot + guest.maximum - 1
    late = {key: top - n if n >= guest.boot else n for key, n in indexes.items()}
    return [indexes, late]


def release_of(text: str) -> tuple[int, int] | None:
    """Return major and minor of a kernel release such as `6.12.47-171`, None for other texts."""
    match = _RELEASE.match(text)
    return None if match is None else (int(match[1]), int(match[2]))


def _is_hotplugged(one: VcpuLink, guest: GuestTopology) -> bool:
    return one.index is not None and one.index >= guest.boot


def _link(
    thread: Thread,
    placement: Placement,
    vmm: Vmm,
    apic_of: Callable[[GuestTopology, int], int] | None,
    number: _Numbering,
) -> VcpuLink:
    role, desired = thread.role, placement.desired.get(thread.key)
    thread_link = _thread_link(thread)
    index = None if thread_link.state is LinkState.UNKNOWN else role.vcpu
    apic_id, apic_link = _apic(thread, index, vmm, apic_of)
    guest_cpu, guest_link = number.of(thread.key, index)
    return VcpuLink(
        key=thread.key,
        index=role.vcpu,
        apic_id=apic_id,
        guest_cpu=guest_cpu,
        thread_link=thread_link,
        apic_link=apic_link,
        guest_link=guest_link,
        cpus=thread.task.affinity if desired is None else desired.applied,
        paired=desired is not None and desired.paired,
        container_id="" if desired is None else desired.container_id,
    )


def _thread_link(thread: Thread) -> Link:
    role = thread.role
    if role.conflict:
        return Link(LinkState.UNKNOWN, f"sources disagree: {role.conflict}")
    if role.vcpu is None:
        return _UNPLACED
    return _THREAD_LINKS[role.source]


_THREAD_LINKS: Final = {
    source: Link(LinkState.MEASURED if source in _MEASURES else LinkState.INFERRED, source.value)
    for source in RoleSource
}


def _apic(
    thread: Thread,
    index: int | None,
    vmm: Vmm,
    apic_of: Callable[[GuestTopology, int], int] | None,
) -> tuple[int | None, Link]:
    if index is None:
        return thread.role.apic_id, _UNPLACED
    if apic_of is None:
        return None, _NO_APIC
    if thread.role.apic_id is not None:
        return thread.role.apic_id, _OF_KVM
    if vmm.apic_ids and vmm.guest.boot:
        return apic_of(vmm.guest, index), _OF_SMP
    return None, _NO_SMP


class _Numbering:
    """How one guest numbers its CPUs."""

    def __init__(self, guest: GuestTopology, facts: GuestFacts) -> None:
        self._guest = guest
        self._measured = facts.measured
        self._release = release_of(facts.release)
        self._rule = self._rule_link(facts.release)

    def of(self, key: ThreadKey, index: int | None) -> tuple[int | None, Link]:
        """Return the guest CPU of a vCPU thread, and the evidence."""
        measured = self._measured.get(key)
        if index is None:
            return None, _UNPLACED
        if measured is not None:
            return measured.guest_cpu, Link(LinkState.MEASURED, measured.source)
        if not self._guest.boot:
            return index, _NO_SMP
        if index < self._guest.boot:
            return index, _BOOT
        return self._hotplugged(index)

    def _hotplugged(self, index: int) -> tuple[int | None, Link]:
        if index >= self._guest.maximum:
            return None, _OUTSIDE
        from_top = self._guest.boot + self._guest.maximum - 1 - index
        if self._release is None:
            return (index, self._rule) if index == from_top else (None, _NO_RULE)
        return (index if self._release >= RENUMBERED else from_top), self._rule

    def _rule_link(self, release: str) -> Link:
        """Return the evidence for a hotplugged vCPU's number."""
        if self._release is None:
            return Link(LinkState.INFERRED, "hotplugged; the same number on every kernel")
        rule = "by APIC id" if self._release >= RENUMBERED else "in order of appearance"
        state = LinkState.PROVEN if self._release in PROVED else LinkState.INFERRED
        tested = " (tested)" if state is LinkState.PROVEN else ""
        return Link(state, f"hotplugged; Linux {release[:32]} numbers {rule}{tested}")


def _without_doubles(links: Sequence[VcpuLink]) -> list[VcpuLink]:
    count = Counter(one.guest_cpu for one in links if one.guest_cpu is not None)
    return [
        replace(one, guest_cpu=None, guest_link=_TWICE)
        if one.guest_cpu is not None and count[one.guest_cpu] > 1
        else one
        for one in links
    ]


# Which guest CPU a vCPU thread is, from busy times in the guest and run times on the host (D12).
#
# Between two readings a guest CPU is busy for as long as its vCPU thread runs on the host, give or
# take exits and ticks. So if a thread ran clearly longer than all others, and one guest CPU was
# busy for as long, they are the same. Nothing runs in the guest for this. There is no answer,
# rather than a guess, for a thread that ran little, two that ran alike, a guest CPU that fits two
# threads, a guest that polls while idle, or one that counts stolen time as busy.
#
# The agent's metrics name guest CPUs by their rank among the online ones; `by_rank` finds the guest
# CPUs that all possible numberings agree about.

LEAST_S: Final = 0.2  # shortest run time that stands out from noise: 20 ticks of the guest's clock
SLACK_S: Final = 0.03
SLACK_SHARE: Final = 0.05
"""How far busy and run time of one vCPU may differ: ticks of 10 ms at both ends, and exits."""

APART: Final = 3.0  # a time must differ from every other by this many times its slack
SOURCE: Final = "busy times in the guest and on the host"


def match(ran: Mapping[ThreadKey, float], busy: Mapping[int, float]) -> dict[ThreadKey, int]:
    """Return the guest CPU of each thread that fits exactly one.

    `ran` and `busy` are seconds over the same interval, of all vCPU threads and all guest CPUs.
    """
    found: dict[ThreadKey, int] = {}
    for key, seconds in ran.items():
        if seconds < LEAST_S or _near(seconds, (s for other, s in ran.items() if other != key)):
            continue
        fitting = [cpu for cpu, s in busy.items() if abs(s - seconds) <= _slack(seconds)]
        if len(fitting) == 1:
            others = (s for cpu, s in busy.items() if cpu != fitting[0])
            if not _near(seconds, others):
                found[key] = fitting[0]
    return found


def _slack(seconds: float) -> float:
    return SLACK_S + seconds * SLACK_SHARE


def _near(seconds: float, others: Iterable[float]) -> bool:
    """Return whether another time is too near to this one to tell them apart."""
    return any(abs(other - seconds) < APART * _slack(seconds) for other in others)


def by_rank(
    ranks: Mapping[ThreadKey, int], numberings: Sequence[Mapping[ThreadKey, int]]
) -> dict[ThreadKey, int]:
    """Return the guest CPUs of threads whose rank among the online guest CPUs is known.

    `numberings` are the ways in which this guest may number its vCPUs. Those with another order are
    excluded; a thread is in the result if all the others agree about it.
    """
    fitting = [one for one in numberings if _ordered(ranks, one)]
    return {
        key: numbers.pop()
        for key in ranks
        if len(numbers := {one[key] for one in fitting if key in one}) == 1
    }


def _ordered(ranks: Mapping[ThreadKey, int], numbering: Mapping[ThreadKey, int]) -> bool:
    line = sorted(numbering.values())
    return all(key in numbering and line.index(numbering[key]) == r for key, r in ranks.items())


@dataclass
class Votes:
    """Collects the answers of several intervals; one contradiction disqualifies a thread."""

    needed: int = 2
    _answers: dict[ThreadKey, tuple[int, int]] = field(default_factory=dict)
    _doubted: set[ThreadKey] = field(default_factory=set)

    def add(self, found: Mapping[ThreadKey, int]) -> None:
        """Add the answer of one interval."""
        for key, cpu in found.items():
            answer, times = self._answers.get(key, (cpu, 0))
            if answer != cpu:
                self._doubted.add(key)
            self._answers[key] = (answer, times + 1)

    def keep_only(self, alive: Iterable[ThreadKey]) -> None:
        """Drop threads that have ended."""
        living = set(alive)
        self._answers = {key: one for key, one in self._answers.items() if key in living}
        self._doubted &= living

    @property
    def measured(self) -> dict[ThreadKey, MeasuredGuestCpu]:
        """The threads with enough intervals that agree."""
        return {
            key: MeasuredGuestCpu(cpu, SOURCE)
            for key, (cpu, times) in self._answers.items()
            if times >= self.needed and key not in self._doubted
        }


# Whether a container runs outside its guest CPUs, from the CPU time that it used.
#
# The agent's success proves nothing, because it only logs what the kernel refused. CPU time can
# show that a container ran elsewhere; it can never prove that it did not, and an idle container
# shows nothing.

PROOF_LEAST_S: Final = 0.1  # least CPU time that shows anything
PROOF_SLACK_S: Final = 0.1
PROOF_SLACK_SHARE: Final = 0.1
"""How much a container's CPU time may exceed the ready time of its vCPU threads, because of ticks
and readings at different moments."""


class Used(Struct, frozen=True):
    """A container's CPU time between two readings, in seconds.

    `per_cpu` is by guest CPU, empty with cgroup v2. `own_ready` is how long the vCPU threads of its
    guest CPUs ran or waited for a CPU, because a guest may count both; None if one is unknown.
    """

    total: float
    per_cpu: Sequence[float] = ()
    own_ready: float | None = None


def runs_elsewhere(used: Used, cpus: CpuSet) -> bool | None:
    """Return whether the container ran outside `cpus`; None where its time does not show it."""
    if used.per_cpu:
        outside = sum(s for cpu, s in enumerate(used.per_cpu) if cpu not in cpus)
        if outside > PROOF_LEAST_S:
            return True
        return False if sum(used.per_cpu) > PROOF_LEAST_S else None
    if used.total <= PROOF_LEAST_S or used.own_ready is None:
        return None
    return used.total > used.own_ready * (1 + PROOF_SLACK_SHARE) + PROOF_SLACK_S
