"""Roles of a VMM's threads, from the first source that answers (D6)."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as dataclasses_field
from itertools import pairwise
from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from kata_pin.base.errors import ParseError
from kata_pin.base.sandbox import Role, Task, Vmm
from kata_pin.base.steps import STEP, Steps
from kata_pin.base.threads import ThreadKey
from kata_pin.base.values import RoleSource, ThreadRole
from kata_pin.linux.files import HostRoot
from kata_pin.linux.proc import kernel_worker, parse_syscall, vcpu_of_link
from kata_pin.peers import qemu
from kata_pin.peers.qemu import QmpAnswers
from kata_pin.rights.broker.threads import ThreadCall
from kata_pin.vmm.kinds import KvmIds, NamedRole, VmmKind, kind_named
from kata_pin.vmm.role_cache import RANK, RoleCache, born
from kata_pin.vmm.state_files import HostAccess

# Roles inferred from the order in which QEMU creates its threads.
#
# Seen with QEMU 7.2, KVM and TCG alike (system/vl.c: objects before the machine, monitors before
# vCPUs):
#
# > main loop, call_rcu, one thread for each -object iothread in command line order,
# > the monitor's thread (with -qmp), boot vCPUs in index order, then whatever comes later:
# > hotplugged vCPUs, workers
#
# Short-lived threads leave no trace; one that is still alive shifts everything after it. So there
# is no guess unless the numbers fit exactly, and none about threads after the boot vCPUs. Kernel
# workers (vhost, KVM) can be anywhere and are left out.

HEAD: Final = 2  # the main loop and call_rcu

MAX_TID_STEP: Final = 8192
"""Within one clock tick tids ascend by less than this, unless they wrapped around."""


def guess(
    vmm: Vmm, tasks: Sequence[Task], known: Mapping[ThreadKey, int], *, monitor: bool
) -> dict[ThreadKey, NamedRole]:
    """Return what follows from creation order; `known` are vCPU threads with their cpu-index.

    `monitor` says whether QEMU has a QMP monitor, which has a thread of its own.
    """
    line = creation_order(tasks) if vmm.guest.boot else None
    if line is None or not line or line[0].tid != line[0].tgid:
        return {}
    first = HEAD + len(vmm.iothreads) + monitor
    boot = line[first : first + vmm.guest.boot]
    if len(boot) < vmm.guest.boot or not _fits(line, boot, known, vmm.guest.boot):
        return {}
    guesses = {key: NamedRole(ThreadRole.VCPU, vcpu=n) for n, key in enumerate(boot)}
    named = zip(line[HEAD:], vmm.iothreads, strict=False)
    guesses |= {key: NamedRole(ThreadRole.IOTHREAD, iothread=name) for key, name in named}
    others = (*line[:HEAD], *line[first - monitor : first])
    return guesses | dict.fromkeys(others, NamedRole(ThreadRole.EMULATOR))


def creation_order(tasks: Sequence[Task]) -> list[ThreadKey] | None:
    """Return user threads as they were created, None when tids wrapped around within a tick."""
    keys = sorted(
        (task.key for task in tasks if not task.user_worker and not task.kernel),
        key=lambda key: (key.starttime, key.tid),
    )
    for before, after in pairwise(keys):
        if before.starttime == after.starttime and after.tid - before.tid > MAX_TID_STEP:
            return None
    return keys


def _fits(
    line: Sequence[ThreadKey],
    boot: Sequence[ThreadKey],
    known: Mapping[ThreadKey, int],
    count: int,
) -> bool:
    """Whether known boot vCPUs are in their places; with none known, no thread may be extra."""
    places = {index: key for key, index in known.items() if index < count}
    if not places:
        return len(line) == line.index(boot[0]) + count
    return all(boot[index] == key for index, key in places.items())


# vCPU threads from KVM's debugfs: `kvm/<tid>-<vm fd>/vcpu<N>/pid` (virt/kvm/kvm_main.c).
#
# The best source: right also for a busy vCPU, and no user process can write it. The folder is named
# after the thread that made the VM: QEMU's main thread, but not cloud-hypervisor's or Dragonball's.
# N is KVM's vCPU id (the APIC id on x86). The file names the thread that last entered KVM_RUN: 0
# before the first time, and still the dead one after an unplug. A thread that is younger than the
# vCPU may therefore be a later thread with a reused tid, or the new thread of a vCPU plugged again:
# it is called doubtful, and needs a second source. Needs root and a mounted debugfs; absent files
# are simply no answer.

_TICKS: Final = os.sysconf("SC_CLK_TCK")
_SLACK_TICKS: Final = 2
"""A thread creates its vCPU at once, but starttime is cut to a tick and clocks are read apart."""


class VcpuThreads(Struct, frozen=True):
    """KVM's vCPU id by thread; `doubtful` are those that need a second source."""

    ids: Mapping[ThreadKey, int] = field(default_factory=dict)
    doubtful: frozenset[ThreadKey] = frozenset()


