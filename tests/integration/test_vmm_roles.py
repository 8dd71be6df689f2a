"""Roles of the threads of real QEMU, from each source alone and from all of them.

The truth is what QEMU itself answers to the shim that holds its QMP socket.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from kata_pin.base.sandbox import Role, Vmm
from kata_pin.base.steps import finish
from kata_pin.base.threads import ThreadKey
from kata_pin.base.values import RoleSource, ThreadRole
from kata_pin.follow.hooks import is_held, query
from kata_pin.linux.files import HostRoot
from kata_pin.peers.qemu import QmpAnswers, QmpCpu, QmpIothread
from kata_pin.rights.broker.threads import KvmVcpu, ThreadCall
from kata_pin.rights.calls import Calls
from kata_pin.vmm import roles
from kata_pin.vmm.find import VmmFinder
from kata_pin.vmm.role_cache import RoleCache
from kata_pin.vmm.state_files import HostAccess
from tests.support.at_once import identify
from tests.support.katalike import KataDirs, KataSandbox
from tests.support.qemu import Accelerator, Machine, accelerator
from tests.support.vmmhost import (
    EXECUTABLES,
    Bystander,
    facts,
    live,
    lookalike,
    private_debugfs,
    tasks,
)
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.qemu, pytest.mark.root]

P1 = f"p{os.getpid()}"
"""Sandbox ids of this run: other runs on the machine have their own."""

needs_kvm = pytest.mark.usefixtures("kvm")

BLIND = "no-such-machine"
"""A uname machine whose ioctl number is unknown: the descriptor map says nothing."""


@pytest.fixture
def kvm() -> Accelerator:
    """KVM, where it works."""
    if accelerator() is not Accelerator.KVM:
        pytest.skip("KVM does not work here")
    return Accelerator.KVM


@pytest.fixture(params=list(Accelerator))
def either(request: pytest.FixtureRequest) -> Accelerator:
    """Each accelerator in turn, KVM only where it works."""
    chosen = Accelerator(request.param)
    if chosen is Accelerator.KVM:
        request.getfixturevalue("kvm")
    return chosen


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A private directory with a short path."""
    root = Path(tempfile.mkdtemp(prefix="kp"))
    yield root
    shutil.rmtree(root)


@pytest.fixture
def debug(scratch: Path) -> Iterator[Path]:
    """A private mount of debugfs."""
    with private_debugfs(scratch / "debug") as path:
        yield path


@pytest.fixture
def dirs(scratch: Path) -> KataDirs:
    """Kata's directories."""
    return KataDirs.below(scratch)


@pytest.fixture(autouse=True)
def bystander() -> Iterator[Bystander]:
    """A process that looks alike; its threads get no role and no other affinity."""
    with lookalike("-name", f"sandbox-{P1}", comm="CPU 0/KVM") as process:
        one = Bystander(process.pid)
        yield one
        one.check()


class Subject:
    """One sandbox under test, what was found of it, and what QEMU says."""

    def __init__(self, kata: KataSandbox, host: HostAccess, *, kvm: bool = True) -> None:
        self.kata = kata
        self.host = host
        self.cache = RoleCache()
        vmm = VmmFinder(host, executables=EXECUTABLES).find(kata.id, {kata.pid: 0})
        self.vmm: Vmm = vmm if kvm else replace(vmm, kvm=False)

    def roles(self, qmp: QmpAnswers | None = None, *, machine: str = "") -> dict[ThreadKey, Role]:
        """Identify the threads that live now."""
        now = tasks(self.kata.pid)
        found = identify(self.host, self.vmm, now, self.cache, qmp, machine=machine)
        assert set(found) == {task.key for task in now}
        return dict(found)

    def settled(self, *sources: RoleSource, machine: str = "") -> dict[ThreadKey, Role]:
        """Identify until the vCPUs are known, from no other source than these."""

        def look() -> dict[ThreadKey, Role] | None:
            found = self.roles(machine=machine)
            used = {r.source for r in found.values() if r.role is ThreadRole.VCPU}
            done = _vcpus(found) == self.truth() and used <= set(sources)
            return found if done else None

        found = wait_for(look, f"all vCPUs named by {', '.join(sources)}")
        assert not any(role.conflict for role in found.values())
        return found

    def truth(self) -> dict[int, int]:
        """Return cpu-index by tid, as QEMU says."""
        return {tid: index for index, tid in self.kata.vcpus().items()}


def _vcpus(roles: dict[ThreadKey, Role]) -> dict[int, int | None]:
    return {k.tid: role.vcpu for k, role in roles.items() if role.role is ThreadRole.VCPU}


