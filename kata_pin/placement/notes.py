"""What an operator should know about a placement; the codes are stable, machines read them.

Each note has its text here. The module that finds something decides whether a note is due.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from kata_pin.base.cpuset import CpuSet, HostTopology, union
from kata_pin.base.placement import Note, Placement
from kata_pin.base.sandbox import GuestTopology, Thread, Vmm
from kata_pin.base.threads import ThreadKey
from kata_pin.base.values import KataRuntime, NoteLevel, count, listed
from kata_pin.placement import vm_size

KATA_PINS_VCPUS: Final = "kata-pins-vcpus"
UNBOUND: Final = "unbound"
RUNS_ON_OTHERS: Final = "runs-on-others"
IDENTIFY: Final = (
    'to have its threads identified, set enable_debug = true and extra_monitor_socket = "qmp" in'
    " Kata's configuration"
)


def remedies(
    vcpus: int, exclusive: int, vmm: Vmm | None
) -> tuple[tuple[vm_size.VmRemedy, vm_size.Lack], ...]:
    """Return what gives a VM one vCPU for each exclusive CPU and one for the guest's own work."""
    runtime = KataRuntime.GO if vmm is None else vmm.runtime
    qemu = vmm is None or bool(vmm.guest.boot)  # only QEMU's command line has it
    template = vmm is not None and vmm.loads and runtime is KataRuntime.RUST
    lack = vm_size.Lack(runtime, exclusive, vcpus, qemu, template=template)
    return tuple((row, lack) for row in vm_size.remedies(lack))


class VcpuCount(NamedTuple):
    """How many vCPUs a VM has, and how many other threads may be vCPUs too (D6)."""

    known: int
    unsure: int
    vmm: Vmm | None

    def __str__(self) -> str:
        """Return it in words."""
        text = count(self.known, "vCPU")
        if self.unsure:
            more = "thread that may be a vCPU" if self.unsure == 1 else "threads that may be vCPUs"
            text += f" and {self.unsure} {more}"
        return text

    @property
    def most(self) -> int:
        """Return how many vCPUs there are at most."""
        return self.known + self.unsure

    def remedies(self, exclusive: int) -> str:
        """Return what gives the VM the vCPUs that it lacks: only once it is known what it has."""
        rows = remedies(self.most, exclusive, self.vmm)
        found = tuple(row.text(lack) for row, lack in rows)
        if self.unsure and (self.vmm is None or self.vmm.runtime is KataRuntime.GO):
            found = (IDENTIFY, *found)
        return f"; remedies: {'; '.join(found)}" if found else ""


def size_text(vcpus: VcpuCount, exclusive: int) -> str:
    """Return how many vCPUs the VM has and needs, with the remedies when it lacks some."""
    text = f"the VM has {vcpus} for {count(exclusive, 'exclusive CPU')}"
    if (vcpus.known, vcpus.unsure) == (exclusive, 0):
        text += ", none is left for the guest's own work"
    return text + vcpus.remedies(exclusive)


HINTS: Final = {
    "bound": "bound by hand: {binding}; kata-pin bind --clear ends it",
    "surplus-overlaps-pairs": "{threads} may run on the paired CPUs {cpus}; to give them a CPU of"
    " their own, set overhead: reserve:1",  # D10: no drift
    "overhead-overlaps-pairs": "{threads} other than vCPUs may run on the paired CPUs {cpus}; to"
    " keep them off, set overhead: reserve:1, or housekeeping CPUs that the cgroup allows",
    "held-by-others": "CPUs {cpus} of its cpuset belong exclusively to other pods by now: no thread"
    " uses them",  # D28
    KATA_PINS_VCPUS: "Kata pins the vCPUs of this sandbox itself ({setting}); kata-pin does not"
    "{inside}",  # D13
    "kata-may-pin": "enable_vcpus_pinning is on (by {evidence}), but Kata pins only while its"
    " containers have as many CPUs as there are vCPUs ({vcpus})",
    "released": "not pinned: {origin}; original affinities are restored",  # D18
}
"""Texts of the notes that need no action, by code."""