NOTHING: Final = VcpuThreads()


def read_vcpus(root: HostRoot, tasks: Mapping[int, ThreadKey], pid: int) -> VcpuThreads:
    """Return which of a VMM's threads (by tid) KVM knows as vCPUs."""
    ids: dict[ThreadKey, int] = {}
    doubtful: set[ThreadKey] = set()
    known = {*tasks, pid}
    try:
        vcpus = root.calls.kvm_vcpus(root.debug("kvm"), pid, known)
    except OSError:
        return NOTHING
    for vcpu in vcpus:
        key = tasks.get(vcpu.tid)
        if key is None:
            continue
        if key in ids:  # two vCPUs cannot share a thread: one of them is unplugged
            doubtful.add(key)
        ids[key] = vcpu.number
        if _is_younger(key, vcpu.created_ns / 1e9):
            doubtful.add(key)
    return VcpuThreads(ids, frozenset(doubtful))


def _is_younger(key: ThreadKey, created: float) -> bool:
    """Whether the thread started after the vCPU was created."""
    booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    return key.starttime > (created - booted) * _TICKS + _SLACK_TICKS


# vCPU threads by the system call they wait in: ioctl(KVM_RUN) on a descriptor `kvm-vcpu:N`.
#
# /proc/<pid>/task/<tid>/syscall shows a sleeping thread's system call and its arguments, and
# /proc/<pid>/fd what the descriptor is; both come from the kernel and need CAP_SYS_PTRACE. N is
# KVM's vCPU id (the APIC id on x86). A busy vCPU reads `running`, so it is tried again shortly.
# Kernel workers inside the VMM show the call that created them, so they are never asked. The
# descriptor of an unplugged vCPU stays open, so an unused one proves something only for boot vCPUs,
# which cannot be unplugged. Under TCG there are no such descriptors.

TRIES: Final = 3


class Waiting(Struct, frozen=True):
    """KVM's vCPU id by thread, the threads that were running at each try, and those not shown."""

    ids: Mapping[ThreadKey, int]
    running: frozenset[ThreadKey]
    hidden: frozenset[ThreadKey]


def read_waiting(
    root: HostRoot, tasks: Iterable[Task], machine: str, *, tries: int = TRIES
) -> Steps[Waiting]:
    """Return what the threads wait in; `machine` is uname's, for the number of ioctl."""
    ids: dict[ThreadKey, int] = {}
    hidden: set[ThreadKey] = set()
    left = [task.key for task in tasks if not task.user_worker and not task.kernel]
    for again in range(tries):
        if again:
            os.sched_yield()
        running = []
        for at in range(0, len(left), STEP):
            if at:
                yield
            keys = left[at : at + STEP]
            for key, call in zip(keys, _calls_of(root, keys), strict=True):
                number = _vcpu_of(call, machine)
                if number is None:
                    running.append(key)
                elif number >= 0:
                    ids[key] = number
                elif not call.text:
                    hidden.add(key)
        left = running
        if not left:
            break
    return Waiting(ids, frozenset(left), frozenset(hidden))


def open_vcpus(root: HostRoot, pid: int) -> frozenset[int]:
    """Return the KVM ids of the vCPU descriptors, those of unplugged vCPUs included.

    A VMM may have any number of descriptors: the first 2,048 are looked at.
    """
    try:
        links = root.calls.descriptors(root.proc(pid))
    except OSError:  # gone, or no right to look: nothing is known
        return frozenset()
    return frozenset(number for number in map(vcpu_of_link, links) if number is not None)


def _calls_of(root: HostRoot, keys: Sequence[ThreadKey]) -> list[ThreadCall]:
    """Return what threads of one process or of several wait in, empty where nothing is shown."""
    found: dict[ThreadKey, ThreadCall] = {}
    for tgid in {key.tgid for key in keys}:
        mine = [key for key in keys if key.tgid == tgid]
        try:
            calls = root.calls.system_calls(root.proc(tgid), [key.tid for key in mine])
        except OSError:
            continue
        found |= dict(zip(mine, calls, strict=True))
    return [found.get(key, ThreadCall("")) for key in keys]


def _vcpu_of(call: ThreadCall, machine: str) -> int | None:
    """Return which vCPU a thread runs, -1 when it does something else, None: running."""
    try:
        parsed = parse_syscall(call.text.encode())
    except ParseError:
        return -1
    if parsed is None:
        return None
    number = vcpu_of_link(call.link)
    return -1 if number is None or parsed.kvm_run_fd(machine) is None else number


