"""What is known of one guest: its kernel, its CPUs' numbers, and whether a cpuset holds.

Least intrusive first (ADR 8): the kernel from the host; CPU times by the agent, compared with the
run times of vCPU threads; programs in a container only if `guest.exec` is set. Answers are kept by
thread identity, so they end with their thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

from kata_pin.config.guest import Guest
from kata_pin.daemon.guests.status import GuestPlan, Proof
from kata_pin.errors import (
    AgentDenied,
    AgentFailed,
    AgentUnavailable,
    AgentUnsupported,
    HostError,
    ParseError,
)
from kata_pin.guest.agent import AgentClient
from kata_pin.host.kernel_image import read_release
from kata_pin.host.root import HostRoot
from kata_pin.host.tasks import run_times
from kata_pin.model.cpuset import CpuSet
from kata_pin.model.guest_map import GuestFacts, GuestMap, LinkState, Measured
from kata_pin.model.sandbox import Vmm
from kata_pin.model.thread import ThreadKey
from kata_pin.policy.guest.busy import Votes, by_rank, match
from kata_pin.policy.guest.map import NOTHING_KNOWN, measured_by_apic, numberings
from kata_pin.policy.guest.proof import Used, runs_elsewhere
from kata_pin.wire.guest.metrics import RankTime, parse_cpu_times

LEAST_GROWTH_MS: Final = 1.0
"""A rank whose time grows by less is of a CPU that is not online any more."""

T = TypeVar("T")

_REFUSALS: Final = (AgentDenied, AgentFailed, AgentUnsupported)
"""What one kind of request may end in while others go on."""


@dataclass(frozen=True)
class _Busy:
    """Run times of threads and busy times in the guest, taken at one moment."""

    ran: Mapping[ThreadKey, float]
    ranks: Sequence[RankTime]


@dataclass(frozen=True)
class _Usage:
    """What a container had used, and how long the threads of its guest CPUs were ready to run."""

    cpus: CpuSet
    total: float
    per_cpu: Sequence[float]
    ready: Mapping[ThreadKey, float]


@dataclass
class GuestProbe:
    """See the module. `facts` is what is known so far."""

    root: HostRoot
    settings: Callable[[], Guest]
    facts: GuestFacts = NOTHING_KNOWN
    kernel_known: bool = False
    _vmm: Vmm | None = None
    _votes: Votes = field(default_factory=Votes)
    _read: dict[ThreadKey, Measured] = field(default_factory=dict)
    _busy: _Busy | None = None
    _usage: dict[str, _Usage] = field(default_factory=dict)

    def set_vmm(self, vmm: Vmm) -> None:
        """Take the VMM whose guest is meant; another process than before is another guest."""
        if self._vmm is None or self._vmm.process != vmm.process:
            self.facts, self.kernel_known = NOTHING_KNOWN, False
            self._votes, self._read, self._busy, self._usage = Votes(), {}, None, {}
        self._vmm = vmm

    async def read_kernel(self) -> None:
        """Read the guest kernel's release from the host, once."""
        if self._vmm is not None and not self.kernel_known:
            found = await asyncio.to_thread(kernel_facts, self.root, self._vmm)
            self.facts = replace(found, measured=self.facts.measured)
            self.kernel_known = True

    def keep_only(self, alive: Iterable[ThreadKey], containers: Iterable[str]) -> None:
        """Drop threads and containers that are gone."""
        living, there = set(alive), set(containers)
        self._read = {key: one for key, one in self._read.items() if key in living}
        self._votes.keep_only(living)
        self._usage = {name: one for name, one in self._usage.items() if name in there}
        self._known()

    def _known(self) -> None:
        measured = {**self._votes.measured, **self._read}
        if measured != self.facts.measured:
            self.facts = replace(self.facts, measured=measured)

    def wanted(self, plan: GuestPlan) -> bool:
        """Whether a vCPU that matters has a link that may not be acted on."""
        owned = any(one.container_id for one in plan.map.links)
        return owned and any(one.state.rank < LinkState.PROVEN.rank for one in plan.map.links)

    async def measure(self, agent: AgentClient, plan: GuestPlan, container: str) -> None:
        """Measure which guest CPU each vCPU thread is; what the guest refuses is left out."""
        try:
            if self.settings().exec and container:
                table = await _by_program(agent, agent.read_apic_ids(container))
                self._read |= measured_by_apic(plan.map, table or {})
            elif self._vmm is not None:
                self._compare(plan.map, self._vmm, parse_cpu_times(await agent.metrics()))
        except (*_REFUSALS, ParseError):
            return
        self._known()

    def _compare(self, found: GuestMap, vmm: Vmm, ranks: Sequence[RankTime]) -> None:
        times = run_times(self.root, (one.key for one in found.links))
        now = _Busy({key: one.ran_s for key, one in times.items()}, ranks)
        before, self._busy = self._busy, now
        if before is None or before.ran.keys() != now.ran.keys():
            return
        busy = _growth(before.ranks, now.ranks)
        if len(busy) != len(found.links):  # some guest CPU is offline: ranks prove nothing
            return
        ran = {key: seconds - before.ran[key] for key, seconds in now.ran.items()}
        self._votes.add(by_rank(match(ran, busy), numberings(found, vmm.guest)))

    async def proof(
        self, agent: AgentClient, container: str, cpus: CpuSet, plan: GuestPlan
    ) -> tuple[Proof, str] | None:
        """Return what is known of a cpuset now and why, None if nothing new is known."""
        if self.settings().exec:
            now = await _by_program(agent, agent.read_cpus(container))
            if now is not None and now <= cpus:  # a guest CPU that is offline is not shown
                return Proof.READ, ""
            if now is not None:
                return Proof.BROKEN, f"may run on guest CPUs {now}"
        try:
            return await self._fits(agent, container, cpus, plan.map)
        except _REFUSALS:
            return None

    async def _fits(
        self, agent: AgentClient, container: str, cpus: CpuSet, found: GuestMap
    ) -> tuple[Proof, str] | None:
        used = await agent.usage(container)
        own = [one.key for one in found.links if one.guest_cpu in cpus]
        whole = len(own) == len(cpus)
        times = run_times(self.root, own) if whole else {}
        now = _Usage(
            cpus,
            used.total_ns / 1e9,
            [ns / 1e9 for ns in used.per_cpu_ns],
            {key: sum(one) for key, one in times.items()},
        )
        before = self._usage.get(container)
        self._usage[container] = now
        if before is None or before.cpus != cpus:
            return None
        elsewhere = runs_elsewhere(_since(before, now), cpus)
        if elsewhere is None:
            return None
        if elsewhere:
            return Proof.BROKEN, "it used CPU time outside its guest CPUs"
        return Proof.FITS, ""