def _iothreads(roles: dict[ThreadKey, Role]) -> dict[str, int]:
    return {r.iothread: k.tid for k, r in roles.items() if r.role is ThreadRole.IOTHREAD}


def _sandbox(dirs: KataDirs, chosen: Accelerator, machine: Machine = Machine()) -> KataSandbox:  # noqa: B008 - frozen
    return KataSandbox(dirs, P1, machine=machine, accelerator=chosen, shim_process=False)


def _answers(vcpus: dict[int, int], iothreads: dict[str, int]) -> QmpAnswers:
    return QmpAnswers(
        cpus=tuple(QmpCpu(index, tid) for index, tid in vcpus.items()),
        iothreads=tuple(QmpIothread(name, tid) for name, tid in iothreads.items()),
    )


# ---- each source alone -------------------------------------------------------------------


@needs_kvm
def test_debugfs_alone_follows_hotplug(dirs: KataDirs, debug: Path) -> None:
    """KVM's debugfs names boot and hotplugged vCPUs, with QMP held and no names."""
    with _sandbox(dirs, Accelerator.KVM) as kata:
        subject = Subject(kata, live(debug))
        subject.settled(RoleSource.DEBUGFS, machine=BLIND)
        kata.shim.plug(3)
        assert sorted(subject.truth().values()) == [0, 1, 5, 6, 7]
        subject.settled(RoleSource.DEBUGFS, machine=BLIND)


@needs_kvm
def test_descriptors_alone_follow_hotplug(dirs: KataDirs) -> None:
    """Without debugfs, what the threads wait in names them, the highest indexes first."""
    with _sandbox(dirs, Accelerator.KVM) as kata:
        subject = Subject(kata, live())
        kata.shim.plug(2)
        roles = subject.settled(RoleSource.KVM_FD)
        plugged = [r for _, r in sorted(roles.items()) if r.vcpu is not None and r.vcpu > 1]
        assert [role.vcpu for role in plugged] == [7, 6]


def test_names_alone(dirs: KataDirs, either: Accelerator) -> None:
    """With debug-threads=on the names tell vCPUs; iothreads with short ids are named too."""
    machine = Machine(iothreads=("iot0",), debug_threads=True)
    with _sandbox(dirs, either, machine) as kata:
        subject = Subject(kata, live(), kvm=False)
        kata.shim.plug(1)
        roles = subject.settled(RoleSource.NAME)
        assert _iothreads(roles) == kata.iothreads()
        sources = {r.source for r in roles.values() if r.role is ThreadRole.IOTHREAD}
        assert sources == {RoleSource.NAME}


def test_order_alone(dirs: KataDirs, either: Accelerator) -> None:
    """With no other source, creation order names boot vCPUs and iothreads, and is called so."""
    machine = Machine(boot=3, iothreads=("iothread-0123456789abcdef", "iothread-fedcba9876543210"))
    with _sandbox(dirs, either, machine) as kata:
        subject = Subject(kata, live(), kvm=False)
        roles = subject.settled(RoleSource.ORDER)
        assert _iothreads(roles) == kata.iothreads()


def test_order_never_guesses_hotplugged_vcpus(dirs: KataDirs) -> None:
    """Under TCG with QMP held a hotplugged vCPU stays unknown: it may be one, and goes wide."""
    with _sandbox(dirs, Accelerator.TCG) as kata:
        subject = Subject(kata, live())
        boot = _vcpus(subject.settled(RoleSource.ORDER))
        kata.shim.plug(1)
        roles = subject.roles()
        assert _vcpus(roles) == boot
        (new,) = set(subject.truth()) - set(boot)
        doubted = {key.tid for key, role in roles.items() if role.conflict}
        assert doubted == {new}


def test_order_is_silent_when_the_numbers_do_not_fit(dirs: KataDirs) -> None:
    """First seen after a hotplug under TCG, nothing fits: no vCPU is named, all are doubted."""
    with _sandbox(dirs, Accelerator.TCG) as kata:
        kata.shim.plug(1)
        roles = Subject(kata, live()).roles()
        assert _vcpus(roles) == {}
        doubted = {key.tid for key, role in roles.items() if role.conflict}
        assert set(kata.vcpus().values()) <= doubted
        assert kata.pid not in doubted


