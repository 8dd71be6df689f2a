"""Real QEMU with the idle firmware: its command line in Kata's shape, and which accelerator works.

Shapes follow command lines recorded from Kata 3.21: no path on -qmp, a
-pidfile, `sockets=MAX,maxcpus=MAX`, iothreads named by 16 hex digits. runtime-rs gives no -pidfile
and only `-smp N,maxcpus=M`. What Kata adds for devices that an idle guest lacks is left out.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from tests.support.waiting import wait_for

ROOT = Path(__file__).resolve().parents[2]
INSTALLED = Path("/usr/bin/qemu-system-x86_64")


def _own_path() -> str:
    """Return a path of QEMU that this checkout's test process alone uses.

    Daemons accept VMMs by their executable. With a path per process, tests that run at the same
    time do not see each other's VMs. A link keeps the inode; across file systems it is a copy.
    QEMU finds its modules and firmware relative to its own folder.
    """
    prefix = ROOT / ".cache" / "qemu" / os.environ.get("PYTEST_XDIST_WORKER", "alone")
    own = prefix / "bin" / INSTALLED.name
    if not INSTALLED.exists():
        return str(INSTALLED)
    own.parent.mkdir(parents=True, exist_ok=True)
    for name in ("lib", "share"):
        with contextlib.suppress(FileExistsError):
            (prefix / name).symlink_to(Path("/usr") / name)
    installed = INSTALLED.stat()
    if not own.exists() or (own.stat().st_size, own.stat().st_mtime) != (
        installed.st_size,
        installed.st_mtime,
    ):
        own.unlink(missing_ok=True)
        try:
            own.hardlink_to(INSTALLED)
        except OSError:
            shutil.copy2(INSTALLED, own)
    return str(own)


QEMU = _own_path()

KVM_CPUS = ("host", "host,-arch-capabilities")
"""The -cpu models to try, in order: a nested KVM may offer an MSR that it then refuses to set."""

KVM_S = 30.0
"""How long a vCPU may take to enter KVM. Too short, a busy machine counts as one without KVM."""


class Accelerator(StrEnum):
    """What runs the guest's instructions."""

    KVM = "kvm"
    TCG = "tcg"

    @property
    def cpu_model(self) -> str:
        """The -cpu model; the word before its comma is the type of hotplugged vCPUs too."""
        return (_kvm_cpu() or KVM_CPUS[0]) if self is Accelerator.KVM else "max"


@dataclass(frozen=True)
class Machine:
    """What a VM is made of. `paused` starts it with -S: its vCPU threads never enter KVM_RUN.

    `extra_monitor` is the path of Kata's debug monitor, empty for none. `smp` overrides the whole
    -smp argument.
    """

    boot: int = 2
    maximum: int = 8
    iothreads: tuple[str, ...] = ("iothread-93faf1dd31a4eabb",)
    debug_threads: bool = False
    paused: bool = False
    memory_mib: int = 16
    smp: str = ""
    extra: tuple[str, ...] = ()


TWENTY = Machine(boot=14, maximum=16, iothreads=("io0", "io1"))
"""20 threads under KVM: 14 vCPUs, 2 iothreads, main, RCU, two of QEMU's and KVM's own."""

TWO_HUNDRED_SIXTY = Machine(
    boot=128, maximum=128, iothreads=tuple(f"io{number}" for number in range(128))
)
"""260 threads under KVM: 128 vCPUs, 128 iothreads and the four others."""


def with_one_vcpu(threads: int) -> Machine:
    """Return a VM of so many threads under KVM, all but five of them iothreads."""
    return Machine(boot=1, maximum=4, iothreads=tuple(f"io{n}" for n in range(threads - 5)))


@functools.cache
def busy_machine(folder: Path) -> Machine:
    """Return a VM whose only vCPU never rests: its firmware, made in `folder`, jumps to itself."""
    image = folder / "spin.bin"
    image.write_bytes(b"\xeb\xfe" * 32768)
    return Machine(boot=1, maximum=1, extra=("-bios", str(image)))


def firmware() -> Path:
    """Return the idle guest's firmware, assembled when it is missing or old."""
    done = subprocess.run(
        [ROOT / "scripts" / "firmware"], check=True, capture_output=True, text=True, timeout=30
    )
    return Path(done.stdout.strip())


def command_line(
    name: str,
    machine: Machine,
    accelerator: Accelerator,
    *,
    smp: str,
    qmp: Sequence[str] = (),
    pidfile: Path | None = None,
) -> list[str]:
    """Return QEMU's arguments in the order that Kata's Go runtime uses."""
    naming = f"{name},debug-threads=on" if machine.debug_threads else name
    argv = [QEMU, "-name", naming, "-machine", f"q35,accel={accelerator}"]
    argv += ["-cpu", accelerator.cpu_model]
    for monitor in qmp:
        argv += ["-qmp", monitor]
    argv += ["-m", f"{machine.memory_mib}M", "-vga", "none", "-no-user-config", "-nodefaults"]
    argv += ["-nographic", "--no-reboot", "-bios", str(firmware())]
    argv += machine.extra
    for iothread in machine.iothreads:
        argv += ["-object", f"iothread,id={iothread}"]
    if pidfile is not None:
        argv += ["-pidfile", str(pidfile)]
    if machine.paused:
        argv += ["-S"]
    return [*argv, "-smp", machine.smp or smp]


@functools.cache
def accelerator() -> Accelerator:
    """Return KVM when a vCPU really runs on it here, else TCG; tried once and printed."""
    found = Accelerator.KVM if _kvm_cpu() else Accelerator.TCG
    print(f"accelerator: {found} ({platform.node()})", file=sys.stderr)
    return found


def minikata_settings() -> dict[str, str]:
    """Return the settings that minikata (tests/e2e/minikata) needs to run VMs here."""
    _, _, features = accelerator().cpu_model.partition(",")
    return {
        "accel": str(accelerator()),
        "firmware": str(firmware()),
        "cpu_features": ",".join(["pmu=off", *features.split()]),
    }


@functools.cache
def _kvm_cpu() -> str:
    """Return the first -cpu model of which a vCPU really runs on KVM here, empty for none."""
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return ""
    return next((model for model in KVM_CPUS if _kvm_runs(model)), "")


def _kvm_runs(model: str) -> bool:
    argv = [QEMU, "-machine", "q35,accel=kvm", "-cpu", model, "-m", "16M"]
    argv += ["-nodefaults", "-nographic", "-bios", str(firmware())]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(argv, stdin=quiet, stdout=quiet, stderr=quiet) as vm:
        try:
            wait_for(lambda: vm.poll() is not None or _enters_kvm_run(vm.pid), "vCPU", KVM_S)
        except TimeoutError:
            return False
        else:
            return vm.poll() is None
        finally:
            vm.kill()


def _enters_kvm_run(pid: int) -> bool:
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            words = (task / "syscall").read_text().split()
        except OSError:
            continue
        if words[:1] == ["16"] and words[2] == "0xae80":
            return True
    return False
