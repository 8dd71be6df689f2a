"""Which processes VmmFinder believes, by recordings of real Kata and by files on disk."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import pytest
from msgspec.structs import replace

from kata_pin.base.errors import NotRead, TaskGone, VmmError
from kata_pin.base.sandbox import Process, ProcessKey
from kata_pin.base.steps import finish
from kata_pin.base.values import KataRuntime
from kata_pin.linux.files import HostRoot
from kata_pin.linux.proc import Cgroups, ExeFile, parse_cgroup
from kata_pin.linux.process import ProcessIndex
from kata_pin.rights.calls import Calls, File
from kata_pin.vmm.claims import Accepted, Strength
from kata_pin.vmm.find import MAX_REFUSALS, VmmFinder
from kata_pin.vmm.state_files import HostAccess, KataPaths, digest, read_pids
from tests.support import recordings


class _One:
    """A process table of one VMM below init."""

    def __init__(self, pid: int) -> None:
        self.process = Process(ProcessKey(pid, 1), 1, "qemu-system-x86", 0)

    def get(self, pid: int) -> Process | None:
        return self.process if pid == self.process.pid else None

    def all(self) -> Sequence[Process]:
        return [self.process]

    def children(self, ppid: int) -> Sequence[Process]:
        return [self.process] if ppid == self.process.ppid else []

    @property
    def kernel_workers(self) -> Mapping[int, Sequence[Process]]:
        return {}


def _facts(root: HostRoot, argv: list[str], cgroup: bytes, exe: str = "") -> HostAccess:
    """Return a host whose only process is the VMM with this command line and cgroup."""
    one = _One(1780)

    def read(pid: int) -> Process:
        if pid != one.process.pid:
            raise TaskGone("read", f"process {pid}")
        return one.process

    def cgroups(pid: int) -> Cgroups:
        read(pid)
        return parse_cgroup(cgroup)

    path = exe or argv[0]
    file = ExeFile(path, deleted=False, device=1, inode=1, uid=0, mode=0o100755)
    return HostAccess(
        root,
        cast("ProcessIndex", one),
        read,
        lambda _: argv,
        lambda _: (path, False),
        lambda pids: [path for _ in pids],
        lambda _: file,
        cgroups,
    )


@pytest.mark.parametrize("path", recordings.files("**/qemu-cmdline.txt"), ids=recordings.label)
def test_recorded_command_lines(path: Path, tmp_path: Path) -> None:
    """Every recorded QEMU names its sandbox and machine, and a matching cgroup confirms it."""
    argv = recordings.argv(path)
    name = argv[argv.index("-name") + 1].split(",")[0].removeprefix("sandbox-")
    host = _facts(HostRoot(str(tmp_path)), argv, f"0::/katalab/kata_{name}\n".encode())
    vmm = VmmFinder(host).find(name)
    assert (vmm.kind, vmm.witness) == ("qemu", "cgroup holds the sandbox id")
    assert vmm.guest.boot >= 1
    assert len(vmm.iothreads) == 1
    rust = "kata-4.1" in path.parts
    assert vmm.runtime is (KataRuntime.RUST if rust else KataRuntime.GO)
    with pytest.raises(VmmError, match="no VMM found for sandbox other"):
        VmmFinder(host).find("other", {1780: 0})


@pytest.mark.parametrize(
    "cgroup", ["/", "/kata_p10", "/kubepods/p1x/kata_p12", "/system.slice/ssh.service"]
)
def test_cgroups_that_do_not_confirm(cgroup: str, tmp_path: Path) -> None:
    """A cgroup of another sandbox, whatever it shares with the id, is no witness."""
    argv = ["/usr/bin/qemu-system-x86_64", "-name", "sandbox-p1"]
    host = _facts(HostRoot(str(tmp_path)), argv, f"0::{cgroup}\n".encode())
    with pytest.raises(VmmError, match="no cgroup, parent, file or hook confirms it"):
        VmmFinder(host).find("p1")


@pytest.mark.parametrize(
    ("exe", "hung", "claimed"),
    [
        pytest.param("/pause", False, False, id="not read: another runtime's process"),
        pytest.param("/usr/bin/qemu-system-x86_64", False, True, id="not read: it may be the VMM"),
        pytest.param("/pause", True, True, id="its memory is locked"),
    ],
)
def test_what_cannot_be_read_may_be_a_claim(
    exe: str, hung: bool, claimed: bool, tmp_path: Path
) -> None:
    """A pod of another runtime is not taken for Kata's because nobody has read its process yet."""

    def unread(pid: int) -> Sequence[str]:
        raise NotRead(f"command line of process {pid}", hung=hung)

    host = replace(_facts(HostRoot(str(tmp_path)), [], b"0::/\n", exe), cmdline=unread)
    assert VmmFinder(host).is_claimed("p1", {1780: 0}) is claimed


