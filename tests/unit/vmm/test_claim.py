"""Which processes VmmFinder believes, by recordings of real Kata and by files on disk."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from kata_pin.errors import NotRead, TaskGone, VmmError
from kata_pin.host.cgroup_owner import why_not_roots
from kata_pin.host.root import HostRoot
from kata_pin.model.thread import Process, ProcessKey
from kata_pin.vmm.find import VmmFinder
from kata_pin.vmm.host_access import HostAccess
from kata_pin.vmm.state_files import KataPaths, read_pids, virtiofsd_pid
from kata_pin.wire.proc import Cgroups, ExeFile, parse_cgroup
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
        one,
        read,
        lambda _: argv,
        lambda _: (path, False),
        lambda _: file,
        cgroups,
        partial(why_not_roots, root),
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
    assert virtiofsd_pid(root, KataPaths(), "p1") == 1778


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


@pytest.mark.parametrize("kind", ["link", "linked folder", "fifo", "folder", "long"])
def test_what_is_no_file_of_ours(vc: Path, tmp_path: Path, kind: str) -> None:
    """Symlinks at any depth below the base, FIFOs, folders and long files read as absent."""
    pid = vc / "vm/p1/pid"
    match kind:
        case "link":
            (vc / "real").write_text("1780")
            pid.symlink_to(vc / "real")
        case "linked folder":
            (vc / "vm/p1").rename(vc / "elsewhere")
            (vc / "elsewhere/pid").write_text("1780")
            (vc / "vm/p1").symlink_to(vc / "elsewhere")
        case "fifo":
            os.mkfifo(pid)
        case "folder":
            pid.mkdir()
        case "long":
            pid.write_text("0" * 40)
    assert read_pids(HostRoot(str(tmp_path)), KataPaths(), "p1") == {}


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_file_of_another_user(vc: Path, tmp_path: Path) -> None:
    """Somebody else's file is not believed, though we can read it."""
    (vc / "vm/p1/pid").write_text("1780")
    assert read_pids(HostRoot(str(tmp_path)), KataPaths(), "p1") == {1780: "pid file"}
    os.chown(vc / "vm/p1/pid", 65534, 65534)
    assert read_pids(HostRoot(str(tmp_path)), KataPaths(), "p1") == {}
