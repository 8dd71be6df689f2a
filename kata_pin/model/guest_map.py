"""The map from vCPU threads to guest CPUs, and the evidence for each of its links (D12).

Three numbers are kept apart: the thread's tid, the VMM's cpu-index with the APIC id, and the number
that Linux in the guest uses. A conclusion from one to another is as sure as its weakest link.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from kata_pin.model.cpuset import CpuSet
from kata_pin.model.thread import ThreadKey


class LinkState(StrEnum):
    """How well a link is known."""

    MEASURED = "measured"  # read since this guest started
    PROVEN = "proven"  # follows from what never changes, or from a rule proved in the lab
    INFERRED = "inferred"  # follows from a rule that this guest may not follow
    UNKNOWN = "unknown"

    @property
    def rank(self) -> int:
        """A number, higher for a state that is better known."""
        return _RANK[self]


_RANK = {state: rank for rank, state in enumerate(reversed(LinkState))}


@dataclass(frozen=True, slots=True)
class Link:
    """One step of the map: how well it is known, and from which source."""

    state: LinkState
    source: str


@dataclass(frozen=True, slots=True)
class VcpuLink:
    """One vCPU, from its thread to its guest CPU.

    `thread_link` leads from the thread to the cpu-index, `apic_link` to the APIC id, `guest_link`
    to the guest CPU. `cpus` are the thread's expected pCPUs, `container_id` the container that owns
    them (empty: none), `paired` whether the thread has them now.
    """

    key: ThreadKey
    index: int | None
    apic_id: int | None
    guest_cpu: int | None
    thread_link: Link
    apic_link: Link
    guest_link: Link
    cpus: CpuSet
    paired: bool = False
    container_id: str = ""

    @property
    def weakest(self) -> Link:
        """The weakest link; a measurement of the guest CPU is of the thread itself and decides."""
        if self.guest_link.state is LinkState.MEASURED:
            return self.guest_link
        every = (self.thread_link, self.apic_link, self.guest_link)
        return min(every, key=lambda link: link.state.rank)

    @property
    def state(self) -> LinkState:
        """How well it is known which guest CPU this thread is."""
        return self.weakest.state


@dataclass(frozen=True, slots=True)
class Measured:
    """The guest CPU of a vCPU thread as measured; `source` says how."""

    guest_cpu: int
    source: str


@dataclass(frozen=True)
class GuestFacts:
    """What is known of a guest beside its threads.

    `release` is its kernel's (`6.12.47`; empty: unknown) and `source` where that is from.
    `measured` is by living thread: a thread's guest CPU does not change while it lives.
    """

    release: str = ""
    source: str = ""
    measured: Mapping[ThreadKey, Measured] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class GuestMap:
    """The links of a sandbox's vCPU threads by cpu-index, unknown ones first.

    `hotplugged` is whether there is a vCPU that did not exist when the VM started, None where its
    size then is unknown.
    """

    sandbox_id: str
    links: tuple[VcpuLink, ...] = ()
    hotplugged: bool | None = False
    facts: GuestFacts = field(default_factory=GuestFacts)

    def usable(self, *, inferred: bool = False) -> dict[ThreadKey, int]:
        """Return the guest CPUs that are known well enough to act on, inferred ones if allowed."""
        least = LinkState.INFERRED if inferred else LinkState.PROVEN
        return {
            one.key: one.guest_cpu
            for one in self.links
            if one.guest_cpu is not None and one.state.rank >= least.rank
        }

    @property
    def every(self) -> CpuSet | None:
        """All guest CPUs, None while one of them is unknown."""
        known = [one.guest_cpu for one in self.links if one.guest_cpu is not None]
        return CpuSet(known) if len(known) == len(self.links) else None


@dataclass(frozen=True, slots=True)
class GuestCpuset:
    """The guest CPUs of a container's processes, None for any, and the reason."""

    container_id: str
    cpus: CpuSet | None
    reason: str
    owned: bool = False
    """Whether the CPUs belong to this container alone."""
