"""Roles of a VMM's threads, from the first source that answers (DESIGN D6).

KVM debugfs, QMP answers that somebody got in time, KVM's file descriptors, thread names, creation
order. debugfs and descriptors give KVM's vCPU id, which is the APIC id on x86 and is converted to
the cpu-index before anything is compared. Sources that contradict each other, and threads that may
be a vCPU while vCPUs are missing, carry a conflict: such a thread belongs on the whole mask.

No thread outside `tasks` ever gets a role, whatever a source says: the caller listed them from
/proc. Out of scope: helpers outside the VMM (overhead.py), asking QMP (qmp.py).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from kata_pin.errors import HostError
from kata_pin.model.sandbox import Vmm
from kata_pin.model.thread import Role, RoleSource, Task, ThreadKey, ThreadRole
from kata_pin.vmm import debugfs, kvm_fd, order
from kata_pin.vmm.host_access import HostAccess
from kata_pin.vmm.kinds import kind_named
from kata_pin.vmm.role_cache import RoleCache
from kata_pin.wire.proc import kernel_worker
from kata_pin.wire.qemu import apic
from kata_pin.wire.qemu.qmp import QmpAnswers

__all__ = ["RoleCache", "identify"]

MAX_THREADS: Final = 4096
"""A VMM with more is not looked into: all of it goes to the whole mask."""

_X86: Final = frozenset({"x86_64", "i686"})
_MONITORS: Final = frozenset({"-qmp", "--qmp", "-qmp-pretty", "--qmp-pretty"})


@dataclass(frozen=True)
class _Claim:
    """What one source says of one thread."""

    source: RoleSource
    role: ThreadRole
    vcpu: int | None = None
    apic_id: int | None = None
    iothread: str = ""

    @property
    def text(self) -> str:
        what = self.role.value
        if self.role is ThreadRole.VCPU:
            what += f" {self.vcpu}" if self.vcpu is not None else f" with KVM id {self.apic_id}"
        return f"{self.source.value} says {what}"

    def contradicts(self, other: _Claim) -> bool:
        if self.role is not other.role:
            return True
        unknown = self.vcpu is None or other.vcpu is None
        return self.role is ThreadRole.VCPU and not unknown and self.vcpu != other.vcpu


@dataclass
class _Look:
    """One look at all sources; claims by thread, best source first."""

    host: HostAccess
    vmm: Vmm
    tasks: Sequence[Task]
    machine: str
    remembered: Mapping[ThreadKey, int]
    claims: dict[ThreadKey, list[_Claim]] = field(default_factory=dict)

    def add(self, key: ThreadKey, claim: _Claim) -> None:
        self.claims.setdefault(key, []).append(claim)

    def vcpu_by_kvm(self, key: ThreadKey, source: RoleSource, kvm_id: int) -> None:
        """Claim a vCPU that KVM numbered: convert the APIC id on x86."""
        x86 = self.machine in _X86
        convert = x86 and self.vmm.apic_ids
        index = apic.cpu_index(self.vmm.guest, kvm_id) if convert else kvm_id
        claim = _Claim(source, ThreadRole.VCPU, vcpu=index, apic_id=kvm_id if x86 else None)
        self.add(key, claim)

    @property
    def known(self) -> dict[ThreadKey, int]:
        """The vCPU threads named so far, now or in an earlier look, with their cpu-index."""
        now = {
            key: claims[0].vcpu for key, claims in self.claims.items() if claims[0].vcpu is not None
        }
        alive = {task.key for task in self.tasks}
        return {key: index for key, index in self.remembered.items() if key in alive} | now

    @property
    def sees_vcpus(self) -> bool:
        """Whether a source names vCPUs here that names new ones too: KVM or thread names."""
        lasting = {RoleSource.DEBUGFS, RoleSource.KVM_FD, RoleSource.NAME}
        named = (c for claims in self.claims.values() for c in claims)
        return any(c.role is ThreadRole.VCPU and c.source in lasting for c in named)

    @property
    def missing(self) -> set[int]:
        """The boot vCPUs without a thread; they always have one."""
        return set(range(self.vmm.guest.boot)) - set(self.known.values())


def identify(
    host: HostAccess,
    vmm: Vmm,
    tasks: Sequence[Task],
    cache: RoleCache,
    qmp: QmpAnswers | None = None,
    *,
    machine: str = "",
) -> dict[ThreadKey, Role]:
    """Return the role of each of the VMM's own threads.

    `tasks` are the threads of the VMM process as just listed, `qmp` what QEMU answered if it was
    asked: pass it soon, it is tied to the threads alive now. `machine` is uname's, this host's by
    default. Reads the sources only when the cache cannot answer; never raises for threads that
    vanish.
    """
    cache.bind(qmp, tasks)
    if cache.needs_look(tasks, vmm.guest.boot):
        look = _Look(host, vmm, tasks, machine or os.uname().machine, cache.vcpus)
        cache.learn(_look(look, cache))
    roles = {}
    for task in tasks:
        role = cache.get(task.key)
        if role is not None:
            roles[task.key] = role
    return roles


def _look(look: _Look, cache: RoleCache) -> dict[ThreadKey, Role]:
    if len(look.tasks) > MAX_THREADS:
        crowd = Role(
            ThreadRole.EMULATOR, RoleSource.REST, conflict=f"more than {MAX_THREADS} threads"
        )
        return {task.key: crowd for task in look.tasks}
    _ask_kernel(look, cache)
    _ask_names(look)
    _ask_order(look)
    _ask_flags(look, cache)
    roles = {task.key: _decide(look, task) for task in look.tasks}
    return _flag_doubles(roles)


def _ask_kernel(look: _Look, cache: RoleCache) -> None:
    """Ask debugfs, QMP's answers, and descriptors where they are still needed."""
    keys = {task.key.tid: task.key for task in look.tasks if not task.user_worker}
    pid = look.vmm.process.pid
    from_debugfs = (
        debugfs.read_vcpus(look.host.root, keys, pid) if look.vmm.kvm else debugfs.NOTHING
    )
    for key, kvm_id in from_debugfs.ids.items():
        if key not in from_debugfs.doubtful:
            look.vcpu_by_kvm(key, RoleSource.DEBUGFS, kvm_id)
    alive = set(keys.values())
    for key, index in cache.qmp_vcpus.items():
        if key in alive:
            look.add(key, _Claim(RoleSource.QMP, ThreadRole.VCPU, vcpu=index))
    for key, name in cache.qmp_iothreads.items():
        if key in alive:
            look.add(key, _Claim(RoleSource.QMP, ThreadRole.IOTHREAD, iothread=name))
    if look.vmm.kvm:
        _ask_descriptors(look, from_debugfs)


