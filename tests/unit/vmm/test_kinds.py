"""Every row of vmm/kinds.py: its executables, command line, thread names, and workers.

A new row needs an entry in SAMPLES; every test here then runs over it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import pytest
from msgspec.structs import replace

from kata_pin.base.cpuset import EMPTY
from kata_pin.base.errors import NotRead
from kata_pin.base.sandbox import PF_KTHREAD, PF_USER_WORKER, Role, Task, Vmm
from kata_pin.base.threads import ThreadKey
from kata_pin.base.values import RoleSource, ThreadRole
from kata_pin.linux.files import HostRoot
from kata_pin.linux.proc import parse_cmdline
from kata_pin.peers.vmm_cmdline import parse_shim
from kata_pin.vmm import kinds
from kata_pin.vmm.checks import DEFAULT_EXECUTABLES, VmmAllowlist
from kata_pin.vmm.claims import Shims
from kata_pin.vmm.find import VmmFinder, find_helpers
from kata_pin.vmm.kinds import (
    BUILTIN,
    GROUP,
    NamedRole,
    ThreadName,
    VmmKind,
    kind_named,
    vcpu_names,
)
from kata_pin.vmm.role_cache import RoleCache
from tests.support import recordings
from tests.support.at_once import identify
from tests.support.hosttree import FakeHost
from tests.support.vmmhost import facts

PID, SHIM = 100, 90
KATA_SHIM = "/usr/bin/containerd-shim-kata-v2"
SANDBOX = "0123456789abcdef" * 4


def _vcpu(index: int) -> NamedRole:
    return NamedRole(ThreadRole.VCPU, vcpu=index)


def _iothread(name: str) -> NamedRole:
    return NamedRole(ThreadRole.IOTHREAD, iothread=name)


@dataclass(frozen=True)
class Sample:
    """One VMM as Kata starts it: `threads` after the main one, `names` with what they say."""

    exe: str
    argv: Sequence[str]
    main: str
    threads: Sequence[str]
    names: Mapping[str, NamedRole | None] = field(default_factory=dict)


SAMPLES = {
    "qemu": Sample(
        "/usr/bin/qemu-system-x86_64",
        ["qemu-system-x86_64", "-name", f"sandbox-{SANDBOX}", "-accel", "kvm", "-smp", "2"],
        "qemu-system-x86",
        ("CPU 0/KVM", "CPU 1/KVM", "IO mon_iothread"),
        {
            "CPU 15/TCG": _vcpu(15),
            "CPU 1/KVM2": None,
            "CPU x/KVM": None,
            "CPU 99999/KVM": None,
            "ALL CPUs/TCG": None,
            "qemu-system-x86": None,
            "vcpu0": None,
            "IO mon_iothread": NamedRole(ThreadRole.EMULATOR),
            "IO iot0": _iothread("iot0"),
            "IO other": _iothread(""),
        },
    ),
    "cloud-hypervisor": Sample(
        "/opt/kata/bin/cloud-hypervisor",
        ["cloud-hypervisor", "--api-socket", f"/run/vc/vm/{SANDBOX}/clh-api.sock"],
        "cloud-hyperviso",
        ("vmm", "http-server", "vmm_signal_hand", "vcpu0", "vcpu1", "_disk0_q0", "__rng"),
        {
            "vcpu12": _vcpu(12),
            "vcpu12a": None,
            "CPU 0/KVM": None,
            "vmm": None,
            "_disk0_q0": _iothread("_disk0_q0"),
            "_disk12_q3": _iothread("_disk12_q3"),
            "clh_drive_3_q0": _iothread("clh_drive_3_q0"),
            "clh_drive_123_q": _iothread("clh_drive_123_q"),  # cut by the kernel
            "__rng": None,
            "_vsock1": None,
            "__balloon": None,
            "_disk0": None,
        },
    ),
    "firecracker": Sample(
        "/opt/kata/bin/firecracker",
        [
            *("firecracker", "--api-sock"),
            f"/run/vc/firecracker/{SANDBOX[:32]}/root/run/firecracker.socket",
            *("--config-file", f"/run/vc/firecracker/{SANDBOX[:32]}/root/fcConfig.json"),
        ],
        "firecracker",
        ("fc_api", "fc_vcpu 0", "fc_vcpu 1"),
        {"fc_vcpu 3": _vcpu(3), "fc_vcpu3": _vcpu(3), "fc_vmm": None},
    ),
    "openvmm": Sample(
        "/opt/kata/bin/openvmm",
        ["/opt/kata/bin/openvmm", "--ttrpc", f"/run/kata/{SANDBOX}/openvmm.sock"],
        "openvmm",
        ("io-uring", "vp-0", "vp-1"),
        {"vp-12": _vcpu(12), "vp-": None, "vp-1x": None, "io-uring": None},
    ),
    "dragonball": Sample(
        "/opt/kata/runtime-rs/bin/containerd-shim-kata-v2",
        ["containerd-shim-kata-v2", "-namespace", "k8s.io", "-id", SANDBOX],
        "containerd-shim",
        ("tokio-runtime-w", "vmm_master", "db_vcpu0", "db_vcpu1", "blk_iothread_q0"),
        {
            "db_vcpu2": _vcpu(2),
            "blk_iothread_q0": _iothread("blk_iothread_q0"),
            "tokio-runtime-w": None,
        },
    ),
}

each = pytest.mark.parametrize("kind", BUILTIN, ids=lambda kind: kind.name)


@dataclass(frozen=True)
class Running:
    """A sample as processes of a written /proc."""

    vmm: Vmm
    host: FakeHost
    tasks: Sequence[Task]

    def tid(self, comm: str) -> int:
        """Return the thread of that name."""
        return next(task.key.tid for task in self.tasks if task.comm == comm)

    def roles(self, *more: Task) -> Mapping[ThreadKey, Role]:
        """Return the roles of its threads and `more`."""
        return identify(facts(self.host.root), self.vmm, [*self.tasks, *more], RoleCache())


def _run(kind: VmmKind, host: FakeHost) -> Running:
    """Write the sample's processes and threads, and accept it as the daemon does."""
    sample = SAMPLES[kind.name]
    names = (sample.main, *sample.threads)
    parent = 1 if kind.in_shim else SHIM
    host.process(PID, comm=sample.main, ppid=parent, cgroup=f"0::/kata_{SANDBOX}", starttime=50)
    _be(host, PID, sample.exe, sample.argv)
    for number, comm in enumerate(names):
        host.thread(PID, PID + number, comm=comm, starttime=50)
        (host.folder / f"proc/{PID}/task/{PID + number}/comm").write_text(f"{comm}\n")
    tasks = [
        Task(ThreadKey(PID, PID + number, 50), comm, 0, EMPTY, EMPTY, "/")
        for number, comm in enumerate(names)
    ]
    return Running(VmmFinder(facts(host.root)).find(SANDBOX), host, tasks)


