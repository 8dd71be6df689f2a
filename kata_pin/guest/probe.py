"""What is known of one guest: its kernel, its CPUs' numbers, and whether a cpuset holds."""

from __future__ import annotations

import asyncio
import os
import re
import stat
import struct
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from kata_pin.base.config.tree import Guest
from kata_pin.base.cpuset import CpuSet
from kata_pin.base.errors import (
    AgentDenied,
    AgentFailed,
    AgentUnavailable,
    AgentUnsupported,
    HostError,
    ParseError,
)
from kata_pin.base.sandbox import GuestFacts, GuestMap, MeasuredGuestCpu, ProcessKey, Vmm
from kata_pin.base.threads import TaskRun, ThreadKey
from kata_pin.base.values import LinkState, Proof
from kata_pin.guest.cpus import GuestPlan
from kata_pin.guest.map import (
    NOTHING_KNOWN,
    Used,
    Votes,
    by_rank,
    match,
    measured_by_apic,
    numberings,
    runs_elsewhere,
)
from kata_pin.linux.files import HostRoot, host_errors
from kata_pin.linux.task_counters import TaskSampler
from kata_pin.peers.agent.client import AgentClient
from kata_pin.peers.agent.messages import RankTime, parse_cpu_times

# The release of a Linux kernel image.
#
# A guest's kernel is a file on the host (QEMU's -kernel), so its release is known without asking
# the guest. Two forms: bzImage, whose header points to the text (Documentation/arch/x86/boot.rst,
# kernel_version), and vmlinux, an ELF file with the banner `Linux version <release>` somewhere in
# it.

HEAD: Final = 64 * 1024
"""Bytes to read from the start of a bzImage: the setup code is 32 KiB at most."""

BANNER: Final = 128
"""Bytes by which the pieces of a vmlinux must overlap, so that `find_banner` misses nothing."""

_MAGIC: Final = 0x202
_VERSION: Final = 0x20E
_SECTOR: Final = 0x200
_RELEASE: Final = re.compile(rb"[0-9]+\.[0-9]+[0-9A-Za-z._+~-]{0,100}")
_BANNER: Final = re.compile(rb"Linux version (" + _RELEASE.pattern + rb") ")


def is_vmlinux(head: bytes) -> bool:
    """Return whether an image is an ELF file, to be searched with `find_banner`."""
    return head.startswith(b"\x7fELF")


def parse_release(head: bytes) -> str:
    """Read the release, such as `6.12.47`, from the first HEAD bytes of a bzImage; ParseError."""
    if head[_MAGIC : _MAGIC + 4] != b"HdrS" or len(head) < _VERSION + 2:
        raise ParseError("not a bzImage", source="kernel image")
    (offset,) = struct.unpack_from("<H", head, _VERSION)
    match = _RELEASE.match(head, _SECTOR + offset)
    if match is None:
        raise ParseError("a bzImage without a release", source="kernel image")
    return match[0].decode("ascii")


def find_banner(piece: bytes) -> str:
    """Return the release in a piece of a vmlinux, empty if there is none."""
    match = _BANNER.search(piece)
    return match[1].decode("ascii") if match else ""


# Which Linux a guest was started with: the release that its kernel's image names.
#
# The image is a file of the host, named by the VMM's command line (QEMU's -kernel). A VMM that lies
# about it misleads nobody but its own guest; so that it can not have us read what it likes, only
# regular files are opened, and at most LIMIT bytes read. An image, or a link to it, that was
# changed after the VMM's start says nothing: it may have been another one then.
#
# Blocking; nothing is kept.

LIMIT: Final = 128 * 1024 * 1024
"""Most that is read of a vmlinux in search of its banner: Kata's have about 50 MiB."""

PIECE: Final = 1024 * 1024