# KVM debugfs, QMP answers that came in time, KVM's file descriptors, thread names, creation order.
# debugfs and descriptors give KVM's vCPU id, which is converted to the cpu-index before anything is
# compared. Where sources contradict each other, or a thread may be one of the vCPUs that are
# missing, the role carries a conflict: such a thread belongs on the whole mask.
#
# No thread outside `tasks` ever gets a role, whatever a source reports: the caller listed them from
# /proc.

MAX_THREADS: Final = 4096
"""A VMM with more is not examined: all of its threads go to the whole mask."""

_X86: Final = frozenset({"x86_64", "i686"})
_KNOWN: Final = frozenset({RoleSource.DEBUGFS, RoleSource.QMP, RoleSource.KVM_FD})
_LASTING: Final = frozenset({RoleSource.DEBUGFS, RoleSource.KVM_FD, RoleSource.NAME})
"""Sources that name a vCPU that is hotplugged later, too."""


def _is_lasting_vcpu(role: Role) -> bool:
    return role.role is ThreadRole.VCPU and role.source in _LASTING


def _words(claim: Role) -> str:
    what = claim.role.value
    if claim.role is ThreadRole.VCPU:
        what += f" {claim.vcpu}" if claim.vcpu is not None else f" with KVM id {claim.apic_id}"
    return f"{claim.source.value} reports {what}"


def _contradict(one: Role, other: Role) -> bool:
    if one.role is not other.role:
        return True
    unknown = one.vcpu is None or other.vcpu is None
    return one.role is ThreadRole.VCPU and not unknown and one.vcpu != other.vcpu


@dataclass
class _Evidence:
    """What all sources report: roles by thread, best source first, in whichever order they come.

    `tasks` are examined; `others` are the roles of threads that are not, because nothing new can
    be reported of them. `known` are the vCPU threads, from now or an earlier examination, with
    their cpu-index.
    """

    host: HostAccess
    vmm: Vmm
    kind: VmmKind
    tasks: Sequence[Task]
    machine: str
    known: dict[ThreadKey, int]
    others: Mapping[ThreadKey, Role] = dataclasses_field(default_factory=dict)
    claims: dict[ThreadKey, list[Role]] = dataclasses_field(default_factory=dict)

    def add(self, key: ThreadKey, claim: Role) -> None:
        claims = self.claims.setdefault(key, [])
        claims.append(claim)
        claims.sort(key=lambda one: RANK[one.source])
        if claims[0] is claim and claim.vcpu is not None:
            self.known[key] = claim.vcpu

    def add_named(self, key: ThreadKey, source: RoleSource, named: NamedRole) -> None:
        self.add(key, Role(named.role, source, named.vcpu, iothread=named.iothread))

    def add_vcpu(self, key: ThreadKey, source: RoleSource, kvm_id: int) -> None:
        """Add a vCPU by KVM's number for it: the APIC id on x86."""
        x86 = self.machine in _X86
        index: int | None = kvm_id
        if x86 and self.kind.kvm_ids is not KvmIds.INDEX:
            by_smp = self.kind.kvm_ids is KvmIds.SMP
            index = qemu.cpu_index(self.vmm.guest, kvm_id) if by_smp else None
        self.add(key, Role(ThreadRole.VCPU, source, index, kvm_id if x86 else None))

    @property
    def missing(self) -> set[int]:
        """The boot vCPUs whose thread is not known; each always has one."""
        return set(range(self.vmm.guest.boot)).difference(self.known.values())


