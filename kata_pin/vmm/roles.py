"""Roles of a VMM's threads, from the first source that answers (D6).

KVM debugfs, QMP answers that came in time, KVM's file descriptors, thread names, creation
order. debugfs and descriptors give KVM's vCPU id, which is converted to the cpu-index before
anything is compared. Where sources contradict each other, or a thread may be one of the vCPUs that
are missing, the role carries a conflict: such a thread belongs on the whole mask.

No thread outside `tasks` ever gets a role, whatever a source reports: the caller listed them from
/proc. Out of scope: helpers outside the VMM (overhead.py), asking QMP (qmp.py).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from kata_pin.model.sandbox import Vmm
from kata_pin.model.steps import Steps, at_once
from kata_pin.model.thread import Role, RoleSource, Task, ThreadKey, ThreadRole
from kata_pin.vmm import debugfs, kvm_fd, order
from kata_pin.vmm.host_access import HostAccess
from kata_pin.vmm.kinds import KvmIds, NamedRole, VmmKind, kind_named
from kata_pin.vmm.role_cache import RoleCache, born
from kata_pin.wire.proc import kernel_worker
from kata_pin.wire.qemu import apic
from kata_pin.wire.qemu.qmp import QmpAnswers

MAX_THREADS: Final = 4096
"""A VMM with more is not examined: all of its threads go to the whole mask."""

_X86: Final = frozenset({"x86_64", "i686"})
_LASTING: Final = frozenset({RoleSource.DEBUGFS, RoleSource.KVM_FD, RoleSource.NAME})
"""Sources that name a vCPU that is hotplugged later, too."""


@dataclass(frozen=True, slots=True)
class _Claim:
    """What one source reports about one thread."""

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
        return f"{self.source.value} reports {what}"

    def contradicts(self, other: _Claim) -> bool:
        if self.role is not other.role:
            return True
        unknown = self.vcpu is None or other.vcpu is None
        return self.role is ThreadRole.VCPU and not unknown and self.vcpu != other.vcpu


@dataclass
class _Evidence:
    """What all sources report: claims by thread, best source first.

    `known` are the vCPU threads, from now or an earlier examination, with their cpu-index.
    """

    host: HostAccess
    vmm: Vmm
    kind: VmmKind
    tasks: Sequence[Task]
    machine: str
    known: dict[ThreadKey, int]
    claims: dict[ThreadKey, list[_Claim]] = field(default_factory=dict)

    def add(self, key: ThreadKey, claim: _Claim) -> None:
        claims = self.claims.setdefault(key, [])
        claims.append(claim)
        if len(claims) == 1 and claim.vcpu is not None:
            self.known[key] = claim.vcpu

    def add_named(self, key: ThreadKey, source: RoleSource, named: NamedRole) -> None:
        self.add(key, _Claim(source, named.role, named.vcpu, iothread=named.iothread))

    def add_vcpu(self, key: ThreadKey, source: RoleSource, kvm_id: int) -> None:
        """Add a vCPU by KVM's number for it: the APIC id on x86."""
        x86 = self.machine in _X86
        index: int | None = kvm_id
        if x86 and self.kind.kvm_ids is not KvmIds.INDEX:
            by_smp = self.kind.kvm_ids is KvmIds.SMP
            index = apic.cpu_index(self.vmm.guest, kvm_id) if by_smp else None
        claim = _Claim(source, ThreadRole.VCPU, vcpu=index, apic_id=kvm_id if x86 else None)
        self.add(key, claim)

    @property
    def missing(self) -> set[int]:
        """The boot vCPUs whose thread is not known; each always has one."""
        return set(range(self.vmm.guest.boot)).difference(self.known.values())


