"""Finding VMMs among real processes: who is believed, and why the others are not."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kata_pin.base.errors import VmmError
from kata_pin.base.sandbox import Vmm
from kata_pin.base.steps import finish
from kata_pin.vmm.claims import Shims
from kata_pin.vmm.find import MAX_REFUSALS, Executables, VmmFinder
from kata_pin.vmm.state_files import KataPaths
from tests.bench.node import BenchNode
from tests.bench.standins import StandIns
from tests.support.katalike import KataDirs, KataSandbox, Runtime
from tests.support.qemu import QEMU, Accelerator, Machine
from tests.support.vmmhost import EXECUTABLES, SHIMS, Bystander, live, lookalike

pytestmark = [pytest.mark.qemu, pytest.mark.root]

P1 = f"p{os.getpid()}"
P2 = f"{P1}b"
P3 = f"{P1}c"
P8 = f"{P1}d"
P9 = f"{P1}e"
"""Sandbox ids of this run: other runs on the machine have their own."""

CPUSETS = Path("/sys/fs/cgroup/cpuset")


@pytest.fixture(autouse=True)
def bystander() -> Iterator[Bystander]:
    """A process named and called like the sandbox's QEMU, which none may take for it."""
    with lookalike("-name", f"sandbox-{P1}", "-smp", "2") as process:
        one = Bystander(process.pid)
        yield one
        one.check()


def _sandbox(dirs: KataDirs, name: str = P1, **options: object) -> KataSandbox:
    """Return a cheap sandbox: what is found does not depend on the accelerator."""
    return dataclasses.replace(
        KataSandbox(dirs, name, accelerator=Accelerator.TCG, machine=Machine(boot=1, maximum=2)),
        **options,  # type: ignore[arg-type]
    )


def _find(dirs: KataDirs, name: str = P1, *hints: int, executables: tuple[str, ...] = ()) -> Vmm:
    paths = KataPaths(str(dirs.vc), str(dirs.kata))
    allowed = Executables(vmms=(QEMU, *executables), shims=SHIMS)
    finder = VmmFinder(live(), paths=paths, executables=allowed)
    return finder.find(name, dict.fromkeys(hints, 0))