def _shims(host: FakeHost) -> Shims:
    return Shims(facts(host.root))


def _be(host: FakeHost, pid: int, exe: str, argv: Sequence[str]) -> None:
    """Give a written process an executable, arguments and root as its owner."""
    home = host.folder / "proc" / str(pid)
    (home / "exe").unlink()
    (home / "exe").symlink_to(exe)
    (home / "cmdline").write_bytes("".join(f"{arg}\0" for arg in argv).encode())
    (home / "status").write_text(f"Tgid:\t{pid}\nUid:\t0\t0\t0\t0\n")


@pytest.fixture
def host(tmp_path: Path) -> FakeHost:
    """A host without processes."""
    return FakeHost(tmp_path)


@each
def test_is_recognised_and_accepted(kind: VmmKind, host: FakeHost) -> None:
    """Its executable is on the default allow-list and its command line names the sandbox."""
    running = _run(kind, host)
    assert (running.vmm.kind, running.vmm.process.pid) == (kind.name, PID)
    assert running.vmm.witness == "cgroup holds the sandbox id"
    assert kind_named(running.vmm.kind) is kind


@each
def test_is_documented_and_run(kind: VmmKind) -> None:
    """In what is known of each VMM, and, but for QEMU, as a stand-in."""
    pages = ("docs/verification.md", "tests/integration/test_other_vmms.py")
    known, run = (Path(__file__).parents[3] / page for page in pages)
    assert f"\n| {kind.name} | " in known.read_text().lower()
    assert kind.name == "qemu" or f'\n    "{kind.name}": _' in run.read_text()


