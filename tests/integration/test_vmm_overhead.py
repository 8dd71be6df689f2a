"""Helpers of a real sandbox: virtiofsd, KVM's kernel threads, the shim; and who is none of them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kata_pin.base.threads import ThreadKey
from kata_pin.base.values import RoleSource, ThreadRole
from kata_pin.vmm.claims import Shims
from kata_pin.vmm.find import VmmFinder, find_helpers
from kata_pin.vmm.state_files import KataPaths
from tests.support.katalike import VIRTIOFSD, KataDirs, KataSandbox
from tests.support.qemu import Accelerator, accelerator
from tests.support.vmmhost import EXECUTABLES, SHIMS, Bystander, live, lookalike, tasks
from tests.support.waiting import wait_for

pytestmark = [
    pytest.mark.qemu,
    pytest.mark.root,
    pytest.mark.skipif(not VIRTIOFSD.exists(), reason="needs virtiofsd of QEMU 7.2 or older"),
]

P1 = f"p{os.getpid()}"
P12 = f"{P1}2"
"""Sandbox ids of this run: other runs on the machine have their own."""


@pytest.fixture(autouse=True)
def bystander() -> Iterator[Bystander]:
    """A process that calls itself a vhost worker of everything."""
    with lookalike("-name", f"sandbox-{P1}", comm="vhost-1") as process:
        one = Bystander(process.pid)
        yield one
        one.check()


def _roles(dirs: KataDirs, kata: KataSandbox, *, files: bool = True) -> dict[int, ThreadRole]:
    """Return role by pid of all helpers; without `files` Kata's own are not looked at."""
    host = live()
    vmm = VmmFinder(host, executables=EXECUTABLES).find(kata.id, {kata.pid: 0})
    paths = KataPaths(str(dirs.vc), str(dirs.kata)) if files else KataPaths("/none", "/none")
    helpers = find_helpers(host, vmm, kata.id, _own(kata), Shims(host, SHIMS), paths=paths)
    assert kata.pid not in {helper.process.pid for helper in helpers}
    return {helper.process.pid: helper.role for helper in helpers}


def _own(kata: KataSandbox) -> list[ThreadKey]:
    """Return the VMM's own threads."""
    return [task.key for task in tasks(kata.pid)]


@pytest.mark.parametrize("files", [True, False], ids=["persist.json", "parent and arguments"])
def test_virtiofsd_and_shim(dirs: KataDirs, files: bool) -> None:
    """virtiofsd is found by persist.json, and without it as the shim's child for this sandbox."""
    with KataSandbox(dirs, P1, accelerator=Accelerator.TCG, virtiofsd=True) as kata:
        roles = _roles(dirs, kata, files=files)
        assert roles[kata.virtiofsd_pid] is ThreadRole.VIRTIOFSD
        assert roles[kata.shim.pid] is ThreadRole.SHIM
        assert len(roles) == 2


def test_virtiofsd_of_an_orphan(dirs: KataDirs) -> None:
    """With the shim gone, persist.json still names virtiofsd."""
    with KataSandbox(dirs, P1, accelerator=Accelerator.TCG, virtiofsd=True) as kata:
        kata.orphan()
        assert _roles(dirs, kata) == {kata.virtiofsd_pid: ThreadRole.VIRTIOFSD}


@contextmanager
def _virtiofsd(dirs: KataDirs, kata: KataSandbox) -> Iterator[subprocess.Popen[bytes]]:
    """Run virtiofsd for the sandbox's own directory, but not as the shim's child."""
    socket_path = dirs.vc / "other.sock"
    argv = [str(VIRTIOFSD), f"--socket-path={socket_path}", "-o", f"source={kata.shared_dir}"]
    with subprocess.Popen(argv, stderr=subprocess.DEVNULL) as process:
        try:
            wait_for(socket_path.exists, "virtiofsd's socket")
            yield process
        finally:
            process.kill()


def test_somebody_elses_virtiofsd(dirs: KataDirs) -> None:
    """The same program with the same arguments under another parent is no helper."""
    with (
        KataSandbox(dirs, P1, accelerator=Accelerator.TCG, virtiofsd=True) as kata,
        _virtiofsd(dirs, kata) as other,
    ):
        assert other.pid not in _roles(dirs, kata, files=False)
        assert other.pid not in _roles(dirs, kata)


def test_a_recorded_pid_that_is_no_file_server(dirs: KataDirs, bystander: Bystander) -> None:
    """A stale VirtiofsDaemonPid that another process has now is not believed."""
    with KataSandbox(dirs, P1, accelerator=Accelerator.TCG) as kata:
        kata.virtiofsd_pid = bystander.pid
        kata.write_persist(())
        kata.virtiofsd_pid = 0
        assert _roles(dirs, kata) == {kata.shim.pid: ThreadRole.SHIM}


def test_neighbours_keep_their_helpers(dirs: KataDirs) -> None:
    """Two sandboxes side by side: each gets its own shim and virtiofsd only."""
    with (
        KataSandbox(dirs, P1, accelerator=Accelerator.TCG, virtiofsd=True) as one,
        KataSandbox(dirs, P12, accelerator=Accelerator.TCG, virtiofsd=True) as two,
    ):
        assert set(_roles(dirs, one)) == {one.shim.pid, one.virtiofsd_pid}
        assert set(_roles(dirs, two)) == {two.shim.pid, two.virtiofsd_pid}


def test_a_shared_parent(dirs: KataDirs) -> None:
    """Two VMMs below one parent, as after their shims died: its arguments tell whose virtiofsd."""
    with (
        KataSandbox(dirs, P1, accelerator=Accelerator.TCG, shim_process=False) as one,
        KataSandbox(dirs, P12, accelerator=Accelerator.TCG, shim_process=False) as two,
        _virtiofsd(dirs, one) as server,
    ):
        assert _roles(dirs, one) == {server.pid: ThreadRole.VIRTIOFSD}
        assert _roles(dirs, two) == {}


def test_kernel_threads_of_kvm(dirs: KataDirs) -> None:
    """KVM's kernel threads for this VM are found; a process of that name is not one."""
    if accelerator() is not Accelerator.KVM:
        pytest.skip("KVM does not work here")
    with KataSandbox(dirs, P1, accelerator=Accelerator.KVM) as kata:
        named = f"kvm-pit/{kata.pid}"
        with lookalike(comm=named, executable=sys.executable) as impostor:
            host = live()
            vmm = VmmFinder(host, executables=EXECUTABLES).find(kata.id, {kata.pid: 0})
            helpers = find_helpers(host, vmm, kata.id, _own(kata), Shims(host, SHIMS))
            kernel = {h.process.pid for h in helpers if h.source is RoleSource.FLAGS}
            truth = {p.key.pid for p in host.processes.all() if p.comm == named}
            assert impostor.pid in truth
            assert kernel == truth - {impostor.pid}
            assert kernel