def identify_in_steps(
    host: HostAccess,
    vmm: Vmm,
    tasks: Sequence[Task],
    cache: RoleCache,
    qmp: QmpAnswers | None = None,
    *,
    asked: Collection[ThreadKey] = (),
    machine: str = "",
) -> Steps[Mapping[ThreadKey, Role]]:
    """Return the role of each of the VMM's own threads.

    `tasks` are the threads of the VMM process as just listed, `qmp` what QEMU answered if it was
    asked: pass it soon, it is tied to the threads alive now. `asked` are the threads that were
    known before that. `machine` is uname's, this host's by
    default. Reads the sources only when the cache cannot answer; never raises for threads that
    vanish.
    """
    cache.bind(qmp, tasks, asked)
    roles = cache.recall(tasks)
    if roles is None:
        machine = machine or os.uname().machine
        evidence = _Evidence(host, vmm, kind_named(vmm.kind), tasks, machine, cache.vcpus(tasks))
        found = yield from _examine(evidence, cache)
        yield
        roles = cache.learn(found, tasks, vmm.guest.boot)
    return roles


identify = at_once(identify_in_steps)


def _examine(evidence: _Evidence, cache: RoleCache) -> Steps[dict[ThreadKey, Role]]:
    if len(evidence.tasks) > MAX_THREADS:
        crowd = Role(
            ThreadRole.EMULATOR, RoleSource.REST, conflict=f"more than {MAX_THREADS} threads"
        )
        return {task.key: crowd for task in evidence.tasks}
    yield from _ask_kernel(evidence, cache)
    _ask_names(evidence)
    yield
    _ask_order(evidence)
    _ask_flags(evidence, cache)
    yield
    return _flag_doubles(_decide(evidence))


def _ask_kernel(evidence: _Evidence, cache: RoleCache) -> Steps[None]:
    """Ask debugfs, QMP's answers, and descriptors where they are still needed."""
    keys = {task.key.tid: task.key for task in evidence.tasks if not task.user_worker}
    from_debugfs = debugfs.NOTHING
    if evidence.vmm.kvm:
        pid = evidence.vmm.process.pid
        from_debugfs = debugfs.read_vcpus(evidence.host.root, keys, pid)
    for key, kvm_id in from_debugfs.ids.items():
        if key not in from_debugfs.doubtful:
            evidence.add_vcpu(key, RoleSource.DEBUGFS, kvm_id)
    alive = set(keys.values())
    for key, index in cache.qmp_vcpus.items():
        if key in alive:
            evidence.add(key, _Claim(RoleSource.QMP, ThreadRole.VCPU, vcpu=index))
    for key, name in cache.qmp_iothreads.items():
        if key in alive:
            evidence.add(key, _Claim(RoleSource.QMP, ThreadRole.IOTHREAD, iothread=name))
    for key in cache.qmp_others & alive:
        evidence.add(key, _Claim(RoleSource.QMP, ThreadRole.EMULATOR))
    if evidence.vmm.kvm:
        yield from _ask_descriptors(evidence, from_debugfs)


def _ask_descriptors(evidence: _Evidence, from_debugfs: debugfs.VcpuThreads) -> Steps[None]:
    """Ask what the unnamed threads wait in, and settle what debugfs left in doubt."""
    unnamed = [task for task in evidence.tasks if task.key not in evidence.claims]
    waiting = yield from kvm_fd.read_waiting_in_steps(evidence.host.root, unnamed, evidence.machine)
    for key, kvm_id in waiting.ids.items():
        source = RoleSource.KVM_FD
        if from_debugfs.ids.get(key) == kvm_id:
            source = RoleSource.DEBUGFS  # confirmed
        evidence.add_vcpu(key, source, kvm_id)
    main = evidence.vmm.process.pid
    running = [key for key in waiting.running if key.tid != main]
    missing = evidence.missing
    if len(running) == 1 and len(missing) == 1:
        _eliminate(evidence, running[0], missing.pop())


def _eliminate(evidence: _Evidence, key: ThreadKey, index: int) -> None:
    """Name the one running thread as the one missing boot vCPU, if its descriptor is there.

    A busy iothread would look the same, so creation order must not contradict it.
    """
    guess = _guesses(evidence).get(key)
    by_smp = evidence.machine in _X86 and evidence.kind.kvm_ids is KvmIds.SMP
    kvm_id = apic.apic_id(evidence.vmm.guest, index) if by_smp else index
    agrees = guess is not None and guess.vcpu == index
    if agrees and kvm_id in kvm_fd.open_vcpus(evidence.host.root, evidence.vmm.process.pid):
        evidence.add_vcpu(key, RoleSource.KVM_FD, kvm_id)


