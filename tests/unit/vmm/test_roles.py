"""Roles where no QEMU can be had: other VMMs, too many threads, vhost inside QEMU, doubles."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from kata_pin.base.cpuset import EMPTY
from kata_pin.base.sandbox import PF_USER_WORKER, GuestTopology, ProcessKey, Role, Task, Vmm
from kata_pin.base.threads import ThreadKey
from kata_pin.base.values import RoleSource, ThreadRole
from kata_pin.linux.files import HostRoot
from kata_pin.peers.qemu import QmpAnswers, QmpCpu, QmpIothread
from kata_pin.vmm import role_cache, roles
from kata_pin.vmm.role_cache import LIST_S, RoleCache
from kata_pin.vmm.state_files import HostAccess
from tests.support.at_once import identify
from tests.support.vmmhost import facts

PID = 100


@pytest.fixture
def host(tmp_path: Path) -> HostAccess:
    """A host that shows nothing but what the tasks carry."""
    (tmp_path / "proc").mkdir()
    return facts(HostRoot(str(tmp_path)))


def _tasks(*comms: str, flags: int = 0) -> list[Task]:
    return [
        Task(ThreadKey(PID, PID + n, 50), comm, flags, EMPTY, EMPTY, "/")
        for n, comm in enumerate(comms)
    ]


def _vmm(kind: str, boot: int = 0) -> Vmm:
    guest = GuestTopology(boot=boot, maximum=boot, sockets=boot)
    return Vmm(kind, ProcessKey(PID, 50), 1, "", "", guest=guest)


def _identify(
    host: HostAccess, vmm: Vmm, tasks: Sequence[Task], qmp: QmpAnswers | None = None
) -> list[Role]:
    found = identify(host, vmm, tasks, RoleCache(), qmp)
    return [found[task.key] for task in tasks]


def test_without_any_vcpu_all_but_the_main_thread_are_doubted(host: HostAccess) -> None:
    """Nobody knows which thread is a vCPU, so none is confined like an emulator thread."""
    found = _identify(host, _vmm("cloud-hypervisor"), _tasks("vmm", "a", "b"))
    assert [bool(role.conflict) for role in found] == [False, True, True]
    assert {role.role for role in found} == {ThreadRole.EMULATOR}


def test_vhost_workers_inside_qemu(host: HostAccess) -> None:
    """Linux 6.4 and later: by flag and owner; other kernel workers are emulator threads."""
    tasks = _tasks("qemu", f"vhost-{PID}", "vhost-7", "kvm-nx-lpage-re", "iou-wrk-100")
    workers = [Task(t.key, t.comm, PF_USER_WORKER, EMPTY, EMPTY, "/") for t in tasks[1:]]
    found = _identify(host, _vmm("qemu"), [tasks[0], *workers])
    assert [role.role for role in found[1:]] == [
        ThreadRole.VHOST,
        ThreadRole.EMULATOR,
        ThreadRole.KVM,
        ThreadRole.EMULATOR,
    ]
    assert {role.source for role in found[1:]} == {RoleSource.FLAGS}


def test_a_vhost_worker_outlives_its_creator(host: HostAccess) -> None:
    """Dragonball's vCPU thread that created it may be unplugged: it stays a vhost worker."""
    vmm, cache = _vmm("dragonball"), RoleCache()
    main, vcpu, worker, late = _tasks("containerd-shim", "db_vcpu0", f"vhost-{PID + 1}", "x")
    worker = replace(worker, flags=PF_USER_WORKER)
    expected = Role(ThreadRole.VHOST, RoleSource.FLAGS)
    assert identify(host, vmm, [main, vcpu, worker], cache)[worker.key] == expected
    assert identify(host, vmm, [main, worker, late], cache)[worker.key] == expected


class CountedKey(ThreadKey):
    """A key that counts how often it is looked up or put somewhere."""

    hashes = 0

    def __hash__(self) -> int:
        CountedKey.hashes += 1
        return hash(self.tid)


