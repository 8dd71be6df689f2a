"""What an operator should know about a placement; the codes are stable, machines read them.

Each note has one function here. The module that finds something decides whether a note is due.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from kata_pin.base.cpuset import CpuSet, HostTopology, union
from kata_pin.base.placement import Binding, Note, Placement
from kata_pin.base.sandbox import GuestTopology, Thread, ThreadKey, Vmm
from kata_pin.base.settings import Overhead
from kata_pin.base.values import KataRuntime, NoteLevel, count
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


def bound(binding: Binding) -> Note:
    """Report that an administrator named the CPUs."""
    return Note("bound", f"bound by hand: {binding}; kata-pin bind --clear ends it")


def unbound(why: str) -> Note:
    """Report that a binding ended, with all that it had set."""
    return Note(UNBOUND, f"no longer bound by hand: {why}", NoteLevel.WARNING)


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


def fewer_vcpus(vcpus: VcpuCount, exclusive: int) -> Note:
    """Say that the VM has fewer vCPUs than exclusive CPUs, and how to size it."""
    return _warning("fewer-vcpus", size_text(vcpus, exclusive))


def fewer_vcpus_than_containers(vcpus: VcpuCount, containers: int, exclusive: int) -> Note:
    """Say that not even each container with exclusive CPUs can have a vCPU."""
    text = (
        f"the VM has {vcpus} for {containers} containers with exclusive CPUs, so"
        f" every vCPU gets the whole sandbox mask{vcpus.remedies(exclusive)}"
    )
    return _warning("fewer-vcpus-than-containers", text)


def shared_without_vcpu(containers: Sequence[str], vcpus: VcpuCount, exclusive: int) -> Note:
    """Say that containers without exclusive CPUs have no vCPU of their own."""
    text = (
        f"no vCPU is left for {_names(containers)}: vCPUs that are paired with exclusive CPUs serve"
        f" them{vcpus.remedies(exclusive)}"
    )
    return _warning("shared-without-vcpu", text)


def shared_on_overhead(containers: Sequence[str], setting: Overhead, shared: CpuSet) -> Note:
    """Say that the vCPUs of shared containers are kept off the containers' CPUs."""
    text = (
        f"{_names(containers)} run on unpaired vCPUs, which the setting overhead: {setting} keeps"
        f" off the shared CPUs {shared}; set overhead: auto, or overhead for the role vcpu"
    )
    return _warning("shared-on-overhead", text)


def surplus_overlaps_pairs(vcpus: int, cpus: CpuSet) -> Note:
    """Say that unpaired vCPUs may run on paired CPUs (D10: a note, not drift)."""
    text = (
        f"{count(vcpus, 'unpaired vCPU')} may run on the paired CPUs {cpus}; to give them a CPU of"
        " their own, set overhead: reserve:1"
    )
    return Note("surplus-overlaps-pairs", text)


def overhead_overlaps_pairs(threads: int, cpus: CpuSet) -> Note:
    """Say that threads other than vCPUs may run on paired CPUs."""
    text = (
        f"{count(threads, 'thread')} other than vCPUs may run on the paired CPUs {cpus}; to keep"
        " them off, set overhead: reserve:1, or housekeeping CPUs that the cgroup allows"
    )
    return Note("overhead-overlaps-pairs", text)


def role_conflict(tids: Sequence[int], why: str) -> Note:
    """Say which threads' roles the sources disagree about (D6)."""
    text = f"sources disagree about the role of {_tids(tids)} ({why}): whole sandbox mask"
    return _warning("role-conflict", text)


def vcpu_index_unknown(tids: Sequence[int]) -> Note:
    """Say which vCPUs have no known index."""
    text = f"the vCPU index of {_tids(tids)} is unknown; these vCPUs are paired last"
    return _warning("vcpu-index-unknown", text)


def exclusive_offline(cpus: CpuSet) -> Note:
    """Say which exclusive CPUs are off."""
    return _warning("exclusive-offline", f"exclusive CPUs {cpus} are offline")