# ---- Kata's files ------------------------------------------------------------------------


@pytest.fixture
def vc(tmp_path: Path) -> Path:
    """/run/vc of a small host."""
    for name in ("run/vc/vm/p1", "run/vc/sbs/p1", "run/kata/p1"):
        (tmp_path / name).mkdir(parents=True)
    return tmp_path / "run/vc"


def test_pids_of_both_runtimes(vc: Path, tmp_path: Path) -> None:
    """The pid file, persist.json and state.json are all read; duplicates count once."""
    (vc / "vm/p1/pid").write_text("1780\n")
    state = {"HypervisorState": {"Pid": 1780, "VirtiofsDaemonPid": 1778}}
    (vc / "sbs/p1/persist.json").write_text(json.dumps(state))
    rs = {"hypervisor": {"id": "p1", "pid": 99}}
    (tmp_path / "run/kata/p1/state.json").write_text(json.dumps(rs))
    root = HostRoot(str(tmp_path))
    assert read_pids(root, KataPaths(), "p1") == {1780: "pid file", 99: "state.json"}
    assert digest(root, KataPaths(), "p1").virtiofsd_pid == 1778


def test_a_vm_that_waits_in_katas_cache_is_looked_for_where_a_vm_is_missing(
    vc: Path, tmp_path: Path
) -> None:
    """Each look reads the state of sandboxes without a VMM, however many have theirs."""

    class Noted(Calls):
        def file(self, base: str, parts: Sequence[str], limit: int) -> File:
            read.update(part for part in parts if part in {"p1", "p2"})
            return super().file(base, parts, limit)

    read: set[str] = set()
    (vc / "sbs/p2").mkdir()
    argv = ["/usr/bin/qemu-system-x86_64", "-name", "sandbox-0a1b2c3d-0000-4000-8000-000000000000"]
    finder = VmmFinder(_facts(HostRoot(str(tmp_path), calls=Noted()), argv, b"0::/other\n"))
    assert finish(finder.sandboxes({"p1": ProcessKey(7, 7)})) == {}
    assert read == {"p2"}
    finish(finder.sandboxes())
    assert read == {"p1", "p2"}


@pytest.mark.parametrize(
    "text",
    ["", "-1", "0x10", "17 80", "1780\n\n", "9" * 400, "1780\0"],
    ids=["empty", "negative", "hex", "two", "newlines", "long", "nul"],
)
def test_damaged_pid_files(vc: Path, tmp_path: Path, text: str) -> None:
    """A pid file that is not one number says nothing."""
    (vc / "vm/p1/pid").write_text(text)
    (vc / "sbs/p1/persist.json").write_text('{"HypervisorState": {"Pid": 17')
    assert read_pids(HostRoot(str(tmp_path)), KataPaths(), "p1") == {}


@pytest.mark.parametrize("name", ["..", "../p1", "p1/../p1", "", "a" * 200])
def test_ids_that_are_paths(vc: Path, tmp_path: Path, name: str) -> None:
    """An id that could lead elsewhere is not looked up at all."""
    (vc / "vm/p1/pid").write_text("1780")
    assert read_pids(HostRoot(str(tmp_path)), KataPaths(), name) == {}


# ---- what changes during the check --------------------------------------------------------

QEMU = "/usr/bin/qemu-system-x86_64"


def _qemu(folder: Path) -> HostAccess:
    """Return a host whose QEMU is accepted: it stays as it is."""
    host = _facts(HostRoot(str(folder)), [QEMU, "-name", "sandbox-p1"], b"0::/kata_p1\n")
    assert VmmFinder(host).find("p1").process.pid == 1780
    return host


@pytest.mark.parametrize(("path", "deleted"), [(f"{QEMU}-spice", False), (QEMU, True)])
def test_an_executable_that_changes_during_the_check(
    tmp_path: Path, path: str, deleted: bool
) -> None:
    """Between the look at its name and the look at its file it executed something else."""
    file = ExeFile(path, deleted=deleted, device=1, inode=1, uid=0, mode=0o100755)
    host = replace(_qemu(tmp_path), exe_file=lambda _: file)
    with pytest.raises(VmmError, match="its executable changed during the check"):
        VmmFinder(host).find("p1")


def test_a_pid_that_is_another_processs_after_the_check(tmp_path: Path) -> None:
    """It ended after its executable was looked at, and its number was given out again."""
    host = _qemu(tmp_path)
    before = host.read_process(1780)
    now = [before]

    def then_ends(pid: int) -> ExeFile:
        now[0] = replace(before, key=ProcessKey(pid, before.key.starttime + 1))
        return host.exe_file(pid)

    ending = replace(host, exe_file=then_ends, read_process=lambda _: now[0])
    with pytest.raises(VmmError, match="it exited during the check"):
        VmmFinder(ending).find("p1")