def _hashes(host: HostAccess, count: int) -> tuple[int, int]:
    """Return the hashes of a first pass over so many threads, and of one over the same again."""
    tasks = [
        Task(CountedKey(PID, PID + n, 50 + n), "qemu", 0, EMPTY, EMPTY, "/") for n in range(count)
    ]
    cache, counts = RoleCache(), []
    for _ in range(2):
        CountedKey.hashes = 0
        identify(host, _vmm("qemu"), tasks, cache)
        counts.append(CountedKey.hashes)
    return counts[0], counts[1]


def test_work_grows_with_the_number_of_threads(host: HostAccess) -> None:
    """Twice the threads cost twice the work, and threads that are known next to none."""
    (few, again), (many, _) = _hashes(host, 500), _hashes(host, 1000)
    assert few * 1.9 < many < few * 2.1
    assert many < 20 * 1000
    assert again == 0


def test_a_thread_named_like_a_worker_is_none(host: HostAccess) -> None:
    """A tenant can choose the name, not the flag."""
    found = _identify(host, _vmm("qemu", boot=1), _tasks("qemu", f"vhost-{PID}"))
    assert found[1].role is ThreadRole.EMULATOR
    assert found[1].conflict


def test_two_threads_that_claim_one_vcpu(host: HostAccess) -> None:
    """Both are in conflict: one of them lies."""
    found = _identify(host, _vmm("qemu", boot=1), _tasks("qemu", "CPU 0/KVM", "CPU 0/KVM"))
    assert [role.conflict for role in found[1:]] == ["2 threads claim this vCPU"] * 2


def test_names_and_answers_that_disagree(host: HostAccess) -> None:
    """The better source gives the role, the conflict names both."""
    answers = QmpAnswers(cpus=(QmpCpu(0, PID + 1),))
    found = _identify(host, _vmm("qemu", boot=1), _tasks("qemu", "CPU 3/KVM"), answers)
    assert found[1].vcpu == 0
    assert found[1].conflict == "qmp reports vcpu 0, name reports vcpu 3"


def test_what_qmp_does_not_list_is_neither_vcpu_nor_iothread(host: HostAccess) -> None:
    """The monitor's thread lived when QEMU was asked; a later one may be a hotplugged vCPU."""
    main, iothread, monitor, vcpu, late = _tasks(*["qemu-system-x86"] * 5)
    answers = QmpAnswers((QmpCpu(0, vcpu.key.tid),), (QmpIothread("iot0", iothread.key.tid),))
    vmm = replace(_vmm("qemu", boot=1), guest=GuestTopology(boot=1, maximum=2), kvm=False)
    before = {task.key for task in (main, iothread, monitor, vcpu)}
    threads = [main, iothread, monitor, vcpu, late]
    found = identify(host, vmm, threads, RoleCache(), answers, asked=before)
    assert found[iothread.key] == Role(ThreadRole.IOTHREAD, RoleSource.QMP, iothread="iot0")
    assert found[monitor.key] == Role(ThreadRole.EMULATOR, RoleSource.QMP)
    assert found[main.key] == Role(ThreadRole.EMULATOR, RoleSource.QMP)
    assert found[late.key].conflict.startswith("may be a vCPU")


def test_a_crowd_is_not_looked_into(host: HostAccess, monkeypatch: pytest.MonkeyPatch) -> None:
    """Above the limit no source is asked and all goes to the whole mask."""
    monkeypatch.setattr(roles, "MAX_THREADS", 2)
    found = _identify(host, _vmm("qemu", boot=1), _tasks("qemu", "CPU 0/KVM", "x"))
    assert {role.conflict for role in found} == {"more than 2 threads"}


# ---- a booted QEMU on a written tree -----------------------------------------------------

MAIN, RCU, IOT, MON, CPU0, CPU1 = range(PID, PID + 6)
BOOTED = _tasks(*["qemu-system-x86"] * 6)
POLL, FUTEX, RUNNING = "271 0x1 0x4", "202 0x1 0x189", "running"
KVM_RUN = "16 {fd:#x} 0xae80"