_TICKS: Final = os.sysconf("SC_CLK_TCK")
# O_NONBLOCK: opening a FIFO must not hang.
_OPEN: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def read_release(root: HostRoot, path: str, vmm: ProcessKey) -> str:
    """Return the release of the kernel that a VMM was started with.

    Raises HostError when there is no such file, ParseError when it does not say, or not any more.
    """
    if not path.startswith("/"):
        raise ParseError("not an absolute path", source="-kernel", text=path)
    # when the VMM started, on the clock of file times
    started_s = time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - vmm.starttime / _TICKS)
    with host_errors("read", f"kernel image {path}"):
        return _read(root.path(path), started_s)


def _read(path: str, started_s: float) -> str:
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ParseError("not a regular file", source="-kernel", text=path)
    descriptor = os.open(path, _OPEN)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ParseError("not a regular file", source="-kernel", text=path)
        if max(status.st_ctime, os.lstat(path).st_ctime) > started_s:
            raise ParseError("changed since the VMM's start", source="-kernel", text=path)
        head = os.read(descriptor, HEAD)
        return _banner(descriptor, head) if is_vmlinux(head) else parse_release(head)
    finally:
        os.close(descriptor)


def _banner(descriptor: int, head: bytes) -> str:
    piece, total = head, len(head)
    while True:
        release = find_banner(piece)
        more = b"" if release or total > LIMIT else os.read(descriptor, PIECE)
        if not more:
            break
        piece, total = piece[-BANNER:] + more, total + len(more)
    if not release:
        raise ParseError("a vmlinux that does not say its release", source="kernel image")
    return release


LEAST_GROWTH_MS: Final = 1.0
"""A rank whose time grows by less is of a CPU that is not online any more."""

T = TypeVar("T")

_REFUSALS: Final = (AgentDenied, AgentFailed, AgentUnsupported)
"""What one kind of request may end in while others go on."""


class _Busy(Struct, frozen=True):
    """Run times of threads and busy times in the guest, taken at one moment."""

    ran: Mapping[ThreadKey, float]
    ranks: Sequence[RankTime]


class _Usage(Struct, frozen=True):
    """What a container had used, and how long the threads of its guest CPUs were ready to run."""

    cpus: CpuSet
    total: float
    per_cpu: Sequence[float]
    ready: Mapping[ThreadKey, float]


@dataclass
class GuestProbe:
    """What is known of one guest: its kernel, its CPUs' numbers, and whether a cpuset holds.

    Least intrusive first (ADR 8): the kernel from the host; CPU times by the agent, compared
    with the run times of vCPU threads; programs in a container only if `guest.exec` is set.
    Answers are kept by thread identity, so they end with their thread.

    `facts` is what is known so far.
    """

    root: HostRoot
    settings: Callable[[], Guest]
    facts: GuestFacts = NOTHING_KNOWN
    kernel_known: bool = False
    _vmm: Vmm | None = None
    _votes: Votes = field(default_factory=Votes)
    _read: dict[ThreadKey, MeasuredGuestCpu] = field(default_factory=dict)
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

    def _runs(self, keys: Iterable[ThreadKey]) -> dict[ThreadKey, TaskRun]:
        """Return how long threads have run and waited; those that are gone are left out.

        What a vCPU thread ran is what its guest CPU can have been busy; a guest without stolen-time
        accounting counts what it waited as its own too.
        """
        return {key: one.run for key, one in TaskSampler(self.root, 0).sample(keys, ()).items()}

    def _compare(self, found: GuestMap, vmm: Vmm, ranks: Sequence[RankTime]) -> None:
        runs = self._runs(one.key for one in found.links)
        now = _Busy({key: one.ran_ns / 1e9 for key, one in runs.items()}, ranks)
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
        runs = self._runs(own) if whole else {}
        now = _Usage(
            cpus,
            used.total_ns / 1e9,
            [ns / 1e9 for ns in used.per_cpu_ns],
            {key: (one.ran_ns + one.waited_ns) / 1e9 for key, one in runs.items()},
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