def exclusive_overlap(cpus: CpuSet) -> Note:
    """Say which CPUs two containers of the sandbox claim exclusively."""
    text = (
        f"CPUs {cpus} are exclusive to more than one container of the sandbox; the first recorded"
        " one keeps them"
    )
    return _warning("exclusive-overlap", text)


def reserve_too_large(reserve: int, exclusive: int) -> Note:
    """Say that a reserve leaves nothing to pair."""
    text = (
        f"overhead: reserve:{reserve} takes all {count(exclusive, 'exclusive CPU')}; no vCPU can be"
        " paired, so every vCPU gets the whole sandbox mask"
    )
    return _warning("reserve-too-large", text)


def reserve_takes_container(containers: Sequence[str]) -> Note:
    """Say which containers a reserve leaves without exclusive CPUs."""
    text = f"the overhead reserve takes every exclusive CPU of {_names(containers)}"
    return _warning("reserve-takes-container", text)


def fallback(threads: int, step: str, wanted: CpuSet, obstacle: str) -> Note:
    """Say that threads cannot have the CPUs they should (D7), and which they have instead."""
    text = (
        f"{count(threads, 'thread')} cannot run on {wanted or 'no CPU'} ({obstacle}); falling back"
        f" to {_STEPS[step]}"
    )
    return _warning("fallback", text)


_STEPS: Final = {
    "shared": "the sandbox's shared CPUs",
    "reserve": "the sandbox's reserve CPUs",
    "surplus": "the CPUs of unpaired vCPUs",
    "cpuset": "the cgroup's cpuset",
    "online": "all online CPUs",
}


def held_by_others(cpus: CpuSet) -> Note:
    """Say which CPUs of the sandbox's cpuset are not used, because other pods hold them (D28)."""
    text = f"CPUs {cpus} of its cpuset belong exclusively to other pods by now: no thread uses them"
    return Note("held-by-others", text)


def runs_on_others(threads: int, cpus: CpuSet) -> Note:
    """Say that threads cannot leave the CPUs of other pods: their cgroup allows no others."""
    text = (
        f"{count(threads, 'thread')} may run on CPUs {cpus}, which belong exclusively to other"
        " pods: the cgroup allows no others until its cpuset is updated"
    )
    return _warning(RUNS_ON_OTHERS, text)


def kata_pins_vcpus(evidence: str, containers: Sequence[str] = ()) -> Note:
    """Say that the vCPUs are left to Kata's own pinning (D13), and how that is known.

    `containers` are those that run on all vCPUs then, as Kata confines none in the guest.
    """
    setting = f"enable_vcpus_pinning by {evidence}" if evidence else "enable_vcpus_pinning"
    text = f"Kata pins the vCPUs of this sandbox itself ({setting}); kata-pin does not"
    if len(containers) > 1:
        text += (
            f"; in the guest {_names(containers)} run on every vCPU, so its exclusive CPUs are"
            " exclusive against other pods, not inside this one"
        )
    return Note(KATA_PINS_VCPUS, text)


def kata_may_pin(evidence: str, vcpus: int) -> Note:
    """Say that Kata's own pinning is on but inactive: it needs equal numbers (D13)."""
    text = (
        f"enable_vcpus_pinning is on (by {evidence}), but Kata pins only while its containers have"
        f" as many CPUs as there are vCPUs ({vcpus})"
    )
    return Note("kata-may-pin", text)


def released(origin: str) -> Note:
    """Say that the original affinities are restored (D18)."""
    return Note("released", f"not pinned: {origin}; original affinities are restored")


def _warning(code: str, text: str) -> Note:
    return Note(code, text, NoteLevel.WARNING)


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"container {name}" for name in names)


def _tids(tids: Sequence[int]) -> str:
    shown = ", ".join(str(tid) for tid in tids[:8])
    return f"tid {shown}" + (f" and {len(tids) - 8} more" if len(tids) > 8 else "")


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