@pytest.fixture
def vmm() -> Vmm:
    """Two boot vCPUs that can all be there is, and one iothread."""
    return replace(_vmm("qemu", boot=2), iothreads=("iot0",), monitor=True)


def _boot(folder: Path, *, cpu0: str, cpu1: str, iothread: str = POLL) -> HostAccess:
    """Write what the threads of a QEMU wait in; descriptor 10 + N is vCPU N."""
    home = folder / "proc" / str(PID)
    (home / "fd").mkdir(parents=True)
    for number in range(2):
        (home / "fd" / str(10 + number)).symlink_to(f"anon_inode:kvm-vcpu:{number}")
    calls = {MAIN: POLL, RCU: FUTEX, IOT: iothread, MON: POLL, CPU0: cpu0, CPU1: cpu1}
    for tid, call in calls.items():
        (home / "task" / str(tid)).mkdir(parents=True)
        (home / "task" / str(tid) / "syscall").write_text(call)
    return facts(HostRoot(str(folder)))


def _debugfs(host: HostAccess, **tids: int) -> None:
    for name, tid in tids.items():
        folder = Path(host.root.debug("kvm", f"{PID}-9", name))
        folder.mkdir(parents=True)
        (folder / "pid").write_text(str(tid))


def _sources(found: Sequence[Role]) -> list[tuple[int | None, RoleSource]]:
    return [(role.vcpu, role.source) for role in found if role.role is ThreadRole.VCPU]


def test_the_last_running_thread_is_the_last_vcpu(tmp_path: Path, vmm: Vmm) -> None:
    """One boot vCPU is missing and one thread is busy where it belongs: by elimination."""
    host = _boot(tmp_path, cpu0=KVM_RUN.format(fd=10), cpu1=RUNNING)
    found = _sources(_identify(host, vmm, BOOTED))
    assert found == [(0, RoleSource.KVM_FD), (1, RoleSource.KVM_FD)]


@pytest.mark.parametrize(("every_s", "times"), [(LIST_S, 1), (0.0, 5)])
def test_descriptors_are_listed_rarely(
    tmp_path: Path, vmm: Vmm, monkeypatch: pytest.MonkeyPatch, every_s: float, times: int
) -> None:
    """However often another thread is busy where a boot vCPU is missing."""
    listed: list[int] = []
    open_vcpus = roles.open_vcpus

    def listing(root: HostRoot, pid: int) -> frozenset[int]:
        listed.append(pid)
        return open_vcpus(root, pid)

    monkeypatch.setattr(roles, "open_vcpus", listing)
    monkeypatch.setattr(role_cache, "LIST_S", every_s)
    host, cache = _boot(tmp_path, cpu0=KVM_RUN.format(fd=10), cpu1=FUTEX), RoleCache()
    (tmp_path / "proc" / str(PID) / "fd" / "11").unlink()
    for tid in range(PID + 10, PID + 15):
        (tmp_path / "proc" / str(PID) / "task" / str(tid)).mkdir()
        (tmp_path / "proc" / str(PID) / "task" / str(tid) / "syscall").write_text(RUNNING)
        busy = replace(BOOTED[-1], key=ThreadKey(PID, tid, 60))
        found = identify(host, vmm, [*BOOTED[:-1], busy], cache)
        assert found[busy.key].source is RoleSource.ORDER
    assert len(listed) == times


def test_a_busy_iothread_is_no_vcpu(tmp_path: Path, vmm: Vmm) -> None:
    """The one busy thread stands where an iothread does: elimination is wrong, order is not."""
    host = _boot(tmp_path, cpu0=KVM_RUN.format(fd=10), cpu1=FUTEX, iothread=RUNNING)
    found = _identify(host, vmm, BOOTED)
    assert _sources(found) == [(0, RoleSource.KVM_FD), (1, RoleSource.ORDER)]
    assert found[IOT - PID].iothread == "iot0"