@each
def test_another_sandbox_is_not_named(kind: VmmKind) -> None:
    """The command line names one sandbox only, and no line of another VMM's form."""
    assert kind.read(SAMPLES[kind.name].argv).names(SANDBOX)
    assert not kind.read(SAMPLES[kind.name].argv).names("f" * 64)
    assert kind.read(["x", "--unknown"]).sandbox_id == ""


@each
def test_names_of_threads(kind: VmmKind) -> None:
    """Its own names only, whole, and without numbers that no vCPU has."""
    for comm, said in SAMPLES[kind.name].names.items():
        assert kind.role_of(comm, ("iot0",) if comm.startswith("IO") else ()) == said, comm


@each
def test_roles_by_names(kind: VmmKind, host: FakeHost) -> None:
    """Two vCPUs are known by name, by the broker too; what has no telling name is an emulator's."""
    running = _run(kind, host)
    roles = running.roles()
    vcpus = {r.vcpu: r.source for r in roles.values() if r.role is ThreadRole.VCPU}
    assert vcpus == {0: RoleSource.NAME, 1: RoleSource.NAME}
    assert roles[running.tasks[0].key] == Role(ThreadRole.EMULATOR, RoleSource.REST)
    assert not any(role.conflict for role in roles.values())
    names = [re.compile(pattern) for pattern in vcpu_names([kind])]
    named = {task.key for task in running.tasks if any(one.fullmatch(task.comm) for one in names)}
    assert named == {key for key, role in roles.items() if role.role is ThreadRole.VCPU}


@each
def test_vhost_workers_of_any_thread(kind: VmmKind, host: FakeHost) -> None:
    """Linux 6.4 and later: threads of the VMM, named after whichever thread created them."""
    running = _run(kind, host)
    owners = [task.key.tid for task in running.tasks]
    workers = [_worker(PID + 50 + n, f"vhost-{tid}") for n, tid in enumerate(owners)]
    roles = running.roles(*workers)
    assert {roles[task.key].role for task in workers} == {ThreadRole.VHOST}
    assert {roles[task.key].source for task in workers} == {RoleSource.FLAGS}


@each
def test_vhost_kernel_threads_of_any_thread(kind: VmmKind, host: FakeHost) -> None:
    """Before Linux 6.4: kernel threads, named after whichever thread created them."""
    running = _run(kind, host)
    for number, task in enumerate(running.tasks):
        host.process(200 + number, comm=f"vhost-{task.key.tid}", ppid=2, flags=PF_KTHREAD)
    host.process(300, comm=f"vhost-{PID + 99}", ppid=2, flags=PF_KTHREAD)
    threads = [task.key for task in running.tasks]
    helpers = find_helpers(facts(host.root), running.vmm, SANDBOX, threads, _shims(host))
    found = {h.process.pid for h in helpers if h.role is ThreadRole.VHOST}
    assert found == {200 + number for number in range(len(threads))}


@each
def test_the_shim_is_a_helper_of_those_beside_it(kind: VmmKind, host: FakeHost) -> None:
    """A shim that starts a VMM is overhead; one that is the VMM is not its own helper."""
    running = _run(kind, host)
    if not kind.in_shim:
        host.process(SHIM, comm="containerd-shim")
        _be(
            host,
            SHIM,
            "/usr/bin/containerd-shim-kata-v2",
            ["containerd-shim-kata-v2", "-id", SANDBOX],
        )
    helpers = find_helpers(facts(host.root), running.vmm, SANDBOX, (), _shims(host))
    assert [h.process.pid for h in helpers] == ([] if kind.in_shim else [SHIM])