def test_qmp_answers_alone(dirs: KataDirs) -> None:
    """What QMP answered in its window names vCPUs and iothreads, also hotplugged ones."""
    with _sandbox(dirs, Accelerator.TCG) as kata:
        kata.shim.plug(2)
        kata.shim.let_go()
        wait_for(lambda: not is_held(str(kata.qmp_path)), "socket to be free")
        subject = Subject(kata, live())
        answers = asyncio.run(query(str(kata.qmp_path)))
        kata.shim.hold()
        roles = subject.roles(answers)
        assert _vcpus(roles) == subject.truth()
        assert _iothreads(roles) == kata.iothreads()
        assert {r.source for r in roles.values() if r.vcpu is not None} == {RoleSource.QMP}


@needs_kvm
def test_paused_vcpus_are_named_by_order_until_they_run(dirs: KataDirs, debug: Path) -> None:
    """With -S no vCPU has entered KVM: order tells them, and KVM takes over once they run."""
    with _sandbox(dirs, Accelerator.KVM, Machine(paused=True)) as kata:
        subject = Subject(kata, live(debug))
        subject.settled(RoleSource.ORDER)
        kata.shim.execute("cont")
        wait_for(lambda: _sources(subject) <= {RoleSource.DEBUGFS, RoleSource.KVM_FD}, "KVM")


def _sources(subject: Subject) -> set[RoleSource]:
    roles = subject.roles().values()
    return {role.source for role in roles if role.role is ThreadRole.VCPU}


# ---- what KVM leaves behind --------------------------------------------------------------


@needs_kvm
def test_traces_of_an_unplugged_vcpu_name_nobody(dirs: KataDirs, debug: Path) -> None:
    """After an unplug debugfs and the descriptor still tell of it; no living thread gets it."""
    with _sandbox(dirs, Accelerator.KVM) as kata:
        subject = Subject(kata, live(debug))
        kata.shim.plug(2)
        before = subject.settled(RoleSource.DEBUGFS, RoleSource.KVM_FD)
        (dead,) = [key for key, role in before.items() if role.vcpu == 6]
        kata.shim.unplug(1)
        assert 6 in roles.open_vcpus(subject.host.root, kata.pid)
        stale = next(Path(debug).glob(f"kvm/{kata.pid}-*/vcpu6/pid")).read_text()
        assert int(stale) == dead.tid
        assert _vcpus(subject.roles()) == subject.truth()

        # A later thread that got the dead one's tid is younger than the vCPU: doubtful.
        heir = ThreadKey(kata.pid, dead.tid, dead.starttime + 10_000_000)
        found = roles.read_vcpus(subject.host.root, {dead.tid: heir}, kata.pid)
        assert found.doubtful == {heir}

        kata.shim.plug(1)
        subject.settled(RoleSource.DEBUGFS, RoleSource.KVM_FD)


@needs_kvm
def test_apic_ids_are_converted(dirs: KataDirs, debug: Path) -> None:
    """With three cores a socket, APIC ids have gaps; roles hold both numbers."""
    machine = Machine(boot=5, smp="5,sockets=2,cores=3,threads=1,maxcpus=6")
    with _sandbox(dirs, Accelerator.KVM, machine) as kata:
        subject = Subject(kata, live(debug))
        roles = subject.settled(RoleSource.DEBUGFS, RoleSource.KVM_FD)
        pairs = {r.vcpu: r.apic_id for r in roles.values() if r.role is ThreadRole.VCPU}
        assert pairs == {0: 0, 1: 1, 2: 2, 3: 4, 4: 5}


@pytest.fixture
def busy_firmware(scratch: Path) -> Path:
    """Firmware whose only instruction jumps to itself: the boot vCPU never sleeps."""
    rom = bytearray(64 * 1024)
    rom[0xFFF0:0xFFF2] = b"\xeb\xfe"
    path = scratch / "busy.rom"
    path.write_bytes(rom)
    return path


@needs_kvm
def test_a_busy_vcpu(dirs: KataDirs, debug: Path, busy_firmware: Path) -> None:
    """A vCPU that never sleeps is named by debugfs, and without it by elimination or order."""
    machine = Machine(boot=2, extra=("-bios", str(busy_firmware)))
    with _sandbox(dirs, Accelerator.KVM, machine) as kata:
        with_debugfs = Subject(kata, live(debug))
        with_debugfs.settled(RoleSource.DEBUGFS, RoleSource.KVM_FD)
        without = Subject(kata, live())
        waiting = finish(roles.read_waiting(without.host.root, tasks(kata.pid), os.uname().machine))
        assert kata.vcpus()[0] in {key.tid for key in waiting.running}
        without.settled(RoleSource.KVM_FD, RoleSource.ORDER)