WARNINGS: Final = {
    UNBOUND: "no longer bound by hand: {why}",  # with all that it had set
    "fewer-vcpus": "{size}",
    "fewer-vcpus-than-containers": "the VM has {vcpus} for {containers} containers with exclusive"
    " CPUs, so every vCPU gets the whole sandbox mask{remedies}",
    "shared-without-vcpu": "no vCPU is left for {names}: vCPUs that are paired with exclusive CPUs"
    " serve them{remedies}",
    "shared-on-overhead": "{names} run on unpaired vCPUs, which the setting overhead: {setting}"
    " keeps off the shared CPUs {shared}; set overhead: auto, or overhead for the role vcpu",
    "role-conflict": "sources disagree about the role of {tids} ({why}): whole sandbox mask",  # D6
    "vcpu-index-unknown": "the vCPU index of {tids} is unknown; these vCPUs are paired last",
    "exclusive-offline": "exclusive CPUs {cpus} are offline",
    "exclusive-overlap": "CPUs {cpus} are exclusive to more than one container of the sandbox; the"
    " first recorded one keeps them",
    "reserve-too-large": "overhead: reserve:{reserve} takes all {exclusive}; no vCPU can be paired,"
    " so every vCPU gets the whole sandbox mask",
    "reserve-takes-container": "the overhead reserve takes every exclusive CPU of {names}",
    "fallback": "{threads} cannot run on {wanted} ({obstacle}); falling back to {step}",  # D7
    RUNS_ON_OTHERS: "{threads} may run on CPUs {cpus}, which belong exclusively to other pods: the"
    " cgroup allows no others until its cpuset is updated",
}
"""Texts of the others."""


def note(code: str, **facts: object) -> Note:
    """Return a note; `facts` are what its text names."""
    if code in HINTS:
        return Note(code, HINTS[code].format(**facts))
    return Note(code, WARNINGS[code].format(**facts), NoteLevel.WARNING)


def kata_pins_vcpus(evidence: str, containers: Sequence[str] = ()) -> Note:
    """Say that the vCPUs are left to Kata's own pinning (D13), and how that is known.

    `containers` are those that run on all vCPUs then, as Kata confines none in the guest.
    """
    setting = f"enable_vcpus_pinning by {evidence}" if evidence else "enable_vcpus_pinning"
    inside = ""
    if len(containers) > 1:
        inside = (
            f"; in the guest {named(containers)} run on every vCPU, so its exclusive CPUs are"
            " exclusive against other pods, not inside this one"
        )
    return note(KATA_PINS_VCPUS, setting=setting, inside=inside)


def named(containers: Iterable[str]) -> str:
    """Return containers in words."""
    return ", ".join(f"container {name}" for name in containers)


def tids(numbers: Sequence[int]) -> str:
    """Return threads in words; of many the first ones."""
    return f"tid {listed(numbers, 8)}"


# How the CPUs of a pair relate to the guest's memory and thread siblings, in words.
#
# Derived from the placement alone, so it holds for pairs that were only kept, too.


def localities(
    threads: Iterable[Thread], placement: Placement, guest: GuestTopology, topology: HostTopology
) -> dict[ThreadKey, str]:
    """Return a sentence for each paired vCPU whose guest node or guest core says something."""
    runs = {
        one.role.vcpu: placement.desired[one.key].wanted
        for one in threads
        if one.role.vcpu is not None and _is_paired(placement, one.key)
    }
    found = {}
    for one in threads:
        index = one.role.vcpu
        if index in runs and _is_paired(placement, one.key):
            parts = [_memory(index, runs[index], guest, topology)]
            parts += [_siblings(index, runs, guest, topology)]
            found[one.key] = "; ".join(part for part in parts if part)
    return found


def _is_paired(placement: Placement, key: ThreadKey) -> bool:
    desired = placement.desired.get(key)
    return desired is not None and desired.paired


def _memory(index: int, run: CpuSet, guest: GuestTopology, topology: HostTopology) -> str:
    """Say where the memory of the vCPU's guest node is, where QEMU bound it."""
    bound = guest.host_nodes.get(guest.numa.get(index, -1))
    if not bound:
        return ""
    nodes = CpuSet(node for cpu in run if (node := topology.node_of(cpu)) is not None)
    here = "where its memory is" if nodes <= bound else f"its memory is on {bound}"
    return f"on host NUMA node {nodes}, {here}"


def _siblings(
    index: int, runs: Mapping[int, CpuSet], guest: GuestTopology, topology: HostTopology
) -> str:
    """Say whether the vCPUs of a guest core share a host core."""
    core = guest.siblings_of(index)
    others = [one for one in sorted(runs) if one != index and guest.siblings_of(one) == core]
    if guest.threads < 2 or not others:
        return ""
    names = ", ".join(f"vCPU {one}" for one in others)
    together = union([runs[index], *(runs[one] for one in others)])
    same = together <= topology.siblings(together.first)
    return f"thread sibling of {names}, {'on the same core' if same else 'on another core'}"