def kernel_facts(root: HostRoot, vmm: Vmm) -> GuestFacts:
    """Return the guest kernel's release and the file it is from, or why it is not known.

    Only what the VMM's command line gives away. Reading a vmlinux takes tens of milliseconds, so
    the daemon does it in a thread.
    """
    if not vmm.kernel:
        return GuestFacts(source="the VMM's command line names none")
    try:
        return GuestFacts(read_release(root, vmm.kernel, vmm.process), vmm.kernel)
    except (HostError, ParseError) as error:
        return GuestFacts(source=str(error))


async def _by_program(agent: AgentClient, answer: Awaitable[T]) -> T | None:
    """Return the output of a program in a container, None if it cannot be run or does not end.

    A container may be frozen, or have no such program; the agent may be well all the same.
    """
    try:
        return await answer
    except _REFUSALS:
        return None
    except AgentUnavailable:
        await agent.connect()
        return None


def _since(before: _Usage, now: _Usage) -> Used:
    ready: float | None = None
    if now.ready and now.ready.keys() == before.ready.keys():
        ready = sum(now.ready.values()) - sum(before.ready.values())
    per_cpu: Sequence[float] = ()
    if len(now.per_cpu) == len(before.per_cpu):
        per_cpu = [b - a for a, b in zip(before.per_cpu, now.per_cpu, strict=True)]
    return Used(now.total - before.total, per_cpu, ready)


def _growth(before: Sequence[RankTime], now: Sequence[RankTime]) -> dict[int, float]:
    """Return how long the CPU of each rank was busy, in seconds; offline ones are left out."""
    return {
        new.rank: (new.busy_ms - old.busy_ms) / 1000
        for old, new in zip(before, now, strict=False)
        if new.total_ms - old.total_ms > LEAST_GROWTH_MS
    }