def identify(
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
        known = cache.vcpus(tasks)
        evidence = _Evidence(host, vmm, kind_named(vmm.kind), tasks, machine, known)
        is_small = len(tasks) <= MAX_THREADS
        others = cache.settled(tasks) if is_small and not evidence.missing else {}
        if any(map(_is_lasting_vcpu, others.values())):  # else newborn threads put others in doubt
            evidence.tasks = [task for task in tasks if task.key not in others]
            evidence.others = others
        found = yield from _examine(evidence, cache)
        yield
        roles = cache.learn(found, tasks, vmm.guest.boot)
    return roles


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
    found, others = _decide(evidence), evidence.others
    if not others:
        return _flag_doubles(found)
    roles = _flag_doubles({**others, **found})
    return {key: role for key, role in roles.items() if role is not others.get(key)}


def _ask_kernel(evidence: _Evidence, cache: RoleCache) -> Steps[None]:
    """Ask debugfs, QMP's answers, and descriptors, each where it is still needed.

    Of threads born in a VMM that is known the descriptors are asked first: one call for them alone,
    however many vCPUs the VM has.
    """
    own = [task for task in evidence.tasks if not task.user_worker]
    missing = bool(evidence.missing)
    asked = cache.to_ask(own, missing=missing) if evidence.vmm.kvm else []
    _recall(evidence, cache, asked)
    _ask_qmp(evidence, cache, {task.key for task in own})
    from_debugfs, left = NOTHING, frozenset(task.key for task in asked)
    if asked and not missing and cache.are_newborn(asked):
        # one that is being born runs: the next look is in a moment
        unclear = yield from _ask_descriptors(evidence, cache, asked, from_debugfs, tries=1)
        left = frozenset(key for key in unclear if cache.get(key) is not None)
    if left:
        keys = {task.key.tid: task.key for task in own}
        pid = evidence.vmm.process.pid
        from_debugfs = read_vcpus(evidence.host.root, keys, pid)
    for key, kvm_id in from_debugfs.ids.items():
        if key not in from_debugfs.doubtful:
            evidence.add_vcpu(key, RoleSource.DEBUGFS, kvm_id)
    if left:
        yield from _ask_descriptors(evidence, cache, asked, from_debugfs)


def _recall(evidence: _Evidence, cache: RoleCache, asked: Collection[Task]) -> None:
    """Add what was reported before of the threads that the kernel is not asked about now."""
    again = {task.key for task in asked}
    for task in evidence.tasks:
        role = cache.get(task.key)
        if role is not None and role.source in _KNOWN and task.key not in again:
            evidence.add(task.key, role)


def _ask_qmp(evidence: _Evidence, cache: RoleCache, alive: Collection[ThreadKey]) -> None:
    for key, index in cache.qmp_vcpus.items():
        if key in alive:
            evidence.add(key, Role(ThreadRole.VCPU, RoleSource.QMP, index))
    for key, name in cache.qmp_iothreads.items():
        if key in alive:
            evidence.add(key, Role(ThreadRole.IOTHREAD, RoleSource.QMP, iothread=name))
    for key in cache.qmp_others.intersection(alive):
        evidence.add(key, Role(ThreadRole.EMULATOR, RoleSource.QMP))


def _ask_descriptors(
    evidence: _Evidence,
    cache: RoleCache,
    asked: Sequence[Task],
    from_debugfs: VcpuThreads,
    *,
    tries: int = TRIES,
) -> Steps[frozenset[ThreadKey]]:
    """Ask what the unnamed threads wait in, and settle what debugfs left in doubt.

    Returns the threads of which that could not be seen.
    """
    unnamed = [task for task in asked if task.key not in evidence.claims]
    waiting = yield from read_waiting(evidence.host.root, unnamed, evidence.machine, tries=tries)
    for key, kvm_id in waiting.ids.items():
        source = RoleSource.KVM_FD
        if from_debugfs.ids.get(key) == kvm_id:
            source = RoleSource.DEBUGFS  # confirmed
        evidence.add_vcpu(key, source, kvm_id)
    main = evidence.vmm.process.pid
    running = [key for key in waiting.running if key.tid != main]
    missing = evidence.missing
    if len(running) == 1 and len(missing) == 1:
        _eliminate(evidence, cache, running[0], missing.pop())
    return waiting.running | waiting.hidden


def _eliminate(evidence: _Evidence, cache: RoleCache, key: ThreadKey, index: int) -> None:
    """Name the one running thread as the one missing boot vCPU, if its descriptor is there.

    A busy iothread would look the same, so creation order must not contradict it.
    """
    guess = _guesses(evidence).get(key)
    by_smp = evidence.machine in _X86 and evidence.kind.kvm_ids is KvmIds.SMP
    kvm_id = qemu.apic_id(evidence.vmm.guest, index) if by_smp else index
    agrees = guess is not None and guess.vcpu == index
    if not agrees or not cache.may_list():
        return
    if kvm_id in open_vcpus(evidence.host.root, evidence.vmm.process.pid):
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
    return guess(vmm, evidence.tasks, evidence.known, monitor=vmm.monitor)


def _ask_flags(evidence: _Evidence, cache: RoleCache) -> None:
    """Name the kernel's workers inside the VMM (Linux 6.4 and later).

    A vhost worker is named after the thread that created it, which may have ended since, so a
    worker keeps its first role.
    """
    tids = {key.tid for key in (*(task.key for task in evidence.tasks), *evidence.others)}
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
        evidence.add(task.key, Role(role, RoleSource.FLAGS))


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


def _role(claims: Sequence[Role]) -> Role:
    first = claims[0]
    against = [claim for claim in claims[1:] if _contradict(claim, first)]
    vcpu = next((claim.vcpu for claim in claims if claim.vcpu is not None), None)
    return Role(
        role=first.role,
        source=first.source,
        vcpu=vcpu if first.role is ThreadRole.VCPU else None,
        apic_id=next((claim.apic_id for claim in claims if claim.apic_id is not None), None),
        iothread=next((claim.iothread for claim in claims if claim.iothread), ""),
        conflict=", ".join(map(_words, (first, *against))) if against else "",
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
    sees_vcpus = any(map(_is_lasting_vcpu, named))
    if evidence.others or sees_vcpus or guest.boot == guest.maximum > 0:
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