def _copy_of_python(dirs: KataDirs, name: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a program of that name which runs Python, to put on the allow-list."""
    monkeypatch.setenv("PYTHONHOME", sys.base_prefix)
    return str(shutil.copy(os.path.realpath(sys.executable), dirs.vc / name))


def _forget_files(kata: KataSandbox) -> None:
    kata.persist_path.unlink()
    kata.pidfile.unlink()


@pytest.mark.parametrize("runtime", list(Runtime))
def test_parent_shim_is_a_witness(dirs: KataDirs, runtime: Runtime) -> None:
    """With neither files nor hints, the scan finds QEMU and its shim confirms it."""
    with _sandbox(dirs, runtime=runtime) as kata:
        kata.persist_path.unlink()
        if runtime is Runtime.GO:
            kata.pidfile.unlink()
        vmm = _find(dirs)
        assert vmm.process.pid == kata.pid
        assert vmm.witness == f"its parent, the sandbox's shim (pid {kata.shim.pid})"
        assert (vmm.kind, vmm.kvm, vmm.orphan) == ("qemu", False, False)
        assert (vmm.guest.boot, vmm.guest.maximum) == (1, 2)
        assert vmm.iothreads == kata.machine.iothreads


def test_root_files_are_a_witness(dirs: KataDirs) -> None:
    """The pid file alone, and persist.json alone, confirm a QEMU whose parent says nothing."""
    with _sandbox(dirs, shim_process=False) as kata:
        kata.persist_path.unlink()
        assert _find(dirs).witness == "pid in pid file"
        kata.write_persist(())
        kata.pidfile.unlink()
        assert _find(dirs).witness == "pid in persist.json"


def test_hook_pid_is_a_witness(dirs: KataDirs) -> None:
    """A pid from a hook confirms; the same QEMU found by the scan only is refused."""
    with _sandbox(dirs, shim_process=False) as kata:
        _forget_files(kata)
        assert _find(dirs, P1, kata.pid).witness == "pid from a hook"
        with pytest.raises(
            VmmError, match=rf"pid {kata.pid} \(scan\): no cgroup, parent, file or hook"
        ):
            _find(dirs)


def test_a_hook_that_reports_the_shim(dirs: KataDirs) -> None:
    """As Kata's poststart does: the shim is no other process that claims to be the VMM."""
    with _sandbox(dirs) as kata:
        assert _find(dirs, P1, kata.shim.pid).refused == ()
        (other,) = _find(dirs, P1, os.getpid()).refused
        assert other.startswith(f"pid {os.getpid()} (hook): ")


@pytest.mark.skipif(not CPUSETS.is_dir(), reason="needs the cpuset hierarchy of cgroup v1")
def test_cgroup_is_a_witness(dirs: KataDirs) -> None:
    """A cgroup directory called kata_<sandbox> confirms."""
    name = f"p{os.getpid()}"
    cgroup = CPUSETS / f"kata_{name}"
    cgroup.mkdir()
    try:
        for file in ("cpuset.cpus", "cpuset.mems"):
            (cgroup / file).write_text((CPUSETS / file).read_text())
        with _sandbox(dirs, name, shim_process=False, cgroups=(cgroup,)) as kata:
            _forget_files(kata)
            assert _find(dirs, name).witness == "cgroup holds the sandbox id"
    finally:
        cgroup.rmdir()


def test_files_of_others_are_no_witness(dirs: KataDirs) -> None:
    """A pid file of another uid, a symlink to one, and a symlinked directory prove nothing."""
    with _sandbox(dirs, shim_process=False) as kata:
        kata.persist_path.unlink()
        os.chown(kata.pidfile, 65534, 65534)
        with pytest.raises(VmmError, match="no cgroup, parent, file or hook"):
            _find(dirs)
        os.chown(kata.pidfile, 0, 0)
        moved = kata.pidfile.rename(kata.pidfile.with_name("elsewhere"))
        kata.pidfile.symlink_to(moved)
        with pytest.raises(VmmError, match="no cgroup, parent, file or hook"):
            _find(dirs)
        kata.pidfile.unlink()
        moved.rename(kata.pidfile)
        real = kata.vm_dir.rename(kata.vm_dir.with_name("real"))
        kata.vm_dir.symlink_to(real)
        try:
            with pytest.raises(VmmError, match="no cgroup, parent, file or hook"):
                _find(dirs)
        finally:
            kata.vm_dir.unlink()
            real.rename(kata.vm_dir)
        assert _find(dirs).process.pid == kata.pid


def test_a_lying_command_line_is_refused(dirs: KataDirs, bystander: Bystander) -> None:
    """A process that only says it is the VMM is refused, whoever points at it."""
    with pytest.raises(VmmError, match=r"its executable .* is not on the allow-list"):
        _find(dirs, P1, bystander.pid)


def test_another_file_of_the_same_name_is_refused(
    dirs: KataDirs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a container's own mounts, /usr/bin/qemu-system-x86_64 can be anything."""
    fake = _copy_of_python(dirs, "fake", monkeypatch)
    mounts = f'mount --bind {fake} {QEMU} && exec setpriv --pdeathsig KILL -- "$@"'
    prefix = ("unshare", "-m", "--propagation", "private", "sh", "-c", mounts, "sh")
    with (
        lookalike("-name", f"sandbox-{P1}", executable=QEMU, prefix=prefix) as process,
        pytest.raises(VmmError, match="is not the host's file"),
    ):
        _find(dirs, P1, process.pid)


def test_a_nested_pid_namespace_is_refused(dirs: KataDirs) -> None:
    """Even the real QEMU is refused in a pid namespace of its own, as in a container."""
    argv = [QEMU, "-name", f"sandbox-{P1}", "-S", "-nodefaults", "-nographic", "-M", "none"]
    with subprocess.Popen(["unshare", "-p", "-f", "--kill-child", *argv]) as outer:
        try:
            children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children")
            pid = 0
            while not pid or QEMU not in os.readlink(f"/proc/{pid}/exe"):
                pid = int(children.read_text() or 0)
            with pytest.raises(VmmError, match="its own pid namespace"):
                _find(dirs, P1, pid)
        finally:
            outer.kill()


def test_another_sandbox_is_refused(dirs: KataDirs) -> None:
    """A hint that points at another sandbox's VMM does not stick; the right one is still found."""
    with _sandbox(dirs, P2) as other:
        with pytest.raises(VmmError, match=f"its command line names {P2}"):
            _find(dirs, P1, other.pid)
        with _sandbox(dirs) as kata:
            assert _find(dirs, P1, other.pid).process.pid == kata.pid


def test_stale_hints_are_refused(dirs: KataDirs) -> None:
    """A pid that is gone, and one that Kata's Go shim gave for itself, are refused with reasons."""
    with _sandbox(dirs) as kata:
        gone = kata.pid
        shim = kata.shim.pid
        assert _find(dirs, P1, shim).process.pid == kata.pid
    with pytest.raises(VmmError, match=rf"pid {gone} \(hook\): .*[Nn]o such"):
        _find(dirs, P1, gone)


def test_a_go_shim_is_no_dragonball(dirs: KataDirs, monkeypatch: pytest.MonkeyPatch) -> None:
    """A listed shim with the right -id is no VMM unless it has vCPU threads itself."""
    binary = _copy_of_python(dirs, "containerd-shim-kata-v2", monkeypatch)
    with (
        lookalike("-id", P9, comm="containerd-shim", executable=binary) as process,
        pytest.raises(VmmError, match="runs no VM itself"),
    ):
        _find(dirs, P9, process.pid, executables=(binary,))
    with lookalike("-id", P9, comm="db_vcpu0", executable=binary) as process:
        assert _find(dirs, P9, process.pid, executables=(binary,)).kind == "dragonball"


def test_whose_shims_are_believed() -> None:
    """A process with the right -id counts when it is root's or ours, not another user's."""
    for user, believed in (("0", True), ("65534", False)):
        prefix = ("setpriv", f"--reuid={user}", "--clear-groups")
        with lookalike("-id", P9, prefix=prefix, executable="/usr/bin/python3") as process:
            shims = Shims(live(), SHIMS)
            assert shims.is_shim_of(process.pid, P9) is believed
            assert not shims.is_shim_of(process.pid, P8)


def test_an_orphan_is_found_and_called_one(dirs: KataDirs) -> None:
    """After its shim was killed, QEMU is still found by Kata's files, as an orphan."""
    with _sandbox(dirs) as kata:
        kata.orphan()
        vmm = _find(dirs)
        assert (vmm.process.pid, vmm.orphan) == (kata.pid, True)


def test_a_replaced_executable_is_reported(dirs: KataDirs, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an upgrade of the package the running binary is deleted: accepted, and said so."""
    binary = _copy_of_python(dirs, "qemu-system-old", monkeypatch)
    with lookalike("-name", f"sandbox-{P3}", executable=binary) as process:
        Path(binary).unlink()
        vmm = _find(dirs, P3, process.pid, executables=(binary,))
        assert (vmm.exe, vmm.exe_deleted) == (binary, True)


def test_sandboxes_are_listed_for_adoption(dirs: KataDirs, bystander: Bystander) -> None:
    """The scan lists every sandbox by its VMM, and no process that is none."""
    with _sandbox(dirs, P1) as one, _sandbox(dirs, P2, runtime=Runtime.RS) as two:
        found = finish(VmmFinder(live(), executables=EXECUTABLES).sandboxes())
        assert {P1: one.pid, P2: two.pid}.items() <= found.items()
        assert bystander.pid not in found.values()


def test_what_kata_tells_of_is_found_before_other_claims() -> None:
    """A scan refuses a few claims only, and those that no file of Kata's names come last."""
    with BenchNode() as node, contextlib.closing(StandIns(node)) as stand_ins:
        stand_ins.start(3 * MAX_REFUSALS)
        ids = stand_ins.announce(MAX_REFUSALS, MAX_REFUSALS + 10)
        paths = KataPaths(str(node.dirs.vc), str(node.dirs.kata))
        allowed = Executables(vmms=(str(stand_ins.executable),), shims=SHIMS)
        assert finish(
            VmmFinder(live(), paths=paths, executables=allowed).sandboxes()
        ).keys() == set(ids)