@pytest.mark.parametrize(
    ("strength", "kept"), [(Strength.CGROUP, True), (Strength.FILE, False), (0, False)]
)
def test_a_vmm_that_less_confirms_is_compared_with_others(
    tmp_path: Path, strength: int, *, kept: bool
) -> None:
    """A new daemon keeps the former one's VMM without a search only if as much confirms it."""
    host = _qemu(tmp_path)
    before = Accepted(host.read_process(1780).key, strength)
    assert (VmmFinder(host, before=lambda _: before).confirm("p1") is not None) is kept


def _running(host: HostAccess, path: Sequence[str]) -> HostAccess:
    """Return the host with the executable that `path` has at the time of each look."""
    return replace(
        host, exe=lambda _: (path[0], False), exe_paths=lambda pids: [path[0] for _ in pids]
    )


def test_a_child_that_was_seen_before_its_exec_is_looked_at_again(tmp_path: Path) -> None:
    """exec may keep the name: while a process is young, that it claims nothing is not kept."""
    born = int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))
    argv, cgroup = [QEMU, "-name", "sandbox-p1"], b"0::/kata_p1\n"
    path = ["/usr/bin/containerd-shim-kata-v2"]
    host = _facts(HostRoot(str(tmp_path)), argv, cgroup)
    child = replace(host.read_process(1780), key=ProcessKey(1780, born))
    host.processes.process = child  # type: ignore[attr-defined]
    finder = VmmFinder(_running(host, path))
    assert finish(finder.sandboxes()) == {}
    path[0] = QEMU
    assert finish(finder.sandboxes()) == {"p1": 1780}


def test_a_process_that_executes_a_vmm_late_is_looked_at_again(tmp_path: Path) -> None:
    """However old it is: its name is another one then."""
    host = _facts(HostRoot(str(tmp_path)), [QEMU, "-name", "sandbox-p1"], b"0::/kata_p1\n")
    path, later = ["/bin/sh"], host.read_process(1780)
    host.processes.process = replace(later, comm="sh")  # type: ignore[attr-defined]
    finder = VmmFinder(_running(host, path))
    assert finish(finder.sandboxes()) == {}
    host.processes.process, path[0] = later, QEMU  # type: ignore[attr-defined]
    assert finish(finder.sandboxes()) == {"p1": 1780}


@pytest.mark.parametrize("steps", range(4))
def test_a_look_that_is_interrupted_drops_no_claim_of_another(tmp_path: Path, steps: int) -> None:
    """Meanwhile a process may execute a VMM, and the other look finds that."""
    host = _facts(HostRoot(str(tmp_path)), [QEMU, "-name", "sandbox-p1"], b"0::/kata_p1\n")
    runs = {1000: "/bin/sh", 1780: "/bin/sh"}

    def every() -> Sequence[Process]:
        return [Process(ProcessKey(pid, 1), 1, path[-15:], 0) for pid, path in runs.items()]

    cast("_One", host.processes).all = every  # type: ignore[method-assign]
    claims = VmmFinder(replace(host, exe_paths=lambda pids: [runs[one] for one in pids])).claims
    look = claims.look()
    for _ in range(steps):
        next(look)
    runs[1780] = QEMU
    finish(claims.look())
    assert [one.process.pid for one in claims.of("p1")] == [1780]
    finish(look)
    assert [one.process.pid for one in claims.of("p1")] == [1780]


def test_new_strangers_keep_no_vmm_waiting(tmp_path: Path) -> None:
    """A scan refuses a few claims only: those that come anew each time have their turn last."""
    vmm = Process(ProcessKey(5000, 100), 1, "qemu-system-x86", 0)
    strangers: list[Process] = []
    host = _facts(HostRoot(str(tmp_path)), [QEMU], b"0::/kata_p1\n")
    table = cast("_One", host.processes)

    def process(pid: int) -> Process:
        return next(one for one in (*strangers, vmm) if one.pid == pid)

    def named(pid: int) -> list[str]:
        return [QEMU, "-name", f"sandbox-p{1 if pid == vmm.pid else pid}"]

    table.all = lambda: [*strangers, vmm]  # type: ignore[method-assign]
    cgroup = parse_cgroup(b"0::/kata_p1\n")
    finder = VmmFinder(replace(host, read_process=process, cmdline=named, cgroups=lambda _: cgroup))
    found = []
    for scan in range(3):
        born = 1000 * (scan + 1)
        strangers[:] = [
            Process(ProcessKey(born + n, born), 1, "qemu-system-x86", 0)
            for n in range(2 * MAX_REFUSALS)
        ]
        found.append(finish(finder.sandboxes()))
    assert found == [{"p1": 5000}] * 3
