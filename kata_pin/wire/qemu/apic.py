"""A vCPU's cpu-index, its place in the guest topology, and its APIC id.

KVM calls an x86 vCPU by its APIC id (debugfs `vcpuN`, descriptor `kvm-vcpu:N`), QMP by cpu-index:
they are compared only after conversion here (D6). Index to place is division by -smp's
numbers. An APIC id gives each level its own bits, as many as the highest number on that level needs
(Intel SDM volume 3, "Hierarchical mapping of shared resources"; QEMU include/hw/i386/topology.h,
x86_apicid_from_cpu_idx), so ids have gaps when a level's count is not a power of two. Kata's Go
runtime uses sockets only and runtime-rs one socket of single-thread cores: there all three numbers
are equal. Out of scope: EPYC topologies of QEMU 5.0 and 5.1, and other architectures, where KVM's
vCPU id is the cpu-index itself.
"""

from __future__ import annotations

from typing import NamedTuple

from kata_pin.model.sandbox import GuestTopology


class Place(NamedTuple):
    """Where a vCPU sits in its guest."""

    socket: int
    die: int
    core: int
    thread: int


def place_of(guest: GuestTopology, index: int) -> Place:
    """Return the place of a cpu-index (x86_topo_ids_from_idx)."""
    rest, thread = divmod(index, max(1, guest.threads))
    rest, core = divmod(rest, max(1, guest.cores))
    socket, die = divmod(rest, max(1, guest.dies))
    return Place(socket, die, core, thread)


def index_of(guest: GuestTopology, socket: int, die: int, core: int, thread: int) -> int:
    """Return the cpu-index at a place, the inverse of place_of."""
    return ((socket * guest.dies + die) * guest.cores + core) * guest.threads + thread


def apic_id(guest: GuestTopology, index: int) -> int:
    """Return the APIC id of a cpu-index."""
    place = place_of(guest, index)
    thread_bits, core_bits, die_bits = _widths(guest)
    number = place.socket << die_bits | place.die
    number = number << core_bits | place.core
    return number << thread_bits | place.thread


def cpu_index(guest: GuestTopology, apic: int) -> int | None:
    """Return the cpu-index of an APIC id, None when no vCPU of this guest can have it."""
    thread_bits, core_bits, die_bits = _widths(guest)
    rest, thread = _split(apic, thread_bits)
    rest, core = _split(rest, core_bits)
    socket, die = _split(rest, die_bits)
    inside = (
        apic >= 0
        and thread < guest.threads
        and core < guest.cores
        and die < guest.dies
        and socket < guest.sockets
    )
    return index_of(guest, socket, die, core, thread) if inside else None


def _widths(guest: GuestTopology) -> tuple[int, int, int]:
    """Return the bits for thread, core and die (apicid_bitwidth_for_count)."""
    return _bits_for(guest.threads), _bits_for(guest.cores), _bits_for(guest.dies)


def _bits_for(count: int) -> int:
    return max(0, count - 1).bit_length()


def _split(value: int, bits: int) -> tuple[int, int]:
    return value >> bits, value & ((1 << bits) - 1)