@needs_kvm
def test_kernel_workers_are_not_vcpus(dirs: KataDirs) -> None:
    """A kernel worker in QEMU shows its creator's system call; it is named by its flags."""
    with _sandbox(dirs, Accelerator.KVM) as kata:
        subject = Subject(kata, live())
        roles = subject.settled(RoleSource.KVM_FD)
        workers = {t.key for t in tasks(kata.pid) if t.user_worker}
        assert all(roles[key].source is RoleSource.FLAGS for key in workers)
        assert all(roles[key].role is ThreadRole.KVM for key in workers)


# ---- contradictions and lies -------------------------------------------------------------


@needs_kvm
def test_a_lying_qemu_is_contradicted(dirs: KataDirs, debug: Path) -> None:
    """QMP answers that disagree with KVM put both threads in conflict, and name the sources."""
    with _sandbox(dirs, Accelerator.KVM) as kata:
        subject = Subject(kata, live(debug))
        subject.settled(RoleSource.DEBUGFS, RoleSource.KVM_FD)
        truth = kata.vcpus()
        roles = subject.roles(_answers({0: truth[1], 1: truth[0]}, {}))
        conflicts = {key.tid: role.conflict for key, role in roles.items() if role.conflict}
        assert set(conflicts) == set(truth.values())
        assert "qmp reports vcpu 0" in conflicts[truth[1]]


def test_foreign_threads_in_an_answer_are_ignored(dirs: KataDirs, bystander: Bystander) -> None:
    """Thread ids that are not QEMU's own, init's among them, get no role."""
    with _sandbox(dirs, Accelerator.TCG) as kata:
        subject = Subject(kata, live())
        roles = subject.roles(_answers({0: bystander.pid, 1: 1}, {"iothread-1": kata.shim.pid}))
        assert {key.tgid for key in roles} == {kata.pid}
        assert _vcpus(roles) == subject.truth()  # by order


def test_an_answer_is_tied_to_the_threads_it_was_about(dirs: KataDirs) -> None:
    """A thread that has a dead one's tid inherits nothing from an old answer."""
    with _sandbox(dirs, Accelerator.TCG) as kata:
        now = tasks(kata.pid)
        answers = _answers(kata.vcpus(), kata.iothreads())
        cache = RoleCache()
        cache.bind(answers, now)
        named = set(cache.qmp_vcpus)
        later = [
            replace(task, key=task.key._replace(starttime=task.key.starttime + 1)) for task in now
        ]
        cache.bind(answers, later)
        assert set(cache.qmp_vcpus) == named
        cache.learn({t.key: Role(ThreadRole.EMULATOR, RoleSource.REST) for t in later}, later, 0)
        cache.prune()
        assert not cache.qmp_vcpus


class AskedCalls(Calls):
    """Notes what the kernel is asked about threads: the tids, or `debugfs`."""

    def __init__(self) -> None:
        self.asked: list[object] = []

    def kvm_vcpus(self, folder: str, pid: int, tids: Collection[int]) -> list[KvmVcpu]:
        """See Calls."""
        self.asked.append("debugfs")
        return super().kvm_vcpus(folder, pid, tids)

    def system_calls(self, process: str, tids: Sequence[int]) -> list[ThreadCall]:
        """See Calls."""
        self.asked.append(set(tids))
        return super().system_calls(process, tids)


@needs_kvm
def test_only_the_born_thread_is_asked_about(dirs: KataDirs, debug: Path) -> None:
    """Once a sandbox has settled a pass asks nothing, and of a new thread only what that is."""
    calls = AskedCalls()
    with _sandbox(dirs, Accelerator.KVM) as kata:
        subject = Subject(kata, facts(HostRoot(debugfs=str(debug), calls=calls)))
        subject.settled(RoleSource.DEBUGFS, RoleSource.KVM_FD)
        wait_for(lambda: subject.roles() and subject.cache.recall(tasks(kata.pid)), "grown up")
        calls.asked.clear()
        subject.roles()
        assert calls.asked == []
        before = set(kata.tids())
        kata.shim.plug(1)
        born = set(kata.tids()) - before
        subject.roles()
        assert born in calls.asked, "one call, whatever the VM's size"
        subject.settled(RoleSource.DEBUGFS, RoleSource.KVM_FD)
        assert all(asked in ("debugfs", born) for asked in calls.asked)


def test_a_vmm_that_exits_meanwhile(dirs: KataDirs) -> None:
    """Threads listed before QEMU died still get roles; nothing is raised."""
    with _sandbox(dirs, Accelerator.TCG) as kata:
        subject = Subject(kata, live())
        before = tasks(kata.pid)
        kata.shim.stop()
        roles = identify(subject.host, subject.vmm, before, RoleCache())
        assert set(roles) == {task.key for task in before}
