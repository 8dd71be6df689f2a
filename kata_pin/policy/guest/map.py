"""Which guest CPU each vCPU thread is, and the evidence for it (D12).

    tid --(KVM, QMP, names)--> cpu-index --(-smp)--> APIC id --(the guest's numbering)--> guest CPU

The guest's numbering, where it was not measured:
- A vCPU present at start has the number of its cpu-index, for good: Linux numbers the CPUs present
  at boot in the order of QEMU's table, and a number stays with its APIC id
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
from dataclasses import replace
from typing import Final

from kata_pin.model.guest_map import GuestFacts, GuestMap, Link, LinkState, Measured, VcpuLink
from kata_pin.model.placement import Placement
from kata_pin.model.sandbox import GuestTopology, Sandbox, Vmm
from kata_pin.model.thread import RoleSource, Thread, ThreadKey, ThreadRole
from kata_pin.policy.placement.pairing import index_order

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

    `apic_of` gives the APIC id of a cpu-index, None where the machine has none (wire/qemu/apic.py).
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


def measured_by_apic(found: GuestMap, table: Mapping[int, int]) -> dict[ThreadKey, Measured]:
    """Return the guest CPUs of threads by `table`, the guest's /proc/cpuinfo.

    It maps guest CPUs to APIC ids. Only threads whose own APIC id is proven are in the result.
    """
    cpu_of = {apic: cpu for cpu, apic in table.items()}
    return {
        one.key: Measured(cpu_of[one.apic_id], "the guest's /proc/cpuinfo")
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