def _ask_names(evidence: _Evidence) -> None:
    for task in evidence.tasks:
        if not task.user_worker:
            named = evidence.kind.role_of(task.comm, evidence.vmm.iothreads)
            if named is not None:
                evidence.add_named(task.key, RoleSource.NAME, named)


def _ask_order(evidence: _Evidence) -> None:
    """Fill in what no better source named; a guess contradicts nothing."""
    for key, guess in _guesses(evidence).items():
        if key not in evidence.claims:
            evidence.add_named(key, RoleSource.ORDER, guess)


def _guesses(evidence: _Evidence) -> Mapping[ThreadKey, NamedRole]:
    if not evidence.kind.in_order:
        return {}
    vmm = evidence.vmm
    return order.guess(vmm, evidence.tasks, evidence.known, monitor=vmm.monitor)


def _ask_flags(evidence: _Evidence, cache: RoleCache) -> None:
    """Name the kernel's workers inside the VMM (Linux 6.4 and later).

    A vhost worker is named after the thread that created it, which may have ended since, so a
    worker keeps its first role.
    """
    tids = {task.key.tid for task in evidence.tasks}
    for task in evidence.tasks:
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
        evidence.add(task.key, _Claim(RoleSource.FLAGS, role))


def _decide(evidence: _Evidence) -> dict[ThreadKey, Role]:
    doubt, since = _doubt(evidence)
    roles = {}
    for task in evidence.tasks:
        key = task.key
        claims = evidence.claims.get(key)
        if claims:
            roles[key] = _role(claims)
        else:  # an emulator thread, in conflict while it may be a vCPU that no source named
            conflict = doubt if key.tid != key.tgid and born(key) >= since else ""
            roles[key] = Role(ThreadRole.EMULATOR, RoleSource.REST, conflict=conflict)
    return roles


def _role(claims: Sequence[_Claim]) -> Role:
    first = claims[0]
    against = [claim for claim in claims[1:] if claim.contradicts(first)]
    vcpu = next((claim.vcpu for claim in claims if claim.vcpu is not None), None)
    return Role(
        role=first.role,
        source=first.source,
        vcpu=vcpu if first.role is ThreadRole.VCPU else None,
        apic_id=next((claim.apic_id for claim in claims if claim.apic_id is not None), None),
        iothread=next((claim.iothread for claim in claims if claim.iothread), ""),
        conflict=", ".join(claim.text for claim in (first, *against)) if against else "",
    )


def _doubt(evidence: _Evidence) -> tuple[str, tuple[int, int]]:
    """Return why unnamed threads may be vCPUs (empty: they cannot), and from which age on.

    Where neither KVM nor names identify vCPUs, one made after the boot vCPUs may be hotplugged.
    """
    guest, missing = evidence.vmm.guest, len(evidence.missing)
    if missing:
        vcpus = "boot vCPU has" if missing == 1 else "boot vCPUs have"
        return f"may be a vCPU: {missing} {vcpus} no known thread", (0, 0)
    named = (claim for claims in evidence.claims.values() for claim in claims)
    sees_vcpus = any(c.role is ThreadRole.VCPU and c.source in _LASTING for c in named)
    if sees_vcpus or guest.boot == guest.maximum > 0:
        return "", (0, 0)
    boot = [born(key) for key, index in evidence.known.items() if index < guest.boot]
    return "may be a vCPU: neither KVM nor thread names identify it", max(boot, default=(0, 0))


def _flag_doubles(roles: dict[ThreadKey, Role]) -> dict[ThreadKey, Role]:
    """Add a conflict to threads that claim to be the same vCPU."""
    count = Counter(role.vcpu for role in roles.values() if role.vcpu is not None)
    doubles = {index for index, threads in count.items() if threads > 1}
    for key, role in roles.items():
        if role.vcpu in doubles:
            text = role.conflict or f"{count[role.vcpu]} threads claim this vCPU"
            roles[key] = replace(role, conflict=text)
    return roles