def test_a_file_server_of_the_shim_is_known_by_its_parent(host: FakeHost) -> None:
    """Nothing that takes long is read of it; a child of who is no shim has to name the sandbox."""
    running = _run(kinds.QEMU, host)
    host.process(SHIM, comm="containerd-shim")
    _be(host, SHIM, KATA_SHIM, ["containerd-shim-kata-v2", "-id", SANDBOX])
    host.process(SHIM + 1, comm="virtiofsd", ppid=SHIM)
    _be(host, SHIM + 1, "/usr/libexec/virtiofsd", [])
    access = facts(host.root)

    def cmdline(pid: int) -> Sequence[str]:
        if pid == SHIM + 1:
            raise NotRead(f"command line of process {pid}", hung=True)
        return parse_cmdline((host.folder / f"proc/{pid}/cmdline").read_bytes())

    access = replace(access, cmdline=cmdline)

    def servers() -> list[int]:
        found = find_helpers(access, running.vmm, SANDBOX, (), Shims(access))
        return [one.process.pid for one in found if one.role is ThreadRole.VIRTIOFSD]

    assert servers() == [SHIM + 1]
    _be(host, SHIM, "/usr/bin/other", ["containerd-shim-kata-v2", "-id", SANDBOX])
    assert servers() == []


def test_a_shim_is_read_once(host: FakeHost) -> None:
    """Every pass asks whose shim it is; a process that is none yet is asked again."""
    running = _run(kinds.QEMU, host)
    host.process(SHIM, comm="containerd-shim")
    reads: list[int] = []
    access = facts(host.root)

    def cmdline(pid: int) -> Sequence[str]:
        reads.append(pid)
        return parse_cmdline((host.folder / f"proc/{pid}/cmdline").read_bytes())

    access = replace(access, cmdline=cmdline)
    shims = Shims(access)
    found = [find_helpers(access, running.vmm, SANDBOX, (), shims) for _ in range(2)]
    _be(host, SHIM, KATA_SHIM, ["containerd-shim-kata-v2", "-id", SANDBOX])
    reads.clear()
    found += [find_helpers(access, running.vmm, SANDBOX, (), shims) for _ in range(3)]
    assert [len(helpers) for helpers in found] == [0, 0, 1, 1, 1]
    assert reads == [SHIM]


@each
def test_debugfs_under_the_name_of_any_thread(kind: VmmKind, host: FakeHost) -> None:
    """KVM names the folder after the thread that made the VM, which need not be the main one."""
    running = _run(kind, host)
    maker, vcpu = running.tasks[1].key.tid, running.tasks[-1].key.tid
    folder = Path(host.root.debug("kvm", f"{maker}-9", "vcpu7"))
    folder.mkdir(parents=True)
    (folder / "pid").write_text(f"{vcpu}\n")
    tasks = [Task(task.key, "x", 0, EMPTY, EMPTY, "/") for task in running.tasks]
    cache = RoleCache()
    roles = identify(facts(host.root), running.vmm, tasks, cache, machine="aarch64")
    assert {k.tid for k, r in roles.items() if r.source is RoleSource.DEBUGFS} == {vcpu}


def test_apic_ids_of_a_topology_that_is_not_shown(host: FakeHost) -> None:
    """cloud-hypervisor's KVM ids have gaps that its command line does not explain: names count."""
    running = _run(kinds.CLOUD_HYPERVISOR, host)
    folder = Path(host.root.debug("kvm", f"{running.tid('vmm')}-9", "vcpu4"))
    folder.mkdir(parents=True)
    (folder / "pid").write_text(f"{running.tid('vcpu1')}\n")
    found = identify(facts(host.root), running.vmm, running.tasks, RoleCache(), machine="x86_64")
    role = next(r for key, r in found.items() if key.tid == running.tid("vcpu1"))
    assert role == Role(ThreadRole.VCPU, RoleSource.DEBUGFS, vcpu=1, apic_id=4)


def _worker(tid: int, comm: str) -> Task:
    return Task(ThreadKey(PID, tid, 60), comm, PF_USER_WORKER, EMPTY, EMPTY, "/")


# ---- the allow-list ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/usr/bin/qemu-system-x86_64", "qemu"),
        ("/opt/kata/bin/qemu-system-x86_64-snp-experimental", "qemu"),
        ("/usr/libexec/qemu-kvm", "qemu"),
        ("/opt/kata/bin/cloud-hypervisor", "cloud-hypervisor"),
        ("/opt/kata/bin/firecracker", "firecracker"),
        ("/opt/kata/runtime-rs/bin/containerd-shim-kata-v2", "dragonball"),
        ("/tmp/qemu-system-x86_64", None),
        ("/usr/bin/../../tmp/qemu-system-x86_64", None),
        ("/usr/bin/x/qemu-system-x86_64", None),
        ("/usr/bin/python3", None),
        ("", None),
    ],
)
def test_allow_list(path: str, name: str | None) -> None:
    """Exact directories; patterns in the file's name only."""
    kind = VmmAllowlist(HostRoot(), DEFAULT_EXECUTABLES).kind_of(path)
    assert (kind.name if kind else None) == name


