"""A VMM with KVM as its host shows it: the stand-in of other VMMs, and QEMU with the same VM."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from msgspec.structs import replace

from kata_pin.base.values import RoleSource, ThreadRole
from kata_pin.vmm.find import Executables, VmmFinder
from kata_pin.vmm.role_cache import RoleCache
from tests.support import qemu, vmm_standin
from tests.support.at_once import identify
from tests.support.qemu import Accelerator, Machine
from tests.support.vmm_standin import Spec, copy_of_python
from tests.support.vmmhost import NO_DEBUGFS, SHIMS, live, private_debugfs, tasks
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.qemu, pytest.mark.root]

SANDBOX = f"p{os.getpid()}"
VCPUS = {"CPU 0/KVM": 0, "CPU 1/KVM": 1}
NO_MACHINE = "no-such-machine"
"""A uname machine whose ioctl number is unknown: descriptors say nothing."""

Vcpus = dict[str, tuple[int | None, RoleSource]]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A private directory with a short path."""
    root = Path(tempfile.mkdtemp(prefix="kv"))
    yield root
    shutil.rmtree(root)


def _argv(program: str) -> list[str]:
    machine = Machine(debug_threads=True, iothreads=())
    _, *rest = qemu.command_line(f"sandbox-{SANDBOX}", machine, Accelerator.KVM, smp="2")
    return [program, *rest]


@contextlib.contextmanager
def standin(folder: Path) -> Iterator[int]:
    """Run the stand-in; the thread that makes the VM is the first, as in QEMU."""
    program = copy_of_python(folder / "qemu-system-x86_64")
    with vmm_standin.running(Spec(program, _argv(program), tuple(VCPUS), kvm_ids=VCPUS)) as pid:
        yield pid


@contextlib.contextmanager
def real(folder: Path) -> Iterator[int]:
    """Run QEMU."""
    with subprocess.Popen(_argv(qemu.QEMU), stdin=subprocess.DEVNULL) as process:
        try:
            wait_for(lambda: VCPUS.keys() <= _names(process.pid), "the vCPU threads")
            yield process.pid
        finally:
            process.kill()


@pytest.fixture(params=[standin, real])
def vmm(request: pytest.FixtureRequest, folder: Path) -> Iterator[int]:
    if qemu.accelerator() is not Accelerator.KVM:
        pytest.skip("KVM does not work here")
    run: Callable[[Path], AbstractContextManager[int]] = request.param
    with run(folder) as pid:
        yield pid


def _names(pid: int) -> set[str]:
    return {path.read_text().strip() for path in Path(f"/proc/{pid}/task").glob("*/comm")}


def _vcpus(pid: int, debugfs: str | Path, *, machine: str = "", kvm: bool = True) -> Vcpus:
    """Return the vCPUs that are identified by thread name, each with what named it."""
    host = live(debugfs)
    executables = Executables((os.readlink(f"/proc/{pid}/exe"),), shims=SHIMS)
    found = VmmFinder(host, executables=executables).find(SANDBOX, {pid: 0})
    assert found.kvm
    threads = tasks(pid)
    known = replace(found, kvm=kvm)
    roles = identify(host, known, threads, RoleCache(), None, machine=machine)
    comms = {task.key: task.comm for task in threads}
    return {
        comms[key]: (role.vcpu, role.source)
        for key, role in roles.items()
        if role.role is ThreadRole.VCPU
    }


def _until(vmm: int, source: RoleSource, look: Callable[[], Vcpus]) -> None:
    """Wait until all vCPUs are named by a source: a thread that runs shows no system call."""
    wanted = {name: (index, source) for name, index in VCPUS.items()}
    wait_for(lambda: look() == wanted, f"vCPUs of {vmm} named by {source}")


def test_kvms_debugfs(vmm: int, folder: Path) -> None:
    """The VM's folder has the process's pid, because its first thread made it."""
    with private_debugfs(folder / "debug") as debug:
        _until(vmm, RoleSource.DEBUGFS, lambda: _vcpus(vmm, debug, machine=NO_MACHINE))
        assert any(path.name.startswith(f"{vmm}-") for path in (debug / "kvm").iterdir())


def test_descriptors(vmm: int) -> None:
    """Each vCPU thread is inside KVM_RUN on a descriptor that has the vCPU's number."""
    _until(vmm, RoleSource.KVM_FD, lambda: _vcpus(vmm, NO_DEBUGFS))


def test_names(vmm: int) -> None:
    """Names alone, where nothing of KVM can be read."""
    _until(vmm, RoleSource.NAME, lambda: _vcpus(vmm, NO_DEBUGFS, kvm=False))


def test_what_proc_shows(vmm: int) -> None:
    """Its whole command line and its program; the first thread has the program's name."""
    program = os.readlink(f"/proc/{vmm}/exe")
    line = Path(f"/proc/{vmm}/cmdline").read_bytes().split(b"\0")
    assert [word.decode() for word in line[:-1]] == _argv(line[0].decode())
    assert os.path.samefile(line[0], program)
    assert Path(f"/proc/{vmm}/comm").read_text() == "qemu-system-x86\n"