def _ask_descriptors(look: _Look, from_debugfs: debugfs.VcpuThreads) -> None:
    """Ask what the unnamed threads wait in, and settle what debugfs left in doubt."""
    unnamed = [task for task in look.tasks if task.key not in look.claims]
    waiting = kvm_fd.read_waiting(look.host.root, unnamed, look.machine)
    for key, kvm_id in waiting.ids.items():
        source = RoleSource.KVM_FD
        if from_debugfs.ids.get(key) == kvm_id:
            source = RoleSource.DEBUGFS  # confirmed
        look.vcpu_by_kvm(key, source, kvm_id)
    main = look.vmm.process.pid
    running = [key for key in waiting.running if key.tid != main]
    if len(running) == 1 and len(look.missing) == 1:
        _eliminate(look, running[0])


def _eliminate(look: _Look, key: ThreadKey) -> None:
    """Name the one running thread as the one missing boot vCPU, if its descriptor is there.

    A busy iothread would look the same, so creation order must not say otherwise.
    """
    guess = _guesses(look).get(key)
    (index,) = look.missing
    kvm_id = apic.apic_id(look.vmm.guest, index) if look.machine in _X86 else index
    agrees = guess is not None and guess.vcpu == index
    if agrees and kvm_id in kvm_fd.open_vcpus(look.host.root, look.vmm.process.pid):
        look.vcpu_by_kvm(key, RoleSource.KVM_FD, kvm_id)


def _ask_names(look: _Look) -> None:
    kind = kind_named(look.vmm.kind)
    for task in look.tasks:
        named = None if task.user_worker else kind.role_of(task.comm, look.vmm.iothreads)
        if named is not None:
            look.add(
                task.key,
                _Claim(RoleSource.NAME, named.role, vcpu=named.vcpu, iothread=named.iothread),
            )