def test_an_executable_that_no_row_fits_is_a_qemu() -> None:
    """An administrator may allow a QEMU under another name."""
    allowed = VmmAllowlist(HostRoot(), [*DEFAULT_EXECUTABLES, "/srv/vmm"])
    assert allowed.kind_of("/srv/vmm") is kinds.QEMU


# ---- recordings of QEMU ------------------------------------------------------------------


def test_a_name_shared_by_two_iothreads_names_neither() -> None:
    """The kernel cuts names: two long ids may look the same."""
    declared = ("indep_iothread_0", "indep_iothread_1")
    assert kinds.QEMU.role_of("IO indep_iothre", declared) == NamedRole(ThreadRole.IOTHREAD)


@pytest.mark.parametrize("path", recordings.files("**/qemu-threads.txt"), ids=recordings.label)
def test_recorded_threads(path: Path) -> None:
    """Kata names no thread by default; with its debug switch vCPUs, and never its iothread."""
    threads = recordings.threads(path)
    said = [kinds.QEMU.role_of(one.comm, ("iothread-1122876e2a9e5c87",)) for one in threads]
    if "debug-and-extra-monitor" in str(path):
        vcpus = [one.vcpu for one in said if one is not None and one.role is ThreadRole.VCPU]
        assert vcpus == [0, 1, 15, 14, 13, 12]
        assert not any(one is not None and one.role is ThreadRole.IOTHREAD for one in said)
    else:
        assert said == [None] * len(threads)


# ---- rows of other packages --------------------------------------------------------------

OTHER = VmmKind(
    "othervmm",
    ("othervmm",),
    parse_shim,
    [ThreadName(re.compile("o_vcpu([0-9]+)"), ThreadRole.VCPU)],
)


@pytest.fixture
def entry_points(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Packages with a row each: one that is good, one that is missing, one with a name of ours."""
    asked: list[str] = []
    points = metadata.EntryPoints(
        (
            metadata.EntryPoint("othervmm", f"{__name__}:OTHER", GROUP),
            metadata.EntryPoint("broken", "no.such.module:ROW", GROUP),
            metadata.EntryPoint("ours", "kata_pin.vmm.kinds:QEMU", GROUP),
        )
    )

    def found(*, group: str) -> metadata.EntryPoints:
        asked.append(group)
        return points

    monkeypatch.setattr(metadata, "entry_points", found)
    kinds._third.cache_clear()
    yield asked
    kinds._third.cache_clear()


def test_a_row_by_entry_point(entry_points: list[str], caplog: pytest.LogCaptureFixture) -> None:
    """A configured executable of an unknown name loads them; a useless one is logged, no more."""
    allowed = VmmAllowlist(HostRoot(), [*DEFAULT_EXECUTABLES, "/opt/x/othervmm"])
    assert allowed.kind_of("/opt/x/othervmm") is OTHER
    assert kind_named("othervmm") is OTHER
    assert entry_points == [GROUP]
    assert "cannot load VMM kind broken" in caplog.text
    assert "kata-pin has a VMM qemu itself" in caplog.text
    assert caplog.text.count("cannot load") == 2


def test_known_executables_load_no_row(entry_points: list[str]) -> None:
    """Looking for entry points costs time, so ordinary nodes do not."""
    VmmAllowlist(HostRoot(), [*DEFAULT_EXECUTABLES, "/srv/qemu-system-x86_64"])
    assert entry_points == []


def test_nothing_else_knows_a_vmm_by_name() -> None:
    """What depends on the VMM is asked of its row."""
    package = Path(kinds.__file__).parents[1]
    names = {kind.name for kind in BUILTIN}
    strings = {
        str(path.relative_to(package)): node.value
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and node.value in names
    }
    assert set(strings) == {"vmm/kinds.py"}