def test_a_doubtful_entry_needs_a_second_source(tmp_path: Path, vmm: Vmm) -> None:
    """debugfs names a thread younger than the vCPU: only with its descriptor is it believed."""
    young = [replace(t, key=t.key._replace(starttime=10**12)) for t in BOOTED]
    host = _boot(tmp_path, cpu0=KVM_RUN.format(fd=10), cpu1=FUTEX)
    _debugfs(host, vcpu0=CPU0, vcpu1=IOT)
    found = _identify(host, vmm, young)
    assert _sources(found) == [(0, RoleSource.DEBUGFS), (1, RoleSource.ORDER)]
    assert found[IOT - PID].role is ThreadRole.IOTHREAD


def test_a_worker_cannot_take_a_vcpus_place(tmp_path: Path, vmm: Vmm) -> None:
    """An answer that names a kernel worker is ignored: the boot vCPU is still looked for."""
    worker = replace(_tasks(*"1234567")[6], flags=PF_USER_WORKER)
    host = _boot(tmp_path, cpu0=FUTEX, cpu1=FUTEX)
    answers = QmpAnswers(cpus=(QmpCpu(0, worker.key.tid),))
    found = _identify(host, vmm, [*BOOTED, worker], answers)
    assert _sources(found) == [(0, RoleSource.ORDER), (1, RoleSource.ORDER)]
    assert found[-1].source is RoleSource.FLAGS


def test_a_newborn_thread_is_examined_alone(tmp_path: Path, vmm: Vmm) -> None:
    """The others keep the roles that they have, and count in its own."""
    vmm = replace(vmm, guest=replace(vmm.guest, maximum=3, sockets=3))
    host, cache = (
        _boot(tmp_path, cpu0=KVM_RUN.format(fd=10), cpu1=KVM_RUN.format(fd=11)),
        RoleCache(),
    )
    before = dict(identify(host, vmm, BOOTED, cache))
    renamed = [replace(task, comm="CPU 0/KVM") for task in BOOTED]
    plugged, worker = (
        replace(task, key=task.key._replace(starttime=10**12))
        for task in _tasks(*["qemu"] * 6, "qemu", f"vhost-{MAIN}")[6:]
    )
    worker = replace(worker, flags=PF_USER_WORKER)
    home = tmp_path / "proc" / str(PID)
    (home / "task" / str(plugged.key.tid)).mkdir()
    call = home / "task" / str(plugged.key.tid) / "syscall"
    call.write_text(FUTEX)
    tasks = [*renamed, plugged, worker]
    found = dict(identify(host, vmm, tasks, cache))
    unnamed = Role(ThreadRole.EMULATOR, RoleSource.REST)
    assert found == before | {
        plugged.key: unnamed,
        worker.key: Role(ThreadRole.VHOST, RoleSource.FLAGS),
    }
    (home / "fd" / "12").symlink_to("anon_inode:kvm-vcpu:2")
    call.write_text(KVM_RUN.format(fd=12))
    assert identify(host, vmm, tasks, cache)[plugged.key].vcpu == 2


def test_a_newborn_thread_that_claims_a_vcpu(tmp_path: Path, vmm: Vmm) -> None:
    """It and the vCPU's thread are in conflict, though that one is not examined again."""
    vmm = replace(vmm, guest=replace(vmm.guest, maximum=3, sockets=3))
    host, cache = (
        _boot(tmp_path, cpu0=KVM_RUN.format(fd=10), cpu1=KVM_RUN.format(fd=11)),
        RoleCache(),
    )
    identify(host, vmm, BOOTED, cache)
    late = replace(BOOTED[-1], key=ThreadKey(PID, PID + 6, 10**12))
    (tmp_path / "proc" / str(PID) / "task" / str(late.key.tid)).mkdir()
    call = tmp_path / "proc" / str(PID) / "task" / str(late.key.tid) / "syscall"
    call.write_text(KVM_RUN.format(fd=10))
    found = identify(host, vmm, [*BOOTED, late], cache)
    in_conflict = {task.key.tid for task in (*BOOTED, late) if found[task.key].conflict}
    assert in_conflict == {CPU0, late.key.tid}