def _ask_order(look: _Look) -> None:
    """Fill in what no better source named; a guess contradicts nobody."""
    for key, guess in _guesses(look).items():
        if key in look.claims:
            continue
        if guess.vcpu is not None:
            look.add(key, _Claim(RoleSource.ORDER, ThreadRole.VCPU, vcpu=guess.vcpu))
        elif guess.iothread:
            claim = _Claim(RoleSource.ORDER, ThreadRole.IOTHREAD, iothread=guess.iothread)
            look.add(key, claim)
        else:
            look.add(key, _Claim(RoleSource.ORDER, ThreadRole.EMULATOR))


def _guesses(look: _Look) -> Mapping[ThreadKey, order.Guess]:
    if not kind_named(look.vmm.kind).in_order:
        return {}
    try:
        argv = look.host.cmdline(look.vmm.process.pid)
    except HostError:
        return {}
    monitor = not _MONITORS.isdisjoint(argv)
    return order.guess(look.vmm, look.tasks, look.known, monitor=monitor)


def _ask_flags(look: _Look, cache: RoleCache) -> None:
    """Name the kernel's workers inside the VMM (Linux 6.4 and later).

    A vhost worker is named after the thread that created it, which may have ended since: what was
    said of a worker once stays.
    """
    tids = {task.key.tid for task in look.tasks}
    for task in look.tasks:
        if not task.user_worker:
            continue
        before = cache.get(task.key)
        worker = kernel_worker(task.comm)
        if before is not None:
            role = before.role
        elif worker is not None and worker.role is ThreadRole.VHOST and worker.owner in tids:
            role = ThreadRole.VHOST
        elif task.comm.startswith("kvm-"):
            role = ThreadRole.KVM
        else:
            role = ThreadRole.EMULATOR  # io_uring and whatever comes
        look.claims[task.key] = [_Claim(RoleSource.FLAGS, role)]


def _decide(look: _Look, task: Task) -> Role:
    claims = look.claims.get(task.key)
    if not claims:
        return _unnamed(look, task)
    first = claims[0]
    against = [claim for claim in claims[1:] if claim.contradicts(first)]
    conflict = ", ".join(claim.text for claim in (first, *against)) if against else ""
    vcpu = next((claim.vcpu for claim in claims if claim.vcpu is not None), None)
    return Role(
        role=first.role,
        source=first.source,
        vcpu=vcpu if first.role is ThreadRole.VCPU else None,
        apic_id=next((claim.apic_id for claim in claims if claim.apic_id is not None), None),
        iothread=next((claim.iothread for claim in claims if claim.iothread), ""),
        conflict=conflict,
    )


def _unnamed(look: _Look, task: Task) -> Role:
    """Return an emulator thread, with a conflict while it may be a vCPU that nobody named."""
    return Role(ThreadRole.EMULATOR, RoleSource.REST, conflict=_doubt(look, task))


def _doubt(look: _Look, task: Task) -> str:
    """Return why an unnamed thread may be a vCPU, empty when it cannot be; the main one never is.

    Where neither KVM nor names tell, a thread made after the boot vCPUs may be a hotplugged one.
    """
    guest = look.vmm.guest
    if task.key.tid == task.key.tgid:
        return ""
    if look.missing:
        return f"may be a vCPU: {len(look.missing)} boot vCPUs have no known thread"
    if look.sees_vcpus or guest.boot == guest.maximum > 0:
        return ""
    boot = [_age(key) for key, index in look.known.items() if index < guest.boot]
    if boot and _age(task.key) < max(boot):
        return ""
    return "may be a vCPU: neither KVM nor names tell"


def _age(key: ThreadKey) -> tuple[int, int]:
    """Sort key of creation."""
    return (key.starttime, key.tid)


def _flag_doubles(roles: dict[ThreadKey, Role]) -> dict[ThreadKey, Role]:
    """Add a conflict to threads that claim to be the same vCPU."""
    count = Counter(role.vcpu for role in roles.values())
    return {
        key: replace(role, conflict=role.conflict or f"{count[role.vcpu]} threads are this vCPU")
        if role.vcpu is not None and count[role.vcpu] > 1
        else role
        for key, role in roles.items()
    }
